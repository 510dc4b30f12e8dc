"""``make gpu-test``: bytes and times of the CUDA kernels on this card, as one page to send back.

Writes ``gpu-report.json`` and ``gpu-report.md``. SGLang is measured beside if it is installed or
its package folder is given; without it the report says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from needlepoint.benchmarks.byte_sweep import ByteCount, comparisons
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
from needlepoint.optimized.build.compile import sources_sha256
from needlepoint.optimized.build.toolchain import BuildError
from needlepoint.optimized.build.variants import MODULES
from needlepoint.optimized.engines.sglang import SglangKernels, find_sglang, load_sglang
from needlepoint.verify.base.atomic import write_files

Totals = dict[str, dict[str, int]]


def totals(counts: Sequence[ByteCount], *, by_kind: bool = False) -> Totals:
    """Return rows, differing rows and bytes by layout and input dtype, or also by kind of data."""
    out: Totals = {}
    for item in counts:
        name = f"{item.layout}, {item.inputs} in" + (f", {item.kind}" if by_kind else "")
        sums = out.setdefault(name, {"rows": 0, "differing": 0, "bytes": 0})
        sums["rows"] += item.rows
        sums["differing"] += item.differing
        sums["bytes"] += item.compared
    return out


def markdown(
    bench: BenchReport, counts: Sequence[ByteCount], scores: ScoreReport | None = None
) -> str:
    """Return the report as a page."""
    facts = (
        ("date", bench.date),
        ("card", bench.card),
        ("architecture", bench.architecture),
        ("driver", bench.driver),
        ("torch", bench.torch),
        ("sglang", bench.sglang or "not measured"),
    )
    lines = ["# GPU report", "", *(f"* {name}: {value}" for name, value in facts)]
    lines += ["", "## Bytes against the emulation", ""]
    lines += ["| rows | compared | differing | bytes |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {sums['rows']} | {sums['differing']} | {sums['bytes']} |"
        for name, sums in totals(counts).items()
    ]
    lines += ["", "## Times", "", "```", bench.table(), "```", ""]
    if scores is not None:
        lines += ["## Index scores and top-k", "", "```", scores.table(), "```", ""]
    return "\n".join(lines)


def write(
    folder: Path,
    bench: BenchReport,
    counts: Sequence[ByteCount],
    scores: ScoreReport | None = None,
) -> str:
    """Write both files of the report and return its page."""
    page = markdown(bench, counts, scores)
    report = {
        "bench": json.loads(bench.json()),
        "scores": None if scores is None else json.loads(scores.json()),
        "bytes": totals(counts, by_kind=True),
        "sources_sha256": {module: sources_sha256(module) for module in MODULES},
        "variants": [variant.name for own in MODULES.values() for variant in own],
    }
    text = json.dumps(report, indent=1) + "\n"
    files = {folder / "gpu-report.md": page, folder / "gpu-report.json": text}
    write_files({path: content.encode() for path, content in files.items()}, force=True)
    return page


def _sglang(folder: Path | None) -> SglangKernels | None:
    try:
        return load_sglang(find_sglang() if folder is None else folder)
    except (ValueError, ImportError) as error:
        sys.stdout.write(f"SGLang is not measured: {error}\n")
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run bench and comparison; return 1 if a byte differs, 2 if one of them could not run."""
    parser = argparse.ArgumentParser(prog="gpu-report", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the report")
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows compared, each format")
    parser.add_argument("--seconds", type=float, default=300, help="limit of the comparison")
    parser.add_argument("--only", action="append", default=[], help="part of a workload's name")
    parser.add_argument("--sglang", type=Path, help="an unpacked sglang package folder")
    options = parser.parse_args(arguments)
    counts: list[ByteCount] = []
    try:
        cases, queries = select([*prefill_cases(), *decode_cases()], QUERIES, options.only)
        bench = run_bench(_sglang(options.sglang), cases, queries, progress=_progress)
        write(options.out, bench, counts)  # times are kept if the comparison is cut short
        scores = run_score_bench(find_engines(options.sglang), progress=_progress)
        write(options.out, bench, counts, scores)
        for item in comparisons(options.rows, options.seconds):
            counts.append(item)
            if item.differing:
                _progress(f"{item.differing} of {item.rows} rows differ: {item}")
    except (ValueError, BuildError) as error:
        sys.stderr.write(f"gpu-report: {error}\n")
        return 2
    sys.stdout.write(write(options.out, bench, counts, scores))
    return int(any(item.differing for item in counts))


def _progress(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
