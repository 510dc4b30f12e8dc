"""Recall of marked needles: in ``verify``, in ``recall --input``, and spans that lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.recall.grid import parse_depths, parse_lengths
from needlepoint.verify.recall.pool import load_pool
from needlepoint.verify.recording.recording import RecordingError, open_recording
from needlepoint.verify.recording.results import load_result, shipped_schema
from needlepoint.verify.report.recall_svg import curve, heat_map
from needlepoint.verify.report.terminal import print_report
from needlepoint.verify.schema.recall import RecallCell, RecallMargin, RecallMiss
from needlepoint.verify.schema.result import Result

REQUESTS = [620, 40]
NEEDLES = [
    {"request": 0, "start": 30, "stop": 33, "query": 619},
    {"request": 0, "start": 300, "stop": 302, "query": 615},
    {"request": 0, "start": 600, "stop": 603, "query": 619},
    {"request": 1, "start": 4, "stop": 6, "query": 39},
]
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a writer of a recording of real hidden states with marked needles."""

    def make(needles: object = NEEDLES, name: str = "marked") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        states = load_pool().states[: sum(REQUESTS)].clone()
        save_file({"input": states}, folder / "input.safetensors")
        manifest: dict[str, object] = {
            "schema": "needlepoint.recording/1",
            "kind": "input",
            "model": "mini",
            "requests": REQUESTS,
            "tensors": {
                "input": {
                    "file": "input.safetensors",
                    "dtype": "BF16",
                    "shape": list(states.shape),
                }
            },
        }
        if needles is not None:
            manifest["needles"] = needles
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return folder

    return make


def recall_of(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_text())
    jsonschema.validate(value, json.loads(shipped_schema()))
    load_result(path)
    found: dict[str, Any] = value["candidates"][0]["recall"]
    return found


def test_verify_fills_recall_from_marked_needles(write: Write, tmp_path: Path) -> None:
    folder, out = write(), tmp_path / "result.json"
    arguments = ["verify", "--input", str(folder), "--layers", "0", "--quiet"]
    arguments += ["--candidate", "emulated:fused-fp8", "--json", str(out)]
    assert run_app(app, arguments) == 0
    recall = recall_of(out)
    # k is 128: 619 sees 155 entries, 615 sees 154; request 1 sees 10 of its own.
    assert recall["rows"] == 2
    assert recall["window"]["rows"] == 2
    assert recall["not_exercised"]["rows"] == 0
    assert recall["k"] == 128
    assert "marks" in recall["label"]
    assert len(json.loads(out.read_text())["candidates"][0]["layers"]) == 1


def test_verify_and_recall_agree_on_a_recording(write: Write, tmp_path: Path) -> None:
    folder = write()
    found = []
    for command in ("verify", "recall"):
        out = tmp_path / f"{command}.json"
        arguments = [command, "--input", str(folder), "--layers", "0", "--quiet"]
        arguments += ["--candidate", "emulated:fused-fp4", "--json", str(out)]
        assert run_app(app, arguments) == 0
        found.append(recall_of(out))
    same = ("rows", "hits", "lost", "gained", "reference_rate", "cells", "margins", "window")
    assert [found[0][name] for name in same] == [found[1][name] for name in same]
    assert "random" in found[1]["label"]


def test_without_needles_there_is_no_recall(write: Write, tmp_path: Path) -> None:
    folder, out = write(None), tmp_path / "result.json"
    arguments = ["--input", str(folder), "--candidate", "emulated:fused-fp8", "--layers", "0"]
    assert run_app(app, ["verify", *arguments, "--quiet", "--json", str(out)]) == 0
    assert recall_of(out) is None
    assert run_app(app, ["recall", *arguments]) == 2


def test_a_recording_keeps_its_needles(write: Write, tmp_path: Path) -> None:
    folder, out = write(), tmp_path / "recorded"
    arguments = ["record", "--input", str(folder), "--layers", "0", "--out", str(out), "--quiet"]
    assert run_app(app, arguments) == 0
    kept = open_recording(out).manifest.needles
    assert kept is not None
    assert [n.model_dump() for n in kept] == NEEDLES


