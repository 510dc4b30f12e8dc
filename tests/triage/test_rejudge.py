"""Rejudging: new limits over saved rows say what a run under those limits would have said."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.wrapped import WrappedCandidate, planted

from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    Candidate,
    LayerInputs,
    Observed,
)
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recording.results import load_result
from needlepoint.verify.schema.result import Result, StageResult
from needlepoint.verify.selftest.faults.ground import Ground
from needlepoint.verify.selftest.faults.scores import on_scores
from needlepoint.verify.triage.rejudge import rejudge

Cli = Callable[..., CompletedProcess[str]]


def nudged(inputs: LayerInputs, observed: Observed) -> Observed:
    """Move one pooled row by three radii, and scores by what this explains."""
    # The norm takes a gain out again, so nothing behind the stage notices.
    rows = observed.dense[MAIN, "pooled"].clone()
    rows[-1] *= 1 + 3e-6
    dense = {**observed.dense, (MAIN, "pooled"): rows}
    reader = observed.scores
    if reader is None:
        return replace(observed, dense=dense)
    return replace(observed, dense=dense, scores=lambda r, a, b: reader(r, a, b) * (1 + 2e-5))


NUDGED = WrappedCandidate(nudged, claims={"name": "test:nudged"})


def limits(tmp_path: Path, text: str) -> Limits:
    path = tmp_path / "limits.toml"
    path.write_text(text)
    return Limits.load(path)


def stages(result: Result) -> dict[tuple[int, str, str], StageResult]:
    return {
        (layer.layer, stage.path, stage.stage): stage
        for layer in result.candidates[0].layers
        for stage in layer.stages
    }


@pytest.mark.parametrize(
    "text", ["scale = 1.0", "scale = 0.3", "scale = 40.0", "scale = 1e7", "[pooled]\nvalue = 1e3"]
)
def test_rejudging_is_running_again_under_those_limits(
    text: str,
    tmp_path: Path,
    judge: Callable[..., PipelineOutput],
    small_inputs: Callable[..., Inputs],
) -> None:
    other = limits(tmp_path, text)
    inputs = small_inputs(tokens=136)
    first, again = judge(inputs, NUDGED), judge(inputs, NUDGED, limits=other)

    found = rejudge(first.result, first.rows, other)

    assert found.verdict == again.result.verdict
    assert found.counts == again.result.counts
    for key, stage in stages(again.result).items():
        mine = stages(found)[key]
        assert (mine.verdict, mine.detail) == (stage.verdict, stage.detail), key
        if stage.local is not None and mine.local is not None:
            assert mine.local.rows_failed == stage.local.rows_failed
        assert [test.exceeded for test in mine.bias] == [test.exceeded for test in stage.bias]
        if stage.limit is not None and mine.limit is not None:
            assert mine.limit.value == stage.limit.value
            assert (mine.limit.passing is None) == (stage.limit.passing is None)
            if mine.limit.passing is not None:
                assert mine.limit.passing == pytest.approx(stage.limit.passing, rel=1e-6)
    tops = [layer.topk for layer in found.candidates[0].layers]
    assert tops == [layer.topk for layer in again.result.candidates[0].layers]
    where, meant = (r.candidates[0].first_divergence for r in (found, again.result))
    assert (where is None) == (meant is None)
    if where is not None and meant is not None:
        assert (where.stage, where.position, where.entry) == (
            meant.stage,
            meant.position,
            meant.entry,
        )


def test_the_smallest_passing_limit_passes_and_a_smaller_one_does_not(
    tmp_path: Path, judge: Callable[..., PipelineOutput], small_inputs: Callable[..., Inputs]
) -> None:
    output = judge(small_inputs(tokens=136, layers=(0,)), NUDGED)
    key = (0, "main", "pooled")
    stage = stages(output.result)[key]
    assert stage.verdict == "differ"
    assert stage.limit is not None
    assert stage.limit.passing is not None
    assert stage.limit.passing > 1

    for factor, verdict in ((1.0, "match"), (0.999, "differ")):
        other = limits(tmp_path, f"[pooled]\nvalue = {stage.limit.passing * factor!r}")
        assert stages(rejudge(output.result, output.rows, other))[key].verdict == verdict


def test_looser_limits_explain_swaps_and_never_excuse_a_selection(
    tmp_path: Path, judge: Callable[..., PipelineOutput], small_inputs: Callable[..., Inputs]
) -> None:
    """A row of keys moved a little: its swaps are `upstream` until the limit is wide enough."""

    def moved(ground: Ground, request: int, scores: torch.Tensor) -> torch.Tensor:
        return scores * (1 + 0.02 * torch.cos(torch.arange(scores.shape[1])))

    candidate = WrappedCandidate(planted(on_scores(moved)), inner="emulated:unfused-bf16")
    output = judge(small_inputs(tokens=200, layers=(0,)), candidate)
    before = output.result.candidates[0].layers[0].topk
    assert before is not None
    assert before.swaps.upstream > 0

    loose = limits(tmp_path, "[topk]\nvalue = 1e9")
    after = rejudge(output.result, output.rows, loose).candidates[0].layers[0].topk

    assert after is not None
    assert after.swaps.upstream == 0
    assert after.swaps.explained == before.swaps.explained + before.swaps.upstream


def test_the_command_reads_files_and_prints_what_would_pass(
    cli: Cli,
    candidate_named: Callable[[str, Candidate], str],
    small_model: Path,
) -> None:
    name = candidate_named("test:nudged", NUDGED)
    words = ["verify", "--input", "synthetic", "--model", small_model, "--tokens", "136"]
    first = cli(*words, "--layers", "0", "--candidate", name, "--json", "a.json", "--quiet")
    assert first.returncode == 1
    Path("loose.toml").write_text("scale = 50.0")

    found = cli("rejudge", "a.json", "--limits", "loose.toml", "--json", "b.json")

    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.startswith("match")
    assert "Smallest limit that every row passes" in found.stdout
    assert load_result(Path("b.json")).verdict == "match"
    # The rejudged result can be judged again, and the shipped limits still fail it.
    assert cli("rejudge", "b.json", "--quiet").returncode == 1
    gated = cli("rejudge", "b.json", "--limits", "loose.toml", "--gate", "layers.topk.k<=2")
    assert gated.returncode == 1


def test_rejudging_loads_no_torch(cli: Cli, small_model: Path) -> None:
    """Two seconds for 43 layers: importing torch alone takes most of them."""
    words = ["verify", "--input", "synthetic", "--model", small_model, "--tokens", "136"]
    assert cli(*words, "--json", "a.json", "--markdown", "a.md", "--quiet").returncode == 0
    options = "'rejudge', 'a.json', '--json', 'b.json', '--junitxml', 'b.xml', '--markdown', 'b.md'"
    code = (
        f"import sys; sys.argv[1:] = [{options}]; from needlepoint.verify.cli.main import main; "
        "code = main(); print('torch' in sys.modules); sys.exit(code)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("match: ")
    assert done.stdout.endswith("\nFalse\n")
    before, after = (load_result(Path(name)) for name in ("a.json", "b.json"))
    assert (after.counts, after.input) == (before.counts, before.input)
    assert [c.verdict for c in after.candidates] == ["match"] * len(before.candidates)
    assert Path("b.rows.safetensors").read_bytes() == Path("a.rows.safetensors").read_bytes()
    assert cli("rejudge", "b.json", "--html", "b.html", "--quiet").returncode == 0
    assert Path("b.html").stat().st_size > 10_000


@pytest.mark.parametrize(
    "fault", ["missing", "a row short", "another tensor", "another run", "swaps"]
)
def test_row_files_that_do_not_belong_are_refused(fault: str, cli: Cli, small_model: Path) -> None:
    words = ["verify", "--input", "synthetic", "--model", small_model, "--tokens", "136"]
    words += ["--layers", "0", "--candidate", "emulated:fused-fp8", "--json", "a.json", "--quiet"]
    assert cli(*words).returncode == 0
    rows = Path("a.rows.safetensors")
    tensors = load_file(rows)
    name = f"emulated:fused-fp8/layer0/{INDEX}/normed/local"
    if fault == "missing":
        rows.unlink()
    else:
        if fault == "a row short":
            tensors[name] = tensors[name][1:].clone()
        elif fault == "another tensor":
            del tensors[name]
        elif fault == "another run":  # of the same name and size
            tensors[name] = tensors[name] / 2
        else:
            tensors["emulated:fused-fp8/layer0/index/topk/swaps"] = torch.ones(3)
        save_file(tensors, rows)

    found = cli("rejudge", "a.json")

    assert found.returncode == 2
    assert "a.rows.safetensors" in found.stderr or "row file" in found.stderr


def test_a_run_that_could_not_judge_stays_so(
    cli: Cli, small_model: Path, tmp_path: Path, recorded: Callable[..., Path]
) -> None:
    """Two recordings of which one has a byte changed that no entry owns: no limit excuses it."""
    a, b = recorded("emulated:fused-fp8", "a"), tmp_path / "b"
    shutil.copytree(a, b)
    file = b / "layer0.safetensors"
    tensors = load_file(file)
    pages = tensors["layer0.index.stored.pages"]
    pages[-1, -1] ^= 1
    save_file(tensors, file)
    first = cli("diff", a, b, "--json", "d.json", "--quiet")
    assert first.returncode == 1, first.stdout

    Path("loose.toml").write_text("scale = 50.0")
    assert cli("rejudge", "d.json", "--limits", "loose.toml", "--quiet").returncode == 1
