"""What cannot be aligned is named, and a fault before the stages is called upstream."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import Candidate
from needlepoint.verify.diff.mapping import MAPPING_FILE
from needlepoint.verify.recording.results import load_result

Dumps: TypeAlias = Any
Served: TypeAlias = Any
Cli = Callable[..., CompletedProcess[str]]
Engine = Callable[..., Candidate]


def test_projections_in_the_dump_say_whether_the_fault_is_upstream(
    dumps: Dumps,
    served: Callable[..., Served],
    cli: Cli,
    reference: Path,
    engine: Engine,
    tmp_path: Path,
) -> None:
    run = served()
    assert run.given.index is not None

    def dump_of(name: str, kv: Tensor) -> Path:
        index = replace(run.given.index, kv=kv)
        given = replace(run.given, index=index)
        found = replace(run, given=given, observed=engine("sglang", "fp8").run(given))
        folder: Path = dumps.write(tmp_path / name, found)
        for part in ("kv", "score"):
            for step in range(4):
                rows = found.tokens(getattr(index, part), step)
                dumps.save_pt(folder, dumps.stage(f"index.projected.{part}", 0, step), rows)
        lines = "".join(
            f'"index.projected.{p}" = "{dumps.template(f"index.projected.{p}")}"\n'
            for p in ("kv", "score")
        )
        dumps.edit(folder, "[rows]\n", f"[rows]\n{lines}")
        return folder

    kv = run.given.index.kv
    other_order = kv * (1 + 2**-23 * torch.randn(kv.shape, generator=torch.manual_seed(0)).sign())
    wrong = kv.clone()
    wrong[17] *= 1.05
    sound = cli("diff", reference, dump_of("sound", other_order), "--json", tmp_path / "a.json")
    moved = cli("diff", reference, dump_of("moved", wrong), "--json", tmp_path / "b.json")

    assert sound.returncode == 0
    assert load_result(tmp_path / "a.json").detail is None
    assert moved.returncode == 1
    result = load_result(tmp_path / "b.json")
    assert result.detail == "upstream"
    # The engine made the right thing of what it got: no stage behind is blamed.
    stages = dumps.compared(result.candidates[0])
    assert {name for name, verdict in stages.items() if verdict == "differ"} == {"index.projected"}
    asked = cli("diff", reference, tmp_path / "sound", "--stages", "stored,attention")
    assert asked.returncode == 2
    assert "--stages main.attention: not among the stages that dump" in asked.stderr
    assert "index.projected, " in asked.stderr
    assert cli("diff", reference, tmp_path / "sound", "--stages", "stored").returncode == 0


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda d, w: w.edit(d, "requests = [300", "requests = [301"),
            "requests of .* tokens, the",
        ),
        (
            lambda d, w: w.edit(d, "steps = [0, 1, 2, 3]", "steps = [0, 1, 2]"),
            "tokens are in no pass",
        ),
        (lambda d, w: w.edit(d, "steps = [0, 1, 2, 3]", "steps = [0, 1, 2, 3, 3]"), "comes twice"),
        (lambda d, w: w.edit(d, "layers = [0]", "layers = [1]"), "no tensor"),
        (
            lambda d, w: w.edit(d, 'profile = "sglang"', 'profile = "slang"'),
            "profile 'slang', expected",
        ),
        (lambda d, w: w.edit(d, 'layout = "index-fp8"', 'layout = "index-fp6"'), "one of index"),
        (
            lambda d, w: w.edit(d, 'layout = "index-fp8"', 'layout = "index-fp4"'),
            "8448 bytes a page",
        ),
        (lambda d, w: w.edit(d, '"main.pooled"', '"main.polled"'), "is no tensor of a layer"),
        (lambda d, w: w.edit(d, "ranks = 1", "rank = 1"), "rank: got"),
        (lambda d, w: w.edit(d, "ranks = 1", "ranks = 1.5"), "ranks: got"),
        (lambda d, w: w.edit(d, "[rows]", "[rows"), "is not valid TOML"),
        (
            lambda d, w: w.edit(d, 'requests = "name=requests,step={step}"', ""),
            "needs exactly one of requests and lengths",
        ),
        (
            lambda d, w: w.save_pt(d, w.stage("main.pooled", 0, 0) + "___x=1", torch.zeros(1)),
            "fits 2 tensors",
        ),
        (
            lambda d, w: w.save_pt(d, w.stage("main.pooled", 0, 1), torch.zeros(3, 512)),
            r"main.pooled: shape \[3, 512\], expected .* rows, those of the tokens",
        ),
        (
            lambda d, w: w.save_pt(d, "name=positions___step=1", torch.zeros(3)),
            r"torch.float32 \[3\], expected a list of integers",
        ),
    ],
)
def test_what_cannot_be_aligned_is_named(
    dumps: Dumps,
    served: Callable[..., Served],
    cli: Cli,
    reference: Path,
    tmp_path: Path,
    spoil: Callable[[Path, Dumps], None],
    message: str,
) -> None:
    dump = dumps.write(tmp_path / "dump", served(), rows=("main.pooled",))
    spoil(dump, dumps)

    done = cli("diff", reference, dump)

    assert done.returncode == 2
    assert done.stdout == ""
    assert re.search(message, done.stderr), done.stderr


def test_a_dump_as_a_is_refused(cli: Cli, reference: Path, tmp_path: Path) -> None:
    (tmp_path / MAPPING_FILE).touch()
    done = cli("diff", tmp_path, reference)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is a dump; give it as B" in done.stderr
