"""Blocks of work on several threads, each block on one.

A library that splits one product over threads may add up in another order when their number
changes. Here threads share out whole blocks and everything inside a block is single-threaded, so
the bits of a block do not depend on how many threads there are.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 16  # half a megabyte of float64: stays in a core's cache


def for_each_block(work: Callable[[int], None], blocks: int) -> None:
    """Call ``work(0) .. work(blocks - 1)``, each with one torch thread, and wait for all.

    As many run at a time as :func:`torch.get_num_threads` says; the order is open, so blocks must
    write to disjoint places. The first exception of a block is raised.
    """
    threads = torch.get_num_threads()
    if threads == 1 or _on_card():
        for block in range(blocks):
            work(block)
        return
    try:
        with ThreadPoolExecutor(
            threads, initializer=torch.set_num_threads, initargs=(1,)
        ) as executor:
            for _ in executor.map(work, range(blocks)):
                pass
    finally:
        # The workers' setting is also the default of threads that start later; restore it.
        torch.set_num_threads(threads)


def sized(core: int, card: int) -> int:
    """Return the size of a block: what suits a core's cache, or a card's launches.

    Rows do not depend on it, but for the last bits of fp32 products, whose sums a library may order
    by the shape of a block.
    """
    return card if _on_card() else core


def _on_card() -> bool:
    """Whether tensors are made on a card: one stream does the work there, in launches."""
    return torch.get_default_device().type != "cpu"


def map_rows(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Apply a row-wise function to blocks of rows and return the joined results.

    The result is ``function(*tensors)``; only the memory for what lies between is smaller, and the
    work is shared by threads.

    Parameters
    ----------
    function
        Takes blocks of the tensors, all with the same number of rows, and returns one row for each
        that depends on nothing else.
    tensors
        ``[n, ...]`` each, ``n >= 1``.
    """
    count = len(tensors[0])
    if _on_card():
        return function(*tensors)
    step = max(1, _BLOCK_ELEMENTS * count // max(1, max(t.numel() for t in tensors)))
    first = function(*(t[:step] for t in tensors))
    out = torch.empty(count, *first.shape[1:], dtype=first.dtype)
    out[:step] = first

    def block(index: int) -> None:
        rows = slice((index + 1) * step, (index + 2) * step)
        out[rows] = function(*(t[rows] for t in tensors))

    for_each_block(block, -(-count // step) - 1)
    return out
