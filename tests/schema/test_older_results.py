"""Results that earlier versions wrote are still read, validated and shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console

from needlepoint.verify.judge.results.gates import apply_gates, parse_gate
from needlepoint.verify.recording.results import load_result, shipped_schema
from needlepoint.verify.report.html import html_report
from needlepoint.verify.report.junit import junit_xml
from needlepoint.verify.report.markdown import markdown_summary
from needlepoint.verify.report.terminal import print_report

OLDER = sorted((Path(__file__).parent / "data").glob("result-of-*.json"))


def test_there_are_older_results() -> None:
    assert [path.name for path in OLDER][:1] == ["result-of-0.1.0.json"]


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.stem)
def test_an_older_result_is_read_and_validates(path: Path) -> None:
    result = load_result(path)
    document = json.loads(path.read_text())
    jsonschema.Draft202012Validator(json.loads(shipped_schema())).validate(document)
    again = json.loads(result.model_dump_json(by_alias=True))
    assert _missing(document, again) == []


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.stem)
def test_an_older_result_is_shown_on_every_surface(path: Path) -> None:
    result = apply_gates(load_result(path), (parse_gate("layers.topk.overlap_min>=0"),))
    out = io.StringIO()
    print_report(result, Console(file=out, width=100))
    assert out.getvalue().startswith("match: 4 of 4 stages compared")
    assert b"match" in html_report(result, {})
    assert b"match" in markdown_summary(result)
    assert b"testsuite" in junit_xml(result)


def test_a_field_that_is_renamed_would_be_seen() -> None:
    document = json.loads(OLDER[0].read_text())
    document["candidates"][0]["kernel"]["renamed"] = document["candidates"][0]["kernel"].pop(
        "variant"
    )
    validator = jsonschema.Draft202012Validator(json.loads(shipped_schema()))
    assert not validator.is_valid(document)


def test_a_newer_schema_is_named(tmp_path: Path) -> None:
    document = {**json.loads(OLDER[0].read_text()), "schema": "needlepoint.result/2"}
    path = tmp_path / "newer.json"
    path.write_text(json.dumps(document))
    with pytest.raises(
        ValueError, match=r"newer\.json: schema 'needlepoint\.result/2', this version"
    ):
        load_result(path)


def _missing(old: object, new: object, where: str = "") -> list[str]:
    """Return the places of a document that another one does not hold."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            gone
            for key, value in old.items()
            for gone in (
                _missing(value, new[key], f"{where}.{key}") if key in new else [f"{where}.{key}"]
            )
        ]
    if isinstance(old, list) and isinstance(new, list):
        pairs = enumerate(zip(old, new, strict=True))
        return [gone for i, (a, b) in pairs for gone in _missing(a, b, f"{where}[{i}]")]
    return [] if old == new else [where]


def test_a_field_of_a_newer_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "newer.json"
    path.write_text(json.dumps({**json.loads(OLDER[0].read_text()), "later": 1}))
    with pytest.raises(ValueError, match=r"later: Extra .*; read it with the version that wrote"):
        load_result(path)
