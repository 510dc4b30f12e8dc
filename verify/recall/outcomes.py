"""The outcome of each needle: hits at several k, rank, and whether anything had to be left out.

Up to ``k * ratio`` tokens every finished window is picked, whatever the scores say; such rows are
kept and marked. A needle inside the query's sliding window is read there, whatever the indexer
does: that is an outcome of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from needlepoint.reference.topk import select_topk
from needlepoint.verify.inputs.recall_needles import Needle
from needlepoint.verify.recall.model import Setting
from needlepoint.verify.recall.queries import NeedleQueries

MARGINS: Final = (-4.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0)
_WITHIN: Final = 0.25
"""An entry counts for a margin if it is this close, in noises."""


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


def outcomes(queries: NeedleQueries, topk_indices: Tensor, scores: Tensor | None) -> list[Outcome]:
    """Return what became of every needle of one request.

    Parameters
    ----------
    queries
        What was asked; its scores are those of the reference.
    topk_indices
        int ``[rows, k]``, the candidate's at the model's k.
    scores
        ``[rows, entries]`` of the candidate, for its rank and :func:`smaller_ks`; or None.
    """
    needles, reference = queries.prompt.needles, queries.scores
    ratio, visible = queries.inputs.ratio, queries.visible.tolist()
    k, *smaller = smaller_ks(queries.inputs.topk)
    entries = [needle_entries(n, ratio, v) for n, v in zip(needles, visible, strict=True)]
    whole = [reachable(n, ratio, v) for n, v in zip(needles, visible, strict=True)]

    def picked(chosen: Tensor) -> list[bool]:
        return [
            ok and bool(torch.isin(own, row).all())
            for ok, own, row in zip(whole, entries, chosen, strict=True)
        ]

    hits = {k: picked(topk_indices)}
    if scores is not None:
        hits |= {k: picked(select_topk(scores, k)) for k in smaller}
    expected = {k: picked(select_topk(reference, k)) for k in (k, *smaller)}
    return [
        Outcome(
            queries.prompt.setting,
            queries.inputs.layer,
            needle,
            visible[row],
            {k: hit[row] for k, hit in hits.items()},
            {k: hit[row] for k, hit in expected.items()},
            None if scores is None or not whole[row] else needle_rank(scores[row], entries[row]),
            needle_rank(reference[row], entries[row]) if whole[row] else None,
        )
        for row, needle in enumerate(needles)
    ]


def needle_rank(scores: Tensor, entries: Tensor) -> int:
    """Return how many entries score higher than the lowest of a needle."""
    return int((scores > scores[entries].min()).sum())


@dataclass
class MarginTally:
    """Needles of a controlled margin: entries at stated distances from the selection border.

    The unit is the score noise of the candidate in that row: the spread of its scores around the
    reference's, over the entries that the query sees. An entry at margin 0 stands at the
    reference's k-th best score, one at +4 is four noises above it. Every row gives at most one
    needle a margin; ``rows`` and ``hits`` hold one number a margin.
    """

    rows: list[int] = field(default_factory=lambda: [0] * len(MARGINS))
    hits: list[int] = field(default_factory=lambda: [0] * len(MARGINS))

    def add(
        self, scores: Tensor, reference: Tensor, topk_indices: Tensor, visible: int, k: int
    ) -> None:
        """Add one query: scores ``[entries]`` of both sides, and the candidate's picks.

        Nothing is added unless the query sees more than ``k`` entries.
        """
        if visible <= k:
            return
        expected = reference[:visible].to(torch.float64)
        noise = float((scores[:visible].to(torch.float64) - expected).std())
        if not noise > 0.0:
            return
        border = torch.topk(expected, k).values[-1]
        distance = (expected - border) / noise
        chosen = set(topk_indices.tolist())
        for place, margin in enumerate(MARGINS):
            nearest = int((distance - margin).abs().argmin())
            if abs(float(distance[nearest]) - margin) <= _WITHIN:
                self.rows[place] += 1
                self.hits[place] += nearest in chosen

    def merge(self, other: MarginTally) -> None:
        """Add the counts of another tally."""
        self.rows = [a + b for a, b in zip(self.rows, other.rows, strict=True)]
        self.hits = [a + b for a, b in zip(self.hits, other.hits, strict=True)]
