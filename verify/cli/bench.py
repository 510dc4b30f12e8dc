"""``needlepoint bench``: kernel times as ratios, side by side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
from needlepoint.verify.cli.options import BenchOptions
from needlepoint.verify.cli.outputs import reader_may_leave


def bench(options: BenchOptions) -> int:
    """Run the command and return its exit code."""
    if options.device != "cuda":
        raise ValueError(
            f"--device {options.device!r}: expected cuda; the bench times CUDA kernels"
        )
    if options.json_ is not None:
        check_writable(options.json_, force=options.force)

    def progress(line: str) -> None:
        if not options.quiet:
            typer.echo(line, err=True)

    report: BenchReport | ScoreReport
    try:
        if options.scores:
            report = run_score_bench(find_engines(options.sglang), options.only, progress)
        else:
            cases, queries = select([*prefill_cases(), *decode_cases()], QUERIES, options.only)
            report = run_bench(_sglang(options.sglang, progress), cases, queries, progress)
    except BuildError as error:
        raise ValueError(str(error)) from error
    if options.json_ is not None:
        write_files({options.json_: report.json().encode()}, force=options.force)
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
