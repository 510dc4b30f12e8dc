"""Selection: the ``k`` best entries of each row, with a stated tie rule.

Ties go to the LOWER entry and picks are in ascending order, so there is exactly one answer. Engines
leave both open; the judge compares their picks with this answer and calls each difference a swap.
Rows that see fewer than ``k`` entries keep all of them and are padded with -1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def visible_entries(positions: Tensor, ratio: int) -> Tensor:
    """Return how many entries a query at each position may see: ``(p + 1) // ratio``.

    An entry counts from the token that completes it, that token included; unfinished windows are
    reached through the sliding window alone. Ratio 0 has no entries.

    Parameters
    ----------
    positions
        Integers of any shape.
    ratio
        0, 1, 4 or 128.
    """
    if ratio == 0:
        return torch.zeros_like(positions)
    return (positions + 1) // ratio


def select_topk(scores: Tensor, k: int) -> Tensor:
    """Pick the ``k`` highest scores of each row exactly.

    The ``k``-th value is found by partial selection; everything above it is in, and equal values
    fill up from the lowest entry. Entries at ``-inf`` (masked) are never picked.

    Parameters
    ----------
    scores
        float32 or float64 ``[S, T]``; ``+0`` and ``-0`` are equal.
    k
        Entries to pick, at least 1.

    Returns
    -------
    Tensor
        int32 ``[S, k]``, ascending entries, then -1.

    Raises
    ------
    ValueError
        If ``k`` is not positive, ``scores`` is not a matrix, or a score is NaN (naming where).
    """
    if k < 1 or scores.dim() != 2:
        raise ValueError(
            f"select_topk: k {k} of scores {tuple(scores.shape)}, expected k >= 1 and [S, T]"
        )
    nan = torch.isnan(scores)
    if bool(nan.any()):
        row, entry = (int(i) for i in nan.nonzero()[0])
        raise ValueError(f"select_topk: NaN score in row {row}, entry {entry}")
    chosen = scores > -torch.inf
    if scores.shape[1] > k:
        threshold = scores.topk(k, dim=1, sorted=False).values.amin(dim=1, keepdim=True)
        chosen &= scores >= threshold
        _drop_surplus_ties(chosen, scores, threshold, k)
    return _list_entries(chosen, k)


def _drop_surplus_ties(chosen: Tensor, scores: Tensor, threshold: Tensor, k: int) -> None:
    """In rows with more than ``k`` chosen, drop the highest entries that equal the threshold."""
    crowded = (chosen.sum(dim=1) > k).nonzero().squeeze(1)
    if len(crowded) == 0:
        return
    tied = scores[crowded] == threshold[crowded]
    room = k - (chosen[crowded] & ~tied).sum(dim=1, keepdim=True)
    chosen[crowded] &= ~tied | (tied.cumsum(dim=1) <= room)


def _list_entries(chosen: Tensor, k: int) -> Tensor:
    """Turn a mask with at most ``k`` true entries a row into ascending entries padded with -1."""
    row, entry = chosen.nonzero(as_tuple=True)
    counts = chosen.sum(dim=1)
    first = counts.cumsum(dim=0) - counts
    picks = torch.full((len(chosen), k), -1, dtype=torch.int32)
    picks[row, torch.arange(len(row)) - first[row]] = entry.to(torch.int32)
    return picks
