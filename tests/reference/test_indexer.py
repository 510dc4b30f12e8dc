from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from needlepoint.reference.formats import to_bf16
from needlepoint.reference.hadamard import SCALE_EXACT, hadamard
from needlepoint.reference.indexer import (
    head_weights,
    index_scores,
    rotate_query,
    score_blocks,
)
from needlepoint.reference.profile import (
    BF16_CONTRACT,
    CONTRACTS,
    EXACT,
    OFFICIAL,
    Arithmetic,
    Precision,
)
from needlepoint.reference.rope import apply_rope
from needlepoint.reference.rounding import round_to

Case = tuple[Tensor, Tensor, Tensor, Tensor]


def case(queries: int = 7, heads: int = 3, keys: int = 20, seed: int = 0) -> Case:
    g = torch.Generator().manual_seed(seed)
    q = to_bf16(torch.randn(queries, heads, 128, generator=g)).double()
    w = torch.randn(queries, heads, generator=g).double()
    k = to_bf16(torch.randn(keys, 128, generator=g)).double()
    return q, w, k, torch.randint(0, keys + 1, (queries,), generator=g)


def by_definition(q: Tensor, w: Tensor, k: Tensor, arithmetic: Arithmetic) -> float:
    """Score one query against one key: a rounding after each of the three steps."""

    def rounded(value: float, precision: Precision) -> float:
        return round_to(torch.tensor(value, dtype=torch.float64), precision).item()

    terms = []
    for head in range(len(w)):
        pairs = zip(q[head].tolist(), k.tolist(), strict=True)
        dot = rounded(math.fsum(a * b for a, b in pairs), arithmetic.dot)
        terms.append(rounded(max(dot, 0.0) * w[head].item(), arithmetic.weighted))
    return rounded(math.fsum(terms), arithmetic.head_sum)


@pytest.mark.parametrize("arithmetic", CONTRACTS.values(), ids=lambda a: a.name)
def test_scores_follow_the_definition(arithmetic: Arithmetic) -> None:
    q, w, k, visible = case()
    w = round_to(w, arithmetic.weights)
    scores = index_scores(q, w, k, visible, arithmetic)
    assert scores.shape == (7, 20)
    for query in range(7):
        for key in range(20):
            found = scores[query, key].item()
            if key >= visible[query]:
                assert found == -math.inf
            elif arithmetic is EXACT:
                wanted = by_definition(q[query], w[query], k[key], arithmetic)
                assert found == pytest.approx(wanted, rel=1e-12, abs=1e-12)
            else:
                assert found == by_definition(q[query], w[query], k[key], arithmetic)


def test_negative_weights_and_dead_heads_count() -> None:
    q, w, k, _ = case()
    visible = torch.full((7,), 20)
    scores = index_scores(q, -w, k, visible, EXACT)
    torch.testing.assert_close(scores, -index_scores(q, w, k, visible, EXACT))
    without_relu = torch.einsum("shd,td,sh->st", q, k, w)
    assert (scores + without_relu).abs().max() > 1


