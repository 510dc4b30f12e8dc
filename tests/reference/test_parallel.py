from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from needlepoint.reference.parallel import for_each_block, map_rows


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("blocks", [0, 1, 7])
def test_every_block_runs_once(threads: int, blocks: int) -> None:
    torch.set_num_threads(threads)
    lock, seen = threading.Lock(), []

    def note(block: int) -> None:
        with lock:
            seen.append(block)

    for_each_block(note, blocks)
    assert sorted(seen) == list(range(blocks))


def test_new_threads_keep_the_default() -> None:
    """Workers run on one torch thread; threads that start afterwards must not inherit that."""
    torch.set_num_threads(3)
    for_each_block(lambda _: None, 4)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert found == [3]


@pytest.mark.parametrize("threads", [1, 2])
def test_failure_of_a_block_is_raised_and_threads_restored(threads: int) -> None:
    torch.set_num_threads(threads)

    def fail(block: int) -> None:
        if block == 2:
            raise ValueError(f"block {block} with {torch.get_num_threads()} thread")

    with pytest.raises(ValueError, match="block 2 with 1 thread"):
        for_each_block(fail, 4)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("count", [1, 3, 700])
def test_map_rows_is_the_function(threads: int, count: int) -> None:
    torch.set_num_threads(threads)
    g = torch.Generator().manual_seed(count)
    a = torch.randn(count, 4, 128, generator=g, dtype=torch.float64)
    b = torch.randn(count, 2, generator=g, dtype=torch.float64)

    def rowwise(x: Tensor, y: Tensor) -> Tensor:
        return x[:, 0, :2] * y + x[:, 1, :2]

    assert torch.equal(map_rows(rowwise, a, b), rowwise(a, b))
