from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from needlepoint.reference.attention import all_visible, sparse_attention
from needlepoint.reference.profile import Precision
from needlepoint.reference.rounding import round_to

HEADS, WIDTH, ENTRIES = 2, 64, 12
Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def case(queries: int, earlier: int = 0, k: int = 4, seed: int = 0) -> Case:
    """Return q, window rows, compressed rows, picks (some -1) and sinks."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(queries, HEADS, WIDTH, generator=g, dtype=torch.float64)
    window = torch.randn(earlier + queries, WIDTH, generator=g, dtype=torch.float64)
    rows = torch.randn(ENTRIES, WIDTH, generator=g, dtype=torch.float64)
    picks = torch.randint(-1, ENTRIES, (queries, k), generator=g, dtype=torch.int32)
    return q, window, rows, picks, torch.randn(HEADS, generator=g)


def by_definition(
    q: Tensor,
    window: Tensor,
    rows: Tensor,
    picks: Tensor,
    sink: Tensor,
    size: int,
    precision: Precision,
) -> Tensor:
    """Attend query by query and head by head over an explicit list of rows."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(len(q)):
        own = len(window) - len(q) + i
        read = list(window[max(0, own - size + 1) : own + 1])
        read += [rows[e] for e in picks[i].tolist() if e >= 0]
        for head in range(q.shape[1]):
            logits = [float(q[i, head] @ row) / math.sqrt(q.shape[2]) for row in read]
            top = max(logits)
            p = [math.exp(logit - top) for logit in logits]
            total = math.fsum(p) + math.exp(sink[head].item() - top)
            factors = round_to(torch.tensor(p, dtype=torch.float64), precision)
            out[i, head] = (factors.unsqueeze(1) * torch.stack(read)).sum(0) / total
    return out


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize(
    ("queries", "earlier", "size"), [(1, 0, 4), (9, 0, 4), (5, 3, 4), (70, 7, 8)]
)
def test_follows_the_definition(
    precision: Precision, queries: int, earlier: int, size: int
) -> None:
    q, window, rows, picks, sink = case(queries, earlier)
    found = sparse_attention(q, window, rows, picks, sink, window_size=size, precision=precision)
    wanted = by_definition(q, window, rows, picks, sink, size, precision)
    tolerance = 1e-12 if precision is not Precision.BF16 else 2**-9
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("queries", [126, 127, 128, 129, 130])
def test_window_of_128_ends_at_the_query(queries: int) -> None:
    q, window, rows, picks, sink = case(queries)
    found = sparse_attention(q, window, rows, picks, sink, window_size=128)
    changed = window.clone()
    changed[0] += 1
    moved = sparse_attention(q, changed, rows, picks, sink, window_size=128)
    differs = [bool((found[i] != moved[i]).any()) for i in range(queries)]
    assert differs == [i < 128 for i in range(queries)]


def test_later_tokens_are_not_read() -> None:
    q, window, rows, picks, sink = case(20)
    found = sparse_attention(q, window, rows, picks, sink, window_size=8)
    changed = window.clone()
    changed[15] += 1
    moved = sparse_attention(q, changed, rows, picks, sink, window_size=8)
    assert torch.equal(moved[:15], found[:15])
    assert (moved[15:] != found[15:]).any(dim=(1, 2)).all()


