"""Make a failing history small: fewer events, fewer requests in a call, fewer tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Final

from needlepoint.verify.scenario.actions import ScenarioError
from needlepoint.verify.scenario.events import Event, Scenario
from needlepoint.verify.scenario.rules import check

MAX_TRIES: Final = 400
SECONDS: Final = 30.0
_NUMBERS = ("tokens", "keep")


def shrink(
    scenario: Scenario, fails: Callable[[Scenario], bool], seconds: float = SECONDS
) -> Scenario:
    """Return a scenario that still fails and from which no single step could be taken.

    Parameters
    ----------
    scenario
        One that fails.
    fails
        Whether a possible scenario fails; impossible ones are not asked about.
    seconds
        When to stop with the smallest so far; also after :data:`MAX_TRIES` runs.
    """
    end = time.monotonic() + seconds
    tries = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _steps(scenario):
            if tries >= MAX_TRIES or time.monotonic() > end:
                return scenario
            if not _possible(candidate):
                continue
            tries += 1
            if fails(candidate):
                scenario, smaller = candidate, True
                break
    return scenario


def _possible(scenario: Scenario) -> bool:
    try:
        return bool(check(scenario))
    except ScenarioError:
        return False


def _steps(scenario: Scenario) -> Iterator[Scenario]:
    """Yield smaller scenarios, the greatest steps first."""
    events = scenario.events
    size = len(events) // 2
    while size:
        for start in range(len(events) - size + 1):
            yield _with(scenario, events[:start] + events[start + size :])
        size //= 2
    for index, event in enumerate(events):
        for other in _smaller(event):
            yield _with(scenario, (*events[:index], other, *events[index + 1 :]))
    for name in [request.name for request in scenario.requests]:
        without = tuple(part for event in events for part in _without(event, name))
        if without != events:
            yield _with(scenario, without)


def _with(scenario: Scenario, events: tuple[Event, ...]) -> Scenario:
    """Return the scenario with other events and the requests that they name."""
    named = {name for event in events for name in _names(event)}
    requests = tuple(request for request in scenario.requests if request.name in named)
    return replace(scenario, events=events, requests=requests)


def _names(event: Event) -> tuple[str, ...]:
    found = tuple(getattr(event, name) for name in ("request", "source") if hasattr(event, name))
    return (*found, *getattr(event, "requests", ()))


def _without(event: Event, name: str) -> Iterator[Event]:
    """Yield the event without a request; nothing where it was all about it."""
    requests: tuple[str, ...] | None = getattr(event, "requests", None)
    if requests is None:
        if name not in _names(event):
            yield event
        return
    kept = [i for i, request in enumerate(requests) if request != name]
    if kept:
        lists = {
            field.name: tuple(getattr(event, field.name)[i] for i in kept)
            for field in fields(event)
        }
        yield replace(event, **lists)


def _smaller(event: Event) -> Iterator[Event]:
    """Yield the event with fewer requests, or with smaller numbers."""
    requests: tuple[str, ...] = getattr(event, "requests", ())
    if len(requests) > 1:
        for name in requests:
            yield from _without(event, name)
    for key in _NUMBERS:
        values: tuple[int, ...] = getattr(event, key, ())
        for place, value in enumerate(values):
            for less in _lesser(value):
                yield replace(event, **{key: (*values[:place], less, *values[place + 1 :])})
    for key in ("prefix", "rows", "ranks"):
        number: int | None = getattr(event, key, None)
        if number is not None:
            yield from (replace(event, **{key: less}) for less in _lesser(number))


def _lesser(value: int) -> list[int]:
    """Return smaller numbers: 0, 1, half, one window of 128 less, four less, one less."""
    steps = (0, 1, value // 2, value - 128, value - 4, value - 1)
    return list(dict.fromkeys(less for less in steps if 0 <= less < value))
