from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from safetensors.torch import load_file, save_file

from needlepoint.verify.base.stages import (
    declared_stages,
    feeds,
    is_key_side,
    rows_expected,
    stage_kind,
    stage_order,
)

RATIO4 = """main.input index.projected main.projected query.projected index.pooled main.pooled
index.normed main.normed index.roped main.roped index.rotated index.stored main.stored query.query
query.weights index.scores index.topk main.attention"""
RATIO128 = "main.input main.projected main.pooled main.normed main.roped main.stored main.attention"
RATIO0 = "main.input main.attention"


@pytest.mark.parametrize(("ratio", "expected"), [(4, RATIO4), (128, RATIO128), (0, RATIO0)])
def test_declared_stages_of_each_ratio_in_order(ratio: int, expected: str) -> None:
    assert [".".join(key) for key in declared_stages(ratio)] == expected.split()


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_a_stage_comes_after_everything_that_feeds_it(ratio: int) -> None:
    for key in declared_stages(ratio):
        assert all(stage_order(feed) < stage_order(key) for feed in feeds(key, ratio))
        assert all(feed in declared_stages(ratio) for feed in feeds(key, ratio))
        assert bool(feeds(key, ratio)) == (key != ("main", "input"))


@pytest.mark.parametrize(
    ("key", "ratio", "expected"),
    [
        (("main", "input"), 4, 266),
        (("index", "projected"), 4, 266),
        (("query", "query"), 4, 266),
        (("query", "weights"), 4, 266),
        (("index", "scores"), 4, 266),
        (("index", "topk"), 4, 266),
        (("main", "attention"), 4, 266),
        (("index", "pooled"), 4, 65),
        (("index", "stored"), 4, 65),
        (("main", "stored"), 4, 65),
        (("main", "pooled"), 128, 2),
        (("main", "attention"), 0, 266),
    ],
)
def test_rows_expected(key: tuple[str, str], ratio: int, expected: int) -> None:
    # 7 // 4 + 3 // 4 + 256 // 4 = 65 entries, not 266 // 4 = 66: requests do not share windows.
    assert rows_expected(key, (7, 3, 256), ratio) == expected


def test_only_the_compressed_rows_are_key_side() -> None:
    keys = {key for key in declared_stages(4) if is_key_side(key)}
    assert keys == {(path, s) for path in ("index", "main") for s in STEPS} | {("index", "rotated")}


STEPS = ("pooled", "normed", "roped", "stored")


def test_kinds_follow_what_the_candidate_brings() -> None:
    brought = {("index", "pooled"), ("index", "projected"), ("main", "attention")}

    assert stage_kind(("index", "pooled"), brought) == "compared"
    assert stage_kind(("index", "projected"), brought) == "compared"
    assert stage_kind(("main", "projected"), brought) == "given"
    assert stage_kind(("main", "input"), brought) == "given"
    assert stage_kind(("main", "pooled"), brought) == "not covered"
    assert stage_kind(("main", "attention"), brought) == "consequence"


def test_unknown_names_and_ratios_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ratio 8: expected one of 0, 1, 4 and 128"):
        declared_stages(8)
    with pytest.raises(ValueError, match=r"stage index\.stored: a layer of ratio 128 has only"):
        rows_expected(("index", "stored"), (128,), 128)
    with pytest.raises(ValueError, match=r"stage index\.pool: expected PATH\.STAGE"):
        stage_kind(("index", "pool"), ())


TOY = Path(__file__).parent / "toy_stage.py"
CANDIDATE = """
from dataclasses import replace

from needlepoint.optimized.candidates.catalogue import create


class Handing:
    def __init__(self, name, factor):
        self._inner, self._factor = create("emulated:fused-fp8"), factor
        self.info = replace(self._inner.info, name=name)

    def stages(self, ratio):
        own = self._inner.stages(ratio)
        return own | {(path, "handed") for path, stage in own if stage == "normed"}

    def run(self, inputs):
        seen = self._inner.run(inputs)
        handed = {
            (path, "handed"): rows * self._factor if path == "index" else rows.clone()
            for (path, stage), rows in seen.dense.items()
            if stage == "normed"
        }
        return replace(seen, dense={**seen.dense, **handed})


def sound():
    return Handing("sound", 1.0)


def faulty():
    return Handing("faulty", 1.001)
"""
MAPPING = """
schema = "needlepoint.dump/1"
name = "dumped"
format = "fp8"
profile = "needlepoint"
requests = [200]
layers = [0]
rows = {"index.handed" = "handed"}
"""


def test_a_new_stage_is_one_entry_and_its_arithmetic(tmp_path: Path, small_model: Path) -> None:
    (tmp_path / "toy.py").write_text(CANDIDATE)
    (tmp_path / "limits.toml").write_text("[handed]\nvalue = 1.5\n")
    (tmp_path / "pyproject.toml").touch()

    def run(*arguments: object) -> CompletedProcess[str]:
        words = [sys.executable, str(TOY), *map(str, arguments)]
        paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        return subprocess.run(
            words,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            check=False,
        )

    given = ("--input", "synthetic", "--model", small_model, "--tokens", 200, "--layers", 0)
    sound, faulty = ("--candidate", "toy:sound"), ("--candidate", "toy:faulty")

    judged = run("verify", *given, *sound, *faulty, "--limits", "limits.toml", "--json", "r.json")

    assert judged.returncode == 1, judged.stderr
    assert "handed" in judged.stdout
    results = json.loads((tmp_path / "r.json").read_text())["candidates"]
    for result, verdicts in zip(results, (("match", "match"), ("differ", "match")), strict=True):
        handed = [s for s in result["layers"][0]["stages"] if s["stage"] == "handed"]
        assert [stage["path"] for stage in handed] == ["index", "main"]
        assert tuple(stage["verdict"] for stage in handed) == verdicts
        assert {stage["limit"]["value"] for stage in handed} == {1.5}
        assert {stage["rows_compared"] for stage in handed} == {50}
        assert "a copy loses nothing" in handed[0]["limit"]["derivation"]
    first = results[1]["first_divergence"]
    assert (first["path"], first["stage"]) == ("index", "handed")

    for name, candidate in (("a", sound), ("b", faulty)):
        written = run("record", *given, *candidate, "--out", name)
        assert written.returncode == 0, written.stderr
    layer = json.loads((tmp_path / "a" / "manifest.json").read_text())["layers"][0]
    assert ["index", "handed"] in layer["stages"]
    compared = run("diff", "a", "b", "--stages", "handed", "--json", "d.json")
    assert compared.returncode == 1, compared.stderr
    found = json.loads((tmp_path / "d.json").read_text())["candidates"][0]["first_divergence"]
    assert (found["path"], found["stage"]) == ("index", "handed")

    (tmp_path / "dump").mkdir()
    rows = load_file(tmp_path / "b" / "layer0.safetensors")["layer0.index.handed"]
    save_file({"handed": rows}, tmp_path / "dump" / "handed.safetensors")
    (tmp_path / "dump" / "needlepoint-dump.toml").write_text(MAPPING)
    dumped = run("diff", "a", "dump", "--json", "e.json")
    assert dumped.returncode == 1, dumped.stderr
    found = json.loads((tmp_path / "e.json").read_text())["candidates"][0]["first_divergence"]
    assert (found["path"], found["stage"]) == ("index", "handed")
