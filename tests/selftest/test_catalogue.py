"""The catalogue through the whole pipeline: the gates of the self-test are those of ``verify``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.wrapped import NamedPlanted

from needlepoint.verify.judge.candidate_run import CandidateFailed
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.schema.result import CandidateResult
from needlepoint.verify.selftest.faults.catalogue import CATALOGUE, CONTROLS, FAULTS
from needlepoint.verify.selftest.faults.fault import Case, Setting
from needlepoint.verify.selftest.gates import (
    BIAS,
    INVALID,
    PROTOCOL,
    REPEAT,
    SELECTOR,
    SKIPPED,
    STAGE_GATES,
    UNKNOWN,
    UNOWNED,
    ordered,
)
from needlepoint.verify.selftest.input import SelftestInput, own_input
from needlepoint.verify.selftest.judge import GroundJudge

Judged = Callable[[Setting], tuple[GroundJudge, dict[str, CandidateResult]]]

PER_GATE = 1
"""Faults of each gate and setting that go through the pipeline; all go through the self-test."""

ALWAYS = ("wrong-positive-constant", "tokens-swapped", "needle-of-one-query-lost")


def _chosen() -> tuple[Case, ...]:
    """Return some faults of each gate and setting that verify judges, and every control."""
    taken: dict[tuple[str, str, int], int] = {}
    found = []
    for case in FAULTS:
        gate = case.gates[0]
        key = (gate, case.setting.key_format, case.setting.ratio)
        asked = case.id in ALWAYS
        if not asked and (
            gate in (PROTOCOL, SKIPPED, UNOWNED, REPEAT) or taken.get(key, 0) == PER_GATE
        ):
            continue
        taken[key] = taken.get(key, 0) + 1
        found.append(case)
    return (*found, *CONTROLS)


@pytest.fixture(scope="module")
def source() -> SelftestInput:
    return own_input(0)


@pytest.fixture(scope="module")
def judged(source: SelftestInput, judge: Callable[..., PipelineOutput]) -> Judged:
    """Return the self-test's judge of a setting, and what the pipeline says of its cases."""
    kept: dict[Setting, tuple[GroundJudge, dict[str, CandidateResult]]] = {}

    def run(setting: Setting) -> tuple[GroundJudge, dict[str, CandidateResult]]:
        if setting not in kept:
            whole = source.of_kind(setting.kind)
            layer = source.layer(setting.ratio)
            assert layer is not None
            inputs = replace(whole, layers=(layer,))
            ground = source.judge(setting, 1.0, Limits.default())
            cases = [case for case in _chosen() if case.setting == setting]
            candidates = [NamedPlanted(case.id, ground.planted(case)) for case in cases]
            result = judge(inputs, *candidates).result
            kept[setting] = ground, {c.name: c for c in result.candidates}
        return kept[setting]

    return run


def gates_of(result: CandidateResult) -> tuple[str, ...]:
    """Return the gates that a result of ``verify`` shows."""
    gates = set()
    for layer in result.layers:
        for stage in layer.stages:
            name = f"{stage.path}.{stage.stage}"
            if name in STAGE_GATES and stage.local is not None and stage.local.rows_failed:
                gates.add(name)
            if any(test.exceeded for test in stage.bias):
                gates.add(BIAS)
        if layer.topk is not None:
            swaps = layer.topk.swaps
            counts = {SELECTOR: swaps.selector, UNKNOWN: swaps.unknown, INVALID: layer.topk.invalid}
            found = {gate for gate, count in counts.items() if count}
            (topk,) = (stage for stage in layer.stages if stage.stage == "topk")
            # Picks of the reference that the candidate's own scores do not justify swap nothing.
            if topk.local is not None and topk.local.rows_failed:
                gates |= found or {SELECTOR}
    return ordered(gates)


@pytest.mark.parametrize("id", [case.id for case in _chosen()])
def test_verify_says_what_the_self_test_says(id: str, judged: Judged) -> None:
    case = CATALOGUE[id]
    ground, results = judged(case.setting)
    result = results[id]

    expected = ground.find(case).gates
    assert gates_of(result) == tuple(gate for gate in expected if gate != UNOWNED)
    assert result.verdict == ("match" if case.control else "differ")
    assert (result.first_divergence is None) == case.control
    if not case.control and case.gates[0] in STAGE_GATES:
        first = result.first_divergence
        assert first is not None
        assert f"{first.path}.{first.stage}" == case.gates[0]


@pytest.mark.parametrize("id", [case.id for case in FAULTS if case.gates == (PROTOCOL,)])
def test_a_broken_rule_is_refused(
    id: str, source: SelftestInput, judge: Callable[..., PipelineOutput]
) -> None:
    case = CATALOGUE[id]
    ground = source.judge(case.setting, 1.0, Limits.default())

    with pytest.raises(CandidateFailed, match=id):
        judge(source.inputs, NamedPlanted(id, ground.planted(case)))


def test_a_stage_that_is_not_returned_is_no_match(
    source: SelftestInput, judge: Callable[..., PipelineOutput]
) -> None:
    case = CATALOGUE["stage-not-returned"]
    ground = source.judge(case.setting, 1.0, Limits.default())
    inputs = replace(source.inputs, layers=(0,))

    result = judge(inputs, NamedPlanted(case.id, ground.planted(case))).result

    assert result.verdict == "cannot-judge"
    assert [(s.path, s.stage) for s in result.counts.skipped] == [("index", "scores")]


def test_what_wrong_scores_select_is_upstream_and_has_a_price(judged: Judged) -> None:
    """The selection did its work; the scores that it was given are to blame."""
    _, results = judged(CATALOGUE["relu-missing"].setting)
    layer = results["relu-missing"].layers[0]

    stages = {stage.stage: stage for stage in layer.stages}
    assert stages["topk"].verdict == "match"
    assert layer.topk is not None
    assert layer.topk.swaps.upstream > 50
    assert layer.topk.swaps.selector == 0
    assert layer.topk.score_lost_max is not None
    assert layer.topk.score_lost_max > 0.1
    attention = stages["attention"].accumulated
    assert attention is not None
    assert attention.error.max is not None
    assert attention.error.max > 0.01
