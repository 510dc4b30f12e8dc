"""Judging picks: which entries were lost, which were gained, and why.

Overlap alone ranks faults in the wrong order: a lost needle costs it less than a harmless swap at
the boundary. So every entry the reference picks and the candidate does not (*lost*) is paired with
one that only the candidate picks (*gained*). Both lists are sorted by reference score, best first,
and paired in that order: the needle meets the best of what replaced it. Each pair is one swap:

* ``selector``: the candidate's own scores do not justify it. With ``kth`` its own k-th best score,
  a swap is justified if lost <= kth <= gained (and at lost = kth, if every pick reaches kth).
* ``tie``: justified, and the candidate scores both equally. Which of two equal entries is picked is
  nobody's fault.
* ``explained``: justified, and the reference scores differ by no more than the a-priori bounds of
  the two: rounding alone may have exchanged them.
* ``upstream``: justified, but the gap is wider. The selection did its work on wrong scores.
* ``unknown``: there are no scores to justify it with.

Picks that no score can justify (duplicate, out of range, not visible, wrong count, -1 before a
pick) are *invalid* and counted apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import torch
from torch import Tensor


class Swap(IntEnum):
    """Class of one swap."""

    TIE = 0
    EXPLAINED = 1
    SELECTOR = 2
    UPSTREAM = 3
    UNKNOWN = 4


_BLOCK_ELEMENTS = 1 << 22
"""Elements of one temporary when ranks are counted."""

_FAULTS = (Swap.SELECTOR, Swap.UPSTREAM, Swap.UNKNOWN)


@dataclass(frozen=True)
class Swaps:
    """All swaps of some rows, one number each; ordered by row, worst lost entry first."""

    # int64 row and entries.
    row: Tensor
    lost: Tensor
    gained: Tensor
    kind: Tensor  # int64, a :class:`Swap`.
    # float64 reference score of lost minus gained, the sum of the bounds of the two, and that sum
    # times the limit.
    gap: Tensor
    bound: Tensor
    allowed: Tensor
    rank: Tensor  # int64 rank of the lost entry by reference score, 0 the best.


@dataclass(frozen=True)
class PickErrors:
    """Judgement of the picks of some rows."""

    counts: Tensor  # int64 [rows, 5], swaps of each :class:`Swap`.
    invalid: Tensor  # int64 [rows], invalid picks.
    # int64 [rows], reference rank of the best lost entry, -1 where nothing is lost.
    lost_rank: Tensor
    # float64 [rows], fraction of the visible entries that a full selection leaves out.
    discarded: Tensor
    swaps: Swaps  # Every swap.

    def count(self, kind: Swap) -> int:
        """Return the number of swaps of one class."""
        return int(self.counts[:, kind].sum())

    def failed(self) -> Tensor:
        """Return the rows with an invalid pick or a swap that nothing excuses, bool [rows]."""
        return self._any(_FAULTS)

    def unjustified(self) -> Tensor:
        """Return the rows with an invalid pick or a swap that no score justifies, bool [rows]."""
        return self._any((Swap.SELECTOR, Swap.UNKNOWN))

    def _any(self, kinds: Sequence[Swap]) -> Tensor:
        return (self.invalid > 0) | torch.stack([self.counts[:, k] > 0 for k in kinds]).any(0)

    def gaps(self) -> Tensor:
        """Return the gap of every justified swap that is no tie, in units of its bound."""
        kind = self.swaps.kind
        justified = (kind == Swap.EXPLAINED) | (kind == Swap.UPSTREAM)
        return (self.swaps.gap / self.swaps.bound)[justified]

    @staticmethod
    def concatenate(parts: list[PickErrors]) -> PickErrors:
        """Return the judgement of consecutive blocks of rows as one.

        Raises
        ------
        ValueError
            If there are no blocks.
        """
        if not parts:
            raise ValueError("picks: no blocks to concatenate, expected at least one")
        swaps = []
        first = 0
        for part in parts:
            moved = {f.name: getattr(part.swaps, f.name) for f in fields(Swaps)}
            swaps.append(moved | {"row": moved["row"] + first})
            first += len(part.invalid)
        return PickErrors(
            counts=torch.cat([p.counts for p in parts]),
            invalid=torch.cat([p.invalid for p in parts]),
            lost_rank=torch.cat([p.lost_rank for p in parts]),
            discarded=torch.cat([p.discarded for p in parts]),
            swaps=Swaps(**{f.name: torch.cat([s[f.name] for s in swaps]) for f in fields(Swaps)}),
        )


def judge_picks(
    candidate_picks: Tensor,
    reference_picks: Tensor,
    candidate_scores: Tensor | None,
    reference_scores: Tensor,
    bound: Tensor,
    visible: Tensor,
    k: int,
    *,
    own_radius: Tensor | None = None,
    limit: float = 1.0,
) -> PickErrors:
    """Judge the picks of a block of rows against the profile's reference.

    Parameters
    ----------
    candidate_picks, reference_picks
        int [rows, columns] picks, request-relative entries, -1 padded; order does not matter.
    candidate_scores
        [rows, entries] the candidate's own scores, or None.
    reference_scores
        [rows, entries], -inf from ``visible`` on.
    bound
        [rows, entries] a-priori bound of the reference scores.
    visible
        int [rows] entries that each query may see.
    k
        Entries to pick; rows that see fewer pick all of them.
    own_radius
        [rows, entries] uncertainty of ``candidate_scores`` where the judge recomputed them from
        stored bytes and query; None for scores that the selection really read.
    limit
        Multiplies the bound (``limits["topk"].value``).

    Returns
    -------
    PickErrors
        Swaps and invalid picks. In a row with invalid picks the missing entries are paired as far
        as gained ones go.

    Raises
    ------
    ValueError
        If shapes do not fit or the reference picks themselves are invalid.
    """
    shape = reference_scores.shape
    if len(shape) != 2 or any(
        x is not None and x.shape != shape for x in (candidate_scores, bound, own_radius)
    ):
        raise ValueError(
            f"picks: reference scores {tuple(shape)}, bound {tuple(bound.shape)}, candidate scores "
            f"{None if candidate_scores is None else tuple(candidate_scores.shape)}; expected one "
            "shape [rows, entries]"
        )
    candidate = pick_sets(candidate_picks, visible, k, shape[1])
    reference = pick_sets(reference_picks, visible, k, shape[1])
    if bool(reference.invalid.any()):
        bad = int(reference.invalid.nonzero()[0])
        raise ValueError(
            f"picks: row {bad} of the reference has {int(reference.invalid[bad])} invalid picks; "
            f"expected min({k}, {int(visible[bad])}) distinct visible entries"
        )
    row, lost, gained = _pairs(candidate, reference, reference_scores)
    gap = (reference_scores[row, lost] - reference_scores[row, gained]).to(torch.float64)
    together = bound[row, lost].to(torch.float64) + bound[row, gained]
    allowed = limit * together
    if candidate_scores is None:
        kind = torch.full_like(row, Swap.UNKNOWN)
    else:
        justified = _Justice(candidate_scores, own_radius, candidate, visible, k).of(
            row, lost, gained
        )
        tied = candidate_scores[row, lost] == candidate_scores[row, gained]
        kind = torch.where(gap <= allowed, int(Swap.EXPLAINED), int(Swap.UPSTREAM))
        kind = torch.where(tied, int(Swap.TIE), kind)
        kind = torch.where(justified, kind, int(Swap.SELECTOR))
    counts = torch.zeros(len(candidate.invalid), len(Swap), dtype=torch.int64)
    counts.index_put_((row, kind), torch.ones_like(row), accumulate=True)
    rank = _ranks(reference, reference_scores, row, lost)
    nothing = torch.full_like(candidate.invalid, shape[1])
    best = nothing.scatter_reduce(0, row, rank, "amin")
    picked = reference.member.sum(1) / visible.clamp(min=1).to(torch.float64)
    return PickErrors(
        counts=counts,
        invalid=candidate.invalid,
        lost_rank=torch.where(best == shape[1], -1, best),
        discarded=torch.where(visible > 0, 1 - picked, 0.0),
        swaps=Swaps(row, lost, gained, kind, gap, together, allowed, rank),
    )


def _pairs(
    candidate: PickSets, reference: PickSets, scores: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, lost and gained entry of each swap: both best first by reference score."""
    lost = _best_first(reference.member & ~candidate.member, scores)
    gained = _best_first(candidate.member & ~reference.member, scores)
    rows = len(candidate.invalid)
    in_lost, in_gained = (torch.bincount(row, minlength=rows) for row, _ in (lost, gained))
    pairs = torch.minimum(in_lost, in_gained)
    keep_lost, keep_gained = (
        _place_in_row(row, count) < pairs[row]
        for (row, _), count in ((lost, in_lost), (gained, in_gained))
    )
    return lost[0][keep_lost], lost[1][keep_lost], gained[1][keep_gained]


