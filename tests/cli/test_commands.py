"""What each command asks for, where its defaults come from, and its exit code."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from needlepoint.verify.base.progress import Progress
from needlepoint.verify.cli import commands
from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.cli.main import main
from needlepoint.verify.cli.options import (
    DEFAULT_CANDIDATES,
    DiffOptions,
    RecordOptions,
    VerifyOptions,
)
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.schema.result import Result

Calls = list[tuple[VerifyOptions, Progress]]


def test_defaults_are_the_main_job(
    pipeline: Callable[[Result], Calls], matching: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = pipeline(matching)

    assert run_app(app, ["verify"]) == 0

    request, _ = calls[0]
    assert request.candidates() == DEFAULT_CANDIDATES
    wanted = VerifyOptions(input="mini", contract="bf16", repeat=1, device="cpu")
    assert request.model_dump() == wanted.model_dump()
    assert not request.model_fields_set
    captured = capsys.readouterr()
    assert captured.out.startswith("match: 20 of 20 stages compared")
    assert captured.err == ""


def test_every_option_reaches_the_request(
    pipeline: Callable[[Result], Calls], matching: Result
) -> None:
    calls = pipeline(matching)
    options = (
        "--input synthetic:gaussian --model v4-pro --contract official --candidate a:b "
        "--candidate c:d --layers 2,4-6 --tokens 512 --seed 7 --device cpu --stages index.stored "
        "--limits l.toml"
    )

    assert run_app(app, ["verify", *options.split()]) == 0

    request, _ = calls[0]
    wanted = VerifyOptions(
        input="synthetic:gaussian",
        model="v4-pro",
        layers=(2, 4, 5, 6),
        tokens=512,
        seed=7,
        candidate=("a:b", "c:d"),
        contract="official",
        limits=Path("l.toml"),
        stages=frozenset({("index", "stored")}),
    )
    assert request.model_dump() == wanted.model_dump()


def test_differ_exits_1(pipeline: Callable[[Result], Calls], differing: Result) -> None:
    pipeline(differing)

    assert run_app(app, ["verify"]) == 1


def test_cannot_judge_exits_2(pipeline: Callable[[Result], Calls], matching: Result) -> None:
    pipeline(matching.model_copy(update={"verdict": "cannot-judge"}))

    assert run_app(app, ["verify"]) == 2


def test_file_gives_defaults_and_the_command_line_wins(
    pipeline: Callable[[Result], Calls],
    matching: Result,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = pipeline(matching)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.needlepoint]\ncandidate = ["a:b", "c:d"]\ncontract = "exact"\ntokens = 640\n'
        'gate = ["layers.topk.overlap_min>=0.999"]\n'
    )

    assert run_app(app, ["verify", "--tokens", "128"]) == 1

    request, _ = calls[0]
    assert request.candidates() == ("a:b", "c:d")
    assert request.contract == "exact"
    assert request.tokens == 128
    assert f"defaults from {tmp_path / 'pyproject.toml'}" in capsys.readouterr().err


def test_record_passes_its_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[RecordOptions] = []
    monkeypatch.setattr(commands, "run_record", lambda request, progress: calls.append(request))
    # Candidates of the file are what `verify` judges; `record` records the reference by default.
    (tmp_path / "pyproject.toml").write_text('[tool.needlepoint]\ncandidate = ["a:b"]\nseed = 5\n')

    assert run_app(app, ["record", "--out", "dir"]) == 0
    assert run_app(app, ["record", "--out", "dir", "--candidate", "x:y", "--force"]) == 0

    assert [(c.recorded(), c.force, c.seed) for c in calls] == [
        (None, False, 5),
        ("x:y", True, 5),
    ]
    assert capsys.readouterr().out == "recorded reference to dir\nrecorded x:y to dir\n"


def test_diff_passes_its_request(monkeypatch: pytest.MonkeyPatch, differing: Result) -> None:
    calls: list[DiffOptions] = []

    def run(request: DiffOptions, progress: Progress) -> PipelineOutput:
        calls.append(request)
        return PipelineOutput(result=differing, rows={})

    monkeypatch.setattr(commands, "run_diff", run)

    assert run_app(app, ["diff", "a", "b", "--layers", "2", "--json", "r.json"]) == 1

    wanted = DiffOptions(a=Path("a"), b=Path("b"), layers=(2,), json_=Path("r.json"))
    assert [request.model_dump() for request in calls] == [wanted.model_dump()]
    assert json.loads(Path("r.json").read_text())["verdict"] == "differ"


@pytest.mark.parametrize("command", ["verify", "record", "diff"])
def test_help_exits_0(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, [command, "--help"]) == 0
    assert "--force" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["rejudge", "--help"], ["--version"]])
def test_a_process_loads_what_its_command_needs(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command line whichever way: the same name, and Ctrl-C and SIGTERM end it alike."""
    handled: list[object] = []
    monkeypatch.setattr("sys.argv", ["needlepoint", *command])
    monkeypatch.setattr("signal.signal", lambda *given: handled.append(given))

    assert main() == 0
    assert handled == [(signal.SIGTERM, signal.default_int_handler)]
    assert "needlepoint " in capsys.readouterr().out
