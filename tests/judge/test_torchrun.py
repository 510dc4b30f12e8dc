"""Several processes: layers shared out, heads spread, and ranks that do not come back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.recording.results import load_result, load_rows
from needlepoint.verify.run.distributed import _PIECE_BYTES, _Group, deal
from needlepoint.verify.schema.result import Result

Judge = Callable[..., PipelineOutput]
Load = Callable[..., Inputs]
Torchrun = Callable[..., CompletedProcess[str]]

FAULTY = '''
import os, signal, time
from dataclasses import replace
from needlepoint.optimized.candidates.catalogue import create


class Faulty:
    """The fp8 emulation, until it meets the layer in FAULT_LAYER."""

    def __init__(self):
        self.own = create("emulated:fused-fp8")
        self.info = replace(self.own.info, name="faulty")
        self.stages = self.own.stages

    def run(self, inputs):
        if inputs.layer == int(os.environ["FAULT_LAYER"]):
            if os.environ["FAULT"] == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("no such kernel")
        return self.own.run(inputs)
'''


@pytest.fixture
def torchrun(small_model: Path, tmp_path: Path) -> Torchrun:
    """Return torchrun of the main job over four layers of the small model."""
    (tmp_path / "faulty.py").write_text(FAULTY)

    def run(ranks: int, candidate: str, layers: str = "0-3", **env: str) -> CompletedProcess[str]:
        words = ["--nproc-per-node", str(ranks), "-m", "needlepoint.verify"]
        words += ["--input", "synthetic", "--model", str(small_model), "--tokens", "140"]
        words += ["--layers", layers, "--candidate", candidate, "--json", "result.json", "--quiet"]
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *words],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | env,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.mark.parametrize("size", [0, 1, _PIECE_BYTES, 3 * _PIECE_BYTES + 5])
def test_what_a_rank_tells_may_be_of_any_size(size: int) -> None:
    """43 layers of 8,192 tokens are 28 MB, and the store takes 8 MiB at once."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = bytes(i % 251 for i in range(min(size, 1000))) + bytes(max(0, size - 1000))

    _Group(store, 1, 2).publish("outcome", told)

    assert _Group(store, 0, 2)._told("outcome", 1) == told


def plain(result: Result) -> dict[str, object]:
    return result.model_dump(exclude={"environment"})


@pytest.mark.parametrize("ranks", [2, 3])
def test_layers_over_ranks_give_the_result_of_one_process(
    torchrun: Torchrun, ranks: int, judge: Judge, small_inputs: Load, tmp_path: Path
) -> None:
    done = torchrun(ranks, "emulated:fused-fp8")

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("match: 30 of 30 stages compared") == 1
    together, rows = load_result(tmp_path / "result.json"), load_rows(tmp_path / "result.json")
    inputs = small_inputs(tokens=140, layers=(0, 1, 2, 3))
    alone = judge(replace(inputs, name="synthetic:gaussian"), create("emulated:fused-fp8"))
    assert together.environment.world == ranks
    assert plain(together) == plain(alone.result)
    assert rows.keys() == alone.rows.keys()


@pytest.mark.parametrize("ranks", [2, 4])
def test_heads_over_ranks_are_judged_as_one(torchrun: Torchrun, ranks: int, tmp_path: Path) -> None:
    done = torchrun(ranks, "heads:fused-fp8", layers="0")

    assert done.returncode == 0, done.stderr
    result = load_result(tmp_path / "result.json")
    assert (result.verdict, result.counts.compared) == ("match", 13)
    assert (
        f"{ranks} ranks of {4 // ranks} heads, all-reduce" in result.candidates[0].kernel.path_taken
    )


@pytest.mark.parametrize(
    ("fault", "layer", "lost"),
    [
        ("die", 3, r"rank 1 \(layers 2, 3\) died"),
        ("die", 0, r"rank 0 \(layers 0, 1\) died"),
        ("raise", 3, r"rank 1 \(layers 2, 3\) failed: .*faulty, layer 3 failed: RuntimeError"),
    ],
)
def test_a_rank_that_does_not_come_back_is_named(
    torchrun: Torchrun, fault: str, layer: int, lost: str, tmp_path: Path
) -> None:
    done = torchrun(2, "faulty:Faulty", FAULT=fault, FAULT_LAYER=str(layer))

    assert done.returncode != 0
    result = load_result(tmp_path / "result.json")
    assert result.verdict == "cannot-judge"
    assert result.detail is not None
    assert re.search(lost, result.detail), result.detail
    assert done.stdout.startswith("cannot-judge: rank")


def test_layers_are_dealt_out_in_turn_indexers_first() -> None:
    ratios = [0, 0, 4, 128, 4, 128, 4]
    # In order 2, 4, 6, then 3, 5, then 0, 1.
    assert deal(range(7), lambda layer: ratios[layer], 3) == [(1, 2, 3), (4, 5), (0, 6)]
    assert deal((2,), lambda layer: 4, 3) == [(2,), (), ()]


def test_heads_need_torchrun(judge: Judge, small_inputs: Load) -> None:
    with pytest.raises(ValueError, match="start the run with torchrun"):
        judge(small_inputs(tokens=64, layers=(0,)), create("heads:fused-fp8"))