def test_needles_beyond_the_kept_tokens_are_not_asked(write: Write, tmp_path: Path) -> None:
    folder, out = write(), tmp_path / "result.json"
    arguments = ["verify", "--input", str(folder), "--layers", "0", "--tokens", "617", "--quiet"]
    arguments += ["--candidate", "emulated:fused-fp8", "--json", str(out)]
    assert run_app(app, arguments) == 0
    assert recall_of(out)["rows"] == 1


GOOD = {"request": 0, "start": 1, "stop": 2, "query": 9}


@pytest.mark.parametrize(
    "needles",
    [
        [{**GOOD, "request": 2}],
        [{**GOOD, "request": -1}],
        [{**GOOD, "stop": 1}],
        [{**GOOD, "start": 5, "stop": 3}],
        [{**GOOD, "start": -4}],
        [{**GOOD, "query": 620}],
        [{**GOOD, "stop": 11, "query": 9}],
        [{**GOOD, "query": 1 << 60}],
        [{**GOOD, "query": 9.5}],
        [{**GOOD, "query": "9"}],
        [{**GOOD, "extra": 1}],
        [{"request": 0}],
        {"request": 0},
        "all",
        [GOOD, {**GOOD, "request": 1, "query": 40}],
    ],
)
def test_spans_that_lie_are_refused(write: Write, needles: object) -> None:
    with pytest.raises(RecordingError, match="needle"):
        open_recording(write(needles))


def test_the_command_measures_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, svg = tmp_path / "r.json", tmp_path / "r.svg"
    arguments = ["recall", "--lengths", "2052,2300@5", "--depths", "0,50", "--haystacks", "2"]
    arguments += ["--needles", "1", "--distractors", "16", "--candidate", "emulated:fused-fp8"]
    page, lines, junit = (tmp_path / name for name in ("r.html", "r.md", "r.xml"))
    files = ["--html", str(page), "--markdown", str(lines), "--junitxml", str(junit)]
    code = run_app(app, [*arguments, "--json", str(out), "--svg", str(svg), *files])
    printed = capsys.readouterr().out
    assert code == 0
    recall = recall_of(out)
    assert recall["rows"] + recall["not_exercised"]["rows"] == 2 * 2 + 2
    assert "mini indexer" in recall["label"]
    assert "0.217 %" in printed  # the fixed position beside depth 0
    assert "says nothing about the recall of a full model" in " ".join(printed.split())
    assert {c["length"] for c in recall["cells"]} == {2052, 2300}
    fixed = [c for c in recall["cells"] if c["length"] == 2300 and c["k"] == 512]
    assert [(c["depth"], c["rows"]) for c in fixed] == [(5 / 2300, 2)]
    assert recall["cost"]["key_bytes"] == 132
    assert recall["cost"]["bytes_per_token"] == 33
    assert recall["cost"]["transient_measured"] == recall["cost"]["transient_predicted"]
    assert "emulated:fused-fp8" in page.read_text()
    assert "recall measured" in lines.read_text()
    ElementTree.parse(junit)
    root = ElementTree.parse(svg).getroot()
    assert root.tag.endswith("svg")
    assert not [e for e in root.iter() if e.tag.endswith(("script", "image", "a"))]
    for title in ("What index keys cost", "Hit rate by score margin", "not exercised", "window"):
        assert title in printed
    shown = report_of(load_result(out))
    assert "causes: 1 outranked" in shown
    assert "2300 tokens, needle at 5, layer 0: outranked (query.query), rank 600 beside 3" in shown
    assert "gap 0.5 of allowed 0.001, page 7, attention kept 0.25, output error 0.125" in shown
    again = [*arguments, "--json", str(out)]
    assert run_app(app, again) == 2
    assert "--force" in capsys.readouterr().err


def report_of(result: Result) -> str:
    """Return the report of a result with one miss put in."""
    miss = RecallMiss(
        length=2300,
        depth=0.0,
        haystack=0,
        layer=0,
        start=5,
        stop=7,
        query=2299,
        cause="outranked",
        by="query.query",
        rank=600,
        reference_rank=3,
        beyond=89,
        gap=0.5,
        allowed=0.001,
        page=7,
        mass=0.5,
        mass_kept=0.25,
        output_error=0.125,
    )
    (candidate,) = result.candidates
    assert candidate.recall is not None
    recall = candidate.recall.model_copy(update={"misses": (miss,), "causes": {"outranked": 1}})
    candidate = candidate.model_copy(update={"recall": recall})
    console = Console(width=200, file=StringIO(), record=True)
    print_report(result.model_copy(update={"candidates": (candidate,)}), console)
    return console.export_text()