@pytest.mark.parametrize("heads", [1, 3, 64])
@pytest.mark.parametrize("keys", [1, 511, 512, 513, 1500])
def test_tiles_leave_no_seams(heads: int, keys: int) -> None:
    q, w, k, visible = case(40, heads, keys, seed=heads)
    visible[0] = keys
    scores = index_scores(q, w, k, visible, EXACT)
    dots = torch.einsum("shd,td->sht", q, k).clamp(min=0)
    wanted = torch.einsum("sht,sh->st", dots, w)
    wanted.masked_fill_(torch.arange(keys) >= visible.unsqueeze(1), -math.inf)
    torch.testing.assert_close(scores, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("arithmetic", CONTRACTS.values(), ids=lambda a: a.name)
def test_threads_do_not_change_bytes(arithmetic: Arithmetic) -> None:
    q, w, k, visible = case(700, 8, 600, seed=4)
    whole = index_scores(q, w, k, visible, arithmetic)
    for threads in (2, 4):
        torch.set_num_threads(threads)
        assert torch.equal(index_scores(q, w, k, visible, arithmetic), whole)


@pytest.mark.parametrize("arithmetic", [BF16_CONTRACT, OFFICIAL], ids=lambda a: a.name)
def test_fp32_compute_stays_near(arithmetic: Arithmetic) -> None:
    q, w, k, visible = case(30, 16, 300, seed=5)
    exact = index_scores(q, w, k, visible, arithmetic)
    fast = index_scores(q, w, k, visible, arithmetic, compute=torch.float32)
    assert fast.dtype == torch.float32
    assert torch.equal(torch.isinf(fast), torch.isinf(exact))
    seen = ~torch.isinf(exact)
    size = torch.einsum("shd,td,sh->st", q.abs(), k.abs(), w.abs())[seen]
    step = 2**-7 if arithmetic is OFFICIAL else 2**-22
    assert ((fast[seen] - exact[seen]).abs() <= step * size).all()


def test_fp32_compute_keeps_bf16_roundings() -> None:
    q, w, k, _ = case()
    visible = torch.full((7,), 20)
    scores = index_scores(q, w, k, visible, OFFICIAL, compute=torch.float32)
    assert torch.equal(scores, scores.bfloat16().float())


def test_query_is_roped_then_rotated() -> None:
    q, _, _, _ = case()
    angles = torch.rand(7, 32, generator=torch.Generator().manual_seed(1)).double()
    rope = torch.stack((angles.cos(), angles.sin()), dim=-1)
    roped = apply_rope(q, rope.unsqueeze(1))
    assert torch.equal(rotate_query(q, rope, EXACT), hadamard(roped, SCALE_EXACT))
    unrotated = replace(EXACT, hadamard=False)
    assert torch.equal(rotate_query(q, rope, unrotated), roped)
    rounded = hadamard(round_to(roped, Precision.BF16))
    assert torch.equal(rotate_query(q, rope, BF16_CONTRACT), round_to(rounded, Precision.BF16))


def test_head_weights_round_once() -> None:
    w = torch.tensor([[1.0, 1 / 3]], dtype=torch.float64)
    assert torch.equal(head_weights(w, 2**-6.5, EXACT), w * 2**-6.5)
    rounded = head_weights(w, 2**-6.5, OFFICIAL)
    assert torch.equal(rounded, (w * 2**-6.5).bfloat16().double())


@pytest.mark.parametrize(
    ("queries", "keys", "budget", "rows"),
    [(10, 100, 32 * 300, 3), (10, 100, 1, 1), (10, 0, 1 << 20, 10), (10, 100, 1 << 30, 10)],
)
def test_blocks_fit_the_budget(queries: int, keys: int, budget: int, rows: int) -> None:
    blocks = score_blocks(queries, keys, budget)
    assert [i for b in blocks for i in range(b.start, b.stop)] == list(range(queries))
    assert max(b.stop - b.start for b in blocks) == rows


@pytest.mark.parametrize(
    ("q", "w", "k", "visible", "named"),
    [
        ((2, 3, 128), (2, 4), (5, 128), [0, 5], r"\(2, 4\)"),
        ((2, 3, 128), (2, 3), (5, 64), [0, 5], r"\(5, 64\)"),
        ((2, 3, 128), (2, 3), (5, 128), [0, 6], "0 to 6"),
        ((2, 3, 128), (2, 3), (5, 128), [-1, 5], "-1 to 5"),
        ((0, 3, 128), (0, 3), (5, 128), [], "S > 0"),
    ],
)
def test_wrong_input(
    q: tuple[int, ...], w: tuple[int, ...], k: tuple[int, ...], visible: list[int], named: str
) -> None:
    seen = torch.tensor(visible, dtype=torch.int64)
    with pytest.raises(ValueError, match=named):
        index_scores(torch.zeros(q), torch.zeros(w), torch.zeros(k), seen, EXACT)


def test_wrong_compute_type() -> None:
    q, w, k, visible = case()
    with pytest.raises(ValueError, match=r"torch\.bfloat16"):
        index_scores(q, w, k, visible, EXACT, compute=torch.bfloat16)
