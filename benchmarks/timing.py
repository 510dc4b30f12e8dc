"""Times of launches as replays of CUDA graphs, sides taken in turn.

A side is a list of calls that do the same work on different inputs. They are captured into one
graph; what is timed is the replay, so that host time stays out. The sides of a comparison are
replayed one after the other, round by round and each round in another order, so that a drift of the
card meets all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

Call = Callable[[], object]
_event = cast(Callable[..., Any], torch.cuda.Event)
_stream = cast(Callable[..., Any], torch.cuda.Stream)
WARMUPS = 3


@dataclass(frozen=True)
class Side:
    """One implementation of a piece of work."""

    name: str
    calls: Sequence[Call]
    """One call an input set; each is captured once."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call of a side: median and quartiles over rounds."""

    name: str
    median_us: float
    low_us: float
    high_us: float


def measure(sides: Sequence[Side | None], rounds: int = 25) -> list[Timing]:
    """Return the time of every side, in order.

    Parameters
    ----------
    sides
        Implementations to compare, None for an absent one, which is left out; their calls must be
        capturable and run on the current stream.
    rounds
        Replays of each side.

    Raises
    ------
    ValueError
        If there is no side, or one without calls.
    """
    present = [side for side in sides if side is not None]
    if not present or any(not side.calls for side in present) or rounds < 4:
        raise ValueError(
            f"{len(present)} sides, {rounds} rounds: expected a side with a call and 4 rounds"
        )
    graphs = [_capture(side.calls) for side in present]
    for graph in graphs:
        for _ in range(WARMUPS):
            graph.replay()
    torch.cuda.synchronize()
    times: list[list[float]] = [[] for _ in present]
    for number in range(rounds):
        order = [(number + i) % len(present) for i in range(len(present))]
        # A replay on an idle card starts late: one goes untimed, so that none is timed so.
        graphs[order[0]].replay()
        events = {}
        for index in order:
            begin, end = _event(enable_timing=True), _event(enable_timing=True)
            begin.record()
            graphs[index].replay()
            end.record()
            events[index] = (begin, end)
        torch.cuda.synchronize()
        for index, (begin, end) in events.items():
            times[index].append(begin.elapsed_time(end) * 1e3 / len(present[index].calls))
    return [_timing(side.name, series) for side, series in zip(present, times, strict=True)]


def _timing(name: str, series: list[float]) -> Timing:
    low, median, high = statistics.quantiles(series, n=4)
    return Timing(name, median, low, high)


def _capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # modules load and lazy state is made outside the capture
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return graph


def copy_rate(size: int, copies: int = 8) -> float:
    """Return terabytes a second, read and written, of an elementwise copy of ``size`` bytes.

    An elementwise kernel is captured, not ``copy_``, which in a graph becomes a slower memcpy node.
    """
    count = max(1, size // 8)
    pairs = [
        (
            torch.randint(256, (count,), device="cuda"),
            torch.empty(count, dtype=torch.int64, device="cuda"),
        )
        for _ in range(copies)
    ]

    def call(source: Tensor, target: Tensor) -> Call:
        def copy() -> None:
            torch.bitwise_not(source, out=target)

        return copy

    side = Side("copy", [call(*pair) for pair in pairs])
    return 2 * 8 * count / measure([side])[0].median_us / 1e6


def large_copy_rate() -> float:
    """Return terabytes a second, read and written, of a 4 GiB device-to-device copy."""
    source = torch.randint(256, (2**32,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    series: list[float] = []
    for _ in range(12):
        begin, end = _event(enable_timing=True), _event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        series.append(begin.elapsed_time(end))
    return 2 * 2**32 / statistics.median(series[2:]) / 1e9


def product_rate() -> float:
    """Return teraflops of an 8192 x 8192 x 8192 bf16 product of random matrices."""
    size = 8192
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    side = Side("product", [lambda: torch.mm(a, b, out=out)])
    return 2 * size**3 / measure([side], rounds=12)[0].median_us / 1e6
