"""The report for everyone: structure, names, colours that can be told, a keyboard in Chromium."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from needlepoint.verify.judge.results.gates import apply_gates, parse_gate
from needlepoint.verify.report.html import html_report, template_text
from needlepoint.verify.report.recall_svg import heat_map
from needlepoint.verify.schema.result import Result

Deep = tuple[Result, dict[str, Tensor]]
Attributes = dict[str, str | None]
HEADINGS = ("h1", "h2", "h3", "h4")
VOID = ("meta", "path", "rect", "line", "circle", "polyline")


class Element:
    """A tag with its attributes, the tags around it, and the text inside."""

    def __init__(self, tag: str, attributes: Attributes, around: tuple[Element, ...]) -> None:
        self.tag, self.attributes, self.around, self.text = tag, attributes, around, ""


class Outline(HTMLParser):
    """Lists the elements of a page in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(Element(tag, dict(attrs), tuple(self._open)))
        if tag not in VOID:
            self._open.append(self.elements[-1])

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def of(self, *tags: str) -> list[Element]:
        return [element for element in self.elements if element.tag in tags]


@pytest.fixture
def pages(deep: Callable[[int, int], Deep], recalled: Result) -> list[Outline]:
    """Return a report of stages and one of everything else."""
    gated = apply_gates(recalled, (parse_gate("layers.topk.overlap_min>=0.99"),))
    return [Outline(html_report(*made).decode()) for made in (deep(20, 2), (gated, {}))]


def test_headings_descend_one_level_at_a_time(pages: list[Outline]) -> None:
    for page in pages:
        levels = [int(heading.tag[1]) for heading in page.of(*HEADINGS)]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after <= before + 1 for before, after in pairwise(levels))
        assert all(heading.text.strip() for heading in page.of(*HEADINGS))


def test_every_table_says_what_its_rows_and_columns_are(pages: list[Outline]) -> None:
    for page in pages:
        assert len(page.of("table")) >= 4
        for header in page.of("th"):
            head = any(element.tag == "thead" for element in header.around)
            assert header.attributes["scope"] == ("col" if head else "row")
            assert header.text.strip()
        for row in page.of("tr"):
            headers = [th for th in page.of("th") if th.around[-1] is row]
            assert headers, row.text
        for table in page.of("table"):
            captions = [c for c in page.of("caption") if table in c.around]
            region = [e for e in table.around if e.attributes.get("aria-label")]
            headed = [e for e in table.around if e.attributes.get("aria-labelledby")]
            assert captions or region or headed


def test_every_picture_and_region_has_a_name(pages: list[Outline]) -> None:
    for page in pages:
        ids = {
            element.attributes["id"]: element
            for element in page.elements
            if "id" in element.attributes
        }
        for element in page.elements:
            named = element.attributes.get("aria-labelledby")
            assert named is None or ids[named].text.strip()
            if element.attributes.get("role") == "img":
                titles = [t for t in page.of("title") if element in t.around and t.text]
                assert element.attributes.get("aria-label") or titles
            if "scroll" in (element.attributes.get("class") or "").split():
                assert element.attributes["tabindex"] == "0"
                assert element.attributes["role"] == "region"
                assert element.attributes["aria-label"]
        assert all(svg.attributes["role"] == "img" for svg in page.of("svg"))
        assert all(element.text.strip() for element in page.of("a", "button", "summary"))
        strips = [
            svg.attributes["aria-label"] for svg in page.of("svg") if "data-r" in svg.attributes
        ]
        assert all(
            re.fullmatch(r"\w+\.\w+ (local|accumulated), \d+ rows", str(name)) for name in strips
        )
        # Only elements of the page's own order take the keyboard.
        assert {element.attributes.get("tabindex") for element in page.elements} <= {
            None,
            "0",
            "-1",
        }


# --- Colours ----------------------------------------------------------------------------------

THEMES = ("light", "dark")
CELLS = ("none", "e0", "e1", "e2", "e3", "e4", "eover", "eunknown")
TEXT = (
    *((ink, paper) for ink in ("fg", "soft", "link") for paper in ("bg", "panel")),
    *((ink, paper) for ink in ("good", "bad", "odd") for paper in ("bg", "panel")),
    *(("fg", cell) for cell in CELLS),
    ("bg", "fg"),
)
SHAPES = (
    *(("bar", paper) for paper in ("panel", "bg")),
    *(("over", paper) for paper in ("panel", "bg", "eover")),
    *((swaps, "panel") for swaps in ("odd", "soft")),
    ("link", "bg"),
)


def luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def colours(theme: str) -> dict[str, str]:
    css = template_text("report.css")
    found = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", css)
    assert set(re.findall(r"var\(--(\w+)\)", css)) == {name for name, _, _ in found}
    return {name: pair[THEMES.index(theme)] for name, *pair in found}


@pytest.mark.parametrize("theme", THEMES)
def test_text_and_shapes_stand_out_in_both_themes(theme: str) -> None:
    known = colours(theme)
    for pairs, least in ((TEXT, 4.5), (SHAPES, 3.0)):
        for ink, paper in pairs:
            assert contrast(known[ink], known[paper]) >= least, (ink, paper)


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


