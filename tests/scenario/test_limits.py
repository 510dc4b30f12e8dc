"""A candidate of another profile is held to that profile's limits, not to bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.servers import Bf16Candidate

from needlepoint.verify.scenario.events import Accept, Decode, Draft, Fork, Prefill, Scenario
from needlepoint.verify.scenario.rules import check
from needlepoint.verify.scenario.trial import covers, try_candidate

EVENTS = (
    Prefill(("a", "b"), (70, 129)),
    Draft(("a",), (5,)),
    Decode(("b",)),
    Accept(("a",), (3,)),
    Fork("c", "b", 61),
    Prefill(("c", "a"), (9, 60)),
)


def test_it_passes_within_the_limits(scenario: Callable[..., Scenario]) -> None:
    made = scenario(*EVENTS)
    trial = try_candidate(made, check(made), Bf16Candidate())

    assert trial.failures == []
    assert set(trial.compared) >= {
        ("contract", 4, ("index", "stored")),
        ("contract", 4, ("index", "topk")),
        ("contract", 4, ("query", "query")),
        ("contract", 128, ("main", "stored")),
    }


@pytest.mark.parametrize("shift", [0.02, -0.5])
def test_it_fails_beyond_them(shift: float, scenario: Callable[..., Scenario]) -> None:
    made = scenario(*EVENTS)
    (found,) = try_candidate(made, check(made), Bf16Candidate(shift)).failures

    assert (found.failure.event, found.failure.problem.entry) == (0, 2)
    assert "x limit of the same tokens alone" in found.failure.problem.detail


def test_a_bf16_state_is_not_covered(scenario: Callable[..., Scenario]) -> None:
    assert covers(Bf16Candidate(), scenario(*EVENTS))
    assert not covers(Bf16Candidate(), scenario(*EVENTS, state="bf16"))
