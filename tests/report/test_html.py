"""The HTML report: self-contained, small, complete, and safe with hostile names."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import Tensor

from needlepoint.verify.cli.options import VerifyOptions
from needlepoint.verify.cli.outputs import Outputs
from needlepoint.verify.judge.results.gates import apply_gates, parse_gate
from needlepoint.verify.report.html import candidate_views, html_report, recall_view
from needlepoint.verify.report.recall_svg import curve, recall_pictures
from needlepoint.verify.schema.recall import RecallMargin
from needlepoint.verify.schema.result import Result

Deep = tuple[Result, dict[str, Tensor]]
MOST_BYTES = 1_500_000
VOID = {"meta", "link", "br", "path", "rect", "line", "img", "input"}


class Page(HTMLParser):
    """Reads a page: tags must nest; ids and links are kept."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: dict[str, int] = {}
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name == "href":
                self.links.append(value or "")
            assert name != "src", value
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(result: Result, rows: dict[str, Tensor] | None = None) -> Page:
    found = Page(html_report(result, rows or {}).decode())
    assert found.open == []
    return found


@pytest.mark.parametrize("candidates", [1, 4])
def test_a_deep_report_is_small(deep: Callable[[int, int], Deep], candidates: int) -> None:
    result, rows = deep(43, candidates)
    assert len(html_report(result, rows)) < MOST_BYTES


def test_links_lead_somewhere_and_ids_are_unique(deep: Callable[[int, int], Deep]) -> None:
    found = page(*deep(20, 2))
    assert len(found.ids) == len(set(found.ids))
    assert {link.removeprefix("#") for link in found.links} <= set(found.ids)
    assert "#c0-l17-index-stored" in found.links


def test_nothing_is_loaded(deep: Callable[[int, int], Deep]) -> None:
    text = html_report(*deep(20, 1)).decode()
    assert re.findall(r"https?:|//[a-z]|@import|url\(|<link|<img|<iframe", text) == []
    assert "default-src 'none'" in text


def test_verdict_and_first_divergence_stand_first(deep: Callable[[int, int], Deep]) -> None:
    text = html_report(*deep(20, 1)).decode()
    body = text[text.index("<header>") :]
    first = body.index("request 0 position 511 entry 127: 3.25 x limit")
    assert first < body.index("<main")
    assert body.index(">differ<") < first


def test_every_layer_and_stage_is_in_the_matrix(deep: Callable[[int, int], Deep]) -> None:
    result, rows = deep(20, 1)
    (view,) = candidate_views(result, rows)
    assert [layer.title for layer in view.layers] == [f"layer {n}, ratio 4" for n in range(20)]
    stages = result.candidates[0].layers[0].stages
    assert set(view.columns) == {f"{stage.path}.{stage.stage}" for stage in stages}
    shades = [cell.shade for layer in view.layers for cell in layer.cells if cell is not None]
    assert shades.count("over") == 1
    bad = view.layers[17]
    assert bad.differs
    (stored,) = (stage for stage in bad.stages if stage.name == "index.stored")
    assert stored.local_strip is not None
    assert stored.local_strip.beyond
    assert len(stored.worst) == 16


def test_every_judged_stage_has_its_strips(deep: Callable[[int, int], Deep]) -> None:
    result, rows = deep(5, 1)
    (view,) = candidate_views(result, rows)
    strips = [
        strip
        for layer in view.layers
        for stage in layer.stages
        for strip in (stage.local_strip, stage.accumulated_strip)
    ]
    assert strips
    assert None not in strips
    assert page(result, rows).tags["svg"] == len(rows)


def test_many_candidates_keep_the_strips_of_what_differs(deep: Callable[[int, int], Deep]) -> None:
    result, rows = deep(43, 4)
    for view in candidate_views(result, rows):
        for layer in view.layers:
            for stage in layer.stages:
                if stage.record.verdict == "match":
                    assert stage.local_strip is not None
                if stage.record.verdict == "differ":
                    assert stage.accumulated_strip is not None


def test_a_deep_report_in_which_everything_differs_is_small(
    deep: Callable[[int, int], Deep],
) -> None:
    result, rows = deep(43, 1)
    (candidate,) = result.candidates
    layers = tuple(
        layer.model_copy(
            update={
                "stages": tuple(
                    stage.model_copy(update={"verdict": stage.verdict and "differ"})
                    for stage in layer.stages
                )
            }
        )
        for layer in candidate.layers
    )
    candidate = candidate.model_copy(update={"layers": layers})
    result = result.model_copy(update={"candidates": (candidate,)})
    rows = {name: errors * 100 for name, errors in rows.items()}

    assert len(html_report(result, rows)) < MOST_BYTES
    (view,) = candidate_views(result, rows)
    differing = [stage for layer in view.layers for stage in layer.stages if stage.record.verdict]
    assert len(differing) > 400
    for stage in differing:
        assert stage.local_strip is not None
        assert stage.local_strip.beyond
        assert 1 <= len(stage.worst) < 16


def test_without_row_errors_the_report_says_so(differing: Result) -> None:
    found = page(differing)
    assert "svg" not in found.tags
    assert "Row errors were not at hand" in found.text


def test_hostile_names_stay_text(differing: Result) -> None:
    evil = "</title><script>alert(1)</script>\"'&\x00"
    named = differing.candidates[0].model_copy(update={"name": evil})
    source = differing.input.model_copy(update={"name": evil})
    result = differing.model_copy(update={"candidates": (named,), "input": source})
    text = html_report(result, {}).decode()
    assert text.count("<script>") == 1
    assert page(result).tags["script"] == 1


