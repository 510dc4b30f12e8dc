"""One message and exit code 2 for whatever goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from needlepoint.verify.base.progress import Progress
from needlepoint.verify.cli import commands
from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.cli.options import VerifyOptions
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.schema.result import Result

Calls = list[tuple[VerifyOptions, Progress]]


def _failing(error: BaseException) -> Callable[[VerifyOptions, Progress], PipelineOutput]:
    def run(request: VerifyOptions, progress: Progress) -> PipelineOutput:
        raise error

    return run


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["verify", "--tokens", "0"], "'0'"),
        (["verify", "--tokens", "-3"], "-3"),
        (["verify", "--tokens", "many"], "many"),
        (["verify", "--contract", "fp64"], "fp64"),
        (["verify", "--device", "tpu"], "tpu"),
        (["verify", "--seed", "-1"], "-1"),
        (["verify", "--layers", "4-2"], "4-2"),
        (["verify", "--stages", "pooling"], "pooling"),
        (["verify", "--gate", "recall.losses<=0"], "losses"),
        (["verify", "--candidate", "x", "--candidate", "x"], "twice"),
        (["verify", "--json", "no/such/r.json"], "no/such"),
        (["verify", "--bogus"], "--bogus"),
        (["verify", "stray"], "stray"),
        (["verify", "--input", "caf\udce9"], "caf\\udce9"),
        (["verifi"], "verifi"),
        (["record"], "--out"),
        (["diff", "only"], "B"),
        ([], "command"),
    ],
)
def test_bad_usage_is_one_message_and_exit_2(
    arguments: list[str],
    named: str,
    pipeline: Callable[[Result], Calls],
    matching: Result,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = pipeline(matching)

    assert run_app(app, arguments) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("needlepoint: error: ")
    assert captured.err.count("\n") == 1
    assert named in captured.err
    assert not calls


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recall", "--svg", "x", "--json", "x"], "named for two outputs"),
        (["recall", "--resume", "journal"], "--resume: belongs to --server"),
        (
            ["recall", "--server", "http://127.0.0.1:9/v1", "--candidate", "emulated:fused-fp8"],
            "--candidate: does not go with --server",
        ),
        (
            ["recall", "--server", "http://127.0.0.1:9/v1", "--checkpoint", "d"],
            "--checkpoint: does not go with --server",
        ),
        (
            ["recall", "--server", "http://127.0.0.1:9/v1", "--needles", "2"],
            "--needles: does not go with --server",
        ),
        (["recall", "--checkpoint", "d"], "--checkpoint: belongs to --input"),
        (["recall", "--model", "v4-flash"], "--model: belongs to --input"),
        (["recall", "--pause-ms", "5"], "--pause-ms: belongs to --server"),
        (["recall", "--picks", "21x512"], "--picks: belongs to --server"),
        (["recall", "--input", "mini", "--lengths", "2560"], "--lengths: does not go with --input"),
    ],
)
def test_options_of_recall_that_do_not_go_together(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("tokens 3: expected at least 4"), "error: tokens 3: expected at least 4\n"),
        (KeyError("missing"), "unexpected KeyError: 'missing'; run again with --debug"),
        (EOFError("short"), "unexpected EOFError: short"),
        (BrokenPipeError(32, "Broken pipe"), "Broken pipe"),
        (MemoryError(), "out of memory"),
        (SystemExit(0), "a candidate ended the process (exit 0)"),
    ],
)
def test_errors_of_a_run_exit_2_without_a_traceback(
    error: BaseException,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(commands, "run_verify", _failing(error))

    assert run_app(app, ["verify", "--json", "r.json"]) == 2

    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]


def test_debug_prints_the_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "run_verify", _failing(ValueError("why")))

    assert run_app(app, ["verify", "--debug"]) == 2

    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("needlepoint: error: why\n")


def test_interrupt_exits_130_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "run_verify", _failing(KeyboardInterrupt()))

    assert run_app(app, ["verify", "--json", "r.json"]) == 130

    assert "interrupted" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]


def test_unknown_key_in_the_file_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.needlepoint]\ntoken = 3\n")

    assert run_app(app, ["verify"]) == 2

    error = capsys.readouterr().err
    assert str(tmp_path / "pyproject.toml") in error
    assert "'token'" in error
