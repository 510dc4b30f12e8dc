"""Exact top-k over index scores, equal scores to the lower entry."""

from __future__ import annotations

import torch
from torch import Tensor


def select_topk(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Return the picks of every query row.

    Score and entry are packed into one integer whose order is the order of selection, so that no
    two keys are equal and any exact selection returns the same set.

    Parameters
    ----------
    scores
        float32 ``[n, entries]``; only the first ``visible`` columns of a row count.
    visible
        Integers ``[n]``, entries that the row may see.
    k
        Picks a row.

    Returns
    -------
    Tensor
        int32 ``[n, k]``: entries in ascending order, then -1.
    """
    rows, entries = scores.shape
    entry = torch.arange(entries)
    hidden = entry >= visible[:, None]
    if entries <= k:  # whatever the scores, all that is visible is picked
        picks = torch.full((rows, k), -1, dtype=torch.int32)
        picks[:, :entries] = entry.to(torch.int32).masked_fill(hidden, -1)
        return picks
    bits = (scores + 0.0).view(torch.int32)  # -0 becomes +0
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    key = (order << 32) + (entries - entry)
    key.masked_fill_(hidden, torch.iinfo(torch.int64).min)
    chosen = torch.topk(key, k, sorted=False).indices
    chosen.masked_fill_(chosen >= visible[:, None], entries)
    chosen = chosen.sort(dim=1).values.to(torch.int32)
    return chosen.masked_fill_(chosen == entries, -1)