def test_gates_costs_memory_and_machine_are_told(matching: Result) -> None:
    gated = apply_gates(matching, (parse_gate("layers.topk.overlap_min>=0.99"),))
    text = page(gated).text
    for wanted in (
        "layers.topk.overlap_min>=0.99",
        "exceeded",
        "0.985",
        "8.25 GiB",
        "Example CPU",
        "ab" * 32,
        "index_key fp8",
    ):
        assert wanted in text, wanted


def test_a_stage_that_could_not_be_judged_is_marked(matching: Result) -> None:
    layer = matching.candidates[0].layers[0]
    stage = layer.stages[1].model_copy(update={"verdict": "cannot-judge", "detail": "no rows"})
    changed = layer.model_copy(update={"stages": (layer.stages[0], stage, *layer.stages[2:])})
    candidate = matching.candidates[0].model_copy(update={"layers": (changed,)})
    (view,) = candidate_views(matching.model_copy(update={"candidates": (candidate,)}), {})
    assert [cell.shade for cell in view.layers[0].cells if cell].count("unknown") == 1


def test_the_pictures_of_recall_are_those_of_the_svg_file(recalled: Result) -> None:
    text = html_report(recalled, {}).decode()
    recall = recalled.candidates[0].recall
    assert recall is not None
    pictures = recall_pictures(recall, recalled.candidates[0].name)
    assert len(pictures) == 2  # one a k
    assert all(text.count(picture) == 1 for picture in pictures)
    assert page(recalled).tags["svg"] == 2


def test_swaps_and_the_curve_by_score_margin_stand_in_one_page(recalled: Result) -> None:
    candidate = recalled.candidates[0]
    recall = candidate.recall
    assert recall is not None
    margins = tuple(
        RecallMargin(margin=margin, rows=8, hits=hits, ci95=(hits / 10, (hits + 1) / 9))
        for margin, hits in ((-1.0, 1), (0.0, 4), (1.0, 8))
    )
    candidate = candidate.model_copy(
        update={"recall": recall.model_copy(update={"margins": margins})}
    )
    result = recalled.model_copy(update={"candidates": (candidate,)})
    topk = "emulated:fused-bf16/layer2/index/topk/local"
    text = html_report(result, {topk: torch.tensor([0.0, 0.2, 3.0, 0.0] * 2048)}).decode()

    # Swaps of the selection: counts in words, a bar with a part a class as wide as its share.
    assert ">1 tie 2 explained <" in text
    widths = dict(re.findall(r'class="s-(\w+)" style="width:([\d.]+)%"', text))
    assert widths == {"tie": "33.33", "explained": "66.67"}
    # Gaps of swaps by query: a strip whose bars reach beyond the limit.
    (strip,) = re.findall(r'aria-label="index.topk local, 8192 rows".*?</svg>', text)
    assert len(re.findall(r'<path d="M', strip)) == 1  # every bin holds a gap beyond the limit
    # Hit rate by margin: one point a margin, with its interval.
    picture = curve(margins, "emulated:fused-bf16: hit rate by score margin")
    assert picture in text
    assert [
        f"<title>{hits} of 8 at {at}</title>" in picture
        for hits, at in ((1, "-1"), (4, "+0"), (8, "+1"))
    ] == [True] * 3
    assert picture.count("<line ") == 3


def test_a_candidate_without_layers_has_no_empty_matrix(recalled: Result) -> None:
    candidate = recalled.candidates[0].model_copy(update={"layers": ()})
    found = page(recalled.model_copy(update={"candidates": (candidate,)}))
    assert "needles hit" in found.text
    for absent in ("Largest row error", "Colour by the larger error", "Layers", "not at hand"):
        assert absent not in found.text


def test_recall_is_shown_only_where_it_was_measured(matching: Result, recalled: Result) -> None:
    assert "Recall" not in page(matching).text
    text = page(recalled).text
    for wanted in (
        "25 of 40 needles hit, rate 0.625 (0.470 to 0.760)",
        "15 outranked",
        "0 of 10, reference 10, 95 % [0.100, 0.900]",
    ):
        assert wanted in text
    recall = recalled.candidates[0].recall
    assert recall is not None
    lines = recall_view("mine", recall).cells
    assert lines[1] == (
        "1,024",
        "50 %",
        "128",
        "0",
        "0 of 10",
        "0.100 to 0.900",
        "10",
        "10",
        "0",
        "",
    )
    assert [line[-1] for line in lines] == ["", "", "", "not exercised", ""]


def test_files_are_written_together_or_not_at_all(
    differing: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, markdown = tmp_path / "r.html", tmp_path / "r.md"
    outputs = Outputs.create(VerifyOptions(quiet=True, html=html, markdown=markdown))
    assert outputs.finish(differing, {}) == 1
    assert html.read_text().startswith("<!DOCTYPE html>")
    assert markdown.read_text().startswith("### needlepoint: differ")
    with pytest.raises(ValueError, match=r"r\.html: already exists; pass --force"):
        Outputs.create(VerifyOptions(html=html))
    with pytest.raises(ValueError, match="named for two outputs"):
        Outputs.create(VerifyOptions(force=True, html=html, markdown=html))
    with pytest.raises(ValueError, match="does not exist; create it first"):
        Outputs.create(VerifyOptions(html=tmp_path / "no" / "r.html"))
    capsys.readouterr()


def test_the_same_result_gives_the_same_bytes(deep: Callable[[int, int], Deep]) -> None:
    result, rows = deep(3, 1)
    assert html_report(result, rows) == html_report(result, rows)
