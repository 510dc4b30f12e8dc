"""On a card: picks against a stable sort, over every kind of row that selection can meet."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.build.score_variants import MMA, SCORE_ROWS, WGMMA, WGMMA_ROWS
from needlepoint.optimized.cuda.topk import (
    PageTable,
    launch_topk,
    score_topk,
    topk,
    topk_kind,
)
from needlepoint.optimized.cuda.topk_lists import long_plan, score_topk_lists
from needlepoint.verify.workloads.scores import make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(60),
]

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
PATHS = [(row, MMA) for row in SCORE_ROWS] + [(row, WGMMA) for row in WGMMA_ROWS if HOPPER]
ROWS = {"few": 3, "many": 200}  # a pair of blocks a row if it is long, one block a row


def draw(kind: str, rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, device="cuda")
    if kind == "relu":
        return x.relu()  # half of every row is one plateau
    if kind == "zero":
        return torch.where(torch.rand(x.shape, device="cuda") < 0.5, 0.0, -0.0)
    if kind == "few":
        return x.round()
    if kind == "bits":
        bits = torch.randint(-(2**31), 2**31, x.shape, generator=generator, device="cuda")
        return bits.to(torch.int32).view(torch.float32)
    if kind == "nan":
        return torch.where(x > 1, x * torch.nan, x)
    if kind == "infinite":
        return torch.where(x.abs() > 1, x * torch.inf, x)
    if kind == "rising":
        return torch.arange(columns, device="cuda").expand(rows, columns) + x
    if kind == "falling":
        return x - torch.arange(columns, device="cuda").float()
    if kind == "spike":  # the sample sees none of the large ones
        x[:, columns // 3 : columns // 3 + 600] += 100
        return x
    if kind == "wide":
        return x * torch.exp2(20 * x)
    if kind == "narrow":  # the first digits of a key say nothing
        return 100 + x / 1000
    return x


def expected_picks(values: Tensor, context_lens: Tensor, k: int) -> Tensor:
    rows, columns = values.shape
    values = torch.where(values.isnan(), torch.nan, values)  # one NaN, of positive sign
    place = torch.arange(columns, device="cuda")
    seen = place < context_lens[:, None]
    # Stable and descending: NaN first, equal numbers by column, what is not seen behind all.
    order = values.masked_fill(~seen, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    order = order[:, :k]
    order = torch.where(order < context_lens[:, None], order, columns).sort(dim=1).values
    out = torch.full((rows, k), -1, dtype=torch.int64, device="cuda")
    out[:, : order.shape[1]] = torch.where(order == columns, -1, order)
    return out.int()


def run(values: Tensor, context_lens: Tensor, k: int) -> Tensor:
    """Select from rows whose unread part is NaN, into a poisoned output between guards."""
    rows, columns = values.shape
    padded = torch.full((rows, -(-columns // 4) * 4 + 8), torch.nan, device="cuda")
    seen = torch.arange(columns, device="cuda") < context_lens[:, None]
    padded[:, :columns] = values.masked_fill(~seen, torch.nan)
    picks = torch.full((rows + 2, k), -2, dtype=torch.int32, device="cuda")
    launch_topk(padded[:, :columns], context_lens, picks[1:-1])
    torch.cuda.synchronize()
    assert bool((picks[[0, -1]] == -2).all())
    return picks[1:-1]


KINDS = (
    "normal",
    "relu",
    "zero",
    "few",
    "bits",
    "nan",
    "infinite",
    "rising",
    "falling",
    "spike",
    "wide",
    "narrow",
)


@pytest.mark.parametrize("k", [1, 3, 512, 513, 1024, 2048])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", KINDS)
def test_picks_are_those_of_a_stable_sort(kind: str, rows: str, k: int) -> None:
    for columns in (1, 511, 2049, 4099, 8191, 8193, 16387, 20001, 32768, 33000):
        count = ROWS[rows]
        values = draw(kind, count, columns, seed=columns)
        context_lens = torch.randint(-2, columns + 1, (count,), dtype=torch.int32, device="cuda")
        context_lens[::2] = columns

        found = run(values, context_lens, k)

        assert torch.equal(found, expected_picks(values, context_lens, k)), columns


@pytest.mark.parametrize("k", [1, 513, 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_few_rows_that_see_little_of_their_columns(kind: str, k: int) -> None:
    """Halves of a row with less than k columns, and without any."""
    seen = [2, 5, k - 1, k, k + 1, k + 2, 2 * k + 1, 4097, 8193, 16384, 16385, 32767, 32768]
    context_lens = torch.tensor(seen, dtype=torch.int32, device="cuda")
    values = draw(kind, len(seen), 32768, seed=k)

    assert topk_kind(len(seen), 32768, k) == "few"
    assert torch.equal(run(values, context_lens, k), expected_picks(values, context_lens, k))


@pytest.mark.parametrize("kind", ["normal", "relu", "few", "rising"])
@pytest.mark.parametrize("k", [512, 1024, 2048])
def test_rows_of_a_million_columns(kind: str, k: int) -> None:
    values = draw(kind, 4, 2**20, seed=1)
    context_lens = torch.tensor([2**20, 2**20 - 3, 70000, k], dtype=torch.int32, device="cuda")

    assert torch.equal(run(values, context_lens, k), expected_picks(values, context_lens, k))


def test_many_long_rows() -> None:
    values = draw("normal", 140, 300001, seed=2)
    context_lens = torch.full((140,), 300001, dtype=torch.int32, device="cuda")

    assert torch.equal(run(values, context_lens, 1000), expected_picks(values, context_lens, 1000))


def test_picks_become_slots_of_the_pool() -> None:
    values = draw("normal", 10, 1000, seed=3)
    context_lens = torch.tensor([1000] * 5 + [100] * 5, dtype=torch.int32, device="cuda")
    owner = torch.tensor([0, 1] * 5, dtype=torch.int32, device="cuda")
    table = torch.randperm(64, device="cuda")[: 2 * 16].view(2, 16).to(torch.int32)

    found = topk(values, context_lens, 128, PageTable(table, 64, owner))

    plain = topk(values, context_lens, 128).long()
    page = table[owner.long()].gather(1, plain.clamp(min=0) // 64)
    expected = torch.where(plain < 0, -1, page * 64 + plain % 64)
    assert torch.equal(found.long(), expected)
    assert bool((found[5:, 100:] == -1).all())


@pytest.mark.parametrize(("row", "unit"), PATHS)
def test_chunks_of_rows_change_nothing(row: str, unit: str) -> None:
    case = make_case(row, 64, (50, 1, 7), (3000, 2500, 900), seed=4)
    arguments = (case.query, case.context_lens, case.paged(64), case.plan(unit), case.columns, 512)

    whole = score_topk(*arguments)

    for rows in (1, 7, 57):
        budget = rows * (4 * case.columns + 16)
        assert torch.equal(score_topk(*arguments, budget_bytes=budget), whole)


@pytest.mark.parametrize("k", [1, 512, 2048])
@pytest.mark.parametrize("heads", [64, 32, 8])
@pytest.mark.parametrize(("row", "unit"), PATHS)
def test_without_a_matrix_the_picks_are_the_same(row: str, unit: str, heads: int, k: int) -> None:
    counts, entries = (1, 4, 2, 1), (30000, 9000, 100, 5000)
    for kind in ("normal", "integers"):  # integers: thousands of equal scores
        case = make_case(row, heads, counts, entries, kind=kind, seed=5)
        keys, columns = case.paged(64), case.columns
        plan = long_plan(counts, heads, unit).to("cuda")

        found = score_topk_lists(case.query, case.context_lens, keys, plan, columns, k)

        expected = score_topk(case.query, case.context_lens, keys, case.plan(unit), columns, k)
        assert torch.equal(found, expected)
