"""Many random histories in a given time: counted, judged, and the failures made small."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from multiprocessing.pool import AsyncResult
from typing import Final

import torch

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.serving import StatefulCandidate
from needlepoint.verify.base.progress import Progress
from needlepoint.verify.scenario.actions import ScenarioError
from needlepoint.verify.scenario.events import Event, Scenario, kind_of
from needlepoint.verify.scenario.file import scenario_digest
from needlepoint.verify.scenario.random import random_scenario
from needlepoint.verify.scenario.rules import check
from needlepoint.verify.scenario.trial import (
    QUIET,
    Compared,
    TrialFailure,
    covers,
    try_candidate,
    try_scenario,
)

BATCH: Final = 8
"""Histories that a worker takes at once."""
REFERENCE_EVERY: Final = 8
"""Of so many histories one is run on the reference too; the oracle is from scratch in all."""
ENOUGH: Final = 12
"""Failing histories after which a sweep ends: more would say the same."""
WORKERS_FROM: Final = 20.0
"""Seconds from which a sweep is worth starting processes for."""


@dataclass
class Tally:
    """What histories covered."""

    histories: int = 0  # Histories run.
    digests: set[str] = field(default_factory=set)  # SHA-256 of each distinct one.
    events: Counter[str] = field(default_factory=Counter)  # Events by kind.
    # Lengths, modulo 128, that requests had when a call or an accept was done.
    lengths: set[int] = field(default_factory=set)
    # Tokens that calls were fed, rejected drafts included, and requests that took part.
    tokens: int = 0
    requests: int = 0
    compared: Compared = field(default_factory=Counter)  # Rows compared.
    # The first failure of each candidate in each history that had one.
    failures: list[TrialFailure] = field(default_factory=list)
    failing: int = 0  # Histories that failed on some candidate.
    # By candidate: histories that it does not cover.
    left_out: Counter[str] = field(default_factory=Counter)

    def run(
        self,
        scenario: Scenario,
        candidates: Sequence[StatefulCandidate],
        *,
        reference: bool = True,
        progress: Progress = QUIET,
    ) -> None:
        """Run one more history."""
        actions = check(scenario)
        trial = try_scenario(scenario, candidates, reference=reference, progress=progress)
        self.histories += 1
        self.digests.add(scenario_digest(scenario))
        self.events.update(kind_of(event) for event in scenario.events)
        for action in actions:
            views = [part.after for part in action.parts if not part.draft]
            views += [] if action.after is None else [action.after]
            self.lengths.update(len(view.texts) % 128 for view in views)
            self.tokens += sum(len(part.texts) for part in action.parts)
        self.requests += len(scenario.requests)
        self.compared += trial.compared
        self.failures += trial.failures
        self.failing += bool(trial.failures)
        self.left_out.update(c.info.name for c in candidates if not covers(c, scenario))

    def add(self, other: Tally) -> None:
        """Add what a worker counted."""
        self.histories += other.histories
        self.digests |= other.digests
        self.events += other.events
        self.lengths |= other.lengths
        self.tokens += other.tokens
        self.requests += other.requests
        self.compared += other.compared
        self.failures += other.failures
        self.failing += other.failing
        self.left_out += other.left_out


def sweep(
    names: Sequence[str],
    candidates: Sequence[StatefulCandidate],
    seconds: float,
    seed: int,
    progress: Progress,
) -> Tally:
    """Run histories 0, 1, 2 .. of a seed until the time is up.

    Parameters
    ----------
    names
        Names that ``create`` knows; workers make their own.
    candidates
        The candidates of these names.
    seconds
        Time; what has begun is finished.
    seed
        Of the histories and of token values.
    progress
        Told of every second that passed.

    Returns
    -------
    Tally
        With the first failure of each candidate made small.

    Raises
    ------
    CandidateFailed
        If a candidate raises.
    """
    end = time.time() + seconds
    progress.start("histories, seconds", max(1, round(seconds)))
    tally = Tally()
    passed = 0
    for part in _parts(names, candidates, end, seed):
        tally.add(part)
        now = min(round(seconds - (end - time.time())), round(seconds))
        progress.advance(max(0, now - passed))
        passed = max(passed, now)
        if tally.failing >= ENOUGH:
            break
    tally.failures = [_smallest(failure, candidates) for failure in _first(tally.failures)]
    return tally


def _parts(
    names: Sequence[str], candidates: Sequence[StatefulCandidate], end: float, seed: int
) -> Generator[Tally, None, None]:
    """Yield tallies of batches of histories."""
    workers = torch.get_num_threads()
    on_card = any(candidate.info.device == "cuda" for candidate in candidates)
    if workers == 1 or on_card or end - time.time() < WORKERS_FROM:
        yield from _here(candidates, end, seed)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _start_worker) as pool:  # leaving the block ends the processes
        waiting: deque[AsyncResult[Tally]] = deque()
        first = 0
        while time.time() < end or waiting:
            while len(waiting) < 2 * workers and time.time() < end:
                task = (tuple(names), end, seed, first)
                waiting.append(pool.apply_async(_batch, task))
                first += BATCH
            if waiting:
                yield waiting.popleft().get()


def _here(candidates: Sequence[StatefulCandidate], end: float, seed: int) -> Iterator[Tally]:
    """Yield tallies of single histories run in this process; at least one."""
    index = 0
    while index == 0 or time.time() < end:
        tally = Tally()
        _run(tally, seed, index, candidates)
        yield tally
        index += 1


def _run(tally: Tally, seed: int, index: int, candidates: Sequence[StatefulCandidate]) -> None:
    reference = index % REFERENCE_EVERY == 0
    tally.run(random_scenario(seed, index), candidates, reference=reference)


def _start_worker() -> None:
    # Ctrl-C is for the parent, which ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _batch(names: tuple[str, ...], end: float, seed: int, first: int) -> Tally:
    candidates = [c for c in map(create, names) if isinstance(c, StatefulCandidate)]
    tally = Tally()
    for index in range(first, first + BATCH):
        if index == first or time.time() < end:
            _run(tally, seed, index, candidates)
    return tally


def _first(failures: Sequence[TrialFailure]) -> list[TrialFailure]:
    """Return the first failure of each candidate."""
    found: dict[str, TrialFailure] = {}
    for failure in failures:
        found.setdefault(failure.candidate, failure)
    return list(found.values())


def _smallest(failure: TrialFailure, candidates: Sequence[StatefulCandidate]) -> TrialFailure:
    """Return the failure of the smallest history that still fails on the same candidate."""
    (candidate,) = [c for c in candidates if c.info.name == failure.candidate]
    found = failure

    def fails(scenario: Scenario) -> bool:
        nonlocal found
        if not covers(candidate, scenario):
            return False
        trial = try_candidate(scenario, check(scenario), candidate)
        if trial.failures:
            found = trial.failures[0]
        return bool(trial.failures)

    shrink(failure.scenario, fails)
    return found


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
