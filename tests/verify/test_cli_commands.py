from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from needlepoint.verify import commands
from needlepoint.verify.cli import app
from needlepoint.verify.cli_run import run_app
from needlepoint.verify.commands import DiffRequest, RecordRequest, VerifyRequest
from needlepoint.verify.options import DEFAULT_CANDIDATES
from needlepoint.verify.output import load_result
from needlepoint.verify.pipeline import PipelineOutput
from needlepoint.verify.progress import NoProgress, Progress
from needlepoint.verify.result import CandidateResult, Result

ROWS: Mapping[str, Tensor] = {
    "emulated:fused-fp8/layer2/index/stored/local": torch.tensor([0.5, 3.25])
}

Calls = list[tuple[VerifyRequest, Progress]]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch) -> Callable[[Result], Calls]:
    """Return a function that replaces the run by a result and lists the requests it got."""

    def replace(result: Result) -> Calls:
        calls: Calls = []

        def run(request: VerifyRequest, progress: Progress) -> PipelineOutput:
            calls.append((request, progress))
            return PipelineOutput(result=result, rows=dict(ROWS))

        monkeypatch.setattr(commands, "run_verify", run)
        return calls

    return replace


def _failing(error: BaseException) -> Callable[[VerifyRequest, Progress], PipelineOutput]:
    def run(request: VerifyRequest, progress: Progress) -> PipelineOutput:
        raise error

    return run


def test_defaults_are_the_main_job(
    pipeline: Callable[[Result], Calls], matching: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = pipeline(matching)

    assert run_app(app, ["verify"]) == 0

    request, _ = calls[0]
    assert request.candidates == DEFAULT_CANDIDATES
    assert request.contract == "bf16"
    assert (request.input.source, request.input.seed) == ("mini", None)
    assert request.input.model is None
    assert request.input.layers is None
    assert request.input.tokens is None
    assert request.limits is None
    assert request.stages is None
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
    assert request == VerifyRequest(
        input=commands.InputRequest("synthetic:gaussian", "v4-pro", (2, 4, 5, 6), 512, 7),
        candidates=("a:b", "c:d"),
        contract="official",
        limits=Path("l.toml"),
        stages=frozenset({("index", "stored")}),
    )


def test_differ_exits_1(pipeline: Callable[[Result], Calls], differing: Result) -> None:
    pipeline(differing)

    assert run_app(app, ["verify"]) == 1


def test_cannot_judge_exits_2(pipeline: Callable[[Result], Calls], matching: Result) -> None:
    pipeline(matching.model_copy(update={"verdict": "cannot-judge"}))

    assert run_app(app, ["verify"]) == 2


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recall", "--svg", "x", "--json", "x"], "named for two outputs"),
        (["recall", "--resume", "journal"], "--resume: belongs to --server"),
        (
            ["recall", "--server", "http://127.0.0.1:9/v1", "--candidate", "emulated:fused-fp8"],
            "--candidate: does not go with --server",
        ),
    ],
)
def test_options_of_recall_that_do_not_go_together(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, arguments) == 2
    assert message in capsys.readouterr().err


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
    assert request.candidates == ("a:b", "c:d")
    assert request.contract == "exact"
    assert request.input.tokens == 128
    assert f"defaults from {tmp_path / 'pyproject.toml'}" in capsys.readouterr().err


def test_unknown_key_in_the_file_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.needlepoint]\ntoken = 3\n")

    assert run_app(app, ["verify"]) == 2

    error = capsys.readouterr().err
    assert str(tmp_path / "pyproject.toml") in error
    assert "'token'" in error


def test_record_passes_its_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[RecordRequest] = []
    monkeypatch.setattr(commands, "run_record", lambda request, progress: calls.append(request))
    # Candidates of the file are what `verify` judges; `record` records the reference by default.
    (tmp_path / "pyproject.toml").write_text('[tool.needlepoint]\ncandidate = ["a:b"]\nseed = 5\n')

    assert run_app(app, ["record", "--out", "dir"]) == 0
    assert run_app(app, ["record", "--out", "dir", "--candidate", "x:y", "--force"]) == 0

    assert [(c.candidate, c.force, c.input.seed) for c in calls] == [
        (None, False, 5),
        ("x:y", True, 5),
    ]
    assert capsys.readouterr().out == "recorded reference to dir\nrecorded x:y to dir\n"


def test_diff_passes_its_request(monkeypatch: pytest.MonkeyPatch, differing: Result) -> None:
    calls: list[DiffRequest] = []

    def run(request: DiffRequest, progress: Progress) -> PipelineOutput:
        calls.append(request)
        return PipelineOutput(result=differing, rows=dict(ROWS))

    monkeypatch.setattr(commands, "run_diff", run)

    assert run_app(app, ["diff", "a", "b", "--layers", "2", "--json", "r.json"]) == 1

    assert calls == [
        DiffRequest(
            a=Path("a"), b=Path("b"), contract="bf16", layers=(2,), limits=None, stages=None
        )
    ]
    assert json.loads(Path("r.json").read_text())["verdict"] == "differ"


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


@pytest.mark.parametrize("command", ["verify", "record", "diff"])
def test_help_exits_0(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, [command, "--help"]) == 0
    assert "--force" in capsys.readouterr().out


def test_names_that_the_terminal_cannot_spell_are_escaped(
    pipeline: Callable[[Result], Calls], matching: Result, capsys: pytest.CaptureFixture[str]
) -> None:
    strange: CandidateResult = matching.candidates[0].model_copy(update={"name": "caf\u00e9[red]"})
    pipeline(matching.model_copy(update={"candidates": (strange,)}))

    assert run_app(app, ["verify"]) == 0
    assert "caf\u00e9[red]" in capsys.readouterr().out
