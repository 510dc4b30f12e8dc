"""Peak memory and time of the reference on one long v4-flash request, and how both grow.

One ratio-4 layer with random weights and random hidden states, fed in chunks, each length in a
fresh process. Prints the peak resident memory and the time of each length and the growth exponents
between lengths, and exits with 1 if a length needs more than the limit.

    python -m needlepoint.benchmarks.reference_memory
    python -m needlepoint.benchmarks.reference_memory --tokens 4096 8192
    python -m needlepoint.benchmarks.reference_memory --no-attention

``--no-attention`` stops after the picks: compressor and indexer alone.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

LENGTHS = (16_384, 32_768, 65_536, 131_072)
LIMIT_GIB = 4.0
CHUNK = 1024  # tokens of one call
LAYER = 2  # the first ratio-4 layer of v4-flash
GIB = 1 << 30


@dataclass(frozen=True)
class Measured:
    """One length.

    Attributes
    ----------
    tokens
        Length of the request.
    seconds
        Time of all calls, start of the process and making of weights excluded.
    baseline
        Bytes resident before the first call: interpreter, torch and weights.
    peak
        Largest number of resident bytes over the life of the process.
    """

    tokens: int
    seconds: float
    baseline: int
    peak: int


def resident_bytes(field: str) -> int:
    """Return ``VmRSS`` (now) or ``VmHWM`` (peak) of this process in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def run_child(tokens: int, seed: int, *, attend: bool) -> None:
    """Run one length and print progress and the result as JSON lines."""
    # Only children load torch: the peak of a process must not start from that of its parent.
    import torch

    from needlepoint.reference.config import MODELS
    from needlepoint.reference.layer import ReferenceLayer
    from needlepoint.reference.profile import BF16_CONTRACT
    from needlepoint.reference.weights import random_layer_weights

    config = MODELS["v4-flash"]
    weights = random_layer_weights(config, LAYER, seed)
    layer = ReferenceLayer(config, LAYER, weights, BF16_CONTRACT, compute=torch.float32)
    state = layer.new_request()
    generator = torch.Generator().manual_seed(seed)
    baseline = resident_bytes("VmRSS")
    began = time.perf_counter()
    for start in range(0, tokens, CHUNK):
        count = min(CHUNK, tokens - start)
        hidden = torch.randn(count, config.hidden_size, generator=generator).to(torch.bfloat16)
        stages = layer.forward(hidden, state, attend=attend)
        if stages.topk is None or (attend and stages.attention is None):
            raise RuntimeError(f"layer {LAYER} of {config.name} picked or attended to nothing")
        print(json.dumps({"done": start + count}), flush=True)
    print(
        json.dumps(
            {
                "tokens": tokens,
                "seconds": time.perf_counter() - began,
                "baseline": baseline,
                "peak": resident_bytes("VmHWM"),
            }
        ),
        flush=True,
    )


def child_lines(tokens: int, seed: int, options: list[str]) -> Iterator[dict[str, float]]:
    """Start a process for one length and yield its lines; ``RuntimeError`` if it fails."""
    command = [sys.executable, __file__, "--child", "--tokens", str(tokens), "--seed", str(seed)]
    command += options
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            yield json.loads(line)
    if process.returncode:
        raise RuntimeError(f"the run over {tokens} tokens ended with code {process.returncode}")


def measure(tokens: int, seed: int, options: list[str], progress: Progress) -> Measured:
    """Measure one length in a fresh process."""
    task = progress.add_task(f"{tokens:,} tokens", total=float(tokens))
    for line in child_lines(tokens, seed, options):
        if "done" in line:
            progress.update(task, completed=line["done"])
        else:
            return Measured(
                int(line["tokens"]), line["seconds"], int(line["baseline"]), int(line["peak"])
            )
    raise RuntimeError(f"the run over {tokens} tokens reported no result")


def exponent(before: Measured, after: Measured, attribute: str) -> float:
    """Return ``p`` of ``attribute ~ tokens**p`` between two lengths."""
    growth: float = getattr(after, attribute) / getattr(before, attribute)
    return math.log(growth) / math.log(after.tokens / before.tokens)


def report(found: list[Measured], console: Console) -> None:
    """Print a line for each length with the exponents since the previous one."""
    table = Table("tokens", "seconds", "time ~ n^p", "peak GiB", "memory ~ n^p", "before GiB")
    for index, m in enumerate(found):
        grown = [exponent(found[index - 1], m, a) for a in ("seconds", "peak")] if index else []
        powers = [f"{p:.2f}" for p in grown] or ["", ""]
        peak, before = f"{m.peak / GIB:.2f}", f"{m.baseline / GIB:.2f}"
        table.add_row(f"{m.tokens:,}", f"{m.seconds:.1f}", powers[0], peak, powers[1], before)
    console.print(table)


def main() -> int:
    """Run the benchmark; 1 if a length needs more memory than the limit."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-gib", type=float, default=LIMIT_GIB)
    parser.add_argument("--no-attention", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if min(options.tokens) < 1:
        parser.error(f"--tokens {min(options.tokens)}: expected positive lengths")
    if options.child:
        run_child(options.tokens[0], options.seed, attend=not options.no_attention)
        return 0
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        passed = ["--no-attention"] if options.no_attention else []
        found = [measure(n, options.seed, passed, progress) for n in sorted(options.tokens)]
    report(found, console)
    worst = max(found, key=lambda m: m.peak)
    within = worst.peak <= options.limit_gib * GIB
    console.print(
        f"peak {worst.peak / GIB:.2f} GiB over {worst.tokens:,} tokens: "
        f"{'within' if within else 'above'} the limit of {options.limit_gib:g} GiB"
    )
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
