from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from needlepoint.benchmarks.same_results import differences, main

BEFORE: dict[str, Any] = {
    "verdict": "match",
    "environment": {"cpu": "one"},
    "candidates": [{"kernel": {"source_sha256": "00"}, "layers": [{"error": 0.5, "rows": 3}]}],
    "elapsed_seconds": 1.0,
}


def other(**changes: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(BEFORE))
    found["candidates"][0]["layers"][0] |= changes
    return found


def test_where_when_and_from_which_sources_do_not_count() -> None:
    after = other()
    after |= {"environment": {"cpu": "another"}, "elapsed_seconds": 9.0}
    after["candidates"][0]["kernel"]["source_sha256"] = "11"

    assert not list(differences(BEFORE, after))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"error": 0.5000000000000001}, "candidates[0].layers[0].error: 0.5 before, 0.50000000"),
        ({"rows": True}, "candidates[0].layers[0].rows: 3 before, true after"),
        ({"more": [1]}, "candidates[0].layers[0].more: only after ([1])"),
    ],
)
def test_every_other_difference_is_named_by_its_path(changes: dict[str, Any], line: str) -> None:
    (found,) = differences(BEFORE, other(**changes))

    assert found.startswith(line)


def test_lists_of_another_length_differ() -> None:
    after = other()
    after["candidates"].append({})

    assert list(differences(BEFORE, after)) == ["candidates: 1 elements before, 2 after"]


def test_the_exit_code_says_whether_files_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [tmp_path / "a.json", tmp_path / "b.json"]
    for name, value in zip(names, (BEFORE, other(rows=4)), strict=True):
        name.write_text(json.dumps(value))

    assert main([str(names[0]), str(names[0])]) == 0
    assert main([str(name) for name in names]) == 1
    assert "layers[0].rows: 3 before, 4 after" in capsys.readouterr().out
    assert main([str(names[0]), str(tmp_path / "none.json")]) == 2
