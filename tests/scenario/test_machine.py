"""Hypothesis writes histories; a failing one is shrunk and printed as a file that replays."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.candidates.emulated import EmulatedCandidate, Order
from needlepoint.verify.scenario.actions import ScenarioError
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
    Restore,
    Scenario,
    Split,
)
from needlepoint.verify.scenario.file import dump_scenario, parse_scenario
from needlepoint.verify.scenario.rules import check
from needlepoint.verify.scenario.trial import try_candidate
from needlepoint.verify.selftest.faults.scenario import FAULTS

NAMES = st.sampled_from("abcd")
SOME = st.lists(NAMES, min_size=1, max_size=3, unique=True)
TOKENS = st.one_of(st.integers(1, 9), st.integers(1, 140))
SETTINGS = settings(
    max_examples=15,
    stateful_step_count=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


class Calls(RuleBasedStateMachine):
    """Adds events that are possible, here short calls, and runs the history at its end."""

    candidate = create("emulated:fused-fp8")
    template: Scenario

    @initialize(
        state=st.sampled_from(["fp32", "bf16"]),
        slots=st.integers(2, 4),
        page_tokens=st.sampled_from([128, 256]),
        tokens=st.integers(1, 9),
    )
    def start(self, state: str, slots: int, page_tokens: int, tokens: int) -> None:
        self.history = replace(
            self.template, state=state, slots=slots, page_tokens=page_tokens, events=()
        )
        self.add(Prefill(("a",), (tokens,)))

    def add(self, *events: Event) -> None:
        longer = replace(self.history, events=(*self.history.events, *events))
        try:
            check(longer)
        except ScenarioError:
            return
        self.history = longer

    @rule(names=SOME, tokens=st.lists(st.integers(1, 9), min_size=3, max_size=3))
    def prefill(self, names: list[str], tokens: list[int]) -> None:
        self.add(Prefill(tuple(names), tuple(tokens[: len(names)])))

    @rule(names=SOME)
    def decode(self, names: list[str]) -> None:
        self.add(Decode(tuple(names)))

    @rule(name=NAMES, tokens=st.integers(1, 8), keep=st.integers(0, 8))
    def draft(self, name: str, tokens: int, keep: int) -> None:
        self.add(Draft((name,), (tokens,)), Accept((name,), (min(keep, tokens),)))

    def teardown(self) -> None:
        failures = try_candidate(self.history, check(self.history), self.candidate).failures  # type: ignore[arg-type]
        if failures:
            raise AssertionError(f"{failures[0].failure}\n# replay\n{dump_scenario(self.history)}")


class Histories(Calls):
    """The whole event language, and requests over windows of 128."""

    @rule(names=SOME, tokens=st.lists(TOKENS, min_size=3, max_size=3))
    def long_prefill(self, names: list[str], tokens: list[int]) -> None:
        self.add(Prefill(tuple(names), tuple(tokens[: len(names)])))

    @rule(name=NAMES, tokens=st.integers(1, 8), others=SOME)
    def draft_and_wait(self, name: str, tokens: int, others: list[str]) -> None:
        self.add(Draft((name,), (tokens,)), Decode(tuple(others)), Accept((name,), (tokens // 2,)))

    @rule(name=NAMES, source=NAMES, prefix=TOKENS)
    def fork(self, name: str, source: str, prefix: int) -> None:
        self.add(Fork(name, source, prefix))

    @rule(name=NAMES, kind=st.sampled_from([Evict, Offload, Restore, Free]))
    def move(self, name: str, kind: Callable[[str], Event]) -> None:
        self.add(kind(name))

    @rule(name=NAMES, pool=st.integers(0, 1))
    def copy(self, name: str, pool: int) -> None:
        self.add(Copy(name, pool))

    @rule(
        names=SOME,
        rows=st.integers(1, 5),
        side=st.sampled_from(["front", "back"]),
        ranks=st.integers(2, 5),
        layout=st.sampled_from(["strided", "contiguous"]),
    )
    def shape(self, names: list[str], rows: int, side: str, ranks: int, layout: str) -> None:
        call = Prefill(tuple(names), (7,) * len(names))
        self.add(Pad(rows, side), Split(ranks, layout), call)


def machine(
    kind: type[Calls], candidate: object, template: Scenario
) -> type[RuleBasedStateMachine]:
    return type("Machine", (kind,), {"candidate": candidate, "template": template})


@pytest.mark.parametrize("name", ["emulated:fused-fp8", "emulated:unfused-bf16"])
def test_histories_equal_their_tokens_alone(name: str, scenario: Callable[..., Scenario]) -> None:
    run_state_machine_as_test(machine(Histories, create(name), scenario()), settings=SETTINGS)


def test_a_failing_history_is_shrunk_and_printed_as_a_file(
    scenario: Callable[..., Scenario],
) -> None:
    (fault,) = [fault for fault in FAULTS if fault.id == "drafts-kept"]
    faulty = fault.candidate()
    quick = settings(
        SETTINGS,
        max_examples=30,
        stateful_step_count=6,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
    )
    with pytest.raises(AssertionError) as caught:
        run_state_machine_as_test(machine(Calls, faulty, scenario()), settings=quick)
    printed = parse_scenario(str(caught.value).partition("# replay\n")[2])

    assert try_candidate(printed, check(printed), faulty).failures
    sound = EmulatedCandidate("fp8", Order.FUSED)
    assert not try_candidate(printed, check(printed), sound).failures
    assert len(printed.events) <= 8
    assert re.search(r"Draft|Accept", " ".join(type(e).__name__ for e in printed.events))
