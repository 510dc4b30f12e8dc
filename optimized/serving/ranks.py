"""A context-parallel group: which tokens a rank takes, and picks of all ranks made one list."""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.optimized.emulation.select import select_topk

CONTIGUOUS = "contiguous"
STRIDED = "strided"
LAYOUTS = (CONTIGUOUS, STRIDED)


def token_shards(count: int, ranks: int, layout: str) -> list[Tensor]:
    """Return the tokens of a part that each rank takes, int64; ranks may come away empty.

    Parameters
    ----------
    count
        Tokens of the part.
    ranks
        Ranks of the group.
    layout
        ``"contiguous"``: runs of equal length, the last ones shorter or empty. ``"strided"``: token
        ``i`` goes to rank ``i % ranks``.

    Raises
    ------
    ValueError
        For an unknown layout or no ranks.
    """
    if layout not in LAYOUTS or ranks < 1:
        raise ValueError(
            f"{ranks} ranks of layout {layout!r}: expected at least 1 and one of {LAYOUTS}"
        )
    tokens = torch.arange(count)
    if layout == STRIDED:
        return [tokens[rank::ranks] for rank in range(ranks)]
    size = -(-count // ranks)
    return [tokens[rank * size : (rank + 1) * size] for rank in range(ranks)]


def merge_picks(scores: Tensor, visible: Tensor, k: int, ranks: int) -> Tensor:
    """Return picks from the best ``k`` of every rank; rank ``r`` has entries ``r, r + ranks ..``.

    Parameters
    ----------
    scores
        float32 ``[n, entries]`` of all ranks, each column from the rank that has the entry.
    visible
        int64 ``[n]``, entries that each row may see.
    k
        Picks a row.
    ranks
        Ranks of the group.

    Returns
    -------
    Tensor
        int32 ``[n, k]``: what ``select_topk`` gives for all entries at once.
    """
    chosen = torch.zeros(scores.shape[0], scores.shape[1] + 1, dtype=torch.bool)
    for rank in range(ranks):
        columns = torch.arange(scores.shape[1])[rank::ranks]
        # A rank sees the entries below `visible` that are its own.
        seen = (visible - rank + ranks - 1).div(ranks, rounding_mode="floor").clamp(min=0)
        local = select_topk(scores[:, columns].contiguous(), seen, k).long()
        entry = torch.where(local < 0, scores.shape[1], local * ranks + rank)
        chosen.scatter_(1, entry, True)
    # Every row has at least as many chosen entries as it picks, so none without a score is picked.
    return select_topk(scores.masked_fill(~chosen[:, :-1], -torch.inf), visible, k)
