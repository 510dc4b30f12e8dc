"""Layers shared out over the processes of torchrun, and one result from all of them.

Every rank judges its own layers and hands what it found to rank 0 through the store of
``torch.distributed``. A rank that dies takes its layers with it: torchrun then ends the others, and
the lowest rank that is left names the dead one in a result that cannot judge. Nothing is taken for
granted that no rank has said.
"""

from __future__ import annotations

import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any

from torch.distributed.rendezvous import rendezvous

from needlepoint.verify.run.candidates import CandidateOutcome, merged_outcomes
from needlepoint.verify.schema.environment import world_size

Judge = Callable[[tuple[int, ...]], list[CandidateOutcome]]

JOIN_S = 120.0
"""Time for all ranks to start."""
SETTLE_S = 12.0
"""Time for the others to answer once torchrun ends the run; it waits 30 s before it kills."""
_POLL_S = 0.1
_PIECE_BYTES = 1 << 22  # the store refuses messages of more than 8 MiB


class Terminated(KeyboardInterrupt):
    """torchrun ends this rank, because another one failed."""


@dataclass(frozen=True)
class Shared:
    """What all ranks found, as this rank knows it.

    Attributes
    ----------
    outcomes
        One for each candidate: all layers on the rank that reports, its own layers elsewhere.
    lost
        What is missing and why; None where every layer was judged.
    reports
        Whether this rank writes the result.
    """

    outcomes: list[CandidateOutcome]
    lost: str | None
    reports: bool


def share_out(
    layers: tuple[int, ...], ratio: Callable[[int], int], judge: Judge, *, together: bool = False
) -> Shared:
    """Judge layers on all ranks of torchrun, or on this process alone.

    Parameters
    ----------
    layers
        All layers of the run.
    ratio
        Compression ratio of a layer: layers with an indexer cost most and are dealt out first.
    judge
        Judges some layers.
    together
        Whether every rank judges every layer, because a candidate spreads one layer over ranks.
    """
    world = world_size()
    if world == 1:
        return Shared(judge(layers), None, reports=True)
    group = _Group.join()
    shares = [layers] * world if together else deal(layers, ratio, world)
    outcomes = judge(())
    with _terminable():
        try:
            group.meet()
            outcomes = judge(shares[group.rank])
            group.publish("outcome", outcomes if group.rank and not together else [])
            if group.rank:
                return Shared(outcomes, None, reports=False)
            return group.collect(outcomes, shares, together)
        except Terminated:
            return group.settle(outcomes, shares)
        except BaseException as error:
            group.publish("failed", f"{type(error).__name__}: {error}")
            if group.rank or isinstance(error, KeyboardInterrupt):
                raise
            return Shared(judge(()), _said(0, shares[0], f"failed: {error}"), reports=True)


def deal(layers: Sequence[int], ratio: Callable[[int], int], world: int) -> list[tuple[int, ...]]:
    """Return the layers of each rank: dealt out in turn, layers with an indexer first."""
    ordered = sorted(layers, key=lambda layer: (ratio(layer) != 4, ratio(layer) == 0, layer))
    return [tuple(sorted(ordered[rank::world])) for rank in range(world)]


