"""Shrinking: the input that comes out is small, still fails, and is replayed by one command."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    Candidate,
    CandidateInfo,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.verify.recording.recording import RecordingError, RecordingWriter, open_recording
from needlepoint.verify.recording.results import load_result
from needlepoint.verify.run.failures_saved import SavedFailures
from needlepoint.verify.triage import shrink

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


@dataclass
class Named(Late):
    """Calls itself something else."""

    def __init__(self, name: str) -> None:
        super().__init__(first=0)
        self.name = name

    @property
    def info(self) -> CandidateInfo:
        return replace(super().info, name=self.name)


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
    result = load_result(Path("r.json"))
    assert result.shrink is None
    assert result.notes == ("shrink: no stage of any candidate differs, nothing to shrink",)
    assert f"note: {result.notes[0]}" in found.stdout
    assert not Path("small").exists()


@pytest.mark.parametrize("runs", [1, 2])
def test_a_failure_that_does_not_come_back_keeps_the_result(runs: int, run: Cli) -> None:
    """The search fails at once, or halfway with a candidate that then differs no more."""
    found = run(Late(first=5, runs_left=runs), "--layers", "0", "--shrink", "small")

    assert found.returncode == 1
    assert found.stdout.startswith("differ: layer 0 index.roped")
    result = load_result(Path("r.json"))
    assert result.candidates[0].first_divergence is not None
    if runs > 1:  # it came back once: the whole input is the smallest that is known to fail
        assert result.shrink is not None
        assert result.shrink.tokens == 48
        return
    assert result.shrink is None
    (note,) = result.notes
    assert "does not fail again at layer 0 index.roped" in note
    assert "--repeat" in note
    assert " ".join(f"note: {note}".split()) in " ".join(found.stdout.split())
    assert not Path("small").exists()


def test_a_note_is_said_beside_the_verdict_line(run: Cli) -> None:
    found = run(Late(first=5, runs_left=1), "--layers", "0", "--shrink", "small", "--quiet")

    assert found.stdout.count("\n") == 1
    assert found.stderr.startswith("needlepoint: note: shrink: candidate what it calls itself")


def test_a_target_that_is_lost_in_between_keeps_the_result(
    run: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shrink.Shrinker, "run", full)
    found = run(Late(first=5), "--layers", "0", "--shrink", "small")

    assert found.returncode == 1
    assert load_result(Path("r.json")).notes == ("shrink: [Errno 28] No space left on device",)


def test_processes_side_by_side_shrink_and_save_nothing(
    run: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for option in ("--shrink", "--save-failures"):
        found = run(Late(first=5), option, "there")
        assert found.returncode == 2
        assert "without torchrun" in found.stderr


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
    (Path("failures") / "test-late").mkdir(parents=True)
    (Path("failures") / "test-late" / "file").touch()
    assert "failures/test-late: already exists" in run(late, "--save-failures", "failures").stderr
    forced = run(late, "--save-failures", "failures", "--force").stderr
    assert "is a folder, but not a recording" in forced
    assert late.runs_left == 1 << 30


def test_failures_are_saved_as_recordings(run: Cli, cli: Cli) -> None:
    # One run a layer: a second one would be sound, so what is saved is what was judged.
    late = Late(first=5, runs_left=2)
    found = run(late, "--save-failures", "failures", tokens=136)
    assert found.returncode == 1
    assert late.runs_left == 0
    assert "saved what it calls itself to failures/test-late: layers 0" in found.stdout

    saved = open_recording(Path("failures/test-late"))

    assert saved.layers == (0,)  # the layer of ratio 128 matches
    sound = ["record", "--candidate", "emulated:fused-fp8", "--out", "sound", "--quiet"]
    words = ["--input", "failures/test-late", "--layers", "0"]
    assert cli(*sound, *words).returncode == 0
    assert cli("diff", "sound", "failures/test-late", "--quiet").returncode == 1
    again = run(Late(first=1000), "--save-failures", "failures", "--force", tokens=136)
    assert again.returncode == 0
    assert "nothing was saved" in again.stdout
    assert open_recording(Path("failures/test-late")).layers == (0,)


@dataclass
class Forgets(Late):
    """Fails in one stage and never hands back another that it declares."""

    def run(self, inputs: LayerInputs) -> Observed:
        observed = super().run(inputs)
        dense = {key: rows for key, rows in observed.dense.items() if key[1] != "normed"}
        return replace(observed, dense=dense)


def test_what_cannot_be_saved_costs_no_result(run: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(Forgets(first=5), "--layers", "0,3", "--save-failures", "failures")
    assert found.returncode == 2
    assert "lacks index.normed, main.normed" in " ".join(found.stdout.split())
    assert not Path("failures").exists()

    def full(*_: object) -> None:
        raise RecordingError("recording failures/test-late: cannot write")

    for step, layers in (("write_layer", "0,3"), ("_commit", "0")):
        with monkeypatch.context() as patched:
            patched.setattr(RecordingWriter, step, full)
            found = run(Late(first=5), "--layers", layers, "--save-failures", "failures", "--force")
        assert found.returncode == 1
        said = " ".join(found.stdout.split())
        assert said.count("was not saved: recording failures/test-late: cannot write") == 1
        assert list(Path("failures").iterdir()) == []


def test_an_end_between_two_layers_leaves_no_recording(
    run: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Late(first=5)

    def ends(inputs: LayerInputs) -> Observed:
        if inputs.layer:
            raise RuntimeError("no card")
        return Late.run(late, inputs)

    monkeypatch.setattr(late, "run", ends, raising=False)
    found = run(late, "--layers", "0,3", "--save-failures", "failures")

    assert found.returncode == 2
    assert list(Path("failures").iterdir()) == []


def test_every_name_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """Names that differ in signs alone do not share one."""
    names = ("a:b", "a-b", "::")
    candidates = {name: Named(name) for name in names}
    saved = SavedFailures(tmp_path / "failures", candidates, force=False)

    folders = list(saved.folders.values())
    assert [folder.name for folder in folders] == ["a-b", "a-b-1", "failures-2"]
    assert {folder.parent for folder in folders} == {tmp_path / "failures"}
