"""What became of each needle: hits at several k, rank, and whether it was exercised at all.

Up to ``k * ratio`` tokens every finished window is picked, whatever the scores say; such rows are
kept and marked. A needle inside the query's sliding window is read there, whatever the indexer
does: that is an outcome of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.reference.topk import select_topk
from needlepoint.verify.inputs.recall_needles import Needle


@dataclass(frozen=True)
class Setting:
    """What a prompt was made for: length, distractors, and its number (the cluster)."""

    length: int
    distractors: int
    cluster: int


@dataclass(frozen=True)
class Outcome:
    """One needle, one layer, one candidate.

    Attributes
    ----------
    setting, layer, needle
        Where it stood.
    visible
        Entries that its query may see.
    hits, reference_hits
        By k: whether every entry of the needle was picked: an answer of several digits is lost with
        any of them. A k that the candidate gives no scores for is missing from ``hits``.
    rank, reference_rank
        Entries that score higher than the needle's lowest; None without scores, or where an entry
        of the needle is not visible.
    """

    setting: Setting
    layer: int
    needle: Needle
    visible: int
    hits: Mapping[int, bool]
    reference_hits: Mapping[int, bool]
    rank: int | None
    reference_rank: int | None

    @property
    def windowed(self) -> bool:
        """Whether the whole needle lies in the query's sliding window."""
        return self.needle.windowed

    def exercised(self, k: int) -> bool:
        """Whether a selection of ``k`` leaves anything out for this query."""
        return self.visible > k


def needle_entries(needle: Needle, ratio: int, visible: int) -> Tensor:
    """Return the entries whose own window holds a token of the needle, int64; visible ones."""
    return torch.arange(needle.start // ratio, min((needle.stop - 1) // ratio + 1, visible))


def reachable(needle: Needle, ratio: int, visible: int) -> bool:
    """Return whether every window that holds a token of the needle is complete at its query."""
    return (needle.stop - 1) // ratio < visible


def smaller_ks(k: int) -> tuple[int, ...]:
    """Return k, and a half, a quarter and an eighth of it, where margins get thin."""
    return tuple(dict.fromkeys(max(1, k >> shift) for shift in range(4)))


def outcomes(
    setting: Setting,
    layer: int,
    needles: Sequence[Needle],
    visible: Tensor,
    ratio: int,
    picks: Tensor,
    scores: Tensor | None,
    reference: Tensor,
    ks: Sequence[int],
) -> list[Outcome]:
    """Return the outcome of every needle of one request.

    Parameters
    ----------
    setting, layer, needles
        What was asked.
    visible
        int64 ``[rows]``.
    ratio
        Tokens an entry.
    picks
        int ``[rows, k]`` of the candidate at the first of ``ks``.
    scores
        ``[rows, entries]`` of the candidate, for its rank and the smaller ``ks``; or None.
    reference
        ``[rows, entries]`` scores of the reference.
    ks
        The model's k, then smaller ones.
    """
    entries = [needle_entries(n, ratio, int(v)) for n, v in zip(needles, visible, strict=True)]
    whole = [reachable(n, ratio, int(v)) for n, v in zip(needles, visible, strict=True)]

    def picked(chosen: Tensor) -> list[bool]:
        return [
            ok and bool(torch.isin(own, row).all())
            for ok, own, row in zip(whole, entries, chosen, strict=True)
        ]

    own = {ks[0]: picked(picks)}
    if scores is not None:
        own |= {k: picked(select_topk(scores, k)) for k in ks[1:]}
    meant = {k: picked(select_topk(reference, k)) for k in ks}
    return [
        Outcome(
            setting,
            layer,
            needle,
            int(visible[row]),
            {k: hits[row] for k, hits in own.items()},
            {k: hits[row] for k, hits in meant.items()},
            None if scores is None or not whole[row] else needle_rank(scores[row], entries[row]),
            needle_rank(reference[row], entries[row]) if whole[row] else None,
        )
        for row, needle in enumerate(needles)
    ]


def needle_rank(scores: Tensor, entries: Tensor) -> int:
    """Return how many entries score higher than the lowest of a needle."""
    return int((scores > scores[entries].min()).sum())