class _Group:
    """The ranks of this run and the store that they share."""

    def __init__(self, store: Any, rank: int, world: int) -> None:  # noqa: ANN401
        self._store = store
        self.rank = rank
        self.world = world

    @classmethod
    def join(cls) -> _Group:
        """Meet the other ranks.

        Raises
        ------
        ValueError
            If they do not come within :data:`JOIN_S`.
        """
        try:
            found = next(rendezvous("env://", timeout=timedelta(seconds=JOIN_S)))
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"torchrun announced several processes and they cannot be reached: {error}"
            ) from error
        store, rank, world = found
        return cls(store, int(rank), int(world))

    def meet(self) -> None:
        """Wait until every rank can be ended without a loss, before one may fail.

        torchrun ends the others as soon as one dies; a rank that is still starting then would go
        without a word.

        Raises
        ------
        ValueError
            If they do not come within :data:`JOIN_S`.
        """
        self.publish("ready", None)
        wanted = [_key("ready", rank) for rank in range(self.world)]
        end = time.monotonic() + JOIN_S
        while not self._store.check(wanted):
            if time.monotonic() > end:
                raise ValueError(
                    f"torchrun announced {self.world} processes and not all came within "
                    f"{JOIN_S:.0f} s; start the run again"
                )
            time.sleep(_POLL_S)

    def publish(self, what: str, value: object) -> None:
        """Tell the others something about this rank."""
        data, key = pickle.dumps(value), _key(what, self.rank)
        starts = range(0, len(data), _PIECE_BYTES)
        for number, start in enumerate(starts):
            self._store.set(f"{key}/{number}", data[start : start + _PIECE_BYTES])
        self._store.set(key, str(len(starts)))  # others look for it: all pieces are there

    def _told(self, what: str, rank: int) -> Any:  # noqa: ANN401
        """Return what a rank has published."""
        key = _key(what, rank)
        pieces = range(int(self._store.get(key)))
        return pickle.loads(b"".join(self._store.get(f"{key}/{number}") for number in pieces))

    def collect(
        self, own: list[CandidateOutcome], shares: Sequence[tuple[int, ...]], together: bool
    ) -> Shared:
        """Wait for every rank and merge; the rank that reports must not be ended while it does."""
        said = self._wait(None)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return self._merged(own, said, shares, together)

    def settle(self, own: list[CandidateOutcome], shares: Sequence[tuple[int, ...]]) -> Shared:
        """Find out who is left after torchrun has ended the run; the lowest of them reports."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.publish("ended", None)
        said = self._wait(SETTLE_S)
        alive = [rank for rank in range(self.world) if said.get(rank) == "ended"]
        if self.rank != min([*alive, self.rank]):
            return Shared(own, None, reports=False)
        return self._merged(own, said, shares, together=False)

    def _wait(self, seconds: float | None) -> dict[int, str]:
        """Return what every other rank has said, ``outcome``, ``failed`` or ``ended``.

        Without a time limit, ``ended`` is no answer: the rank may still be about to fail.
        """
        end = None if seconds is None else time.monotonic() + seconds
        words = ("outcome", "failed") if end is None else ("outcome", "failed", "ended")
        said: dict[int, str] = {}
        while len(said) < self.world - 1 and (end is None or time.monotonic() < end):
            for rank in range(self.world):
                if rank != self.rank and rank not in said:
                    for word in words:
                        if self._store.check([_key(word, rank)]):
                            said[rank] = word
                            break
            time.sleep(_POLL_S)
        return said

    def _merged(
        self,
        own: list[CandidateOutcome],
        said: dict[int, str],
        shares: Sequence[tuple[int, ...]],
        together: bool,
    ) -> Shared:
        parts, lost = [own], []
        for rank in range(self.world):
            word = said.get(rank)
            if rank == self.rank:
                if not any(outcome.layers for outcome in own) and shares[rank]:
                    lost.append(_said(rank, shares[rank], "was ended before it had finished"))
            elif word == "outcome":
                part = self._told("outcome", rank)
                parts += [part] if part else []
            elif word == "failed":
                why = self._told("failed", rank)
                lost.append(_said(rank, shares[rank], f"failed: {why}"))
            elif word == "ended":
                lost.append(_said(rank, shares[rank], "was ended before it had finished"))
            else:
                lost.insert(0, _said(rank, shares[rank], "died"))
        merged = own if together else merged_outcomes(parts)
        return Shared(merged, "; ".join(lost) or None, reports=True)


def _key(what: str, rank: int) -> str:
    return f"needlepoint/{what}/{rank}"


def _said(rank: int, layers: tuple[int, ...], what: str) -> str:
    numbers = ", ".join(str(layer) for layer in layers) or "none"
    return f"rank {rank} (layers {numbers}) {what}"


@contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into :class:`Terminated` inside; signals go to the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, end)
    yield
