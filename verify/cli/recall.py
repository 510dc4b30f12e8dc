"""The command ``recall``."""

from __future__ import annotations

from typing import Final

import typer

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.verify.base.atomic import check_writable
from needlepoint.verify.cli.options import RecallOptions
from needlepoint.verify.cli.outputs import (
    EXIT_CODES,
    Outputs,
    reader_may_leave,
    watched,
    write_record,
)
from needlepoint.verify.inputs.load import load_inputs
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.probe.client import Manners
from needlepoint.verify.probe.server import HAYSTACKS as SERVER_HAYSTACKS
from needlepoint.verify.probe.server import (
    ProbeRequest,
    parse_arms,
    parse_kinds,
    parse_passes,
    parse_picks,
    probe_lines,
    run_probe,
)
from needlepoint.verify.recall.grid import (
    DENSE,
    DISTRACTORS,
    HAYSTACKS,
    Grid,
    parse_depths,
    parse_lengths,
)
from needlepoint.verify.recall.measure import (
    grid_source,
    input_source,
    measure_recall,
    parse_memory,
)
from needlepoint.verify.report.recall_svg import recall_svg

_SERVER: Final = (
    *("api-model", "body", "questions", "cache", "concurrency", "starts", "restart", "picks"),
    *("timeout", "pause-ms", "token-budget", "resume"),
)
_GRID: Final = ("lengths", "depths", "haystacks", "needles", "distractors", "passages")
_INPUT: Final = ("model", "checkpoint")
_LOCAL: Final = (
    *("input", *_INPUT, "needles", "memory", "contract", "candidate", "layers", "device"),
    *("limits", "gate", "junitxml", "html", "markdown", "svg"),
)


def recall(options: RecallOptions) -> int:
    """Run the command and return its exit code."""
    _refuse_idle(options)
    if options.server:
        return _probe(options)
    outputs = Outputs.create(options, options.svg)
    grid = Grid(
        lengths=parse_lengths(options.lengths),
        depths=parse_depths(options.depths),
        haystacks=options.haystacks or HAYSTACKS,
        needles=options.needles,
        distractors=options.distractors or (DISTRACTORS, *DENSE),
        everywhere=options.distractors is not None,
        seed=options.seed or 0,
        passages=options.passages,
    )
    space = parse_memory(options.memory)
    with watched(options.quiet) as progress:
        if options.input is None:
            source = grid_source(grid, options.layers)
        else:
            inputs = load_inputs(
                options.input,
                model=options.model,
                layers=options.layers,
                seed=options.seed,
                checkpoint=options.checkpoint,
            )
            source = input_source(inputs)
        output = measure_recall(
            source,
            [create(name) for name in options.candidates()],
            options.contract,
            Limits.load(options.limits),
            progress,
            space,
        )
    svg = options.svg
    extra = {} if svg is None else {svg: recall_svg(output.result).encode()}
    return outputs.finish(output.result, output.rows, extra=extra)


def _refuse_idle(options: RecallOptions) -> None:
    """Refuse options of the command line that this run would not read."""
    rules: list[tuple[tuple[str, ...], str]]
    if options.server:
        rules = [(_LOCAL, "does not go with --server")]
    else:
        rules = [(_SERVER, "belongs to --server; name a server or leave it away")]
        rules += (
            [(_INPUT, "belongs to --input; name a recording or leave it away")]
            if options.input is None
            else [(_GRID, "does not go with --input; a recording has prompts of its own")]
        )
    for names, why in rules:
        for name in names:
            if options.asked(name):
                raise ValueError(f"--{name}: {why}")


def _probe(options: RecallOptions) -> int:
    """Ask live endpoints, write the result, print the report."""
    request = ProbeRequest(
        arms=parse_arms(options.server, options.api_model, options.body),
        lengths=parse_lengths(options.lengths),
        depths=parse_depths(options.depths),
        kinds=parse_kinds(options.questions),
        haystacks=options.haystacks or SERVER_HAYSTACKS,
        distractors=(options.distractors or (DISTRACTORS,))[0],
        passes=parse_passes(options.cache, options.concurrency, options.starts),
        manners=Manners(
            timeout_s=options.timeout,
            pause_s=options.pause_ms / 1000,
            picks=parse_picks(options.picks),
        ),
        budget_tokens=options.token_budget,
        journal=options.resume,
        restart=options.restart,
        passages=options.passages,
        seed=options.seed or 0,
    )
    if options.json_ is not None:
        check_writable(options.json_, force=options.force)
    with watched(options.quiet) as progress:
        result = run_probe(request, progress)
    write_record(result, options.json_, force=options.force)
    lines = probe_lines(result)
    with reader_may_leave():
        typer.echo("\n".join(lines[:1] if options.quiet else lines))
    return EXIT_CODES[result.verdict]
