"""On a card: index scores against float64 on the stored bytes, within a bound fixed before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.build.score_variants import (
    MMA,
    SCORE_ROWS,
    WGMMA,
    WGMMA_ROWS,
    accumulator,
)
from needlepoint.optimized.cuda.scores import KeyPages, KeyRows, scores
from needlepoint.reference.profile import Accumulator
from needlepoint.verify.goldens.card import CASES, record_card
from needlepoint.verify.goldens.manifest import Cases
from needlepoint.verify.numerics.error_model import ACCUMULATORS
from needlepoint.verify.workloads.scores import KINDS, ScoreCase, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(60),  # a kernel that hangs is not to hang the run
]

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
PATHS = [(row, MMA) for row in SCORE_ROWS] + [(row, WGMMA) for row in WGMMA_ROWS if HOPPER]
COUNTS = (1, 3, 9, 70, 2, 0, 4)
ENTRIES = (700, 65, 513, 129, 1, 9, 64)
GUARD = 8


def run(case: ScoreCase, keys: KeyPages | KeyRows, unit: str) -> Tensor:
    """Score into a poisoned output whose rows are longer than the columns."""
    rows, columns = len(case.context_lens), case.columns
    buffer = torch.full((rows + 2, columns + GUARD), -1, dtype=torch.int32, device="cuda")
    out = buffer.view(torch.float32)[1:-1, :columns]
    scores(case.query, case.context_lens, keys, case.plan(unit), columns, out)
    torch.cuda.synchronize()
    outside = (buffer[0], buffer[-1], buffer[:, columns:])
    assert all(bool((part == -1).all()) for part in outside)
    return out


def worst(case: ScoreCase, found: Tensor, unit: str) -> float:
    """Return the largest error in units of its bound; masks must be equal."""
    ratio = 0.0
    for rows, expected, bound in case.true_rows(accumulator(unit, case.row)):
        masked = expected == -torch.inf
        assert torch.equal(found[rows] == -torch.inf, masked)
        error = (found[rows].double() - expected).abs().masked_fill(masked, 0.0)
        assert bool(torch.isfinite(error).all())
        ratio = max(ratio, float((error / bound.clamp(min=2.0**-100)).max()))
    return ratio


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [64, 32, 8])
@pytest.mark.parametrize(("row", "unit"), PATHS)
def test_scores_lie_within_the_bound(row: str, unit: str, heads: int, kind: str) -> None:
    case = make_case(row, heads, COUNTS, ENTRIES, kind=kind, seed=1)

    found = run(case, case.paged(64), unit)

    assert worst(case, found, unit) <= (0.0 if kind == "integers" else 1.0)
    assert torch.equal(run(case, case.stored, unit), found)


@pytest.mark.skipif(not HOPPER, reason="no FP8 wgmma")
def test_sums_of_both_signs_stay_within_the_constant_of_short_sums() -> None:
    case = make_case("fp8", 64, COUNTS, ENTRIES, seed=1)
    found = run(case, case.paged(64), WGMMA)
    share = ACCUMULATORS[Accumulator.SM90_FP8].value / ACCUMULATORS[Accumulator.FP32].value

    for rows, expected, bound in case.true_rows():
        error = (found[rows].double() - expected).abs().nan_to_num()
        assert bool((error <= share * bound).all())
        assert not bool((error <= bound).all())  # an fp32 limit fails here


@pytest.mark.parametrize("heads", [64, 32])
@pytest.mark.parametrize(("row", "unit"), PATHS)
def test_long_rows_and_many_groups(row: str, unit: str, heads: int) -> None:
    case = make_case(row, heads, (300, 1, 17), (5000, 20000, 3333), seed=2)

    assert worst(case, run(case, case.paged(64), unit), unit) <= 1.0


@pytest.mark.parametrize("page_size", [8, 16, 128, 1024])
@pytest.mark.parametrize(("row", "unit"), PATHS)
def test_page_sizes_do_not_matter(row: str, unit: str, page_size: int) -> None:
    case = make_case(row, 64, COUNTS, ENTRIES, seed=3)

    assert torch.equal(
        run(case, case.paged(page_size, seed=page_size), unit), run(case, case.paged(64), unit)
    )


@pytest.mark.parametrize("heads", [64, 32])
@pytest.mark.parametrize(("row", "unit"), PATHS)
def test_splits_and_order_of_a_batch_change_no_bit(row: str, unit: str, heads: int) -> None:
    case = make_case(row, heads, COUNTS, ENTRIES, seed=4)
    keys = case.paged(64)
    whole = run(case, keys, unit)
    ends = torch.tensor(COUNTS).cumsum(0).tolist()

    for order in ([6, 3, 0, 5, 1, 4, 2], [3], [2, 0]):
        part = case.of(order)
        table = keys.table[torch.tensor(order, device="cuda")].contiguous()
        found = run(replace(part, entries=case.entries), replace(keys, table=table), unit)
        expected = [whole[ends[r] - COUNTS[r] : ends[r]] for r in order]
        assert torch.equal(found, torch.cat(expected))
    # One request in pieces of any number of rows, down to one at a time.
    first = ends[2]
    for size in (1, 2, 5, 8, 33):
        for at in range(0, COUNTS[3], size):
            rows = slice(first + at, first + min(at + size, COUNTS[3]))
            query = replace(
                case.query,
                codes=case.query.codes[rows],
                weights=case.query.weights[rows],
                scales=None if case.query.scales is None else case.query.scales[rows],
            )
            count = rows.stop - rows.start
            piece = replace(
                case, counts=(count,), query=query, context_lens=case.context_lens[rows]
            )
            found = run(piece, replace(keys, table=keys.table[3:4]), unit)
            assert torch.equal(found, whole[rows])


@pytest.mark.parametrize(("row", "unit"), PATHS)
def test_two_runs_are_equal(row: str, unit: str) -> None:
    case = make_case(row, 64, (500,), (9000,), seed=5)
    keys = case.paged(64)

    assert torch.equal(run(case, keys, unit), run(case, keys, unit))


@pytest.mark.parametrize(("row", "unit"), PATHS)
def test_contexts_of_every_size(row: str, unit: str) -> None:
    context_lens = [0, -5, 1, 63, 64, 65, 127, 128, 129, 700, 701, 2**31 - 1]
    case = make_case(row, 64, (len(context_lens),), (700,), seed=6, context_lens=context_lens)

    found = run(case, case.paged(64), unit)

    assert worst(case, found, unit) <= 1.0
    assert (found > -torch.inf).sum(1).tolist() == [min(max(n, 0), 700) for n in context_lens]


@pytest.mark.parametrize(("row", "unit"), PATHS)
def test_keys_past_the_context_are_never_read(row: str, unit: str) -> None:
    case = make_case(row, 64, (4, 11), (256, 512), seed=7, context_lens=[100] * 4 + [300] * 11)
    keys = case.paged(64)
    keys.table[0, 2:] = 2**30  # no such page
    keys.table[1, 5:] = -7

    assert worst(case, run(case, keys, unit), unit) <= 1.0


@pytest.mark.parametrize(("row", "unit"), PATHS)
def test_a_missing_page_scores_nan(row: str, unit: str) -> None:
    case = make_case(row, 64, (2, 12), (256, 512), seed=8, context_lens=[256] * 2 + [512] * 12)
    keys = case.paged(64)
    expected = run(case, keys, unit).isnan()
    keys.table[0, 1], keys.table[1, 3] = keys.pages.shape[0], -1
    expected[:2, 64:128] = True
    expected[2:, 192:256] = True

    assert torch.equal(run(case, keys, unit).isnan(), expected)


@pytest.mark.parametrize(("row", "unit"), PATHS)
def test_pages_past_2_gib(row: str, unit: str) -> None:
    case = make_case(row, 64, (1, 9), (300, 130), seed=9)
    small = case.paged(64)
    pages = 2**31 // small.pages.shape[1] + 20
    large = torch.full((pages, small.pages.shape[1]), 255, dtype=torch.uint8, device="cuda")
    large[-small.pages.shape[0] :] = small.pages
    table = small.table + (pages - small.pages.shape[0])

    found = run(case, KeyPages(row, large, 64, table), unit)

    assert torch.equal(found, run(case, small, unit))


@pytest.mark.parametrize(("row", "unit"), PATHS)
def test_an_output_past_2_gib(row: str, unit: str) -> None:
    case = make_case(row, 64, (70000,), (128,), seed=10, context_lens=[128] * 70000)
    buffer = torch.empty(70000, 8192, device="cuda")

    scores(case.query, case.context_lens, case.stored, case.plan(unit), 128, buffer[:, :128])

    assert worst(case, buffer[:, :128], unit) <= 1.0


@pytest.mark.parametrize(("row", "unit"), PATHS)
def test_memory_is_the_output(row: str, unit: str) -> None:
    case = make_case(row, 64, (6144,), (5632,), seed=11)
    keys, plan = case.paged(64), case.plan(unit)
    out = torch.empty(6144, 5632, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()

    scores(case.query, case.context_lens, keys, plan, 5632, out)

    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 4096  # empty arguments


@pytest.mark.parametrize("cases", CASES)
def test_what_this_card_records_is_admitted(cases: Cases) -> None:
    recording = record_card(cases)

    assert CASES[cases].faults(recording.tensors) == []
    assert recording.card
