"""Impossible events are named by their index; possible ones get slots and pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from needlepoint.verify.scenario.actions import JUNK, ScenarioError
from needlepoint.verify.scenario.events import (
    MAX_TOKENS,
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
    Scenario,
    Split,
)
from needlepoint.verify.scenario.rules import check
from needlepoint.verify.scenario.timeline import timeline

START = Prefill(("a",), (6,))
Make = Callable[..., Scenario]


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Decode(("a",))], r"event 0 \(decode a\): request a has no tokens; prefill it first"),
        ([Draft(("a",), (2,))], "event 0 .*has no tokens"),
        ([START, Decode(("b",))], "event 1 .*request b has no tokens"),
        ([START, Draft(("a",), (2,)), Accept(("a",), (3,))], "event 2 .*keeps 3 of 2 drafts"),
        ([START, Draft(("a",), (2,)), Accept(("a",), (-1,))], "event 2 .*keeps -1 of 2 drafts"),
        ([START, Accept(("a",), (0,))], "event 1 .*request a has no drafts"),
        ([START, Draft(("a",), (9,))], "event 1 .*9 tokens of a, expected 1 to 8"),
        ([START, Draft(("a",), (2,)), Decode(("a",))], "event 2 .*wait for an accept"),
        ([START, Draft(("a",), (2,)), Fork("b", "a", 4)], "event 2 .*wait for an accept"),
        ([Copy("a", 1)], "event 0 .*request a owns no pages"),
        ([START, Offload("a"), Copy("a", 1)], "event 2 .*request a owns no pages"),
        ([START, Evict("a"), Offload("a")], "event 2 .*request a owns no pages"),
        ([Free("a")], "event 0 .*owns no slot and no pages"),
        ([START, Restore("a")], "event 1 .*request a is not offloaded"),
        ([START, Offload("a"), Decode(("a",))], "event 2 .*is offloaded; restore it first"),
        ([START, Free("a"), START], "event 2 .*request a is finished"),
        ([START, Copy("a", 0)], "event 1 .*is in pool 0; expected another one of 2"),
        ([START, Copy("a", 2)], "event 1 .*expected another one of 2"),
        ([START, Fork("b", "a", 7)], "event 1 .*prefix 7, expected 1 to the 6 tokens of a"),
        ([START, Fork("b", "a", 0)], "event 1 .*prefix 0"),
        ([START, Fork("a", "a", 3)], "event 1 .*names a request twice"),
        ([START, Prefill(("b",), (3,)), Fork("b", "a", 3)], "event 2 .*has started already"),
        ([Fork("b", "a", 3)], "event 0 .*request a owns no pages"),
        ([Prefill(("a", "a"), (1, 1))], "event 0 .*names a request twice"),
        ([Prefill(("a", "b"), (1,))], "event 0 .*2 requests and 1 numbers"),
        ([Prefill((), ())], "event 0 .*names no request"),
        ([Prefill(("z",), (1,))], "event 0 .*request 'z' is not one of"),
        ([Prefill(("a",), (0,))], "event 0 .*0 tokens of a, expected 1 to"),
        ([START, Prefill(("a",), (MAX_TOKENS,))], "event 1 .*would have 326 tokens"),
        ([Pad(3, "back"), START, Pad(3, "back")], r"event 2 \(pad .*is not followed by a call"),
        ([START, Split(2, "strided"), Evict("a")], "event 1 .*is not followed by a call"),
        ([Pad(1, "back"), Pad(2, "back"), START], "event 1 .*is padded already"),
        ([Pad(0, "back"), START], "event 0 .*expected 1 to 64 rows"),
        ([Pad(1, "left"), START], "event 0 .*side 'left'"),
        ([Split(1, "strided"), START], "event 0 .*expected 2 to 8 ranks"),
        ([Split(2, "zigzag"), START], "event 0 .*layout 'zigzag'"),
    ],
)
def test_impossible_events_are_named(events: list[Event], message: str, scenario: Make) -> None:
    with pytest.raises(ScenarioError, match=message):
        check(scenario(*events))


def test_slots_and_pages_run_out(scenario: Make) -> None:
    both = Prefill(("a", "b"), (1, 1))
    with pytest.raises(ScenarioError, match=r"event 0 .*every slot is taken"):
        check(scenario(both, slots=1))
    with pytest.raises(ScenarioError, match=r"event 0 .*pool 0 has no page left"):
        check(scenario(both, pages=1))
    check(scenario(Prefill(("a",), (1,)), Free("a"), Prefill(("b",), (1,)), slots=1, pages=1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"slots": 0}, "slots 0, expected 1 to 64"),
        ({"pages": 1000}, "pages 1000, expected 1 to 256"),
        ({"page_tokens": 100}, "page_tokens 100, expected 128, 256 or 512"),
        ({"state": "fp16"}, "state 'fp16'"),
        ({"requests": (Request("a", 9),)}, "request a: text 9, expected 0 to 4"),
        ({"requests": (Request("a", 0), Request("a", 1))}, "request a is declared twice"),
    ],
)
def test_impossible_sizes(fields: dict[str, object], message: str, scenario: Make) -> None:
    with pytest.raises(ScenarioError, match=message):
        check(replace(scenario(START), **fields))  # type: ignore[arg-type]


def test_freed_slots_and_pages_are_handed_out_again(scenario: Make) -> None:
    first, _, second = check(scenario(START, Free("a"), Prefill(("b",), (6,))))
    (a,), (b,) = first.parts, second.parts

    assert a.before.place.slot == b.before.place.slot
    for path in ("index", "main"):
        assert a.before.place.pages[path].tolist() == b.before.place.pages[path].tolist()


def test_a_fork_shares_full_pages_alone(scenario: Make) -> None:
    events = (Prefill(("a",), (300,)), Fork("b", "a", 260), Free("a"), Prefill(("c",), (300,)))
    _, fork, _, last = check(scenario(*events, page_tokens=128))
    assert fork.before is not None
    assert fork.after is not None
    source, own = (view.place.pages["main"].tolist() for view in (fork.before, fork.after))
    taken = last.parts[0].before.place.pages["main"].tolist()

    assert source[:2] == own[:2]
    assert source[2] != own[2]
    assert not set(taken) & set(own)  # what is shared is not given away when one of two ends


def test_drafts_say_the_text_as_far_as_they_are_kept(scenario: Make) -> None:
    call, draft, _ = check(scenario(START, Draft(("a",), (4,)), Accept(("a",), (3,))))
    assert call.parts[0].texts.tolist() == [0] * 6
    assert draft.parts[0].texts.tolist() == [0, 0, 0, JUNK]
    given_up = check(scenario(START, Draft(("a",), (2,)), Evict("a")))[1]
    assert given_up.parts[0].texts.tolist() == [JUNK, JUNK]


def test_the_timeline_shows_every_event(scenario: Make) -> None:
    made = scenario(
        START,
        Pad(2, "front"),
        Draft(("a",), (4,)),
        Accept(("a",), (1,)),
        Fork("b", "a", 5),
        Offload("a"),
        Free("b"),
    )
    lines = timeline(made, failed=3)

    assert [line.split() for line in lines] == [
        ["#", "event", "a", "b", "c", "d"],
        ["0", "prefill", "a", "6", "6@0", "-", "-", "-"],
        ["1", "pad", "rows", "2,", "side", "front"],
        ["2", "draft", "a", "4", "6+4@0", "-", "-", "-"],
        [">", "3", "accept", "a", "1", "7@0", "-", "-", "-"],
        ["4", "fork", "b,", "source", "a,", "prefix", "5", "7@0", "5@1", "-", "-"],
        ["5", "offload", "a", "out", "5@1", "-", "-"],
        ["6", "free", "b", "out", "end", "-", "-"],
    ]
