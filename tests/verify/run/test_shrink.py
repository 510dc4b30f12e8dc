"""Shrinking: the input that comes out is small, still fails, and is replayed by one command."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from needlepoint.optimized.candidates import create
from needlepoint.optimized.interface import (
    INDEX,
    MAIN,
    Candidate,
    CandidateInfo,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.verify import shrink
from needlepoint.verify.output import load_result
from needlepoint.verify.recordings import open_recording

Cli = Callable[..., CompletedProcess[str]]


@dataclass
class Late:
    """The sound candidate, whose entries from ``first`` on are wrong in one stage."""

    first: int
    key: StageKey = (INDEX, "roped")
    runs_left: int = 1 << 30

    @property
    def info(self) -> CandidateInfo:
        return replace(create("emulated:fused-fp8").info, name="what it calls itself")

    def stages(self, ratio: int) -> frozenset[StageKey]:
        return create("emulated:fused-fp8").stages(ratio)

    def run(self, inputs: LayerInputs) -> Observed:
        observed = create("emulated:fused-fp8").run(inputs)
        self.runs_left -= 1
        if self.runs_left < 0 or self.key not in observed.dense:
            return observed
        rows, start = observed.dense[self.key].clone(), 0
        for length in inputs.lengths:
            stop = start + length // inputs.ratio
            rows[start + self.first : stop] *= 1.01
            start = stop
        return replace(observed, dense={**observed.dense, self.key: rows})


@pytest.fixture
def run(
    cli: Cli, candidate_named: Callable[[str, Candidate], str], small_model: Path
) -> Callable[..., CompletedProcess[str]]:
    def verify(candidate: Candidate, *options: object, tokens: int = 48) -> CompletedProcess[str]:
        name = candidate_named("test:late", candidate)
        words = ["verify", "--input", "synthetic", "--model", small_model, "--tokens", tokens]
        return cli(*words, "--candidate", name, "--json", "r.json", *options)

    return verify


def test_an_input_shrinks_to_the_windows_it_takes(run: Cli, cli: Cli) -> None:
    found = run(Late(first=2), "--layers", "0", "--shrink", "small")

    assert found.returncode == 1
    shrunk = load_result(Path("r.json")).shrink
    assert shrunk is not None
    assert (shrunk.layer, shrunk.path, shrunk.stage) == (0, "index", "roped")
    # Entry 2 is the third of its request: three whole windows, whichever, and nothing else.
    assert (shrunk.tokens, shrunk.requests, shrunk.windows) == (12, 1, 3)
    assert (shrunk.heads, shrunk.topk, shrunk.pages) == (1, 1, 2)
    assert shrunk.complete
    assert shrunk.trials < shrink.MAX_TRIALS
    assert open_recording(Path("small")).manifest.requests == (12,)
    assert f"replay: {shrunk.command}" in found.stdout

    replayed = cli(*shlex.split(shrunk.command)[1:], "--json", "again.json")

    assert replayed.returncode == 1
    first = load_result(Path("again.json")).candidates[0].first_divergence
    assert first is not None
    assert (first.path, first.stage, first.entry) == ("index", "roped", 2)


def test_a_layer_of_ratio_128_shrinks_by_its_own_windows(run: Cli) -> None:
    found = run(
        Late(first=0, key=(MAIN, "normed")), "--layers", "1", "--shrink", "small", tokens=136
    )

    assert found.returncode == 1
    shrunk = load_result(Path("r.json")).shrink
    assert shrunk is not None
    assert (shrunk.tokens, shrunk.requests, shrunk.windows) == (128, 1, 1)
    assert shrunk.heads == 4  # ratio 128 has no indexer


def test_nothing_is_shrunk_where_nothing_differs(run: Cli) -> None:
    found = run(Late(first=1000), "--layers", "0", "--shrink", "small")

    assert found.returncode == 0
    assert load_result(Path("r.json")).shrink is None
    assert not Path("small").exists()


def test_a_failure_that_does_not_come_back_is_no_result(run: Cli) -> None:
    found = run(Late(first=5, runs_left=1), "--layers", "0", "--shrink", "small")

    assert found.returncode == 2
    assert "does not fail again" in found.stderr
    assert "--repeat" in found.stderr
    assert not Path("small").exists()


def test_a_search_that_is_cut_short_says_so(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrink, "MAX_TRIALS", 6)

    found = run(Late(first=5), "--layers", "0", "--shrink", "small")

    shrunk = load_result(Path("r.json")).shrink
    assert shrunk is not None
    assert (shrunk.complete, shrunk.trials) == (False, 6)
    assert shrunk.tokens < 48
    assert "not finished" in found.stdout


def test_targets_are_checked_before_the_run(run: Cli) -> None:
    Path("taken").mkdir()
    (Path("taken") / "file").touch()
    late = Late(first=5)

    assert "already exists" in run(late, "--shrink", "taken").stderr
    assert "does not exist" in run(late, "--save-failures", "no/where").stderr
    assert "is a file" in run(late, "--save-failures", "taken/file").stderr
    assert late.runs_left == 1 << 30


def test_failures_are_saved_as_recordings(run: Cli, cli: Cli) -> None:
    assert run(Late(first=5), "--save-failures", "failures", tokens=136).returncode == 1

    saved = open_recording(Path("failures/test-late"))

    assert saved.layers == (0,)  # the layer of ratio 128 matches
    sound = ["record", "--candidate", "emulated:fused-fp8", "--out", "sound", "--quiet"]
    words = ["--input", "failures/test-late", "--layers", "0"]
    assert cli(*sound, *words).returncode == 0
    assert cli("diff", "sound", "failures/test-late", "--quiet").returncode == 1
