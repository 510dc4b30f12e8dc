"""Independent blocks over threads; each block is computed by one thread alone.

NumPy releases the interpreter lock inside its loops, and torch is held to one thread a block, so
that the bits of a block do not depend on how many threads there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


def over_blocks(work: Callable[[Item], Result], blocks: Sequence[Item]) -> list[Result]:
    """Return ``work`` of every block, in order, computed by torch's number of threads.

    Raises
    ------
    Exception
        The first that a block raises.
    """
    workers = torch.get_num_threads()
    if workers == 1:
        return [work(block) for block in blocks]
    if len(blocks) <= 1:
        with _one_thread_each():
            return [work(block) for block in blocks]
    with (
        _one_thread_each(),
        ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool,
    ):
        return list(pool.map(work, blocks))


@contextmanager
def _one_thread_each() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
