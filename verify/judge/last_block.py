"""What several profiles share of one block of queries, computed by whoever asks first."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

from needlepoint.verify.base.stage_blocks import Block

Value = TypeVar("Value")


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
