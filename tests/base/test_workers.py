"""Tasks side by side: what a budget lets run together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier, Event, Lock

import pytest
import torch

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.base.workers import Budget, workers
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recall import run as recall_run
from needlepoint.verify.recall.grid import Grid, Length, grid_prompts
from needlepoint.verify.recall.model import load_trained
from needlepoint.verify.recall.pool import load_pool

WAIT_S = 60


def test_tasks_that_fit_hold_the_budget_together() -> None:
    budget, met = Budget(10), Barrier(2)

    def task(amount: int) -> None:
        with budget.hold(amount):
            met.wait(WAIT_S)  # breaks unless both are inside

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(task, (4, 6)))


@pytest.mark.parametrize("amounts", [(6, 5), (11, 1), (50, 50)])
def test_tasks_that_do_not_fit_wait(amounts: tuple[int, int]) -> None:
    budget, inside = Budget(10), Event()

    def second() -> None:
        with budget.hold(amounts[1]):
            inside.set()

    with ThreadPoolExecutor(1) as pool:
        with budget.hold(amounts[0]):
            running = pool.submit(second)
            assert not inside.wait(0.05)
        running.result(WAIT_S)
    assert inside.is_set()


def test_a_failed_task_gives_its_part_back() -> None:
    budget = Budget(10)
    with pytest.raises(KeyError), budget.hold(10):
        raise KeyError
    with budget.hold(10):
        pass


@pytest.mark.parametrize(("total", "most"), [(2_000, 1), (1 << 20, 2)])
def test_long_prompts_run_one_after_the_other(
    total: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, counts = Lock(), [0, 0]
    real: Callable[..., None] = recall_run._run_candidates
    met = Barrier(most)

    def counted(*arguments: object) -> None:
        with lock:
            counts[0] += 1
            counts[1] = max(counts)
        met.wait(WAIT_S)
        real(*arguments)
        with lock:
            counts[0] -= 1

    monkeypatch.setattr(recall_run, "_run_candidates", counted)
    monkeypatch.setattr(recall_run, "SIDE_BY_SIDE", total)
    prompts = grid_prompts(
        Grid((Length(1_600),), depths=(0.0,), haystacks=2, distractors=(8,)), load_pool()
    )
    model = load_trained()
    threads = torch.get_num_threads()
    with _threads(2):
        recall_run.run_prompts(
            prompts,
            model,
            [create("emulated:fused-fp8")],
            BF16_CONTRACT,
            Limits.default(),
            NoProgress(),
        )
    assert torch.get_num_threads() == threads
    assert counts == [0, most]


def test_workers_keep_the_order() -> None:
    with workers() as pool:
        assert pool.map(lambda item: item * item, range(5)) == [0, 1, 4, 9, 16]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
