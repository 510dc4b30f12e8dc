"""Picks as sets: what each row selected, which picks are invalid, and what the selection costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PickSets:
    """Picks of some rows as sets.

    Attributes
    ----------
    member
        bool [rows, entries], the visible entries that a row picks.
    invalid
        int64 [rows], picks that break the rules of :func:`pick_sets`.
    """

    member: Tensor
    invalid: Tensor


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
    given = wide != -1
    legal = (wide >= 0) & (wide < visible.unsqueeze(1))
    member = torch.zeros(len(picks), entries + 1, dtype=torch.bool)
    member.scatter_(1, wide.where(legal, entries), True)
    member = member[:, :entries]

    repeated = legal.sum(1) - member.sum(1)
    last = (given * torch.arange(1, picks.shape[1] + 1)).amax(1) if picks.shape[1] else 0
    holes = last - given.sum(1)
    wanted = visible.to(torch.int64).clamp(max=k)
    miscounted = (given.sum(1) - wanted).abs()
    invalid = (given & ~legal).sum(1) + repeated + holes + miscounted
    return PickSets(member, invalid)


@dataclass(frozen=True)
class SelectionCost:
    """What a selection costs against a contract.

    Attributes
    ----------
    overlap
        float64 [rows], part of the contract's picks that the candidate picks too; 1 where the
        contract picks nothing.
    score_lost
        float64 [rows], sum of the contract's scores over its own picks minus the sum over the
        candidate's, in units of the RMS of the row's visible scores.
    """

    overlap: Tensor
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
    own = pick_sets(candidate, visible, k, entries).member
    meant = pick_sets(contract, visible, k, entries).member
    size = meant.sum(1)
    shared = (own & meant).sum(1)
    overlap = torch.where(size > 0, shared / size.clamp(min=1).to(torch.float64), 1.0)

    shown = scores.to(torch.float64).masked_fill(scores == -torch.inf, 0.0)
    lost = (shown * meant.to(torch.int8).sub_(own.to(torch.int8))).sum(1)
    rms = (shown.square().sum(1) / visible.clamp(min=1)).sqrt()
    in_rms = torch.where(rms > 0, lost / torch.where(rms > 0, rms, 1.0), 0.0)
    return SelectionCost(overlap, in_rms.clamp(min=0))
