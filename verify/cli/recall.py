"""The command ``recall``: parse, call, write, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.verify.base.atomic import check_writable, write_files
from needlepoint.verify.cli.options import (
    check_device,
    on_device,
    parse_candidates,
    parse_contract,
    parse_layers,
    parse_number,
)
from needlepoint.verify.cli.run import EXIT_CODES, Outputs, reader_may_leave, watched
from needlepoint.verify.inputs.load import load_inputs
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.probe.client import Manners
from needlepoint.verify.probe.questions import KINDS
from needlepoint.verify.probe.server import (
    BUDGET_TOKENS,
    ProbeRequest,
    parse_arms,
    parse_kinds,
    parse_passes,
    parse_picks,
    probe_lines,
    run_probe,
)
from needlepoint.verify.probe.server import HAYSTACKS as SERVER_HAYSTACKS
from needlepoint.verify.recall.grid import (
    DENSE,
    DEPTHS,
    DISTRACTORS,
    HAYSTACKS,
    LENGTHS,
    NEEDLES,
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

_DEPTHS = ",".join(f"{100 * depth:g}" for depth in DEPTHS)
_SERVER: Final = (
    *("api_model", "body", "questions", "cache", "concurrency", "starts", "restart", "picks"),
    *("timeout", "pause_ms", "token_budget", "resume"),
)
_GRID: Final = ("lengths", "depths", "haystacks", "needles", "distractors", "passages")
_INPUT: Final = ("model", "checkpoint")
_LOCAL: Final = (
    *("input", *_INPUT, "needles", "memory", "contract", "candidate", "layers", "device"),
    *("limits", "gate", "junitxml", "html", "markdown", "svg"),
)
DEFAULT_CANDIDATES = ("emulated:fused-bf16", "emulated:fused-fp8", "emulated:fused-fp4")


def recall(
    ctx: typer.Context,
    input: Annotated[
        str | None,
        typer.Option("--input", metavar="PATH", help="Recording with needles; default: the grid."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model shapes of --input.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Weights for --input.")
    ] = None,
    lengths: Annotated[
        str, typer.Option(metavar="N,N@POSITION", help="Tokens of the prompts.")
    ] = ",".join(LENGTHS),
    depths: Annotated[
        str, typer.Option(metavar="PERCENT,..", help="Where needles stand.")
    ] = _DEPTHS,
    haystacks: Annotated[
        str | None, typer.Option(metavar="N", help="Prompts a length; default: 20, of a server 3.")
    ] = None,
    needles: Annotated[str, typer.Option(metavar="N", help="Needles a depth and prompt.")] = str(
        NEEDLES
    ),
    distractors: Annotated[
        str | None, typer.Option(metavar="N,..", help="Near-duplicates a prompt.")
    ] = None,
    passages: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Pool of make_recall; default: the shipped.")
    ] = None,
    memory: Annotated[
        str, typer.Option(metavar="8GiB", help="Memory to fill with index keys.")
    ] = "8GiB",
    contract: Annotated[
        str, typer.Option(metavar="exact|bf16|official", help="The reference of the pairs.")
    ] = "bf16",
    candidate: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Repeatable; default: the three fused emulations."),
    ] = None,
    layers: Annotated[str | None, typer.Option(metavar="0,1", help="Layers; default: 0.")] = None,
    seed: Annotated[
        str | None, typer.Option(metavar="N", help="Seed of prompts and pages.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="cpu|cuda", help="Which candidates run where none is named.")
    ] = "cpu",
    limits: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML: limits for causes.")
    ] = None,
    gate: Annotated[
        list[str] | None, typer.Option(metavar="PATH<=VALUE", help="Such as recall.lost<=0.")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result.")] = None,
    junitxml: Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report to open in a browser.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a summary for a pull request.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write heat maps and curves.")
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Ask an OpenAI-compatible endpoint; repeat to compare."),
    ] = None,
    api_model: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Its model; default: the first listed.")
    ] = None,
    body: Annotated[
        list[str] | None,
        typer.Option(metavar="JSON", help="Fields added to requests; repeat to compare two."),
    ] = None,
    questions: Annotated[
        str, typer.Option(metavar="KIND,..", help="Ask by content, position, quote.")
    ] = ",".join(KINDS),
    cache: Annotated[str, typer.Option(metavar="cold,warm", help="Prefix cache.")] = "cold",
    concurrency: Annotated[str, typer.Option(metavar="1,8", help="Questions at a time.")] = "1",
    starts: Annotated[str, typer.Option(metavar="N", help="Server starts.")] = "1",
    restart: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Starts the servers anew between starts.")
    ] = None,
    picks: Annotated[
        str | None, typer.Option(metavar="LAYERSxK", help="Read picks that the endpoint returns.")
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="S", help="Seconds a request.")] = "120",
    pause_ms: Annotated[str, typer.Option(metavar="MS", help="Between two requests.")] = "200",
    token_budget: Annotated[
        str, typer.Option(metavar="N", help="Estimated prompt tokens to send.")
    ] = str(BUDGET_TOKENS),
    resume: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Journal of replies to go on from.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite output files.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the first line only.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print a traceback.")] = False,
) -> int:
    """Measure which needles each candidate picks, beside the reference, and why it misses any."""
    _refuse_idle(ctx, server=bool(server), recording=input is not None)
    check_device(device)
    number = None if seed is None else parse_number("--seed", seed, 0)
    count = None if haystacks is None else parse_number("--haystacks", haystacks, 1)
    counts = _counts(distractors)
    if server:
        request = ProbeRequest(
            arms=parse_arms(server, api_model or [], body or []),
            lengths=parse_lengths(lengths),
            depths=parse_depths(depths),
            kinds=parse_kinds(questions),
            haystacks=count or SERVER_HAYSTACKS,
            distractors=(counts or (DISTRACTORS,))[0],
            passes=parse_passes(cache, concurrency, parse_number("--starts", starts, 1)),
            manners=Manners(
                timeout_s=parse_number("--timeout", timeout, 1),
                pause_s=parse_number("--pause-ms", pause_ms, 0) / 1000,
                picks=parse_picks(picks),
            ),
            budget_tokens=parse_number("--token-budget", token_budget, 1),
            journal=resume,
            restart=restart,
            passages=passages,
            seed=number or 0,
        )
        return _probe(ctx, request, json, force=force, quiet=quiet)
    outputs = Outputs.create(
        json, junitxml, gate or [], force=force, quiet=quiet, html=html, markdown=markdown, svg=svg
    )
    chosen = parse_candidates(candidate or on_device(DEFAULT_CANDIDATES, device))
    grid = Grid(
        lengths=parse_lengths(lengths),
        depths=parse_depths(depths),
        haystacks=count or HAYSTACKS,
        needles=parse_number("--needles", needles, 1),
        distractors=counts or (DISTRACTORS, *DENSE),
        everywhere=counts is not None,
        seed=number or 0,
        passages=passages,
    )
    space = parse_memory(memory)
    wanted = parse_layers(layers)
    with watched(ctx.obj, quiet=quiet) as progress:
        if input is None:
            source = grid_source(grid, wanted)
        else:
            inputs = load_inputs(
                input, model=model, layers=wanted, seed=number, checkpoint=checkpoint
            )
            source = input_source(inputs)
        output = measure_recall(
            source,
            [create(name) for name in chosen],
            parse_contract(contract),
            Limits.default() if limits is None else Limits.load(limits),
            progress,
            space,
        )
    extra = {} if svg is None else {svg: recall_svg(output.result).encode()}
    return outputs.finish(output.result, output.rows, extra=extra)


def _refuse_idle(ctx: typer.Context, *, server: bool, recording: bool) -> None:
    """Refuse options of the command line that this run would not read."""
    rules: list[tuple[tuple[str, ...], str]]
    if server:
        rules = [(_LOCAL, "does not go with --server")]
    else:
        rules = [(_SERVER, "belongs to --server; name a server or leave it away")]
        rules += (
            [(_GRID, "does not go with --input; a recording has prompts of its own")]
            if recording
            else [(_INPUT, "belongs to --input; name a recording or leave it away")]
        )
    for names, why in rules:
        for name in names:
            source = ctx.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                raise ValueError(f"--{name.replace('_', '-')}: {why}")


def _probe(
    ctx: typer.Context, request: ProbeRequest, json: Path | None, *, force: bool, quiet: bool
) -> int:
    """Ask live endpoints, write the result, print the report."""
    if json is not None:
        check_writable(json, force=force)
    with watched(ctx.obj, quiet=quiet) as progress:
        result = run_probe(request, progress)
    if json is not None:
        text = result.model_dump_json(by_alias=True, indent=1) + "\n"
        write_files({json: text.encode()}, force=force)
    lines = probe_lines(result)
    with reader_may_leave():
        typer.echo("\n".join(lines[:1] if quiet else lines))
    return EXIT_CODES[result.verdict]


def _counts(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = text.replace(" ", "").split(",")
    return tuple(dict.fromkeys(parse_number("--distractors", part, 0) for part in parts))
