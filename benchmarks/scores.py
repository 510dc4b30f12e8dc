"""Times of index scores and top-k beside DeepGEMM, SGLang and torch, sides in turn in one process.

Rates count ``2 * 64 * 128`` operations for every visible (query row, key) pair.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Final

import torch
from torch import Tensor

from needlepoint.benchmarks.cases import rotating_sets
from needlepoint.benchmarks.score_engines import ScoreEngines, torch_scores
from needlepoint.benchmarks.timing import Call, Side, Timing, measure
from needlepoint.optimized.build.score_variants import MMA, default_unit
from needlepoint.optimized.cuda.runtime import require_cuda
from needlepoint.optimized.cuda.scores import (
    Keys,
    allocate_scores,
    launch_scores,
    require_scores,
    scores,
)
from needlepoint.optimized.cuda.topk import launch_topk
from needlepoint.optimized.cuda.topk_lists import long_plan, score_topk_lists
from needlepoint.verify.workloads.scores import ScoreCase, make_case

SCHEMA: Final = "needlepoint.bench-scores/1"
HEADS = 64
PAGE = 64
OPERATIONS = 2 * HEADS * 128
KEY_BYTES = {"bf16": 256, "fp8": 132, "fp4": 68}
FULL = (("bf16", 2048, 8192), ("bf16", 4096, 32768), ("fp8", 2048, 8192), ("fp8", 4096, 32768))
"""Row format, query rows and keys of the full-range products."""
CAUSAL = (8192, 2048)
DECODE = ((64, 16384), (32, 32768), (1, 32768))
LONG = ((64, 16384), (4, 262144))
TOPK = (
    (4096, 8192, ""),
    (4096, 32768, ""),
    (64, 32768, ""),
    (64, 32768, "in the L2"),
    (64, 32768, "rising"),
)
"""Rows, columns, and what is special: scores in the L2, where a score kernel leaves few rows, or
rising by three standard deviations along the row, as late keys may score."""
K = 512
SETS = 3


@dataclass(frozen=True)
class ScoreRow:
    """One workload.

    Attributes
    ----------
    name
        What ran.
    times
        Ours first, then every side that was beside it.
    rate
        What ours reaches, with its unit.
    """

    name: str
    times: tuple[Timing, ...]
    rate: str

    def line(self) -> str:
        """Return the row of the table."""
        ours = self.times[0].median_us
        cells = [f"{t.name} {t.median_us:.1f} ({t.median_us / ours:.2f})" for t in self.times[1:]]
        spread = f"{self.times[0].low_us:.1f}-{self.times[0].high_us:.1f}"
        return f"{self.name:44} {ours:9.1f} {spread:>17} {self.rate:>14}  " + ", ".join(cells)


def visible(case: ScoreCase) -> int:
    """Return the (query row, key) pairs that are seen."""
    return int(case.context_lens.clamp(0).sum())


def units(row: str) -> tuple[str, ...]:
    """Return the units that score a format on this card, the one taken by default first."""
    first = default_unit(row, require_cuda())
    return (first,) if first == MMA else (first, MMA)


def ours(case: ScoreCase, keys: Keys, unit: str) -> Call:
    """Return a call that scores into an output of its own."""
    plan = case.plan(unit)
    arguments = require_scores(case.query, case.context_lens, keys, plan, case.columns)
    out = allocate_scores(plan.rows, case.columns, arguments.device)
    return partial(launch_scores, arguments, plan, out)


def _row(name: str, case: ScoreCase, sides: list[Side | None], rounds: int) -> ScoreRow:
    times = measure(sides, rounds)
    rate = OPERATIONS * visible(case) / times[0].median_us / 1e6
    return ScoreRow(name, tuple(times), f"{rate:.0f} TFLOP/s")


def bench_full(row: str, rows: int, keys: int, engines: ScoreEngines) -> ScoreRow:
    """Measure scores of all pairs."""
    case = make_case(row, HEADS, (rows,), (keys,), context_lens=[keys] * rows)
    sides: list[Side | None] = [Side(unit, [ours(case, case.stored, unit)]) for unit in units(row)]
    if row == "fp8":
        sides.append(engines.ragged(case))
    elif keys <= 8192:
        sides.append(Side("torch", [partial(torch_scores, case)]))
    return _row(f"scores {row} {rows} x {keys}", case, sides, 9)


def bench_causal(row: str, engines: ScoreEngines) -> Iterator[ScoreRow]:
    """Measure a causal prefill, and the same shape without a mask."""
    rows, keys = CAUSAL
    for name, context_lens in (
        ("all", [keys] * rows),
        ("causal", [(i + 1) // 4 for i in range(rows)]),
    ):
        case = make_case(row, HEADS, (rows,), (keys,), context_lens=context_lens)
        pages = case.paged(PAGE)
        sides: list[Side | None] = [Side(unit, [ours(case, pages, unit)]) for unit in units(row)]
        if row == "fp8":
            sides.append(engines.ragged(case))
        yield _row(f"scores {row} {rows} x {keys} {name}", case, sides, 15)


def bench_decode(row: str, requests: int, keys: int, engines: ScoreEngines) -> ScoreRow:
    """Measure paged decode, one query row a request."""
    cases = [
        make_case(row, HEADS, (1,) * requests, (keys,) * requests, seed=seed)
        for seed in range(SETS)
    ]
    paged = [case.paged(PAGE) for case in cases]
    sides: list[Side | None] = [
        Side(unit, [ours(case, pages, unit) for case, pages in zip(cases, paged, strict=True)])
        for unit in units(row)
    ]
    if row == "fp8":
        sides.append(engines.paged(cases, [pages.pages for pages in paged], paged))
    times = measure(sides)
    rate = requests * keys * KEY_BYTES[row] / times[0].median_us / 1e6
    return ScoreRow(f"paged decode {row} {requests} x {keys}", tuple(times), f"{rate:.2f} TB/s")


def bench_decode_topk(row: str, requests: int, keys: int) -> ScoreRow:
    """Measure decode and selection: without a score matrix, and with one."""
    case = make_case(row, HEADS, (1,) * requests, (keys,) * requests)
    unit = units(row)[0]
    pages, plan = case.paged(PAGE), case.plan(unit)
    lists = long_plan(list(case.counts), HEADS, unit).to("cuda")
    out = allocate_scores(requests, keys, case.context_lens.device)
    topk_indices = torch.empty(requests, K, dtype=torch.int32, device="cuda")

    def two() -> None:
        scores(case.query, case.context_lens, pages, plan, keys, out)
        launch_topk(out, case.context_lens, topk_indices)

    arguments = (case.query, case.context_lens, pages, lists, keys, K)
    times = measure(
        [Side("ours, no matrix", [lambda: score_topk_lists(*arguments)]), Side("matrix", [two])]
    )
    rate = requests * keys * KEY_BYTES[row] / times[0].median_us / 1e6
    return ScoreRow(f"decode + top-k {row} {requests} x {keys}", tuple(times), f"{rate:.2f} TB/s")


def bench_topk(rows: int, columns: int, special: str, engines: ScoreEngines) -> ScoreRow:
    """Measure selection of 512 from random scores; ``special`` as in :data:`TOPK`."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    calls = rotating_sets(4 * rows * columns)
    slope = torch.linspace(0, 3 if special == "rising" else 0, columns, device="cuda")
    values = [
        torch.randn(rows, columns, generator=generator, device="cuda") + slope
        for _ in range(2 if special == "in the L2" else calls)
    ]
    values = (values * calls)[:calls]  # what a replay costs is the same share of either
    context_lens = torch.full((rows,), columns, dtype=torch.int32, device="cuda")
    topk_indices = torch.empty(rows, K, dtype=torch.int32, device="cuda")

    def ours_call(scored: Tensor) -> None:
        launch_topk(scored, context_lens, topk_indices)

    sides: list[Side | None] = [
        Side("ours", [partial(ours_call, x) for x in values]),
        engines.topk(values, context_lens, K),
        Side("torch", [partial(torch.topk, x, K, dim=1) for x in values]),
    ]
    times = measure(sides, 15)
    rate = 4 * rows * columns / times[0].median_us / 1e6
    name = f"top-{K} of {rows} x {columns} {special}".rstrip()
    return ScoreRow(name, tuple(times), f"{rate:.2f} TB/s")


