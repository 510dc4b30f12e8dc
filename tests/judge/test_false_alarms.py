from __future__ import annotations

from pathlib import Path

import pytest
from support.wrapped import WrappedCandidate, planted

from needlepoint.benchmarks.random_cases import (
    CANDIDATES,
    SOURCES,
    RandomCase,
    case_inputs,
    judge_case,
    random_case,
)
from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.candidates.emulated import EmulatedCandidate
from needlepoint.optimized.protocol.interface import LayerInputs, Observed
from needlepoint.verify.numerics.limits import Limits

CASES = 40
LONGEST = 150  # short requests: cases are many here, not large
SEED = 5  # the benchmark's default is 0


@pytest.fixture(scope="module")
def cases() -> list[RandomCase]:
    return [random_case(SEED, index, LONGEST) for index in range(CASES)]


@pytest.mark.parametrize("index", range(CASES))
def test_correct_candidates_raise_no_alarm(index: int) -> None:
    outcome = judge_case(random_case(SEED, index, LONGEST))

    assert outcome.alarm is None, outcome.case.describe()
    assert outcome.result is not None
    stages = outcome.result.candidates[0].layers[0].stages
    compared = [stage for stage in stages if stage.kind == "compared"]
    assert len(compared) == 13
    assert all(stage.rows_compared > 0 for stage in compared)


def test_cases_reach_every_pair_both_layers_and_all_residues(cases: list[RandomCase]) -> None:
    pairs = {(case.source, case.candidate) for case in cases}
    lengths = [length for case in cases for length in case.lengths]

    assert len(pairs) == len(SOURCES) * len(CANDIDATES) == 36
    assert {length % 4 for length in lengths} == {0, 1, 2, 3}
    assert {length % 128 for length in lengths} >= {0, 1, 2, 3, 127}
    assert min(lengths) < 4
    assert {len(case.lengths) for case in cases} == {1, 2, 3, 4}
    assert {case_inputs(case).layers for case in cases} == {(0,), (0, 1)}
    assert all(case.config.index_topk < max(case.lengths) // 4 for case in cases)


@pytest.mark.parametrize("index", [0, 1])
def test_a_case_is_a_function_of_seed_and_index(index: int) -> None:
    case = random_case(SEED, index)
    assert random_case(SEED, index) == case
    assert case_inputs(case).sha256 == case_inputs(case).sha256

    others = (random_case(SEED + 1, index), random_case(SEED, index + len(SOURCES)))
    for other in others:
        assert other.source == case.source
        assert other.seed != case.seed
        assert case_inputs(other).sha256 != case_inputs(case).sha256


def test_slices_of_the_recording_differ_and_lie_in_its_longest_request() -> None:
    cases = [random_case(SEED, len(SOURCES) * step) for step in range(40)]
    starts = [start for case in cases for start in case.starts]
    ends = [s + n for case in cases for s, n in zip(case.starts, case.lengths, strict=True)]

    assert {case.source for case in cases} == {"mini"}
    assert len(set(starts)) == len(starts)
    assert max(starts) > 6000
    assert max(ends) <= 8195


@pytest.mark.parametrize(
    ("seed", "index", "longest"), [(-1, 0, 700), (0, -1, 700), (0, 0, 129), (0, 0, 8193)]
)
def test_arguments_out_of_range_are_refused(seed: int, index: int, longest: int) -> None:
    with pytest.raises(ValueError, match=rf"seed {seed}, index {index}, longest request {longest}"):
        random_case(seed, index, longest)


def test_tight_limits_raise_an_alarm_that_names_the_token(tmp_path: Path) -> None:
    path = tmp_path / "limits.toml"
    path.write_text("[pooled]\nvalue = 0.02\n")

    outcome = judge_case(random_case(SEED, 1, LONGEST), Limits.load(path))

    assert outcome.alarm is not None
    assert outcome.alarm.startswith('differ: {"layer":0,"stage":"pooled","path":"index"')


def test_a_fault_raises_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(name: str) -> WrappedCandidate:
        claims = {"name": create(name).info.name}
        return WrappedCandidate(planted("needle-of-one-query-lost"), inner=name, claims=claims)

    monkeypatch.setattr("needlepoint.benchmarks.random_cases.create", faulty)

    outcome = judge_case(random_case(SEED, 1, LONGEST))

    assert outcome.alarm is not None
    assert '"stage":"topk"' in outcome.alarm


def test_a_refusal_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: EmulatedCandidate, inputs: LayerInputs) -> Observed:
        raise RuntimeError("lost the device")

    monkeypatch.setattr(EmulatedCandidate, "run", fail)

    outcome = judge_case(random_case(SEED, 0, LONGEST))

    assert outcome.result is None
    assert outcome.alarm is not None
    assert outcome.alarm.startswith("refused: ")
    assert "lost the device" in outcome.alarm
