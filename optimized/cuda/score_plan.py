"""Which query rows a block of the score kernels keeps, for a batch of any mixture.

A plan depends on the rows of each request, not on their positions or on the number of keys, so a
decode step of fixed shape can be captured in a graph and replayed as requests grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.build.score_variants import MMA, TILES, UNITS, held_heads

_FIELDS = 4
_SPANS = {
    "wide": (4, 1, 128, 512),
    "narrow": (4, 2, 128, 256),
    "c256": (4, 1, 128, 512),
    "c128": (4, 1, 128, 256),
    "c64": (2, 2, 128, 256),
}
"""By tile: blocks a place, places a multiprocessor, keys of a stage, least keys of a block."""


@dataclass(frozen=True)
class ScorePlan:
    """Groups of query rows, each of one request.

    Attributes
    ----------
    unit
        ``"mma"`` or ``"wgmma"``: what multiplies.
    heads
        Head count that the plan is made for.
    rows
        Query rows of the batch.
    requests
        Requests of the batch.
    groups
        By tile of the unit: int32 ``[groups, 4]``, first row, rows, request, 0.
    row_requests
        int32 ``[rows]``, request of each row.
    largest
        Rows of the largest group.
    """

    unit: str
    heads: int
    rows: int
    requests: int
    groups: dict[str, Tensor]
    row_requests: Tensor
    largest: int

    def to(self, device: torch.device | str) -> ScorePlan:
        """Return the plan with its tensors on a device."""
        return replace(
            self,
            groups={name: table.to(device) for name, table in self.groups.items()},
            row_requests=self.row_requests.to(device),
        )


def plan_scores(
    counts: Sequence[int], heads: int, unit: str = MMA, *, most: int | None = None
) -> ScorePlan:
    """Group the query rows of a batch.

    Parameters
    ----------
    counts
        Query rows of each request, in the order of the rows; zero is allowed.
    heads
        Heads of a query row, at most 64.
    unit
        ``"mma"`` or ``"wgmma"``.
    most
        Rows of a group at most, if a block can keep more.

    Raises
    ------
    ValueError
        For a negative count, an unsupported number of heads or unit, or ``most`` below 1.
    """
    if unit not in UNITS:
        raise ValueError(f"unit {unit!r}: expected one of {list(UNITS)}")
    held = held_heads(heads)
    if any(count < 0 for count in counts):
        raise ValueError(f"rows of requests {list(counts)}: expected none below 0")
    if most is not None and most < 1:
        raise ValueError(f"groups of {most} rows: expected at least 1")
    room = {tile: head_rows // held for tile, head_rows in TILES[unit].items()}
    largest = max(room.values())
    if most is not None:
        largest = min(largest, most)
    found: dict[str, list[tuple[int, int, int, int]]] = {tile: [] for tile in room}
    row = 0
    for request, count in enumerate(counts):
        first, end = row, row + count
        while first < end:
            size = min(largest, end - first)
            tile = min((tile for tile in room if room[tile] >= size), key=lambda name: room[name])
            found[tile].append((first, size, request, 0))
            first += size
        row = end
    return ScorePlan(
        unit=unit,
        heads=heads,
        rows=row,
        requests=len(counts),
        groups={name: _table(groups) for name, groups in found.items()},
        row_requests=torch.from_numpy(
            np.repeat(np.arange(len(counts), dtype=np.int32), np.asarray(counts, np.int64))
        ),
        largest=max((group[1] for groups in found.values() for group in groups), default=0),
    )


def _table(groups: list[tuple[int, int, int, int]]) -> Tensor:
    return torch.tensor(groups, dtype=torch.int32).reshape(-1, _FIELDS)


def keys_of_a_block(
    columns: int, groups: int, tile: str, multiprocessors: int, most: int | None = None
) -> int:
    """Return how many keys one block scores: whole stages, enough blocks to fill the card.

    ``columns`` are the keys of the widest request, ``groups`` those of the launch.
    """
    waves, resident, stage, least = _SPANS[tile]
    wanted = -(-columns * groups // (waves * resident * multiprocessors))
    span = max(least, -(-wanted // stage) * stage)
    # Equal parts: a short last span would leave its multiprocessor idle.
    parts = max(1, round(columns / span))
    span = -(-columns // (parts * stage)) * stage
    return max(stage, min(span, most) if most is not None else span)
