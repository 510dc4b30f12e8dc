"""Invariants of a live server, swept: everything equals the same tokens run alone from scratch.

Dozens of requests share one scenario, one for each length, split or accept pattern, so that each
sweep is also a test of its batches. The reference goes first, then a candidate of each format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from needlepoint.verify.scenario.events import (
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
    Split,
)
from needlepoint.verify.scenario.trial import Trial

Drive = Callable[..., Trial]
EVERYONE = ("reference", "emulated:fused-fp8")
FORMATS = ("emulated:fused-bf16", "emulated:fused-fp4", "emulated:unfused-bf16")


def named(count: int) -> tuple[str, ...]:
    return tuple(f"r{i}" for i in range(count))


def sizes(count: int, **more: object) -> dict[str, object]:
    """Return the fields of a scenario of so many requests."""
    requests = tuple(Request(name, i % 5) for i, name in enumerate(named(count)))
    return {"requests": requests, "slots": count, "pages": 3 * count} | more


def fed(calls: Sequence[Sequence[int]]) -> list[Event]:
    """Return calls that feed request ``i`` the numbers in column ``i``; 0 sits a call out."""
    events: list[Event] = []
    names = named(len(calls[0]))
    for call in calls:
        some = [(name, count) for name, count in zip(names, call, strict=True) if count]
        if some:
            events.append(Prefill(tuple(n for n, _ in some), tuple(c for _, c in some)))
    return events


@pytest.mark.parametrize("who", [*EVERYONE, *FORMATS])
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_every_two_way_split(who: str, state: str, drive: Drive) -> None:
    splits = range(1, 21)
    drive(*fed([splits, [21 - s for s in splits]]), who=who, **sizes(20, state=state))


@pytest.mark.parametrize("first", [1, 45, 89])
def test_every_two_way_split_of_a_window_of_128(first: int, drive: Drive) -> None:
    splits = range(first, first + 44)
    drive(*fed([splits, [134 - s for s in splits]]), **sizes(44, page_tokens=128))


@pytest.mark.parametrize("who", EVERYONE)
def test_random_many_way_splits(who: str, drive: Drive) -> None:
    columns = []
    for seed in range(12):
        cuts = sorted({(seed * 37 + 61 * i * i + 17 * i) % 139 + 1 for i in range(6)} | {0, 140})
        columns.append([b - a for a, b in pairwise(cuts)])
    longest = max(map(len, columns))
    calls = [[c[i] if i < len(c) else 0 for c in columns] for i in range(longest)]
    drive(*fed(calls), who=who, **sizes(12, page_tokens=128))


@pytest.mark.parametrize("first", [1, 65])
def test_every_length_modulo_128_and_four_decodes(first: int, drive: Drive) -> None:
    lengths = range(first, first + 64)
    decode = Decode(named(64))
    drive(*fed([lengths]), decode, decode, decode, decode, **sizes(64, pages=128))


@pytest.mark.parametrize("who", EVERYONE)
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_decode_alone_equals_prefill(who: str, state: str, drive: Drive) -> None:
    """From the first token on, one by one; and over a window, a page and k entries."""
    starts = (1, 28, 124, 252)
    decodes = [Decode(named(4))] * 11
    drive(*fed([starts]), *decodes, who=who, **sizes(4, page_tokens=128, state=state))


def test_around_every_boundary(drive: Drive) -> None:
    """Chunks that end before, at and behind 4, 8 entries, 128 and 256, of pages of either size."""
    ends = [e + d for e in (4, 8, 32, 128, 256) for d in (-2, -1, 0, 1, 2)]
    for page_tokens in (128, 256):
        drive(*fed([ends, [5] * 25]), **sizes(25, page_tokens=page_tokens))


@pytest.mark.parametrize("residue", range(4))
@pytest.mark.parametrize("who", EVERYONE)
def test_every_accept_pattern_of_every_depth(who: str, residue: int, drive: Drive) -> None:
    patterns = [(n, j) for n in range(1, 9) for j in range(n + 1)]
    names = named(len(patterns))
    depth, keep = (tuple(p[i] for p in patterns) for i in (0, 1))
    start = Prefill(names, tuple(5 + residue for _ in names))
    again = Prefill(names, tuple(9 - j for j in keep))
    events = (start, Draft(names, depth), Accept(names, keep), again)
    drive(*events, who=who, **sizes(len(names), pages=2 * len(names)))


def test_drafts_over_the_edge_of_a_window_of_128(drive: Drive) -> None:
    patterns = [(start, j) for start in range(121, 129) for j in (0, 1, 4, 7, 8)]
    names = named(len(patterns))
    keep = tuple(j for _, j in patterns)
    events = (
        Prefill(names, tuple(start for start, _ in patterns)),
        Draft(names, (8,) * len(names)),
        Accept(names, keep),
        Draft(names, (8,) * len(names)),
        Accept(names, keep[::-1]),
        Decode(names),
    )
    drive(*events, **sizes(len(names), page_tokens=128))


@pytest.mark.parametrize("who", EVERYONE)
def test_order_padding_slices_and_ranks_change_nothing(who: str, drive: Drive) -> None:
    names, lengths = ("a", "b", "c"), {"a": 5, "b": 70, "c": 129}
    for order in (names, names[::-1], ("b", "a", "c")):
        whole = Prefill(order, tuple(lengths[n] for n in order))
        more = Prefill(order, tuple({"a": 5, "b": 1, "c": 17}[n] for n in order))
        single = [Prefill((n,), (lengths[n],)) for n in order]
        for first in ([whole], single):
            for shape in (
                [],
                [Pad(3, "front")],
                [Pad(7, "back")],
                [Split(2, "strided")],
                [Pad(1, "front"), Split(5, "contiguous")],
            ):
                drive(*first, *shape, more, *shape, Decode(order), who=who)


def test_ranks_without_tokens_and_without_entries(drive: Drive) -> None:
    events: list[Event] = []
    for layout in ("strided", "contiguous"):
        events += [Split(8, layout), Prefill(("a", "b"), (5, 1)), Split(8, layout), Decode(("a",))]
    drive(*events)


@pytest.mark.parametrize("who", EVERYONE)
@pytest.mark.parametrize("end", [Free, Evict])
def test_a_reused_slot_shows_nothing_of_its_former_owner(
    end: Callable[[str], Event], who: str, drive: Drive
) -> None:
    for former in (3, 16, 130):
        for length in (1, 3, 4, 5, 8):
            again = "a" if end is Evict else "b"
            events = (Prefill(("a",), (former,)), end("a"), Prefill((again,), (length,)))
            drive(*events, Decode((again,)), Decode((again,)), who=who, slots=1)


@pytest.mark.parametrize("who", EVERYONE)
def test_forks_from_every_prefix(who: str, drive: Drive) -> None:
    for page_tokens, prefixes in ((128, (1, 2, 3, 4, 5, 127, 128, 129, 130)), (256, (255, 257))):
        for prefix in prefixes:
            source = Prefill(("a",), (max(prefix, 40) + 6,))
            events = (source, Fork("b", "a", prefix), Prefill(("b", "a"), (5, 3)), Decode(("b",)))
            drive(*events, who=who, page_tokens=page_tokens)


@pytest.mark.parametrize("who", EVERYONE)
@pytest.mark.parametrize("state", ["fp32", "bf16"])
def test_prefix_hits_again_and_again(who: str, state: str, drive: Drive) -> None:
    """The same prefix three times with another request between, and after its source is gone."""
    events = [
        Prefill(("a", "b"), (66, 9)),
        Fork("c", "a", 65),
        Decode(("c", "b")),
        Prefill(("a",), (70,)),
        Fork("d", "a", 65),
        Prefill(("d",), (6,)),
        Free("a"),
        Prefill(("c", "b"), (67, 5)),
        Decode(("c", "d")),
    ]
    drive(*events, who=who, state=state, page_tokens=128)


@pytest.mark.parametrize("who", [*EVERYONE, *FORMATS])
def test_restoring_one_leaves_the_others_alone(who: str, drive: Drive) -> None:
    for length in (1, 3, 6, 64, 127, 130):
        events = (
            Prefill(("a", "b"), (length, 9)),
            Offload("a"),
            Prefill(("c",), (length + 1,)),
            Decode(("b", "c")),
            Restore("a"),
            Decode(("c", "a", "b")),
            Copy("a", 1),
            Offload("b"),
            Prefill(("a",), (6,)),
            Restore("b"),
            Copy("a", 0),
            Decode(("a", "b")),
        )
        drive(*events, who=who, page_tokens=128)