def test_skipped_picks_read_nothing() -> None:
    """Rows that nobody picked hold NaN; the first one is what a careless clamp of -1 reads."""
    q, window, rows, _, sink = case(10)
    picks = torch.tensor([[3, -1, 5, -1]] * 10, dtype=torch.int32)
    poisoned = torch.full_like(rows, math.nan)
    poisoned[3], poisoned[5] = rows[3], rows[5]
    found = sparse_attention(q, window, poisoned, picks, sink, window_size=4)
    packed = sparse_attention(q, window, rows, picks[:, [0, 2]], sink, window_size=4)
    torch.testing.assert_close(found, packed, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("k", [0, 6])
def test_no_picks_at_all(k: int) -> None:
    q, window, rows, _, sink = case(10)
    picks = torch.full((10, k), -1, dtype=torch.int32)
    found = sparse_attention(q, window, rows, picks, sink, window_size=4)
    empty = sparse_attention(q, window, rows[:0], picks, sink, window_size=4)
    assert torch.equal(found, empty)
    assert torch.isfinite(found).all()


def test_a_wrong_pick_has_a_price() -> None:
    q, window, rows, picks, sink = case(10)
    picks[4] = torch.tensor([0, 1, 2, 3])
    found = sparse_attention(q, window, rows, picks, sink, window_size=4)
    picks[4, 3] = 7
    moved = sparse_attention(q, window, rows, picks, sink, window_size=4)
    assert (moved[4] - found[4]).abs().max() > 1e-3
    others = [i for i in range(10) if i != 4]
    assert torch.equal(moved[others], found[others])


def test_order_of_picks_is_free() -> None:
    q, window, rows, picks, sink = case(10)
    found = sparse_attention(q, window, rows, picks, sink, window_size=4)
    moved = sparse_attention(q, window, rows, picks.flip(1), sink, window_size=4)
    torch.testing.assert_close(moved, found, rtol=1e-13, atol=1e-13)


def test_the_sink_takes_probability_and_adds_no_value() -> None:
    q, window, rows, picks, sink = case(3)
    none = sparse_attention(q, window, rows, picks, sink - 1000, window_size=4)
    some = sparse_attention(q, window, rows, picks, sink, window_size=4)
    all_of_it = sparse_attention(q, window, rows, picks, sink + 1000, window_size=4)
    torch.testing.assert_close(some / none, (some / none)[..., :1].expand_as(some))
    assert ((some / none) < 1).all()
    assert all_of_it.abs().max() < 1e-100


def test_threads_budget_and_blocks_do_not_change_the_answer() -> None:
    q, window, rows, picks, sink = case(150, 7, seed=3)
    whole = sparse_attention(q, window, rows, picks, sink, window_size=8)
    torch.set_num_threads(3)
    assert torch.equal(sparse_attention(q, window, rows, picks, sink, window_size=8), whole)
    tiny = sparse_attention(q, window, rows, picks, sink, window_size=8, budget_bytes=1)
    torch.testing.assert_close(tiny, whole, rtol=1e-13, atol=1e-13)


def test_fp32_compute_stays_near() -> None:
    q, window, rows, picks, sink = case(20)
    whole = sparse_attention(q, window, rows, picks, sink, window_size=4)
    fast = sparse_attention(q, window, rows, picks, sink, window_size=4, compute=torch.float32)
    assert fast.dtype == torch.float32
    torch.testing.assert_close(fast.double(), whole, rtol=0, atol=1e-5)


def test_all_visible_lists_every_complete_entry() -> None:
    picks = all_visible(torch.tensor([0, 1, 3]), 3)
    assert picks.dtype == torch.int32
    assert picks.tolist() == [[-1, -1, -1], [0, -1, -1], [0, 1, 2]]
    assert all_visible(torch.tensor([0, 0]), 0).shape == (2, 0)


@pytest.mark.parametrize(("value", "shown"), [(ENTRIES, "12"), (-2, "-2")])
def test_impossible_pick_is_named(value: int, shown: str) -> None:
    q, window, rows, picks, sink = case(5)
    picks[3, 2] = value
    with pytest.raises(ValueError, match=f"query 3 picks entry {shown}"):
        sparse_attention(q, window, rows, picks, sink, window_size=4)


def test_wrong_shapes() -> None:
    q, window, rows, picks, sink = case(5)
    with pytest.raises(ValueError, match=r"window \(4, 64\)"):
        sparse_attention(q, window[:4], rows, picks, sink, window_size=4)
    with pytest.raises(ValueError, match=r"sink \(1,\)"):
        sparse_attention(q, window, rows, picks, sink[:1], window_size=4)
