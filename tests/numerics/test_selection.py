"""Picks are judged by what was lost, not by how many agree."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from needlepoint.verify.numerics.selection import (
    PickErrors,
    Swap,
    judge_picks,
    pick_sets,
    selection_cost,
)

K = 4


def top(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Return the k best visible entries, ties to the lower entry, -1 padded; slow and obvious."""
    picks = torch.full((len(scores), k), -1, dtype=torch.int32)
    for row, count in enumerate(visible.tolist()):
        order = sorted(range(count), key=lambda e: (-float(scores[row, e]), e))[:k]
        picks[row, : len(order)] = torch.tensor(sorted(order), dtype=torch.int32)
    return picks


def masked(scores: Tensor, visible: Tensor) -> Tensor:
    hidden = torch.arange(scores.shape[1]) >= visible.unsqueeze(1)
    return scores.masked_fill(hidden, -math.inf)


def draw(rows: int, entries: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    visible = torch.randint(0, entries + 1, (rows,), generator=g)
    scores = torch.randn(rows, entries, generator=g, dtype=torch.float64)
    return masked(scores, visible), visible


def judge(
    own: Tensor | None,
    reference: Tensor,
    visible: Tensor,
    *,
    bound: float = 1e-3,
    picks: Tensor | None = None,
    k: int = K,
    limit: float = 1.0,
    own_radius: Tensor | None = None,
) -> PickErrors:
    """Judge ``picks``, by default the candidate's own best."""
    if picks is None:
        picks = top(reference if own is None else own, visible, k)
    radius = torch.full_like(reference, bound)
    return judge_picks(
        picks,
        top(reference, visible, k),
        own,
        reference,
        radius,
        visible,
        k,
        limit=limit,
        own_radius=own_radius,
    )


def row(*values: float) -> tuple[Tensor, Tensor]:
    return torch.tensor([values], dtype=torch.float64), torch.tensor([len(values)])


def kinds(errors: PickErrors) -> list[Swap]:
    return [Swap(int(kind)) for kind in errors.swaps.kind]


# --- classes of swaps -----------------------------------------------------------------------------


@given(seed=st.integers(0, 2**31), entries=st.integers(1, 40), k=st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_the_same_picks_in_any_order_have_no_swaps(seed: int, entries: int, k: int) -> None:
    scores, visible = draw(9, entries, seed)
    picks = top(scores, visible, k)
    shuffled = torch.full_like(picks, -1)
    for r, count in enumerate(visible.clamp(max=k).tolist()):
        shuffled[r, :count] = picks[r, :count].flip(0)

    errors = judge(scores, scores, visible, picks=shuffled, k=k)

    assert not bool(errors.failed().any())
    assert not bool(errors.counts.any())
    assert errors.lost_rank.tolist() == [-1] * 9
    expected = [1 - min(k, v) / v if v else 0.0 for v in visible.tolist()]
    assert errors.discarded.tolist() == pytest.approx(expected)


def test_a_swap_within_both_bounds_is_explained() -> None:
    reference, visible = row(9.0, 8.0, 7.0, 6.0, 5.9995, 1.0)
    own = reference.clone()
    own[0, 4] += 0.001

    errors = judge(own, reference, visible)

    assert kinds(errors) == [Swap.EXPLAINED]
    assert not bool(errors.failed().any())
    assert errors.swaps.lost.tolist() == [3]
    assert errors.swaps.gained.tolist() == [4]
    assert errors.swaps.gap.tolist() == pytest.approx([5e-4])
    assert errors.swaps.allowed.tolist() == pytest.approx([2e-3])
    assert errors.lost_rank.tolist() == [3]


def test_a_swap_beyond_the_bounds_is_upstream_and_a_limit_loosens_it() -> None:
    reference, visible = row(9.0, 8.0, 7.0, 6.0, 5.99, 1.0)
    own = reference.clone()
    own[0, 4] += 0.02

    assert kinds(judge(own, reference, visible)) == [Swap.UPSTREAM]
    assert bool(judge(own, reference, visible).failed().all())
    loose = judge(own, reference, visible, limit=6.0)
    assert kinds(loose) == [Swap.EXPLAINED]
    assert loose.swaps.bound.tolist() == pytest.approx([2e-3])
    assert loose.swaps.allowed.tolist() == pytest.approx([12e-3])


def test_equal_scores_of_the_candidate_are_a_tie() -> None:
    reference, visible = row(9.0, 8.0, 7.0, 6.0, 5.99, 1.0)
    own = reference.clone()
    own[0, 4] = own[0, 3]
    picks = torch.tensor([[0, 1, 2, 4]])

    errors = judge(own, reference, visible, picks=picks)

    assert kinds(errors) == [Swap.TIE]
    assert errors.count(Swap.TIE) == 1
    assert not bool(errors.failed().any())


def test_a_plateau_of_zeros_may_be_filled_from_anywhere() -> None:
    reference = torch.zeros(1, 200, dtype=torch.float64)
    reference[0, 150:153] = 1
    visible = torch.tensor([200])
    picks = torch.tensor([[150, 151, 152, 199, 198, 77, 3, 160]])

    errors = judge(reference, reference, visible, picks=picks, k=8)

    assert set(kinds(errors)) == {Swap.TIE}
    assert not bool(errors.failed().any())


def test_a_needle_that_the_candidate_scores_high_and_drops_is_the_selectors() -> None:
    reference, visible = row(*range(40, 0, -1))
    picks = torch.tensor([[1, 2, 3, 4]])  # entry 0, the best, is lost

    errors = judge(reference, reference, visible, picks=picks)

    assert kinds(errors) == [Swap.SELECTOR]
    assert errors.swaps.rank.tolist() == [0]
    assert errors.lost_rank.tolist() == [0]
    assert bool(errors.failed().all())


def test_a_lost_entry_above_a_common_pick_is_the_selectors_though_its_pair_is_ordered() -> None:
    # By its own scores the candidate should have dropped entry 2, which both picked.
    reference, visible = row(9.0, 8.0, 7.0, 6.0, 5.9995, 1.0)
    own = torch.tensor([[9.0, 8.0, 5.0, 6.0, 6.5, 1.0]], dtype=torch.float64)
    picks = torch.tensor([[0, 1, 2, 4]])

    assert kinds(judge(own, reference, visible, picks=picks)) == [Swap.SELECTOR]


def test_one_selector_fault_does_not_condemn_the_legal_swap_beside_it() -> None:
    reference, visible = row(9.0, 8.0, 7.0, 6.0, 5.9995, 5.0, 1.0)
    own = reference.clone()
    own[0, 4] += 0.001
    picks = torch.tensor([[1, 2, 4, 5]])  # 0 dropped for 5; 3 exchanged for 4

    errors = judge(own, reference, visible, picks=picks)

    assert sorted(kinds(errors)) == [Swap.SELECTOR, Swap.SELECTOR] or sorted(kinds(errors)) == [
        Swap.EXPLAINED,
        Swap.SELECTOR,
    ]
    assert errors.lost_rank.tolist() == [0]


def test_without_scores_every_swap_is_unknown_and_fails() -> None:
    reference, visible = row(9.0, 8.0, 7.0, 6.0, 5.9999, 1.0)

    errors = judge(None, reference, visible, picks=torch.tensor([[0, 1, 2, 4]]))

    assert kinds(errors) == [Swap.UNKNOWN]
    assert bool(errors.failed().all())
    assert not bool(judge(None, reference, visible).failed().any())


@pytest.mark.parametrize("bad", ["lost", "gained"])
def test_nan_scores_justify_nothing(bad: str) -> None:
    reference, visible = row(9.0, 8.0, 7.0, 6.0, 5.9999, 1.0)
    own = reference.clone()
    own[0, 3 if bad == "lost" else 4] = math.nan

    errors = judge(own, reference, visible, picks=torch.tensor([[0, 1, 2, 4]]))

    assert kinds(errors) == [Swap.SELECTOR]


def test_recomputed_scores_justify_within_their_radius() -> None:
    reference, visible = row(9.0, 8.0, 7.0, 6.0, 5.9995, 1.0)
    picks = torch.tensor([[0, 1, 2, 4]])
    wide, narrow = (torch.full_like(reference, r) for r in (3e-4, 1e-5))

    close = judge(reference, reference, visible, picks=picks, own_radius=wide)
    far = judge(reference, reference, visible, picks=picks, own_radius=narrow)

    assert kinds(close) == [Swap.EXPLAINED]
    assert kinds(far) == [Swap.SELECTOR]


def test_a_positive_gain_on_all_scores_changes_no_pick() -> None:
    scores, visible = draw(30, 50, seed=1)

    assert not bool(judge(scores * 1.1, scores, visible).counts.any())


@given(seed=st.integers(0, 2**31), entries=st.integers(5, 60), k=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_scores_within_the_bound_give_ties_and_explained_swaps_only(
    seed: int, entries: int, k: int
) -> None:
    reference, visible = draw(20, entries, seed)
    reference = masked(torch.round(reference.nan_to_num(neginf=0) * 8) / 8, visible)
    g = torch.Generator().manual_seed(seed + 1)
    push = 2 * torch.rand(reference.shape, generator=g, dtype=torch.float64) - 1
    own = reference + 0.1 * push

    errors = judge(own, reference, visible, bound=0.1, k=k)

    assert not bool(errors.failed().any())
    assert errors.count(Swap.SELECTOR) == errors.count(Swap.UPSTREAM) == 0


@given(seed=st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_pairs_are_lost_and_gained_entries_each_best_first(seed: int) -> None:
    reference, visible = draw(12, 30, seed)
    own, _ = draw(12, 30, seed + 1)
    own = masked(own.nan_to_num(neginf=0), visible)

    errors = judge(own, reference, visible)

    for r in range(12):
        mine, meant = ({int(e) for e in top(s, visible, K)[r] if e >= 0} for s in (own, reference))
        lost = sorted(meant - mine, key=lambda e: -float(reference[r, e]))
        gained = sorted(mine - meant, key=lambda e: -float(reference[r, e]))
        at = errors.swaps.row == r
        assert errors.swaps.lost[at].tolist() == lost
        assert errors.swaps.gained[at].tolist() == gained
        ranked = sorted(range(int(visible[r])), key=lambda e: -float(reference[r, e]))
        assert errors.swaps.rank[at].tolist() == [ranked.index(e) for e in lost]
        assert int(errors.lost_rank[r]) == (ranked.index(lost[0]) if lost else -1)
        assert int(errors.counts[r].sum()) == len(lost)


# --- invalid picks --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("picks", "visible", "invalid"),
    [
        ([0, 1, 2, 3], 9, 0),
        ([3, 0, 2, 8], 9, 0),
        ([0, 1, -1, -1], 2, 0),
        ([-1, -1, -1, -1], 0, 0),
        ([0, 1, 2, 2], 9, 1),  # duplicate
        ([2, 2, 2, 2], 9, 3),
        ([0, 1, 2, 9], 9, 1),  # not visible
        ([0, 1, 2, 40], 9, 1),  # out of range
        ([0, 1, 2, -2], 9, 1),
        ([0, 1, 2, -1], 9, 1),  # one too few
        ([0, 1, -1, 2], 3, 1),  # -1 before a pick
        ([-1, -1, 0, 1], 2, 2),
        ([0, 1, 2, -1], 2, 2),  # entry 2 is not visible, and one too many
        ([-1, -1, -1, -1], 9, 4),
        ([0, 1, 2, 2**31 - 1], 9, 1),
    ],
)
def test_invalid_picks_are_counted(picks: list[int], visible: int, invalid: int) -> None:
    sets = pick_sets(torch.tensor([picks]), torch.tensor([visible]), K, entries=20)

    assert sets.invalid.tolist() == [invalid]
    legal = {p for p in picks if 0 <= p < visible}
    assert set(sets.member[0].nonzero().flatten().tolist()) == legal


def test_an_invalid_row_fails_alone_and_still_names_what_it_lost() -> None:
    reference, visible = draw(6, 30, seed=3)
    visible = visible.clamp(min=10)
    reference = masked(reference.nan_to_num(neginf=0), visible)
    picks = top(reference, visible, K)
    picks[2, 1] = picks[2, 0]

    errors = judge(reference, reference, visible, picks=picks)

    assert errors.failed().nonzero().flatten().tolist() == [2]
    assert errors.invalid.tolist() == [0, 0, 1, 0, 0, 0]


def test_k_off_by_one_is_invalid_in_every_row_that_sees_enough() -> None:
    scores, visible = draw(30, 50, seed=4)
    one_less, one_more = top(scores, visible, K - 1), top(scores, visible, K + 1)

    for picks, threshold in ((one_less, K), (one_more, K + 1)):
        errors = judge(scores, scores, visible, picks=picks)
        assert torch.equal(errors.failed(), visible >= threshold)


def test_visibility_off_by_one_fails() -> None:
    scores = torch.arange(20.0, dtype=torch.float64).expand(5, 20)
    visible = torch.tensor([6, 7, 8, 9, 10])
    late, early = top(scores, visible + 1, K), top(scores, visible - 1, K)

    assert bool((judge(scores, scores, visible, picks=late).invalid > 0).all())
    assert bool(
        judge(masked(scores, visible), masked(scores, visible), visible, picks=early).failed().all()
    )


def test_two_swapped_queries_are_both_named() -> None:
    scores, _ = draw(20, 60, seed=5)
    visible = torch.full((20,), 60)
    scores = masked(
        torch.randn(20, 60, generator=torch.Generator().manual_seed(1)).double(), visible
    )
    picks = top(scores, visible, K)
    picks[[7, 11]] = picks[[11, 7]]

    errors = judge(scores, scores, visible, picks=picks)

    assert errors.failed().nonzero().flatten().tolist() == [7, 11]


# --- cost -----------------------------------------------------------------------------------------


def test_overlap_ranks_a_lost_needle_like_a_boundary_swap_and_score_lost_does_not() -> None:
    scores = torch.linspace(1, 0, 64, dtype=torch.float64).repeat(2, 1)
    scores[:, 0] = 50
    visible = torch.tensor([64, 64])
    contract = top(scores, visible, 16)
    picks = contract.clone()
    picks[0, 15] = 16  # boundary
    picks[1, 0] = 16  # needle

    cost = selection_cost(picks, contract, scores, visible, 16)

    rms = float(scores[0].square().mean().sqrt())
    assert cost.overlap.tolist() == [15 / 16, 15 / 16]
    assert cost.score_lost.tolist() == pytest.approx(
        [float(scores[0, 15] - scores[0, 16]) / rms, float(scores[1, 0] - scores[1, 16]) / rms]
    )
    assert float(cost.score_lost[1]) > 100 * float(cost.score_lost[0])


def test_cost_of_rows_without_scores_or_entries_is_nothing() -> None:
    scores = torch.zeros(2, 8, dtype=torch.float64)
    visible = torch.tensor([0, 8])
    picks = torch.tensor([[-1, -1], [3, 4]])
    contract = torch.tensor([[-1, -1], [0, 1]])

    cost = selection_cost(picks, contract, masked(scores, visible), visible, 2)

    assert cost.overlap.tolist() == [1.0, 0.0]
    assert cost.score_lost.tolist() == [0.0, 0.0]


@given(seed=st.integers(0, 2**31), k=st.integers(1, 9))
@settings(max_examples=20, deadline=None)
def test_score_lost_is_never_negative_and_zero_for_the_contracts_own_picks(
    seed: int, k: int
) -> None:
    scores, visible = draw(15, 30, seed)
    own, _ = draw(15, 30, seed + 1)
    contract = top(scores, visible, k)

    other = selection_cost(top(own, visible, k), contract, scores, visible, k)
    same = selection_cost(contract, contract, scores, visible, k)

    assert bool((other.score_lost >= 0).all())
    assert same.score_lost.tolist() == [0.0] * 15
    assert same.overlap.tolist() == [1.0] * 15


# --- blocks and refusals --------------------------------------------------------------------------


def test_blocks_of_rows_concatenate_to_the_whole() -> None:
    reference, visible = draw(20, 40, seed=8)
    own = reference + draw(20, 40, seed=9)[0].nan_to_num(neginf=0)

    whole = judge(own, reference, visible)
    parts = [judge(own[cut], reference[cut], visible[cut]) for cut in (slice(0, 7), slice(7, 20))]
    joined = PickErrors.concatenate(parts)

    assert int(whole.counts.sum()) > 10
    for name in ("counts", "invalid", "lost_rank", "discarded"):
        assert torch.equal(getattr(whole, name), getattr(joined, name))
    for name in ("row", "lost", "gained", "kind", "gap", "bound", "allowed", "rank"):
        assert torch.equal(getattr(whole.swaps, name), getattr(joined.swaps, name))
    with pytest.raises(ValueError, match="no blocks"):
        PickErrors.concatenate([])


@pytest.mark.parametrize(
    ("picks", "visible", "k", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(3), 4, r"torch\.float32 \(3, 4\), expected integers"),
        (torch.zeros(3, 4, dtype=torch.bool), torch.zeros(3), 4, "expected integers"),
        (torch.zeros(4, dtype=torch.int32), torch.zeros(4), 4, r"expected integers \[rows"),
        (torch.zeros(3, 4, dtype=torch.int32), torch.zeros(2), 4, "one visible count a row"),
        (torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3), 0, "a positive k"),
        (torch.zeros(3, 4, dtype=torch.int32), torch.full((3,), 21), 4, r"21 \.\. 21, expected 0"),
        (torch.zeros(3, 4, dtype=torch.int32), torch.full((3,), -1), 4, r"-1 \.\. -1, expected"),
    ],
)
def test_unfit_picks_are_refused(picks: Tensor, visible: Tensor, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pick_sets(picks, visible, k, entries=20)


def test_unfit_scores_are_refused() -> None:
    reference, visible = draw(3, 10, seed=0)
    picks = top(reference, visible, K)

    with pytest.raises(ValueError, match=r"candidate scores \(3, 9\); expected one shape"):
        judge_picks(picks, picks, reference[:, :9], reference, reference, visible, K)


def test_invalid_reference_picks_are_refused() -> None:
    reference, visible = row(4.0, 3.0, 2.0, 1.0, 0.0)
    picks = torch.tensor([[0, 1, 2, 3]])

    with pytest.raises(ValueError, match="row 0 of the reference has 1 invalid picks"):
        judge_picks(picks, torch.tensor([[0, 1, 2, 2]]), None, reference, reference, visible, K)