def check_against_engines(engines: ScoreEngines) -> str:
    """Compare ours with DeepGEMM once, so that both are known to compute the same."""
    case = make_case("fp8", HEADS, (512,), (4096,), context_lens=[4096] * 512)
    theirs = engines.ragged_scores(case)
    if theirs is None:
        return "DeepGEMM absent"
    plan = case.plan(units("fp8")[0])
    mine = scores(case.query, case.context_lens, case.stored, plan, case.columns)
    torch.cuda.synchronize()
    worst = {"ours": 0.0, "DeepGEMM": 0.0}
    for rows, expected, bound in case.true_rows():
        for name, found in (("ours", mine), ("DeepGEMM", theirs)):
            error = float(((found[rows].double() - expected).abs() / bound).max())
            worst[name] = max(worst[name], error)
    return f"largest fp8 errors in units of the bound of fp32 sums: {worst}"


def workloads(engines: ScoreEngines) -> dict[str, Callable[[], Iterable[ScoreRow]]]:
    """Return every workload of the bench by name."""
    out: dict[str, Callable[[], Iterable[ScoreRow]]] = {}

    def one(name: str, run: Callable[[], ScoreRow]) -> None:
        out[name] = lambda: [run()]

    for row, rows, keys in FULL:
        one(f"scores {row} {rows} x {keys}", partial(bench_full, row, rows, keys, engines))
    for row in ("bf16", "fp8"):
        out[f"scores {row} causal"] = partial(bench_causal, row, engines)
    for row, (requests, keys) in product(KEY_BYTES, DECODE):
        name = f"paged decode {row} {requests} x {keys}"
        one(name, partial(bench_decode, row, requests, keys, engines))
    for rows, columns, special in TOPK:
        run = partial(bench_topk, rows, columns, special, engines)
        one(f"top-{K} {rows} x {columns} {special}".rstrip(), run)
    for row, (requests, keys) in product(("bf16", "fp8"), LONG):
        name = f"decode + top-{K} {row} {requests} x {keys}"
        one(name, partial(bench_decode_topk, row, requests, keys))
    return out


