"""The byte sweep of the CUDA stores shares its time out, without a card."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from needlepoint import benchmarks
from needlepoint.benchmarks import byte_sweep
from needlepoint.benchmarks.byte_sweep import ByteCount
from needlepoint.verify.workloads.projections import KINDS

TABLES = len(byte_sweep.SHAPES) * 2 * len(KINDS)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[object, ...]]:
    """Return how many rounds each table got; a round takes one second of a clock of its own."""
    clock = SimpleNamespace(now=0.0)
    seen: Counter[tuple[object, ...]] = Counter()

    def draw(*key: object, seed: int) -> tuple[object, ...]:
        return key

    def compare(key: tuple[object, ...], feed: object, seed: int) -> Iterator[ByteCount]:
        clock.now += 1
        seen[key] += 1
        yield ByteCount("", "", "", 0, 0, 0, 0)

    monkeypatch.setattr(byte_sweep, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(byte_sweep, "draw_table", draw)
    monkeypatch.setattr(byte_sweep, "compare_round", compare)
    return seen


@pytest.mark.parametrize("seconds", [1, TABLES, 3.5 * TABLES])
def test_short_time_is_shared_out_over_all_tables(
    rounds: Counter[tuple[object, ...]], seconds: float
) -> None:
    assert list(byte_sweep.sweep(10**9, seconds))

    assert len(rounds) == TABLES
    assert min(rounds.values()) >= 1
    assert max(rounds.values()) - min(rounds.values()) <= 1
    assert sum(rounds.values()) <= max(seconds, TABLES) + TABLES


def test_enough_time_gives_every_format_its_rows(rounds: Counter[tuple[object, ...]]) -> None:
    list(byte_sweep.sweep(10**7, 1e9))

    for ratio, dim in byte_sweep.SHAPES:
        own = sum(count for key, count in rounds.items() if key[:2] == (ratio, dim))
        assert own * byte_sweep.ROUND_TOKENS // ratio >= 10**7 * 4 // ratio


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_card_the_sweep_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert byte_sweep.main([]) == 2
    assert "byte-sweep: no CUDA device" in capsys.readouterr().err


def test_the_package_says_what_every_module_measures() -> None:
    folder = Path(benchmarks.__file__).parent
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    named, parts = (benchmarks.__doc__ or "").split("``needlepoint bench`` runs")
    runnable = set(re.findall(r"^``(\w+)``$", named, re.MULTILINE))
    assert runnable | set(re.findall(r"``(\w+)``", parts)) == modules
    for name in modules:
        text = (folder / f"{name}.py").read_text()
        assert ('if __name__ == "__main__":' in text) == (name in runnable), name