def _best_first(mask: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    row, entry = mask.nonzero(as_tuple=True)
    by_score = torch.argsort(scores[row, entry], descending=True, stable=True)
    order = by_score[torch.argsort(row[by_score], stable=True)]
    return row[order], entry[order]


def _place_in_row(row: Tensor, count: Tensor) -> Tensor:
    start = count.cumsum(0) - count
    return torch.arange(len(row)) - start[row]


@dataclass(frozen=True)
class _Justice:
    """The candidate's own scores, and what it picked by them."""

    scores: Tensor
    radius: Tensor | None
    picked: PickSets
    visible: Tensor
    k: int

    def of(self, row: Tensor, lost: Tensor, gained: Tensor) -> Tensor:
        """Return whether the scores, anywhere in their radius, allow each swap, bool [swaps]."""
        if not len(row):
            return torch.zeros_like(row, dtype=torch.bool)
        present = torch.zeros(len(self.scores), dtype=torch.bool).index_fill_(0, row, True)
        rows, index = present.nonzero()[:, 0], (present.cumsum(0) - 1)[row]
        hidden = torch.arange(self.scores.shape[1]) >= self.visible[rows].unsqueeze(1)
        scores = self.scores[rows].masked_fill(hidden, -torch.inf)
        radius = torch.zeros(()) if self.radius is None else self.radius[rows]
        low, high = scores - radius, scores + radius
        # A row with a gained entry sees more than k entries, so its k-th best exists.
        kth_low, kth_high = (torch.topk(x, self.k).values[:, -1] for x in (low, high))
        # An entry at the k-th best score may go only if everything that stayed is as good.
        worst_kept = high.masked_fill(~self.picked.member[rows], torch.inf).amin(1)
        at_lost = low[index, lost]
        may_go = (at_lost < kth_high[index]) | (
            (at_lost == kth_high[index]) & (worst_kept >= kth_low)[index]
        )
        return may_go & (high[index, gained] >= kth_low[index])


def _ranks(reference: PickSets, scores: Tensor, row: Tensor, lost: Tensor) -> Tensor:
    """Return how many picks of the reference score higher than each lost entry."""
    rank = torch.zeros_like(row)
    step = max(1, _BLOCK_ELEMENTS // max(1, scores.shape[1]))
    for start in range(0, len(row), step):
        part = slice(start, start + step)
        better = scores[row[part]] > scores[row[part], lost[part]].unsqueeze(1)
        rank[part] = (better & reference.member[row[part]]).sum(1)
    return rank


@dataclass(frozen=True)
class PickSets:
    """Picks of some rows as sets."""

    member: Tensor  # bool [rows, entries], the visible entries that a row picks.
    invalid: Tensor  # int64 [rows], picks that break the rules of :func:`pick_sets`.


def pick_sets(picks: Tensor, visible: Tensor, k: int, entries: int) -> PickSets:
    """Turn picks into sets and count what is invalid about them.

    Counted, each once: an entry below -1 or not visible, a repeated entry, a -1 that stands before
    a pick, and every pick missing from or beyond ``min(k, visible)``.

    Parameters
    ----------
    picks
        int [rows, columns] request-relative entries in any order, -1 padded at the end.
    visible
        int [rows] entries that each row may see.
    k
        Entries to pick.
    entries
        Columns of the sets, at least the largest of ``visible``.

    Raises
    ------
    ValueError
        If ``picks`` is not an integer [rows, columns] tensor, ``visible`` does not fit it or
        exceeds ``entries``, or ``k`` is below 1.
    """
    integer = not picks.is_floating_point() and not picks.is_complex()
    if not integer or picks.dtype == torch.bool or picks.dim() != 2:
        raise ValueError(
            f"picks: {picks.dtype} {tuple(picks.shape)}, expected integers [rows, columns]"
        )
    if visible.shape != picks.shape[:1] or k < 1:
        raise ValueError(
            f"picks {tuple(picks.shape)} with visible {tuple(visible.shape)} and k {k}: expected "
            "one visible count a row and a positive k"
        )
    if picks.shape[0] and not 0 <= int(visible.min()) <= int(visible.max()) <= entries:
        raise ValueError(
            f"picks: visible counts {int(visible.min())} .. {int(visible.max())}, expected "
            f"0 .. {entries}"
        )
    wide = picks.to(torch.int64)
    named = wide != -1
    legal = (wide >= 0) & (wide < visible.unsqueeze(1))
    member = torch.zeros(len(picks), entries + 1, dtype=torch.bool)
    member.scatter_(1, wide.where(legal, entries), True)
    member = member[:, :entries]

    repeated = legal.sum(1) - member.sum(1)
    last = (named * torch.arange(1, picks.shape[1] + 1)).amax(1) if picks.shape[1] else 0
    holes = last - named.sum(1)
    wanted = visible.to(torch.int64).clamp(max=k)
    miscounted = (named.sum(1) - wanted).abs()
    invalid = (named & ~legal).sum(1) + repeated + holes + miscounted
    return PickSets(member, invalid)


@dataclass(frozen=True)
class SelectionCost:
    """What a selection costs against a contract."""

    # float64 [rows], part of the contract's picks that the candidate picks too; 1 where the
    # contract picks nothing.
    overlap: Tensor
    # float64 [rows], sum of the contract's scores over its own picks minus the sum over the
    # candidate's, in units of the RMS of the row's visible scores.
    score_lost: Tensor


def selection_cost(
    candidate: Tensor, contract: Tensor, scores: Tensor, visible: Tensor, k: int
) -> SelectionCost:
    """Return overlap and score lost of a block of rows.

    Overlap alone cannot tell a lost needle from a swap at the boundary; score lost can.

    Parameters
    ----------
    candidate, contract
        int [rows, columns] picks, -1 padded.
    scores
        [rows, entries] scores of the contract, -inf from ``visible`` on.
    visible
        int [rows].
    k
        Entries to pick.

    Raises
    ------
    ValueError
        As :func:`pick_sets`.
    """
    entries = scores.shape[1]
    picked = pick_sets(candidate, visible, k, entries).member
    expected = pick_sets(contract, visible, k, entries).member
    size = expected.sum(1)
    shared = (picked & expected).sum(1)
    overlap = torch.where(size > 0, shared / size.clamp(min=1).to(torch.float64), 1.0)

    shown = scores.to(torch.float64).masked_fill(scores == -torch.inf, 0.0)
    lost = (shown * expected.to(torch.int8).sub_(picked.to(torch.int8))).sum(1)
    rms = (shown.square().sum(1) / visible.clamp(min=1)).sqrt()
    in_rms = torch.where(rms > 0, lost / torch.where(rms > 0, rms, 1.0), 0.0)
    return SelectionCost(overlap, in_rms.clamp(min=0))
