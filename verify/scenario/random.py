"""Random histories: always possible, the same on every machine, and with every kind of event.

History ``4 i`` lets its first request end at a length of residue ``i`` modulo 128. Chunks prefer
what public faults prefer: single tokens, and ends just before, at and behind a window, page or
entry boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from needlepoint.optimized.protocol.serving import BF16_STATE, FP32_STATE, MAX_DRAFT
from needlepoint.optimized.serving.ranks import LAYOUTS
from needlepoint.verify.inputs.draw import Draw
from needlepoint.verify.scenario.events import (
    MAX_TOKENS,
    TEXTS,
    Accept,
    Copy,
    Decode,
    Draft,
    Event,
    Evict,
    Fork,
    Free,
    Offload,
    Pad,
    Prefill,
    Request,
    Restore,
    Scenario,
    Split,
)
from needlepoint.verify.scenario.rules import SIDES

Choice = TypeVar("Choice")

MIN_EVENTS: Final = 8
MAX_EVENTS: Final = 9
_NAMES = ("a", "b", "c", "d")
_BOUNDARIES = (4, 4, 4, 128, 256, 32)
"""Multiples that chunks end around: windows, pages, and the 8 entries that a query may pick."""
_LONG_IN_16 = 2
"""Histories out of 16 that may grow past two windows of 128; the others stay short."""
_SHORT = 72


@dataclass
class _Life:
    state: str = "new"  # new, live, offloaded, finished
    length: int = 0
    drafted: int = 0
    pool: int = 0


def random_scenario(seed: int, index: int) -> Scenario:
    """Return history ``index`` of a seed; it depends on nothing else.

    Raises
    ------
    ValueError
        If an argument is negative.
    """
    if min(seed, index) < 0:
        raise ValueError(f"history {index} of seed {seed}: expected non-negative numbers")
    return _Author(Draw(seed, f"history {index}"), seed, index).write()


class _Author:
    def __init__(self, draw: Draw, seed: int, index: int) -> None:
        self._draw, self._seed, self._index = draw, seed, index
        self._names = _NAMES[: self._pick(2, 4)]
        self._lives = {name: _Life() for name in self._names}
        self._slots = self._pick(2, 3)
        self._long = self._pick(1, 16) <= _LONG_IN_16
        self._events: list[Event] = []

    def write(self) -> Scenario:
        """Return the history."""
        first, second = self._names[:2]
        if self._pick(0, 1):
            self._call((first, second), (self._chunk(0), self._chunk(0)))
        else:
            self._call((first,), (self._chunk(0),))
            self._call((second,), (self._chunk(0),))
        wanted = self._pick(MIN_EVENTS, MAX_EVENTS)
        while len(self._events) < wanted:
            self._choose()
        self._finish()
        page_tokens = self._one((128, 256))
        return Scenario(
            name=f"history {self._index} of seed {self._seed}",
            requests=tuple(Request(n, self._pick(0, TEXTS - 1)) for n in self._names),
            events=tuple(self._events),
            state=BF16_STATE if self._pick(0, 3) == 0 else FP32_STATE,
            slots=self._slots,
            # Room for every slot at full length, and for a fork's pages beside its source's.
            pages=(self._slots + 1) * -(-self._longest() // page_tokens),
            page_tokens=page_tokens,
        )

    def _longest(self) -> int:
        return MAX_TOKENS if self._long else _SHORT + 128

    def _choose(self) -> None:
        kinds: list[Callable[[], None]] = [self._prefill, self._decode, self._decode]
        kinds += [self._draft, self._accept, self._accept, self._fork, self._fork, self._fork]
        kinds += [self._evict, self._offload, self._restore, self._free, self._copy, self._shape]
        kinds[self._pick(0, len(kinds) - 1)]()

    def _finish(self) -> None:
        """Bring the first request to a length of this history's residue, and settle drafts."""
        first = self._lives[self._names[0]]
        waiting = [n for n, life in self._lives.items() if life.drafted]
        if waiting:
            self._settle(waiting)
        if first.state != "live" and not self._free_slots() and self._settled():
            other = next(n for n, life in self._lives.items() if life.state == "live")
            self._lives[other].state = "finished"
            self._events.append(Free(other))
        if first.state == "offloaded" and self._free_slots() and self._settled():
            self._events.append(Restore(self._names[0]))
            first.state = "live"
        if first.state == "live" or (first.state == "new" and self._free_slots()):
            # Every fourth history is one of 128 residues; that takes long calls.
            missing = (self._index // 4 - first.length) % 128 if self._index % 4 == 0 else 0
            if first.length + missing > MAX_TOKENS:  # start again, to get there
                self._events.append(Evict(self._names[0]))
                missing = (first.length + missing) % 128 or 128
                first.length = 0
            if missing:
                self._call((self._names[0],), (missing,))
            elif first.length == 0:
                self._call((self._names[0],), (4,))
        elif not isinstance(self._events[-1], Prefill | Decode | Draft | Accept):
            self._decode()
        if isinstance(self._events[-1], Pad | Split):
            name = next(n for n, life in self._lives.items() if self._can_call(life))
            self._call((name,), (1,))

    # --- what may happen ----------------------------------------------------------------------

    def _free_slots(self) -> int:
        return self._slots - sum(life.state == "live" for life in self._lives.values())

    def _can_call(self, life: _Life) -> bool:
        return life.state == "live" and not life.drafted and life.length < self._most()

    def _most(self) -> int:
        return MAX_TOKENS - MAX_DRAFT if self._long else _SHORT

    def _callable(self) -> list[str]:
        return [name for name, life in self._lives.items() if self._can_call(life)]

    def _idle(self) -> list[str]:
        return [n for n, life in self._lives.items() if life.state == "live" and not life.drafted]

    def _some(self, names: list[str]) -> tuple[str, ...]:
        """Return one to three of the names, in any order."""
        order = [names[i] for i in self._draw.channels(len(names), len(names)).tolist()]
        return tuple(order[: self._pick(1, min(3, len(names)))])

    def _chunk(self, length: int) -> int:
        """Return the tokens of a chunk from ``length`` on."""
        room = self._most() - length
        shape = self._pick(0, 9)
        if shape < 5:
            count = self._pick(1, 9)
        elif shape < 8:
            step = self._one(_BOUNDARIES)
            count = step - length % step + self._pick(-1, 1)
        else:
            count = self._pick(10, 150 if self._long else 30)
        return max(1, min(count, room))

    def _call(self, names: tuple[str, ...], counts: tuple[int, ...]) -> None:
        for name, count in zip(names, counts, strict=True):
            life = self._lives[name]
            life.state, life.length = "live", life.length + count
        self._events.append(Prefill(names, counts))

    def _prefill(self) -> None:
        new = [n for n, life in self._lives.items() if life.state == "new"][: self._free_slots()]
        # Most requests that start later start from a prefix.
        able = self._callable() + (new if self._pick(0, 3) == 0 else [])
        if able:
            names = self._some(able)
            self._call(names, tuple(self._chunk(self._lives[name].length) for name in names))

    def _decode(self) -> None:
        if able := self._callable():
            names = self._some(able)
            for name in names:
                self._lives[name].length += 1
            self._events.append(Decode(names))

    def _draft(self) -> None:
        if able := self._callable():
            names = self._some(able)
            counts = tuple(self._pick(1, MAX_DRAFT) for _ in names)
            for name, count in zip(names, counts, strict=True):
                self._lives[name].drafted = count
            self._events.append(Draft(names, counts))

    def _accept(self) -> None:
        if waiting := [name for name, life in self._lives.items() if life.drafted]:
            if isinstance(self._events[-1], Pad | Split):
                return
            self._settle(list(self._some(waiting)))

    def _settle(self, names: list[str]) -> None:
        if isinstance(self._events[-1], Pad | Split):
            self._step_past()
        keep = []
        for name in names:
            life = self._lives[name]
            keep.append(self._pick(0, life.drafted))
            life.length, life.drafted = life.length + keep[-1], 0
        self._events.append(Accept(tuple(names), tuple(keep)))

    def _step_past(self) -> None:
        """Let a call follow padding or a split, or take them back where nobody can call."""
        if able := self._callable():
            self._call((able[0],), (1,))
        while isinstance(self._events[-1], Pad | Split):
            self._events.pop()

    def _fork(self) -> None:
        new = [n for n, life in self._lives.items() if life.state == "new" and not life.length]
        sources = self._idle()
        if new and sources and self._free_slots() and self._settled():
            source = self._one(tuple(sources))
            life = self._lives[source]
            prefix = life.length if self._pick(0, 2) == 0 else self._pick(1, life.length)
            self._lives[new[0]] = _Life("live", prefix, 0, life.pool)
            self._events.append(Fork(new[0], source, prefix))

    def _evict(self) -> None:
        if (names := self._idle()) and self._settled():
            name = self._one(tuple(names))
            self._lives[name] = _Life()
            self._events.append(Evict(name))

    def _offload(self) -> None:
        if (names := self._idle()) and self._settled():
            name = self._one(tuple(names))
            self._lives[name].state = "offloaded"
            self._events.append(Offload(name))

    def _restore(self) -> None:
        names = [n for n, life in self._lives.items() if life.state == "offloaded"]
        if names and self._free_slots() and self._settled():
            self._lives[names[0]].state = "live"
            self._events.append(Restore(names[0]))

    def _free(self) -> None:
        names = [n for n in self._idle() if n != self._names[0]]
        if names and self._settled():
            name = self._one(tuple(names))
            self._lives[name].state = "finished"
            self._events.append(Free(name))

    def _copy(self) -> None:
        if (names := self._idle()) and self._settled():
            life = self._lives[name := self._one(tuple(names))]
            life.pool = 1 - life.pool
            self._events.append(Copy(name, life.pool))

    def _shape(self) -> None:
        """Pad or split the next call, and make that call."""
        if not self._callable() or not self._settled():
            return
        if self._pick(0, 1):
            self._events.append(Pad(self._pick(1, 7), self._one(SIDES)))
        if self._pick(0, 1) or not isinstance(self._events[-1], Pad):
            self._events.append(Split(self._pick(2, 5), self._one(LAYOUTS)))
        self._one((self._prefill, self._decode, self._draft))()

    def _settled(self) -> bool:
        """Return whether no padding or split waits for its call."""
        return not isinstance(self._events[-1], Pad | Split)

    def _pick(self, low: int, high: int) -> int:
        return int(self._draw.integers(low, high, (1,))[0])

    def _one(self, choices: tuple[Choice, ...]) -> Choice:
        return choices[self._pick(0, len(choices) - 1)]
