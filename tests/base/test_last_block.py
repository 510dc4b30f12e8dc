from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest

from needlepoint.verify.base.stage_blocks import LastBlock, query_blocks

FIRST, SECOND = list(query_blocks((256,), 4, 1 << 20, 1))[:2]


def test_a_value_is_computed_once_a_block() -> None:
    kept: LastBlock[int] = LastBlock()
    made: list[int] = []

    def make() -> int:
        made.append(1)
        return len(made)

    assert [kept.of(b, "a", make) for b in (FIRST, FIRST, SECOND, SECOND, FIRST)] == [1, 1, 2, 2, 3]
    assert kept.of(FIRST, "b", make) == 4


def test_threads_that_ask_together_share_one_computation() -> None:
    kept: LastBlock[object] = LastBlock()
    together = Barrier(4)

    def ask(_: int) -> object:
        together.wait()
        return kept.of(FIRST, "a", object)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(ask, range(4)))) == 1


def test_another_key_does_not_wait() -> None:
    kept: LastBlock[str] = LastBlock()
    begun, end = Event(), Event()

    def slow() -> str:
        begun.set()
        assert end.wait(60)
        return "slow"

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(kept.of, FIRST, "a", slow)
        assert begun.wait(60)
        assert kept.of(FIRST, "b", lambda: "quick") == "quick"
        end.set()
        assert found.result() == "slow"


def test_a_computation_that_fails_is_tried_again() -> None:
    kept: LastBlock[int] = LastBlock()
    with pytest.raises(ZeroDivisionError):
        kept.of(FIRST, "a", lambda: 1 // 0)
    assert kept.of(FIRST, "a", lambda: 1) == 1
