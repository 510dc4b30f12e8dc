"""``make gpu-test``: bytes and times of the CUDA kernels on this card, as one page to send back.

Writes ``gpu-report.json`` and ``gpu-report.md``. SGLang is measured beside if it is installed or
its package folder is given; without it the report says so.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import count, product
from pathlib import Path

import torch

from needlepoint.optimized.cuda_runtime import require_cuda
from needlepoint.optimized.toolchain import BuildError
from needlepoint.verify.bench import BenchReport, decode_cases, prefill_cases, run_bench
from needlepoint.verify.bench_bytes import KINDS, ByteCount, compare_bytes
from needlepoint.verify.bench_sglang import SglangKernels, find_sglang, load_sglang

SHAPES = ((4, 128, 32768), (4, 512, 8192), (128, 512, 16384))
"""(ratio, head_dim, tokens) of one byte comparison."""
QUERIES = ((8192, 64, "fp8"), (8192, 64, "fp4"), (8192, 64, "bf16"))


def sweep_bytes(seconds: float) -> Iterator[ByteCount]:
    """Yield byte comparisons over all shapes, dtypes and kinds, with new data until time is up."""
    stop = time.monotonic() + seconds
    for seed in count():
        for kind, dtype in product(KINDS, (torch.float32, torch.bfloat16)):
            for ratio, head_dim, tokens in SHAPES:
                if time.monotonic() > stop:
                    return
                cut = tokens // 3 + 1
                yield from compare_bytes(ratio, head_dim, (cut, tokens - cut), dtype, kind, seed)


def totals(counts: Sequence[ByteCount]) -> dict[str, dict[str, int]]:
    """Return rows, differing rows and bytes by layout and input dtype."""
    out: dict[str, dict[str, int]] = {}
    for item in counts:
        sums = out.setdefault(
            f"{item.layout}, {item.inputs} in", {"rows": 0, "differing": 0, "bytes": 0}
        )
        sums["rows"] += item.rows
        sums["differing"] += item.differing
        sums["bytes"] += item.compared
    return out


def driver() -> str:
    """Return the NVIDIA driver's version, or why it cannot be told."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"
    return done.stdout.splitlines()[0].strip()


def markdown(
    bench: BenchReport, by_layout: dict[str, dict[str, int]], facts: dict[str, str]
) -> str:
    """Return the report as a page."""
    lines = ["# GPU report", ""]
    lines += [f"* {name}: {value}" for name, value in facts.items()]
    lines += ["", "## Bytes against the emulation", "", "| rows | compared | differing | bytes |"]
    lines += ["|---|---|---|---|"]
    lines += [
        f"| {name} | {sums['rows']} | {sums['differing']} | {sums['bytes']} |"
        for name, sums in by_layout.items()
    ]
    return "\n".join([*lines, "", "## Times", "", "```", bench.table(), "```", ""])


def _sglang(folder: Path | None) -> SglangKernels | None:
    try:
        return load_sglang(find_sglang() if folder is None else folder)
    except (ValueError, ImportError) as error:
        sys.stdout.write(f"SGLang is not measured: {error}\n")
        return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and the bench; return 1 if a byte differs, 2 without a usable card."""
    parser = argparse.ArgumentParser(prog="gpu-report", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the report")
    parser.add_argument("--seconds", type=float, default=60, help="time for byte comparisons")
    parser.add_argument("--sglang", type=Path, help="an unpacked sglang package folder")
    options = parser.parse_args(arguments)
    try:
        architecture = require_cuda()
        sglang = _sglang(options.sglang)
        cases = [*prefill_cases(), *decode_cases()]
        bench = run_bench(sglang, cases, QUERIES, progress=_progress)
        facts = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "card": bench.card,
            "architecture": f"sm_{architecture}",
            "driver": driver(),
            "torch": bench.torch,
        }
        write(options.out, facts, bench, {})  # times are kept if the comparison is cut short
        counts: list[ByteCount] = []
        for item in sweep_bytes(options.seconds):
            counts.append(item)
            if item.differing:
                _progress(f"{item.differing} of {item.rows} rows differ: {item}")
    except (ValueError, BuildError) as error:
        sys.stderr.write(f"gpu-report: {error}\n")
        return 2
    by_layout = totals(counts)
    sys.stdout.write(write(options.out, facts, bench, by_layout))
    return int(any(sums["differing"] for sums in by_layout.values()))


def write(
    folder: Path, facts: dict[str, str], bench: BenchReport, by_layout: dict[str, dict[str, int]]
) -> str:
    """Write both files of the report and return its page."""
    report = {"facts": facts, "bytes": by_layout, "bench": asdict(bench)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu-report.json").write_text(json.dumps(report, indent=1) + "\n")
    page = markdown(bench, by_layout, facts)
    (folder / "gpu-report.md").write_text(page)
    return page


def _progress(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
