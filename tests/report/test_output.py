from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from needlepoint.verify.base.atomic import write_files
from needlepoint.verify.recording.results import (
    MAX_RESULT_BYTES,
    load_result,
    result_files,
    rows_path,
)
from needlepoint.verify.schema.result import Result


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("r.json", "r.rows.safetensors"),
        ("r.v1.json", "r.v1.rows.safetensors"),
        ("result", "result.rows.safetensors"),
    ],
)
def test_rows_stand_beside_the_result(name: str, rows: str) -> None:
    assert rows_path(Path("dir") / name) == Path("dir") / rows


def test_result_and_rows_come_back(differing: Result, tmp_path: Path) -> None:
    rows = {
        "b/layer2/index/stored/local": torch.tensor([0.5, math.inf, math.nan]),
        "a/layer2/main/stored/accumulated": torch.arange(6, dtype=torch.float64)[::2],
    }
    path = tmp_path / "r.json"

    files = result_files(differing, rows, path)
    write_files(files, force=False)

    assert load_result(path) == differing
    found = load(rows_path(path).read_bytes())
    assert set(found) == set(rows)
    for name, expected in rows.items():
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name].nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))
    # The file that refers to the rows appears after them.
    assert list(files)[-1] == path


def test_same_result_gives_the_same_bytes(differing: Result) -> None:
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    path = Path("r.json")

    assert result_files(differing, {"a": one, "b": two}, path) == result_files(
        differing, {"b": two, "a": one}, path
    )


def _break(document: dict[str, object], how: str) -> str:
    if how == "verdict":
        return json.dumps({**document, "verdict": "ok"})
    if how == "schema":
        return json.dumps({**document, "schema": "needlepoint.result/9"})
    if how == "NaN":
        return json.dumps({**document, "gates": [{"path": "x", "limit": math.nan}]})
    return json.dumps(document)[: -len(how)]


@pytest.mark.parametrize("how", ["verdict", "schema", "NaN", "}truncated"])
def test_a_broken_result_is_named(how: str, matching: Result, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_text(_break(json.loads(matching.model_dump_json(by_alias=True)), how))

    with pytest.raises(ValueError, match=r"broken\.json.*needlepoint\.result/1"):
        load_result(path)


def test_unreadable_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: No such file"):
        load_result(tmp_path / "none.json")

    (tmp_path / "latin.json").write_bytes(b'{"name": "\xe9"}')
    with pytest.raises(ValueError, match=r"latin\.json: not UTF-8"):
        load_result(tmp_path / "latin.json")

    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(MAX_RESULT_BYTES + 1)
    with pytest.raises(ValueError, match=rf"huge\.json: {MAX_RESULT_BYTES + 1} bytes"):
        load_result(tmp_path / "huge.json")
