"""The command ``selftest``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from needlepoint.verify.base.atomic import check_writable, write_files
from needlepoint.verify.cli.options import parse_number
from needlepoint.verify.cli.run import EXIT_CODES, plain_console, reader_may_leave, watched
from needlepoint.verify.inputs.load import load_inputs
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.report.selftest_report import print_selftest
from needlepoint.verify.selftest.command import selftest as run_selftest
from needlepoint.verify.selftest.faults.catalogue import CATALOGUE
from needlepoint.verify.selftest.input import (
    TOKENS,
    SelftestInput,
    own_input,
    recorded_input,
)


def selftest(
    ctx: typer.Context,
    input: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="mini|synthetic[:KIND]|PATH",
            help="What to plant on; default: a small input of its own.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="mini|v4-flash|v4-pro|v3.2|glm-5.2|CONFIG.json", help="Model of --input."
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="N", help=f"Tokens of --input; default: at most {TOKENS}."),
    ] = None,
    seed: Annotated[str, typer.Option(metavar="N", help="Seed of the rows planted on.")] = "0",
    limits: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML: scale = X, or [stage] with value = Y."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write needlepoint.selftest/1.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite output files.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the verdict line only.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print a traceback with an error.")
    ] = False,
) -> int:
    """Plant faults and print which gate catches which; 0 if all are caught and no control is."""
    if json is not None:
        check_writable(json, force=force)
    table = Limits.default() if limits is None else Limits.load(limits)
    source = _source(input, model, tokens, parse_number("--seed", seed, 0))
    with watched(ctx.obj, quiet=quiet) as progress:
        result = run_selftest(source, tuple(CATALOGUE.values()), table, progress)
    if json is not None:
        text = result.model_dump_json(by_alias=True, indent=1) + "\n"
        write_files({json: text.encode()}, force=force)
    with reader_may_leave():
        print_selftest(result, plain_console(sys.stdout), brief=quiet)
    return EXIT_CODES[result.verdict]


def _source(source: str | None, model: str | None, tokens: str | None, seed: int) -> SelftestInput:
    """Return what to plant on.

    Raises
    ------
    ValueError
        If options of ``--input`` are given without it, or the input is not usable.
    """
    if source is None:
        if model is not None or tokens is not None:
            raise ValueError("--model and --tokens belong to --input; name an input as well")
        return own_input(seed)
    wanted = None if tokens is None else parse_number("--tokens", tokens, 1)
    inputs = load_inputs(source, model=model, tokens=wanted, seed=seed)
    if wanted is None and inputs.tokens > TOKENS:
        inputs = load_inputs(source, model=model, tokens=TOKENS, seed=seed)
    return recorded_input(inputs)
