"""The commands ``verify``, ``record`` and ``diff``: from options to a result and an exit code.

``run_*`` know nothing about terminals, files of results or exit codes; the Python face calls them
as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import typer

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import Candidate
from needlepoint.reference.profile import CONTRACTS
from needlepoint.verify.base.progress import Progress
from needlepoint.verify.cli import scenario
from needlepoint.verify.cli.options import (
    DiffOptions,
    InputOptions,
    RecordOptions,
    VerifyOptions,
)
from needlepoint.verify.cli.outputs import Outputs, reader_may_leave, watched
from needlepoint.verify.diff import command as diff_command
from needlepoint.verify.inputs.load import Inputs, load_inputs
from needlepoint.verify.judge import record as record_command
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recording.recording import check_recording_target
from needlepoint.verify.run import pipeline
from needlepoint.verify.run.failures_saved import SavedFailures
from needlepoint.verify.schema.environment import world_size
from needlepoint.verify.schema.result import with_notes
from needlepoint.verify.triage.shrink import Failures


def verify(options: VerifyOptions) -> int:
    """Run the command and return its exit code."""
    outputs = Outputs.create(options)
    with watched(options.quiet) as progress:
        output = run_verify(options, progress)
    if not output.reports:
        return 0  # under torchrun one rank writes for all
    return outputs.finish(output.result, output.rows)


def record(options: RecordOptions) -> int:
    """Run the command and return its exit code."""
    name = options.recorded()
    with watched(options.quiet) as progress:
        run_record(options, progress)
    if not options.quiet:
        with reader_may_leave():
            typer.echo(f"recorded {name or 'reference'} to {options.out}")
    return 0


def diff(options: DiffOptions) -> int:
    """Run the command and return its exit code."""
    outputs = Outputs.create(options)
    with watched(options.quiet) as progress:
        output = run_diff(options, progress)
    return outputs.finish(output.result, output.rows)


def run_verify(
    options: VerifyOptions, progress: Progress, given: Mapping[str, Candidate] | None = None
) -> PipelineOutput:
    """Run reference and candidates over one input, or candidates through scenarios.

    ``given`` holds candidates by name in place of those that the options name.

    Raises
    ------
    ValueError
        Where options do not belong together, or the input, a candidate or a file is not usable.
    """
    scenario.check_options(options)
    limits = Limits.load(None if options.scenario else options.limits)
    named = given or {name: create(name) for name in options.candidates()}
    if options.scenario is not None:
        return scenario.run_scenarios(options, named, progress)
    candidates = tuple(named.values())
    if world_size() > 1 and (options.shrink or options.save_failures):
        raise ValueError(
            "--shrink and --save-failures: work in one process; run the same command without "
            "torchrun"
        )
    if options.shrink is not None:
        check_recording_target(options.shrink, force=options.force)
    saved = None
    if options.save_failures is not None:
        saved = SavedFailures(options.save_failures, named, force=options.force)
    inputs = _inputs(options)
    with saved or nullcontext():
        output = pipeline.verify(
            inputs,
            candidates,
            contract=CONTRACTS[options.contract],
            limits=limits,
            stages=options.stages,
            progress=progress,
            repeat=options.repeat,
            swap=options.swap,
            saved=saved,
            device=options.device,
        )
    if saved is not None:
        output = replace(output, result=with_notes(output.result, *saved.notes()))
    if options.shrink is None:
        return output
    failures = Failures(
        inputs=inputs,
        candidates=candidates,
        names=tuple(named),
        contract=CONTRACTS[options.contract],
        limits=limits,
        limits_file=options.limits,
        checkpoint=options.checkpoint,
        force=options.force,
        progress=progress,
    )
    return replace(output, result=failures.shrink(output.result, options.shrink))


def run_record(options: RecordOptions, progress: Progress) -> None:
    """Write the stages of the reference or of one candidate to a recording directory.

    Raises
    ------
    ValueError
        Where the input or the candidate is not usable, or the directory cannot be written.
    """
    check_recording_target(options.out, force=options.force)
    name = options.recorded()
    record_command.record(
        _inputs(options),
        None if name is None else create(name),
        options.out,
        contract=CONTRACTS[options.contract],
        force=options.force,
        progress=progress,
    )


def run_diff(options: DiffOptions, progress: Progress) -> PipelineOutput:
    """Judge recording ``b`` against recording ``a``.

    Raises
    ------
    ValueError
        Where a recording is not usable, or the two do not belong together.
    """
    return diff_command.diff(
        options.a,
        options.b,
        contract=CONTRACTS[options.contract],
        layers=options.layers,
        limits=Limits.load(options.limits),
        stages=options.stages,
        progress=progress,
    )


def _inputs(options: InputOptions) -> Inputs:
    return load_inputs(
        options.input,
        model=options.model,
        layers=options.layers,
        tokens=options.tokens,
        seed=options.seed,
        checkpoint=options.checkpoint,
    )
