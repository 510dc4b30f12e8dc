"""Kernel times beside SGLang's, beside the bytes floor, and the copy rate of the same run.

Every number of a row comes from one process: our launch, SGLang's launches and the rates that they
are held against. A ratio above 1 means that ours is faster.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import torch

from needlepoint.benchmarks.cases import (
    QueryBench,
    StoreBench,
    StoreCase,
    make_query,
    make_store,
)
from needlepoint.benchmarks.timing import (
    Timing,
    copy_rate,
    large_copy_rate,
    measure,
    product_rate,
)
from needlepoint.optimized.cuda.runtime import require_cuda
from needlepoint.optimized.engines.sglang import VERSION, SglangKernels
from needlepoint.verify.schema.environment import driver_version

SCHEMA: Final = "needlepoint.bench/1"
_FP32, _BF16 = torch.float32, torch.bfloat16
_NAMES = {_FP32: "fp32", _BF16: "bf16"}
PREFILL_TOKENS = (65472, 16384, 4096)
QUERIES = ((8192, 64, "fp8"), (8192, 64, "fp4"), (8192, 64, "bf16"))
"""(tokens, heads, row) of the query workloads."""


@dataclass(frozen=True)
class BenchRow:
    """One workload.

    Attributes
    ----------
    name
        What ran: stage, ratio, layout, dtypes, size.
    ours, sglang
        Times; ``sglang`` is None where it has no such kernel.
    ratio
        SGLang's median over ours.
    floor_us
        Bytes that must move over the rate of an elementwise copy of as many bytes.
    rate
        Terabytes a second that ours moves, counting the bytes that must move.
    """

    name: str
    ours: Timing
    sglang: Timing | None
    ratio: float | None
    floor_us: float
    rate: float

    def line(self) -> str:
        """Return the row of the table."""
        theirs, ratio = f"{'-':>8} {'':>15}", f"{'-':>6}"
        if self.sglang is not None and self.ratio is not None:
            theirs, ratio = _cell(self.sglang), f"{self.ratio:6.2f}"
        return (
            f"{self.name:58} {_cell(self.ours)} {self.rate:5.2f} {self.floor_us:7.2f} {theirs} "
            f"{ratio}"
        )


@dataclass(frozen=True)
class BenchReport:
    """All workloads of one run and the ceilings of the card in that run.

    Attributes
    ----------
    date, card, architecture, driver, torch
        Where and when.
    sglang
        Version that was measured beside, or None.
    copy_4gib
        Terabytes a second, read and written, of a 4 GiB copy.
    product
        Teraflops of an 8192 x 8192 x 8192 bf16 product.
    rows
        Workloads.
    """

    date: str
    card: str
    architecture: str
    driver: str
    torch: str
    sglang: str | None
    copy_4gib: float
    product: float
    rows: tuple[BenchRow, ...]

    def json(self) -> str:
        """Return the report as ``needlepoint.bench/1``: one JSON object."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n"

    def table(self) -> str:
        """Return the report as text, one line a workload."""
        return "\n".join(
            [
                f"{self.date}, {self.card} ({self.architecture}), driver {self.driver}, torch "
                f"{self.torch}, sglang {self.sglang or 'absent'}",
                f"4 GiB copy {self.copy_4gib:.2f} TB/s, bf16 product {self.product:.0f} TFLOP/s",
                f"{'workload':58} {'us':>8} {'quartiles':>15} {'TB/s':>5} {'floor':>7} "
                f"{'sglang':>8} {'quartiles':>15} {'ratio':>6}",
                *(row.line() for row in self.rows),
            ]
        )


def _cell(timing: Timing) -> str:
    spread = f"{timing.low_us:.2f}-{timing.high_us:.2f}"
    return f"{timing.median_us:8.2f} {spread:>15}"


def prefill_cases(tokens: Sequence[int] = PREFILL_TOKENS) -> Iterator[StoreCase]:
    """Yield the prefill workloads: one request from position 0."""
    for count in tokens:
        for layout in ("index-fp8", "index-fp4", "index-bf16"):
            yield StoreCase(layout, 4, _FP32, _FP32, 1, 0, count)
            yield StoreCase(layout, 4, _BF16, _FP32, 1, 0, count)
        yield StoreCase("index-fp8", 4, _BF16, _BF16, 1, 0, count)
        for layout in ("main-bf16", "main-584"):
            yield StoreCase(layout, 4, _FP32, _FP32, 1, 0, count)
            yield StoreCase(layout, 4, _BF16, _FP32, 1, 0, count)
        yield StoreCase("main-bf16", 4, _BF16, _BF16, 1, 0, count)
        for inputs in (_FP32, _BF16):
            yield StoreCase("main-584", 128, inputs, inputs, 1, 0, count)


