"""Token strips: row errors of a stage as SVG paths, max-pooled so that one bad token stays visible.

A strip is a path of bars, one a bin of consecutive rows, as high as the largest error of its rows
on a logarithmic scale. Nothing is averaged: a bin of ten thousand rows is as high as its worst row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import torch
from numpy.typing import ArrayLike
from torch import Tensor

HEIGHT: Final = 40
"""Units of a strip from bottom to top."""
LIMIT_Y: Final = 16
"""Where error 1, the limit, lies; bars of rows beyond it reach above."""
DECADES_BELOW: Final = 4.0
"""Decades from the bottom to the limit."""
DECADES_ABOVE: Final = 8.0
"""Decades from the limit to the top."""
BYTES_A_BIN: Final = 10
MOST_BINS: Final = 256
LEAST_BINS: Final = 16
STRIP_BYTES: Final = 500_000
"""What all strips of a report may take together."""
MOST_STRIPS: Final = 1200
"""With more, accumulated errors have no strip of their own; what differs is counted by itself."""
KINDS: Final = ("local", "accumulated")


@dataclass(frozen=True)
class Strip:
    """One strip."""

    # SVG path data of the bars at most as high as the limit, and of those beyond it.
    within: str
    beyond: str
    bins: int  # Bars.
    rows: int  # Rows that they stand for.


@dataclass(frozen=True)
class Shown:
    """How strips of one sort are shown: which errors, in how many bins."""

    kinds: tuple[str, ...]
    bins: int


@dataclass(frozen=True)
class Strips:
    """Row errors, and how those of stages that match and of stages that differ are shown."""

    rows: Mapping[str, ArrayLike]
    matching: Shown
    differing: Shown

    @classmethod
    def of_report(cls, rows: Mapping[str, ArrayLike], differing: int) -> Self:
        """Return strips such that all of a report's row errors fit its bytes.

        Parameters
        ----------
        rows
            Row errors by ``candidate/layerN/path/stage/local|accumulated``.
        differing
            Stages that differ; while they are few their strips have all bins and both kinds.
        """
        counts = [strip_count(rows, KINDS[:n]) for n in (1, 2)]
        return cls(
            rows,
            _shown(counts[0], counts[1], STRIP_BYTES),
            _shown(differing, 2 * differing, STRIP_BYTES // 2),
        )

    def of(self, prefix: str, kind: str, *, differs: bool) -> Strip | None:
        """Return the strip of one stage, None where it has no row errors or is not shown."""
        found = self.rows.get(f"{prefix}/{kind}")
        shown = self.differing if differs else self.matching
        if found is None or kind not in shown.kinds:
            return None
        return strip(torch.as_tensor(found), shown.bins)


def _shown(local: int, both: int, budget: int) -> Shown:
    """Return how so many strips are shown: local errors alone beyond a number."""
    if both > MOST_STRIPS:
        return Shown(KINDS[:1], bins_for(local, budget))
    return Shown(KINDS, bins_for(both, budget))


def bins_for(strips: int, budget: int) -> int:
    """Return how many bins a strip may have so that all of them fit a budget of bytes."""
    fits = budget // max(1, strips * BYTES_A_BIN)
    return max(LEAST_BINS, min(MOST_BINS, fits))


def pooled(errors: Tensor, bins: int) -> Tensor:
    """Return the largest error of each bin: float64 ``[min(bins, rows)]``, NaN as infinity.

    Parameters
    ----------
    errors
        ``[rows]`` row errors in units of the limit.
    bins
        Bins; row ``i`` falls into bin ``i * bins // rows``.
    """
    values = errors.detach().to(torch.float64).flatten().nan_to_num(nan=math.inf, posinf=math.inf)
    count = min(bins, len(values))
    owner = torch.arange(len(values)) * count // max(1, len(values))
    out = torch.zeros(count, dtype=torch.float64)
    return out.scatter_reduce(0, owner, values, "amax", include_self=True)


def strip(errors: Tensor, bins: int) -> Strip | None:
    """Return the strip of a stage's row errors, None where it has no rows."""
    if errors.numel() == 0:
        return None
    heights = [height(value) for value in pooled(errors, bins).tolist()]
    floor = HEIGHT - LIMIT_Y
    return Strip(
        within=_bars([h if h <= floor else 0 for h in heights]),
        beyond=_bars([h if h > floor else 0 for h in heights]),
        bins=len(heights),
        rows=errors.numel(),
    )


def height(error: float) -> int:
    """Return the height of a bar: 0 only for no error at all, above the limit only beyond it."""
    limit = HEIGHT - LIMIT_Y
    if error <= 0:
        return 0
    if math.isinf(error):
        return HEIGHT
    decades = math.log10(error)
    if error <= 1:
        return max(1, round(limit * (1 + decades / DECADES_BELOW)))
    return min(HEIGHT, limit + max(2, round(LIMIT_Y * decades / DECADES_ABOVE)))


def _bars(heights: list[int]) -> str:
    """Return path data of bars one unit wide; neighbours of one height are one bar."""
    parts: list[str] = []
    start = 0
    for at in range(1, len(heights) + 1):
        if at < len(heights) and heights[at] == heights[start]:
            continue
        if heights[start]:
            parts.append(f"M{start} {HEIGHT}v-{heights[start]}h{at - start}V{HEIGHT}")
        start = at
    return "".join(parts)


def strip_count(rows: Mapping[str, ArrayLike], kinds: tuple[str, ...]) -> int:
    """Return how many strips row errors of some kinds make: one a stage and kind."""
    return sum(name.rsplit("/", 1)[-1] in kinds for name in rows)