@dataclass(frozen=True)
class ScoreReport:
    """All workloads of one run.

    Attributes
    ----------
    facts
        Date, card, driver and versions.
    rows
        Workloads.
    check
        How far ours and DeepGEMM's fp8 scores are from float64.
    """

    facts: dict[str, str]
    rows: tuple[ScoreRow, ...]
    check: str

    def json(self) -> str:
        """Return the report as ``needlepoint.bench-scores/1``: one JSON object."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n"

    def table(self) -> str:
        """Return the report as text, one line a workload."""
        facts = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        return "\n".join([facts, *(row.line() for row in self.rows), self.check])


def run_score_bench(
    engines: ScoreEngines,
    only: Sequence[str] = (),
    progress: Callable[[str], None] = lambda line: None,
) -> ScoreReport:
    """Measure workloads on the current CUDA device; a line each as it is done.

    Parameters
    ----------
    engines
        What is measured beside ours.
    only
        Parts of the names of workloads; none for all.
    progress
        Called with each line.

    Raises
    ------
    ValueError
        If no workload has such a name, or there is no card.
    """
    architecture = require_cuda()
    chosen = {
        name: run
        for name, run in workloads(engines).items()
        if not only or any(part in name for part in only)
    }
    if not chosen:
        raise ValueError(
            f"no workload of {list(only)}; expected parts of {list(workloads(engines))}"
        )
    rows: list[ScoreRow] = []
    for run in chosen.values():
        for row in run():
            rows.append(row)
            progress(row.line())
    facts = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "card": f"{torch.cuda.get_device_name()} (sm_{architecture})",
        "torch": torch.__version__,
        "absent": "; ".join(engines.absent) or "none",
    }
    return ScoreReport(facts, tuple(rows), check_against_engines(engines))
