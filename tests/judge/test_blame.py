"""Directions and blame in a whole run: what hides from the size limits, and where it was born."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.wrapped import WrappedCandidate, keep
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    QUERY,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.report.junit import junit_xml
from needlepoint.verify.report.summary import headline
from needlepoint.verify.schema.result import Result, StageResult

Judge = Callable[..., PipelineOutput]
Load = Callable[..., Inputs]


def stages(result: Result) -> dict[StageKey, StageResult]:
    return {(s.path, s.stage): s for s in result.candidates[0].layers[0].stages}


def of_scores(by: Callable[[Tensor], Tensor]) -> Callable[[LayerInputs, Observed], Observed]:
    """Return a change of every score."""

    def change(_: LayerInputs, observed: Observed) -> Observed:
        reader = observed.scores
        assert reader is not None
        return replace(observed, scores=lambda r, a, b: by(reader(r, a, b)))

    return change


@pytest.mark.parametrize("gain", [2.5e-6, -2.5e-6])
def test_a_gain_of_the_scores_hides_from_their_limit_and_has_a_direction(
    gain: float, judge: Judge, small_inputs: Load
) -> None:
    candidate = WrappedCandidate(of_scores(lambda s: s * (1 + gain)))

    result = judge(small_inputs(tokens=200, layers=(0,)), candidate).result

    scores = stages(result)[INDEX, "scores"]
    assert scores.local is not None
    assert scores.local.rows_failed == 0
    assert scores.verdict == result.verdict == "differ"
    (test,) = scores.bias
    assert (test.test, test.exceeded) == ("gain", True)
    assert test.effect == pytest.approx(gain, rel=0.1)
    first = result.candidates[0].first_divergence
    assert first is not None
    assert first.stage == "scores"
    assert first.detail.startswith("signed bias test, mean gain ")
    assert "; 0 of 200 rows beyond the limit" in first.detail
    # No row fails by itself: the first line of every surface names the test, not a row's error.
    assert headline(result).endswith(f": {first.detail}")
    assert "x limit" not in headline(result)
    assert first.detail.split(";")[0] in junit_xml(result).decode()
    assert "x limit" not in junit_xml(result).decode()
    others = [s for key, s in stages(result).items() if key != (INDEX, "scores")]
    assert not any(test.exceeded for stage in others for test in stage.bias)


def test_blame_parts_format_arithmetic_and_fault(judge: Judge, small_inputs: Load) -> None:
    """One roped row is wrong: a fault of its stage, handed on by what follows, absent elsewhere."""

    def one_row(_: LayerInputs, observed: Observed) -> Observed:
        rows = observed.dense[INDEX, "roped"].clone()
        rows[7] *= 1.25
        return replace(observed, dense={**observed.dense, (INDEX, "roped"): rows})

    inputs = small_inputs(tokens=200, layers=(0,))
    sound = stages(judge(inputs, create("emulated:fused-fp8")).result)
    found = stages(judge(inputs, WrappedCandidate(one_row)).result)

    for stage in sound.values():
        assert (stage.blame is None) == (stage.kind != "compared" or stage.stage == "topk")
        if stage.blame is not None:
            assert stage.blame.fault == 0.0
            assert stage.blame.arithmetic is not None
            assert stage.blame.arithmetic < 1e-3
            assert stage.blame.output == stage.blame.arithmetic
    stored, pooled = sound[INDEX, "stored"].blame, sound[INDEX, "pooled"].blame
    assert stored is not None
    assert pooled is not None
    assert stored.format is not None
    assert 0.01 < stored.format < 0.05  # E4M3: three mantissa bits
    assert pooled.format == 0.0
    normed, roped = (found[INDEX, name].blame for name in ("normed", "roped"))
    assert normed is not None
    assert roped is not None
    assert normed.input == pooled.output
    assert normed.fault == 0.0
    # One of 46 rows is off by a quarter.
    entries = sum(length // 4 for length in inputs.requests)
    assert roped.fault == pytest.approx(0.25 * entries**-0.5, rel=0.3)
    assert roped.input is not None
    assert roped.output is not None
    assert roped.output > 1e4 * roped.input
    rotated = found[INDEX, "rotated"].blame
    assert rotated is not None
    assert rotated.input == roped.output


def test_the_input_of_a_stage_is_that_of_the_last_stage_that_was_shown(
    judge: Judge, small_inputs: Load
) -> None:
    shown = frozenset({(INDEX, "pooled"), (INDEX, "stored"), (MAIN, "stored"), (QUERY, "query")})

    shown |= {(QUERY, "weights")}
    candidate = WrappedCandidate(keep(*shown), shown=shown)
    found = stages(judge(small_inputs(tokens=136, layers=(0,)), candidate).result)

    stored, pooled = found[INDEX, "stored"].blame, found[INDEX, "pooled"].blame
    assert stored is not None
    assert pooled is not None
    assert stored.input == pooled.output
    assert pooled.input is None
