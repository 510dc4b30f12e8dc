"""Blocks of queries, whose scores fit a budget, and what several profiles share of one block."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Generic, TypeVar

import torch
from torch import Tensor

from needlepoint.reference.linear import BLOCK
from needlepoint.reference.topk import visible_entries
from needlepoint.verify.base.rows import Rows

Value = TypeVar("Value")

BUDGET_BYTES = 96 << 20
"""Bound on what one block of queries holds at once, over all candidates and contracts."""

_BYTES_A_SCORE = 160
"""Scores, bounds, masks and their selection copies that are live at once, per query and entry."""
_BYTES_A_VALUE = 64
"""Error bounds and comparison copies that are live at once, per element of a query."""


@dataclass(frozen=True)
class Block:
    """Consecutive queries of one request, or some queries asked for by themselves.

    Attributes
    ----------
    request, start, stop
        Request and positions; row numbers where ``asked`` is given.
    rows
        Token-side rows.
    visible
        int64 ``[queries]`` entries that each query may see.
    entries
        Entries of the request.
    asked
        int64 ``[queries]``, positions of queries that are not consecutive.
    """

    request: int
    start: int
    stop: int
    rows: slice
    visible: Tensor
    entries: int
    asked: Tensor | None = None

    @property
    def columns(self) -> int:
        """Entries that some query of the block may see: no score beyond them is ever read."""
        return int(self.visible.max())

    @property
    def positions(self) -> Tensor:
        """Positions of the queries in their request."""
        return torch.arange(self.start, self.stop) if self.asked is None else self.asked


def query_blocks(
    lengths: tuple[int, ...], ratio: int, query_width: int, budget_bytes: int = BUDGET_BYTES
) -> Iterator[Block]:
    """Cut every request into blocks of queries, in order.

    Parameters
    ----------
    lengths
        Tokens of each request.
    ratio
        Compression ratio.
    query_width
        Elements of one query: heads times dims.
    budget_bytes
        What a block may hold. A block has at least one projection block of queries.
    """
    tokens = Rows(lengths)
    for request, length in enumerate(lengths):
        entries = length // ratio
        cost = entries * _BYTES_A_SCORE + query_width * _BYTES_A_VALUE
        step = max(1, budget_bytes // cost // BLOCK) * BLOCK
        offset = tokens.span(request).start
        for start in range(0, length, step):
            stop = min(start + step, length)
            yield Block(
                request,
                start,
                stop,
                slice(offset + start, offset + stop),
                visible_entries(torch.arange(start, stop), ratio),
                entries,
            )


class LastBlock(Generic[Value]):
    """Values of the block asked for last, by key; threads may ask side by side."""

    def __init__(self) -> None:
        self._rows = slice(0, 0)
        self._slots: dict[Hashable, _Slot[Value]] = {}
        self._lock = Lock()

    def of(self, block: Block, key: Hashable, compute: Callable[[], Value]) -> Value:
        """Return the value of a key, computed once a block; asking for another block drops it."""
        with self._lock:
            if block.rows != self._rows:
                self._rows, self._slots = block.rows, {}
            slot = self._slots.setdefault(key, _Slot())
        with slot.lock:
            if not slot.found:
                slot.found.append(compute())
            return slot.found[0]


class _Slot(Generic[Value]):
    """One value, and the lock under which it is computed."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.found: list[Value] = []