def test_no_colour_is_set_beside_the_themes() -> None:
    rules = re.sub(r":root \{.*?\}", "", template_text("report.css"), count=1, flags=re.DOTALL)
    assert re.findall(r"#[0-9a-fA-F]{3,8}\b|\brgba?\(|\bhsla?\(", rules) == []


def test_figures_stand_out_in_every_cell_of_a_heat_map(recalled: Result) -> None:
    recall = recalled.candidates[0].recall
    assert recall is not None
    for hits in range(101):
        cell = recall.cells[0].model_copy(update={"rows": 100, "hits": hits})
        drawn = heat_map([cell], "t")
        (paper,) = re.findall(r'<rect [^>]*fill="(#\w{6})"', drawn)
        inks = re.findall(r'<text [^>]*fill="(#\w{3})"', drawn)
        assert len(inks) == 2
        for ink in inks:
            assert contrast("#" + "".join(2 * digit for digit in ink[1:]), paper) >= 4.5


# --- Chromium ---------------------------------------------------------------------------------


def told(tree: list[dict[str, Any]], role: str) -> list[str]:
    """Return the names of what a screen reader is told of."""
    return [
        node["name"]["value"]
        for node in tree
        if not node["ignored"] and node["role"]["value"] == role
    ]


FOCUSED = """(function () {
  const now = document.activeElement;
  const all = [...document.querySelectorAll("a, button, summary, [tabindex='0']")];
  const style = getComputedStyle(now);
  return [all.indexOf(now), style.outlineStyle, style.outlineWidth];
})()"""


def test_a_screen_reader_is_told_of_every_section(
    tab: Any,  # noqa: ANN401
    deep: Callable[[int, int], Deep],
    tmp_path: Path,
) -> None:
    """Sections far below the screen are not laid out, and must be there all the same."""
    page = tmp_path / "report.html"
    text = html_report(*deep(20, 3)).decode()
    page.write_text(text)
    tab.open(page)
    tree = tab.call("Accessibility.getFullAXTree")["nodes"]
    outline = Outline(text)
    sections = [f"{name} differ" for name in ("candidate-0", "candidate-1", "candidate-2")]
    sections += ["Cost against the contracts", "Transient memory", "Run"]
    assert [name for name in told(tree, "heading") if name in sections] == sections
    assert set(sections) <= set(told(tree, "region"))
    assert "" not in told(tree, "region") + told(tree, "heading") + told(tree, "image")
    columns = [th.text for th in outline.of("th") if th.attributes["scope"] == "col"]
    assert sorted(told(tree, "columnheader")) == sorted(columns)
    # Closed layers are told of by their summaries alone, open ones with every strip.
    opened = [d for d in outline.of("details") if "open" in d.attributes]
    assert len(told(tree, "DisclosureTriangle")) == 60
    strips = [svg for svg in outline.of("svg") if any(d in svg.around for d in opened)]
    assert [n for n in told(tree, "image") if "rows" in n] == [
        svg.attributes["aria-label"] for svg in strips
    ]


def test_the_tab_key_goes_through_the_page_in_order(
    tab: Any,  # noqa: ANN401
    deep: Callable[[int, int], Deep],
    tmp_path: Path,
) -> None:
    page = tmp_path / "report.html"
    page.write_bytes(html_report(*deep(2, 2)))
    tab.open(page)
    expected = tab.value("document.querySelectorAll(\"a, button, summary, [tabindex='0']\").length")
    seen = []
    for _ in range(expected):
        tab.press("Tab")
        at, style, width = tab.value(FOCUSED)
        assert (style, width) == ("solid", "3px")
        seen.append(at)
    assert seen == list(range(expected))


def test_a_strip_is_a_slider_to_a_screen_reader(
    tab: Any,  # noqa: ANN401
    deep: Callable[[int, int], Deep],
    tmp_path: Path,
) -> None:
    page = tmp_path / "report.html"
    page.write_bytes(html_report(*deep(2, 1)))
    tab.open(page)
    tab.value("document.querySelector('.strip svg').focus()")
    values = []
    for key in ("ArrowRight", "End"):
        tab.press(key)
        (slider,) = [
            node
            for node in tab.call("Accessibility.getFullAXTree")["nodes"]
            if not node["ignored"] and node["role"]["value"] == "slider"
        ]
        assert slider["name"]["value"] == "index.pooled local, 2048 rows"
        values.append(tab.value("document.activeElement.getAttribute('aria-valuetext')"))
    assert re.fullmatch(r"request 0 position \d+ to .*: at most .* x limit", values[0])
    assert "to request 0 position 8191:" in values[1]


def test_print_is_light_and_whole(
    tab: Any,  # noqa: ANN401
    deep: Callable[[int, int], Deep],
    tmp_path: Path,
) -> None:
    page = tmp_path / "report.html"
    page.write_bytes(html_report(*deep(20, 2)))
    tab.open(page)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    ground = "getComputedStyle(document.body).backgroundColor"
    tab.call("Emulation.setEmulatedMedia", media="screen", features=dark)
    assert tab.value(ground) == "rgb(13, 17, 23)"
    tab.call("Emulation.setEmulatedMedia", media="print", features=dark)
    assert tab.value(ground) == "rgb(255, 255, 255)"
    shown = (
        "[...document.querySelectorAll('section')].map(s => getComputedStyle(s).contentVisibility)"
    )
    assert set(tab.value(shown)) == {"visible"}
