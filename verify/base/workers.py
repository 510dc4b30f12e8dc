"""Workers: whole tasks side by side, one torch thread each.

Judging is many small operations. Splitting each of them over threads makes every one wait for the
slowest thread, which costs more than it gains and collapses on a busy machine. Tasks that do not
depend on each other run side by side instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Condition
from typing import TypeVar

import torch

_CARD_WORKERS = 3  # they launch, one card computes; more would wait for each other's interpreter

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers:
    """As many workers as torch has threads, few on a card; use :func:`workers`."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool

    def map(self, task: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return ``task`` of every item in order; the first exception is raised."""
        return list(self._pool.map(task, items))

    def run(self, tasks: Iterable[Callable[[], None]]) -> None:
        """Run tasks side by side and wait for all of them."""
        self.map(lambda task: task(), tasks)


class Budget:
    """What tasks that run side by side may hold together; a task beyond all of it runs alone.

    Parameters
    ----------
    total
        In any unit.
    """

    def __init__(self, total: int) -> None:
        self._total, self._held = total, 0
        self._changed = Condition()

    @contextmanager
    def hold(self, amount: int) -> Iterator[None]:
        """Wait until ``amount`` fits beside what others hold, and hold it until the block ends."""
        own = min(amount, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._held + own <= self._total)
            self._held += own
        try:
            yield
        finally:
            with self._changed:
                self._held -= own
                self._changed.notify_all()


@contextmanager
def workers(device: str = "cpu") -> Iterator[Workers]:
    """Hold this thread and all workers to one torch thread each until the block ends.

    Parameters
    ----------
    device
        Where the workers make tensors that have no device of their own.
    """
    threads = torch.get_num_threads()
    count = threads if device == "cpu" else min(threads, _CARD_WORKERS)
    pool = ThreadPoolExecutor(count, initializer=_begin, initargs=(device,))
    try:
        torch.set_num_threads(1)
        with pool:
            yield Workers(pool)
    finally:
        # The workers' setting is also the default of threads that start later; restore it.
        torch.set_num_threads(threads)


def _begin(device: str) -> None:
    torch.set_num_threads(1)
    if device != "cpu":
        torch.set_default_device(device)  # of this thread alone
