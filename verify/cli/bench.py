"""``needlepoint bench``: kernel times as ratios, side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from needlepoint.benchmarks.score_engines import find_engines
from needlepoint.benchmarks.scores import ScoreReport, run_score_bench
from needlepoint.benchmarks.stores import (
    QUERIES,
    BenchReport,
    decode_cases,
    prefill_cases,
    run_bench,
    select,
)
from needlepoint.optimized.build.toolchain import BuildError
from needlepoint.optimized.engines.sglang import SglangKernels, find_sglang, load_sglang
from needlepoint.verify.base.atomic import check_writable, write_files
from needlepoint.verify.cli.run import reader_may_leave


def bench(
    device: Annotated[str, typer.Option(metavar="cuda", help="What to measure.")] = "cuda",
    sglang: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="SGLang's package folder; default: the installed one."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Repeatable; a part of a workload's name."),
    ] = None,
    scores: Annotated[
        bool, typer.Option("--scores", help="Measure index scores and top-k instead of stores.")
    ] = False,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write needlepoint.bench/1.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite output files.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no line before the table.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Print a traceback with an error.")
    ] = False,
) -> int:
    """Measure the CUDA kernels beside SGLang's and beside the bytes that must move."""
    if device != "cuda":
        raise ValueError(f"--device {device!r}: expected cuda; the bench times CUDA kernels")
    if json is not None:
        check_writable(json, force=force)

    def progress(line: str) -> None:
        if not quiet:
            typer.echo(line, err=True)

    report: BenchReport | ScoreReport
    try:
        if scores:
            report = run_score_bench(find_engines(sglang), only or [], progress)
        else:
            cases, queries = select([*prefill_cases(), *decode_cases()], QUERIES, only or [])
            report = run_bench(_sglang(sglang, progress), cases, queries, progress)
    except BuildError as error:
        raise ValueError(str(error)) from error
    if json is not None:
        write_files({json: report.json().encode()}, force=force)
    with reader_may_leave():
        typer.echo(report.table())
    return 0


def _sglang(folder: Path | None, progress: Callable[[str], None]) -> SglangKernels | None:
    """Load SGLang's kernels; without a folder its absence is said and not an error."""
    if folder is not None:
        return load_sglang(folder)
    try:
        return load_sglang(find_sglang())
    except (ValueError, ImportError) as error:
        progress(f"SGLang is not measured: {error}")
        return None
