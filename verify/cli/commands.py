"""What each command runs: from parsed options to the pipeline's output.

The command line and other callers (a test suite, a notebook) meet here, so nothing in this module
knows about terminals, files of results or exit codes.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import StageKey
from needlepoint.reference.profile import CONTRACTS
from needlepoint.verify.base.progress import Progress
from needlepoint.verify.diff import command as diff
from needlepoint.verify.inputs.load import Inputs, load_inputs
from needlepoint.verify.judge import record
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recording.recording import check_recording_target
from needlepoint.verify.run import pipeline
from needlepoint.verify.run.failures_saved import SavedFailures
from needlepoint.verify.schema.environment import world_size
from needlepoint.verify.schema.result import Contract, with_notes
from needlepoint.verify.triage.shrink import Failures


@dataclass(frozen=True)
class InputRequest:
    """Which input to load; see :func:`needlepoint.verify.inputs.load.load_inputs`."""

    source: str
    model: str | None
    layers: tuple[int, ...] | None
    tokens: int | None
    seed: int | None
    checkpoint: Path | None = None


@dataclass(frozen=True)
class VerifyRequest:
    """Options of ``verify``."""

    input: InputRequest
    candidates: tuple[str, ...]
    contract: Contract
    limits: Path | None
    stages: frozenset[StageKey] | None
    repeat: int = 1
    swap: bool = False
    shrink: Path | None = None
    save_failures: Path | None = None
    force: bool = False
    device: str = "cpu"


@dataclass(frozen=True)
class RecordRequest:
    """Options of ``record``; without a candidate the reference is recorded."""

    input: InputRequest
    candidate: str | None
    contract: Contract
    out: Path
    force: bool


@dataclass(frozen=True)
class DiffRequest:
    """Options of ``diff``: ``a`` is what ``b`` is judged against."""

    a: Path
    b: Path
    contract: Contract
    layers: tuple[int, ...] | None
    limits: Path | None
    stages: frozenset[StageKey] | None


def run_verify(request: VerifyRequest, progress: Progress) -> PipelineOutput:
    """Run reference and candidates over one input and judge every stage.

    Raises
    ------
    ValueError
        Where the input, a candidate or the limits file is not usable.
    """
    limits = _limits(request.limits)
    candidates = tuple(create(name) for name in request.candidates)
    if world_size() > 1 and (request.shrink or request.save_failures):
        raise ValueError(
            "--shrink and --save-failures: work in one process; run the same command without "
            "torchrun"
        )
    if request.shrink is not None:
        check_recording_target(request.shrink, force=request.force)
    saved = None
    if request.save_failures is not None:
        named = dict(zip(request.candidates, candidates, strict=True))
        saved = SavedFailures(request.save_failures, named, force=request.force)
    inputs = _inputs(request.input)
    with saved or nullcontext():
        output = pipeline.verify(
            inputs,
            candidates,
            contract=CONTRACTS[request.contract],
            limits=limits,
            stages=request.stages,
            progress=progress,
            repeat=request.repeat,
            swap=request.swap,
            saved=saved,
            device=request.device,
        )
    if saved is not None:
        output = replace(output, result=with_notes(output.result, *saved.notes()))
    if request.shrink is None:
        return output
    failures = Failures(
        inputs=inputs,
        candidates=candidates,
        names=request.candidates,
        contract=CONTRACTS[request.contract],
        limits=limits,
        limits_file=request.limits,
        checkpoint=request.input.checkpoint,
        force=request.force,
        progress=progress,
    )
    return replace(output, result=failures.shrink(output.result, request.shrink))


def run_record(request: RecordRequest, progress: Progress) -> None:
    """Write the stages of the reference or of one candidate to a recording directory.

    Raises
    ------
    ValueError
        Where the input or the candidate is not usable, or the directory cannot be written.
    """
    check_recording_target(request.out, force=request.force)
    candidate = None if request.candidate is None else create(request.candidate)
    record.record(
        _inputs(request.input),
        candidate,
        request.out,
        contract=CONTRACTS[request.contract],
        force=request.force,
        progress=progress,
    )


def run_diff(request: DiffRequest, progress: Progress) -> PipelineOutput:
    """Judge recording ``b`` against recording ``a``.

    Raises
    ------
    ValueError
        Where a recording is not usable, or the two do not belong together.
    """
    return diff.diff(
        request.a,
        request.b,
        contract=CONTRACTS[request.contract],
        layers=request.layers,
        limits=_limits(request.limits),
        stages=request.stages,
        progress=progress,
    )


def _limits(path: Path | None) -> Limits:
    return Limits.default() if path is None else Limits.load(path)


def _inputs(request: InputRequest) -> Inputs:
    return load_inputs(
        request.source,
        model=request.model,
        layers=request.layers,
        tokens=request.tokens,
        seed=request.seed,
        checkpoint=request.checkpoint,
    )