def decode_cases(batches: Sequence[int] = (1, 16, 64, 256)) -> Iterator[StoreCase]:
    """Yield the decode workloads: one token a request, with and without a completed window."""
    for batch in batches:
        for start in (4099, 4097):
            yield StoreCase("index-fp8", 4, _FP32, _FP32, batch, start, 1)
            yield StoreCase("main-584", 4, _FP32, _FP32, batch, start, 1)
        for start in (4223, 4200):
            yield StoreCase("main-584", 128, _FP32, _FP32, batch, start, 1)
        yield StoreCase("index-fp8", 4, _BF16, _BF16, batch, 4099, 1)
        yield StoreCase("main-584", 4, _BF16, _BF16, batch, 4099, 1)
        yield StoreCase("main-584", 128, _BF16, _BF16, batch, 4223, 1)


def select(
    cases: Sequence[StoreCase], queries: Sequence[tuple[int, int, str]], words: Sequence[str]
) -> tuple[list[StoreCase], list[tuple[int, int, str]]]:
    """Return the workloads whose name holds one of the words; all if there is no word.

    Raises
    ------
    ValueError
        If a word is in no name.
    """
    names = [case_name(case) for case in cases] + [query_case_name(*query) for query in queries]
    for word in words:
        if not any(word in name for name in names):
            raise ValueError(f"workload {word!r}: in no name; names look like {names[0]!r}")

    def wanted(name: str) -> bool:
        return not words or any(word in name for word in words)

    return (
        [case for case in cases if wanted(case_name(case))],
        [query for query in queries if wanted(query_case_name(*query))],
    )


def case_name(case: StoreCase) -> str:
    """Return the name of a store workload."""
    kind = "decode" if case.tokens == 1 else "prefill"
    return (
        f"{kind} r{case.ratio} {case.layout} {_NAMES[case.inputs]} in, {_NAMES[case.state]} state, "
        f"{case.requests} x {case.tokens} at {case.start}"
    )


def query_case_name(tokens: int, heads: int, row: str) -> str:
    """Return the name of a query workload."""
    return f"query {row} bf16 in, {tokens} x {heads} heads"


def bench_store(case: StoreCase, sglang: SglangKernels | None) -> BenchRow:
    """Measure one store workload."""
    return _row(case_name(case), make_store(case), sglang)


def bench_query(tokens: int, heads: int, row: str, sglang: SglangKernels | None) -> BenchRow:
    """Measure one query workload."""
    return _row(query_case_name(tokens, heads, row), make_query(tokens, heads, row), sglang)


def _row(name: str, bench: StoreBench | QueryBench, sglang: SglangKernels | None) -> BenchRow:
    floor = bench.case.floor_bytes if isinstance(bench, StoreBench) else bench.floor_bytes
    mine, *others = measure([bench.ours(), None if sglang is None else bench.sglang(sglang)])
    other = others[0] if others else None
    rate = copy_rate(max(floor // 2, 2**20))
    return BenchRow(
        name=name,
        ours=mine,
        sglang=other,
        ratio=None if other is None else other.median_us / mine.median_us,
        floor_us=floor / rate / 1e6,
        rate=floor / mine.median_us / 1e6,
    )


def run_bench(
    sglang: SglangKernels | None,
    cases: Sequence[StoreCase],
    queries: Sequence[tuple[int, int, str]],
    progress: Callable[[str], None] = lambda line: None,
) -> BenchReport:
    """Measure workloads on the current CUDA device.

    Parameters
    ----------
    sglang
        Its kernels, or None to measure ours alone.
    cases
        Store workloads.
    queries
        (tokens, heads, row) of the query workloads.
    progress
        Called with the line of each workload as it is done.

    Raises
    ------
    ValueError
        If this machine has no supported CUDA device, or there is no workload.
    """
    architecture = require_cuda()
    if not cases and not queries:
        raise ValueError("no workload: expected at least one")
    rows: list[BenchRow] = []

    def done(row: BenchRow) -> None:
        rows.append(row)
        progress(row.line())

    for case in cases:
        done(bench_store(case, sglang))
    for query in queries:
        done(bench_query(*query, sglang))
    return BenchReport(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        card=torch.cuda.get_device_name(),
        architecture=f"sm_{architecture}",
        driver=driver_version(),
        torch=torch.__version__,
        sglang=None if sglang is None else VERSION,
        copy_4gib=large_copy_rate(),
        product=product_rate(),
        rows=tuple(rows),
    )
