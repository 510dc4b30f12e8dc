"""Needles of a controlled margin: entries at stated distances from the selection border.

The unit is the score noise of the candidate in that row: the spread of its scores around the
reference's, over the entries that the query sees. An entry at margin 0 stands at the reference's
k-th best score, one at +4 is four noises above it. Every row gives at most one needle a margin.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

MARGINS: Final = (-4.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 4.0)
_WITHIN: Final = 0.25
"""An entry counts for a margin if it is this close, in noises."""


@dataclass
class MarginTally:
    """Needles and hits by margin.

    Attributes
    ----------
    rows, hits
        One number a margin.
    """

    rows: list[int] = field(default_factory=lambda: [0] * len(MARGINS))
    hits: list[int] = field(default_factory=lambda: [0] * len(MARGINS))

    def add(self, own: Tensor, reference: Tensor, picks: Tensor, visible: int, k: int) -> None:
        """Add one query.

        Parameters
        ----------
        own, reference
            Scores ``[entries]`` of the candidate and of the reference.
        picks
            int, the candidate's.
        visible
            Entries that the query sees; nothing is added unless more than ``k``.
        k
            Entries picked.
        """
        if visible <= k:
            return
        meant = reference[:visible].to(torch.float64)
        noise = float((own[:visible].to(torch.float64) - meant).std())
        if not noise > 0.0:
            return
        border = torch.topk(meant, k).values[-1]
        distance = (meant - border) / noise
        chosen = set(picks.tolist())
        for place, margin in enumerate(MARGINS):
            nearest = int((distance - margin).abs().argmin())
            if abs(float(distance[nearest]) - margin) <= _WITHIN:
                self.rows[place] += 1
                self.hits[place] += nearest in chosen

    def merge(self, others: Iterable[MarginTally]) -> None:
        """Add the counts of other tallies."""
        for other in others:
            self.rows = [a + b for a, b in zip(self.rows, other.rows, strict=True)]
            self.hits = [a + b for a, b in zip(self.hits, other.hits, strict=True)]