def test_nothing_exercised_cannot_be_judged(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["recall", "--lengths", "1200", "--depths", "0", "--haystacks", "1"]
    arguments += ["--distractors", "8", "--candidate", "emulated:fused-fp8"]
    assert run_app(app, arguments) == 2
    assert "no needle was exercised" in " ".join(capsys.readouterr().out.split())


def test_a_needle_in_the_window_is_not_called_unexercised_by_k(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["recall", "--lengths", "2300@2200", "--haystacks", "1", "--distractors", "8"]
    assert run_app(app, [*arguments, "--candidate", "emulated:fused-fp8"]) == 2
    printed = " ".join(capsys.readouterr().out.split())
    assert "or reads it through its window" in printed
    assert "window: 1 needles are read through the sliding window" in printed


def test_a_gate_on_recall(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["recall", "--lengths", "2300", "--depths", "0", "--haystacks", "1"]
    arguments += ["--distractors", "8", "--candidate", "emulated:fused-fp8", "--quiet"]
    assert run_app(app, [*arguments, "--gate", "recall.lost<=0"]) == 0
    assert run_app(app, [*arguments, "--gate", "recall.rate<=0.5"]) == 1
    assert "recall.rate<=0.5 exceeded" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lengths", "zero"],
        ["--lengths", "200000"],
        ["--lengths", "100@100"],
        ["--depths", "101"],
        ["--depths", "-1"],
        ["--haystacks", "0"],
        ["--distractors", "many"],
        ["--memory", "8 parsecs"],
        ["--layers", "2"],
        ["--lengths", "60000"],
        ["--passages", "/nowhere"],
        ["--input", "mini"],
    ],
)
def test_wrong_options_are_one_message(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, ["recall", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("needlepoint: error: ")
    assert "Traceback" not in err


def test_lengths_and_depths_parse() -> None:
    assert [(n.tokens, n.position) for n in parse_lengths("2560, 5200@5,2560")] == [
        (2560, None),
        (5200, 5),
    ]
    assert parse_depths("0,12.5,100") == (0.0, 0.125, 1.0)


def _cell(exercised: bool, hits: int) -> RecallCell:
    return RecallCell(
        length=2560,
        depth=0.5,
        k=512,
        distractors=64,
        rows=40,
        hits=hits,
        ci95=(0.1, 0.9),
        reference_hits=40,
        lost=40 - hits,
        gained=0,
        exercised=exercised,
    )


def test_heat_maps_say_their_numbers() -> None:
    text = heat_map([_cell(True, 31)], "<needles & more>")
    ElementTree.fromstring(text)
    assert "31/40" in text
    assert "0.78" in text
    assert "reference 40" in text
    assert "&lt;needles &amp; more&gt;" in text
    assert "not exercised" in heat_map([_cell(False, 40)], "t")


def test_curves_say_their_numbers() -> None:
    margins = [
        RecallMargin(margin=float(m), rows=10, hits=h, ci95=(0.1, 0.9))
        for m, h in ((-1, 1), (0, 5), (1, 9))
    ]
    text = curve(margins, "t")
    ElementTree.fromstring(text)
    assert "9 of 10 at +1" in text
    empty = curve([RecallMargin(margin=0.0, rows=0, hits=0, ci95=None)], "t")
    ElementTree.fromstring(empty)
    assert "nothing measured" in empty


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 383}, "states"),
        ({"files": {"../x.safetensors": {"passages": [1, 384]}}}, "files"),
        ({"files": {"gone.safetensors": {"passages": [1, 384]}}}, "gone"),
        ({"passages": [{"tokens": 1 << 40, "text": ""}]}, "tokens"),
        ({"schema": "needlepoint.passages/2"}, "schema"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_pool_that_lies_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    states = torch.zeros(4, 384, dtype=torch.bfloat16)
    save_file({"passages": states}, tmp_path / "p.safetensors")
    manifest = {
        "schema": "needlepoint.passages/1",
        "width": 384,
        "passages": [{"tokens": 4, "text": "a"}],
        "facts": [],
        "files": {"p.safetensors": {"passages": [4, 384]}},
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert load_pool(tmp_path).passage_tokens == 4
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, **change}))
    with pytest.raises(RecordingError, match=message):
        load_pool(tmp_path)
