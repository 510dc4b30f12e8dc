"""Scenarios by a few words, and candidates driven through them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.serving import StatefulCandidate
from needlepoint.verify.scenario.events import Event, Request, Scenario
from needlepoint.verify.scenario.reference import ReferenceCandidate
from needlepoint.verify.scenario.rules import check
from needlepoint.verify.scenario.run import Failure
from needlepoint.verify.scenario.trial import Trial, try_candidate

Drive = Callable[..., Trial]


def make_scenario(*events: Event, **fields: object) -> Scenario:
    requests = tuple(Request(name, text) for text, name in enumerate("abcd"))
    made = Scenario("test", requests, events, slots=4, pages=12)
    return replace(made, **fields)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def scenario() -> Callable[..., Scenario]:
    """Return a function that makes a scenario of requests ``a`` to ``d`` from events."""
    return make_scenario


@pytest.fixture(scope="session")
def drive() -> Drive:
    """Return a function that drives candidates, by name or not, through events.

    Whoever is driven must hold to the oracle, and something must have been compared.
    """

    def run(
        *events: Event, who: str | StatefulCandidate = "emulated:fused-fp8", **fields: object
    ) -> Trial:
        made = make_scenario(*events, **fields)
        candidate = who
        if isinstance(candidate, str):
            found = ReferenceCandidate(0) if candidate == "reference" else create(candidate)
            assert isinstance(found, StatefulCandidate)
            candidate = found
        trial = try_candidate(made, check(made), candidate)
        assert [describe(f.failure) for f in trial.failures] == []
        assert sum(trial.compared.values()) > 0
        return trial

    return run


def describe(failure: Failure) -> str:
    problem = failure.problem
    return (
        f"event {failure.event}, request {failure.request}, position {problem.position}: "
        f"{problem.path}.{problem.stage} {problem.detail}"
    )
