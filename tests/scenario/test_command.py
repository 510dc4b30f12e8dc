"""``verify --scenario``: exit codes, the result's scenario block, files that replay, workers."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import jsonschema
import pytest
import torch
from support.servers import WholePromptsOnly, raising

from needlepoint.optimized.candidates.catalogue import FACTORIES, create
from needlepoint.optimized.protocol.serving import StatefulCandidate
from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.recording.results import shipped_schema
from needlepoint.verify.scenario import sweep as scenario_sweep
from needlepoint.verify.scenario.events import KINDS, Decode, Event, Prefill, Request, Scenario
from needlepoint.verify.scenario.file import dump_scenario
from needlepoint.verify.scenario.random import random_scenario
from needlepoint.verify.scenario.rules import check
from needlepoint.verify.scenario.sweep import Tally
from needlepoint.verify.scenario.trial import try_candidate
from needlepoint.verify.selftest.faults.scenario import FAULTS

Cli = Callable[..., CompletedProcess[str]]
FP8 = "emulated:fused-fp8"


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> CompletedProcess[str]:
        capsys.readouterr()
        code = run_app(app, ["verify", *words])
        captured = capsys.readouterr()
        return CompletedProcess(list(words), code, captured.out, captured.err)

    return run


@pytest.fixture
def file(tmp_path: Path, scenario: Callable[..., Scenario]) -> Callable[..., str]:
    def write(*events: Event, **fields: object) -> str:
        path = tmp_path / "scenario.toml"
        path.write_text(dump_scenario(scenario(*events, **fields)))
        return str(path)

    return write


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, object], str]:
    def add(name: str, candidate: object) -> str:
        monkeypatch.setitem(FACTORIES, name, lambda: candidate)
        return name

    return add


def test_a_file_gives_a_result_that_validates(cli: Cli, file: Callable[..., str]) -> None:
    path = file(Prefill(("a", "b"), (131, 6)))
    done = cli("--scenario", path, "--candidate", FP8, "--json", "out.json", "--junitxml", "o.xml")

    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(Path("out.json").read_text())
    jsonschema.validate(result, json.loads(shipped_schema()))
    found = result["scenario"]
    assert (found["histories"], found["distinct"], found["failures"]) == (1, 1, 0)
    assert (found["events"], found["residues4"], found["residues128"]) == ({"prefill": 1}, 2, 2)
    assert result["counts"]["expected"] == result["counts"]["compared"] == 7
    assert result["verdict"] == result["candidates"][0]["verdict"] == "match"
    assert "0 prefill a 131, b 6" in done.stdout


def test_an_impossible_event_is_exit_2_and_named(cli: Cli, file: Callable[..., str]) -> None:
    done = cli("--scenario", file(Decode(("a",))), "--candidate", FP8)

    assert done.returncode == 2
    assert "event 0 (decode a): request a has no tokens; prefill it first" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--scenario", "no.toml"), "cannot be read"),
        (("--scenario", "no.toml", "--seconds", "3"), "--seconds: is the time of --scenario all"),
        (("--seconds", "3"), "give both or neither"),
        (("--scenario", "all", "--seconds", "0"), "--seconds '0': expected a whole number"),
        (("--scenario", "all", "--tokens", "9"), "--tokens: is for whole prompts, and a scenario"),
        (("--scenario", "all", "--input", "mini"), "--input: is for whole prompts, and a scenario"),
        (("--scenario", "no.toml", "--seed", "3"), "--seed: a scenario file has its own seed"),
    ],
)
def test_options_that_do_not_belong_together(
    words: tuple[str, ...], message: str, cli: Cli
) -> None:
    done = cli(*words, "--candidate", FP8)

    assert done.returncode == 2
    assert message in done.stderr


def test_a_candidate_without_serve_is_listed(
    cli: Cli, file: Callable[..., str], known: Callable[[str, object], str]
) -> None:
    whole = known("whole", WholePromptsOnly())
    path = file(Prefill(("a",), (9,)))
    both = cli("--scenario", path, "--candidate", FP8, "--candidate", whole)
    quiet = cli("--scenario", path, "--candidate", FP8, "--candidate", whole, "--quiet")
    alone = cli("--scenario", path, "--candidate", whole)

    assert both.returncode == 0
    assert both.stdout.count("not covered: whole, 1 histories: has no serve()") == 1
    assert len(quiet.stdout.splitlines()) == 1
    assert "not covered: whole, 1 histories: has no serve()" in quiet.stderr
    assert alone.returncode == 2
    assert "cannot-judge: no candidate was driven through a scenario: whole has no" in alone.stdout


def test_a_candidate_that_raises_is_no_verdict(
    cli: Cli, file: Callable[..., str], known: Callable[[str, object], str]
) -> None:
    name = known("raising", raising(lambda: RuntimeError("no card")))
    done = cli("--scenario", file(Prefill(("a",), (9,))), "--candidate", name)

    assert done.returncode == 2
    assert "event 0 (prefill a 9), layer 0 failed: RuntimeError: no card" in done.stderr


def test_a_server_can_be_interrupted(
    cli: Cli, file: Callable[..., str], known: Callable[[str, object], str]
) -> None:
    name = known("interrupted", raising(KeyboardInterrupt))
    done = cli("--scenario", file(Prefill(("a",), (9,))), "--candidate", name)

    assert done.returncode == 130
    assert "interrupted; nothing half-written" in done.stderr


def test_progress_counts_every_event_on_every_server(scenario: Callable[..., Scenario]) -> None:
    """A file may have thousands of events: the bar has to move with them."""

    class Watching:
        total = done = 0

        def start(self, description: str, total: int) -> None:
            self.total += total

        def advance(self, steps: int = 1) -> None:
            self.done += steps

    candidate = create(FP8)
    assert isinstance(candidate, StatefulCandidate)
    made = scenario(Prefill(("a",), (130,)), *(Decode(("a",)) for _ in range(5)))
    watching = Watching()
    Tally().run(made, [candidate], progress=watching)

    assert watching.done == watching.total == 6 * 2 * 2  # events, ratios, reference and candidate


def test_what_a_hostile_file_says_is_printed_escaped(cli: Cli, tmp_path: Path) -> None:
    good = dump_scenario(Scenario("good", (Request("a", 0),), (Prefill(("a",), (3,)),)))
    event = '\n[[event]]\nkind = "pad"\nrows = 1\nside = "VALUE"\n'
    for written in (
        good.replace('name = "good"', 'name = "VALUE"'),
        good.replace('requests = ["a"]', 'requests = ["VALUE"]'),
        good.replace('kind = "prefill"', 'kind = "VALUE"'),
        good.replace("tokens =", '"VALUE" ='),
        good + event,
        good
        + event.replace('"pad"', '"split"')
        .replace("rows = 1", "ranks = 2")
        .replace("side", "layout"),
    ):
        for value, shown in {"1b": "\\x1b", "9b": "\\x9b", "202e": "\\u202e"}.items():
            path = tmp_path / "hostile.toml"
            path.write_text(written.replace("VALUE", f"\\u{value:0>4}[2J"))
            done = cli("--scenario", str(path), "--candidate", FP8)

            assert done.returncode == 2
            assert shown in done.stderr
            assert (done.stdout + done.stderr).replace("\n", "").isprintable()


def test_a_sweep_finds_a_fault_and_prints_a_file_that_replays(
    cli: Cli, known: Callable[[str, object], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (fault,) = [fault for fault in FAULTS if fault.id == "drafts-kept"]
    candidate = fault.candidate()
    name = known("faulty", candidate)
    monkeypatch.setattr(scenario_sweep, "ENOUGH", 1)
    words = ("--scenario", "all", "--seconds", "15", "--candidate", name, "--json", "out.json")
    done = cli(*words, "--save-failures", "failing")

    assert done.returncode == 1
    (found,) = json.loads(Path("out.json").read_text())["scenario"]["failing"]
    assert Path("failing/scenario-0.toml").read_text() == found["history"]
    assert found["history"].count("[[event]]") <= 8
    assert all(line.strip() in done.stdout for line in found["history"].splitlines())
    assert cli("--scenario", "failing/scenario-0.toml", "--candidate", name).returncode == 1
    assert cli("--scenario", "failing/scenario-0.toml", "--candidate", FP8).returncode == 0
    # Files in the way are named before the sweep, and a sound server leaves no folder.
    held = cli(*words[:-2], "--save-failures", "failing")
    assert held.returncode == 2
    assert "failing: holds scenario-0.toml already; pass --force" in held.stderr
    sound = ("--scenario", "failing/scenario-0.toml", "--candidate", FP8)
    assert cli(*sound, "--save-failures", "none").returncode == 0
    assert not Path("none").exists()


def test_histories_cover_every_kind_and_residue() -> None:
    """What is written, not run: the figures that a sweep of 600 seconds must reach."""
    tally = Tally()
    for index in range(600):
        tally.run(random_scenario(0, index), (), reference=False)

    assert tally.histories == len(tally.digests) == 600
    assert set(tally.events) == set(KINDS)
    assert len(tally.lengths) == 128
    assert min(tally.events.values()) > 50


def test_every_history_has_two_requests_and_eight_events() -> None:
    for index in range(300):
        history = random_scenario(7, index)
        named = {
            name for action in check(history) for name in [p.before.request for p in action.parts]
        }
        assert len(named) >= 2
        assert len(history.events) >= 8


def test_workers_run_histories_and_end_with_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scenario_sweep, "WORKERS_FROM", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    parts = scenario_sweep._parts([FP8], [], time.time() + 1, 0)
    first = next(parts)
    here = Tally()
    here.run(random_scenario(0, 0), [FACTORIES[FP8]()])  # type: ignore[list-item]

    assert first.histories > 0
    assert here.digests <= first.digests
    assert sum(first.compared.values()) > 0
    assert first.failing == 0
    with pytest.raises(KeyboardInterrupt):
        parts.throw(KeyboardInterrupt())
    assert multiprocessing.active_children() == []


def test_trials_are_the_same_every_time() -> None:
    history = random_scenario(0, 4)
    candidate = FACTORIES[FP8]()
    first, second = (
        try_candidate(history, check(history), candidate)  # type: ignore[arg-type]
        for _ in range(2)
    )

    assert first.compared == second.compared
    assert first.failures == second.failures == []
