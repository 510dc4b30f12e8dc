"""What the commands write and print: whole, refused before the run, or not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from needlepoint.verify.base.progress import NoProgress, Progress
from needlepoint.verify.cli import commands
from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.cli.options import VerifyOptions
from needlepoint.verify.recording.results import load_result
from needlepoint.verify.schema.result import CandidateResult, Result

Calls = list[tuple[VerifyOptions, Progress]]


def test_exceeded_gate_exits_1_and_is_written(
    pipeline: Callable[[Result], Calls],
    matching: Result,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pipeline(matching)
    gate = "format_cost.bf16.overlap_mean>=0.99"

    assert run_app(app, ["verify", "--gate", gate, "--json", "r.json"]) == 1

    written = load_result(tmp_path / "r.json")
    assert written.verdict == "differ"
    assert [(g.path, g.limit, g.found, g.exceeded) for g in written.gates] == [
        ("format_cost.bf16.overlap_mean", 0.99, 0.985, True)
    ] * 2
    assert [c.verdict for c in written.candidates] == ["match", "match"]
    assert capsys.readouterr().out.startswith("differ: gate format_cost.bf16.overlap_mean>=0.99")


def test_all_files_are_written(
    pipeline: Callable[[Result], Calls], differing: Result, tmp_path: Path
) -> None:
    pipeline(differing)

    assert run_app(app, ["verify", "--json", "r.json", "--junitxml", "r.xml"]) == 1

    files = {path.name for path in tmp_path.iterdir()} - {"pyproject.toml"}
    assert files == {"r.json", "r.rows.safetensors", "r.xml"}
    assert load_result(tmp_path / "r.json") == differing


@pytest.mark.parametrize("existing", ["r.json", "r.rows.safetensors", "r.xml"])
def test_existing_output_is_refused_before_the_run(
    existing: str,
    pipeline: Callable[[Result], Calls],
    matching: Result,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = pipeline(matching)
    (tmp_path / existing).write_text("mine")
    command = ["verify", "--json", "r.json", "--junitxml", "r.xml"]

    assert run_app(app, command) == 2
    assert not calls
    error = capsys.readouterr().err
    assert existing in error
    assert "--force" in error
    assert (tmp_path / existing).read_text() == "mine"

    assert run_app(app, [*command, "--force"]) == 0
    assert load_result(tmp_path / "r.json") == matching


def test_one_path_for_two_outputs_is_refused(
    pipeline: Callable[[Result], Calls], matching: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = pipeline(matching)

    assert run_app(app, ["verify", "--json", "r", "--junitxml", "./r"]) == 2
    assert not calls
    assert "two outputs" in capsys.readouterr().err


def test_quiet_prints_the_verdict_line_only(
    pipeline: Callable[[Result], Calls], differing: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = pipeline(differing)

    assert run_app(app, ["verify", "--quiet"]) == 1

    assert isinstance(calls[0][1], NoProgress)
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert captured.out.startswith("differ: layer 2 index.stored")
    assert captured.err == ""


def test_closed_pipe_costs_neither_files_nor_verdict(
    pipeline: Callable[[Result], Calls],
    differing: Result,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline(differing)

    class Closed:
        encoding = "utf-8"

        def __init__(self, path: Path) -> None:
            self.file = path.open("wb")

        def write(self, text: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

        def flush(self) -> None:
            raise BrokenPipeError(32, "Broken pipe")

        def isatty(self) -> bool:
            return False

        def fileno(self) -> int:
            return self.file.fileno()

    closed = Closed(tmp_path / "pipe")
    monkeypatch.setattr(sys, "stdout", closed)
    try:
        assert run_app(app, ["verify", "--json", "r.json"]) == 1
    finally:
        closed.file.close()
    assert load_result(tmp_path / "r.json") == differing


def test_names_that_the_terminal_cannot_spell_are_escaped(
    pipeline: Callable[[Result], Calls], matching: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    strange: CandidateResult = matching.candidates[0].model_copy(update={"name": "caf\u00e9[red]"})
    pipeline(matching.model_copy(update={"candidates": (strange,)}))

    assert run_app(app, ["verify"]) == 0
    assert "caf\u00e9[red]" in capsys.readouterr().out


PLACES = {
    ".": "output .: is a folder; give the name of a file",
    "..": "output ..: is a folder; give the name of a file",
    "/": "output /: is a folder; give the name of a file",
    "pyproject.toml/r": "output pyproject.toml/r: pyproject.toml is no folder; choose another",
    "no/such/r": "output no/such/r: folder no/such does not exist; create it first",
    "/proc/r": "output /proc/r: folder /proc is not writable",
    os.devnull: f"output {os.devnull}: is not an ordinary file; give the name of a file",
    "n" * 300: "cannot be written (File name too long); choose another name",
}
WRITERS = {
    "verify": ("--json", "--html", "--markdown", "--junitxml"),
    "diff a b": ("--json", "--html", "--markdown", "--junitxml"),
    "rejudge a": ("--json", "--html", "--markdown", "--junitxml"),
    "recall": ("--json", "--html", "--markdown", "--svg"),
    "selftest": ("--json",),
    "bench": ("--json",),
    "doctor": ("--json",),
}


@pytest.mark.parametrize("command", WRITERS)
def test_a_place_that_takes_no_file_is_refused_before_the_run(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ran(*_: object, **__: object) -> None:
        pytest.fail("the run began")

    for place in (
        *(f"{commands.__name__}.run_{name}" for name in ("verify", "diff")),
        "needlepoint.verify.cli.rejudge.load_result",
        "needlepoint.verify.cli.recall.watched",
        "needlepoint.verify.cli.selftest.run_selftest",
        "needlepoint.verify.cli.bench.run_bench",
        "needlepoint.verify.cli.doctor.diagnose",
    ):
        monkeypatch.setattr(place, ran)
    for option, (path, told) in product(WRITERS[command], PLACES.items()):
        assert run_app(app, [*command.split(), option, path]) == 2
        assert told in capsys.readouterr().err, (option, path)


def test_the_row_errors_of_a_result_need_a_name_too(
    pipeline: Callable[[Result], Calls], matching: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = pipeline(matching)
    name = "n" * 240
    assert run_app(app, ["verify", "--json", f"{name}.json"]) == 2
    assert f"output {name}.rows.safetensors: cannot be written" in capsys.readouterr().err
    assert not calls
