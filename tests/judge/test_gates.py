from __future__ import annotations

import pytest

from needlepoint.verify.judge.results.gates import Gate, apply_gates, parse_gate
from needlepoint.verify.schema.result import (
    CandidateResult,
    GateResult,
    LayerResult,
    RecallResult,
    Result,
    Spread,
)


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("recall.lost<=0", Gate("recall.lost", "<=", 0.0)),
        ("recall.rate < 1", Gate("recall.rate", "<", 1.0)),
        (" layers.topk.overlap_min>=.99 ", Gate("layers.topk.overlap_min", ">=", 0.99)),
        ("format_cost.bf16.rel_max > -1e-3", Gate("format_cost.bf16.rel_max", ">", -0.001)),
        ("layers.topk.invalid==0", Gate("layers.topk.invalid", "==", 0.0)),
        ("recall.causes.outranked<=2", Gate("recall.causes.outranked", "<=", 2.0)),
        ("profile.switches.hadamard==1", Gate("profile.switches.hadamard", "==", 1.0)),
        ("layers.stages.local.error.max<1", Gate("layers.stages.local.error.max", "<", 1.0)),
    ],
)
def test_gates_are_parsed(text: str, gate: Gate) -> None:
    assert parse_gate(text) == gate


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected PATH<=VALUE"),
        ("recall.lost", "expected PATH<=VALUE"),
        ("recall.lost=0", "expected PATH<=VALUE"),
        ("recall..lost<=0", "expected PATH<=VALUE"),
        ("<=0", "expected PATH<=VALUE"),
        ("recall.lost<=", "expected PATH<=VALUE"),
        ("recall.lost<=zero", "'zero' is not a finite number"),
        ("recall.lost<=nan", "'nan' is not a finite number"),
        ("recall.lost<=inf", "'inf' is not a finite number"),
        ("recall.losses<=0", "recall has no field 'losses'; expected one of .*'lost'"),
        ("lost<=0", "a candidate has no field 'lost'"),
        ("layers<=0", "'layers' is not a number"),
        ("name<=0", "'name' is not a number"),
        ("recall.causes<=0", "'causes' is not a number"),
        ("recall.lost.x<=0", "'lost' has no fields"),
        ("recall.causes.a.b<=0", "'causes' has no fields"),
    ],
)
def test_wrong_gates_say_what_is_wrong(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_gate(text)


def _gated(result: Result, *texts: str) -> Result:
    return apply_gates(result, tuple(parse_gate(text) for text in texts))


def _with_layers(result: Result, *layers: LayerResult) -> Result:
    candidate = result.candidates[0].model_copy(update={"layers": layers})
    return result.model_copy(update={"candidates": (candidate,)})


def _overlap(layer: LayerResult, low: float | None) -> LayerResult:
    if layer.topk is None:
        raise ValueError("the sample layer has a selection")
    return layer.model_copy(update={"topk": layer.topk.model_copy(update={"overlap_min": low})})


@pytest.mark.parametrize(
    ("text", "exceeded"),
    [
        ("layers.topk.overlap_min>=0.98", False),
        ("layers.topk.overlap_min>0.98", True),
        ("layers.topk.overlap_min<=0.98", False),
        ("layers.topk.overlap_min<0.98", True),
        ("layers.topk.overlap_min==0.98", False),
        ("layers.topk.overlap_min==0.97", True),
    ],
)
def test_every_operator_keeps_or_exceeds_at_its_limit(
    text: str, exceeded: bool, matching: Result
) -> None:
    gated = _gated(matching, text)

    assert [g.exceeded for g in gated.gates] == [exceeded, exceeded]
    assert gated.verdict == ("differ" if exceeded else "match")
    assert [c.verdict for c in gated.candidates] == ["match", "match"]


def test_one_bad_element_of_a_list_is_found(matching: Result) -> None:
    layer = matching.candidates[0].layers[0]
    result = _with_layers(matching, layer, _overlap(layer, 0.4), _overlap(layer, 0.9))

    gate = _gated(result, "layers.topk.overlap_min>=0.98").gates[0]

    assert (gate.found, gate.exceeded, gate.candidate) == (0.4, True, "emulated:fused-bf16")


def test_kept_gate_shows_the_value_closest_to_its_limit(matching: Result) -> None:
    layer = matching.candidates[0].layers[0]
    result = _with_layers(matching, layer, _overlap(layer, 0.99))

    low, high = _gated(result, "layers.topk.overlap_min>=0.5", "layers.topk.overlap_min<=1").gates

    assert (low.found, high.found) == (0.98, 0.99)


def test_layers_without_a_selection_are_passed_over(matching: Result) -> None:
    assert matching.candidates[0].layers[1].topk is None

    assert _gated(matching, "layers.topk.overlap_min>=0.5").verdict == "match"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("recall.lost<=0", "holds no number"),
        ("format_cost.exact.rel_max<=1", "holds no number"),
        ("recall.causes.outranked<=0", "holds no number"),
    ],
)
def test_a_gate_over_nothing_cannot_be_judged(text: str, why: str, matching: Result) -> None:
    gated = _gated(matching, text)

    assert gated.verdict == "cannot-judge"
    assert all(g.exceeded is None and g.found is None for g in gated.gates)
    assert why in str(gated.gates[0].detail)


def test_a_null_among_numbers_cannot_be_judged(matching: Result) -> None:
    layer = matching.candidates[0].layers[0]
    result = _with_layers(matching, layer, _overlap(layer, None))

    gate = _gated(result, "layers.topk.overlap_min>=0.5").gates[0]

    assert gate.exceeded is None
    assert "null in 1 of 2 places" in str(gate.detail)
    # A value past the limit is an answer, whatever the null hides.
    assert _gated(result, "layers.topk.overlap_min>=0.99").gates[0].exceeded is True


def test_a_null_statistic_is_not_a_pass(matching: Result) -> None:
    candidate = matching.candidates[0]
    layer = candidate.layers[0]
    broken = layer.stages[1]
    if broken.local is None:
        raise ValueError("the sample stage has errors")
    stats = broken.local.model_copy(update={"error": Spread(max=None, mean=None, p99=None)})
    stages = (broken.model_copy(update={"local": stats}), *layer.stages[2:])
    result = _with_layers(matching, layer.model_copy(update={"stages": stages}))

    assert _gated(result, "layers.stages.local.error.max<=1").verdict == "cannot-judge"


def test_gates_see_every_candidate(matching: Result) -> None:
    def recall(lost: int) -> RecallResult:
        return RecallResult(
            rows=10,
            hits=10 - lost,
            rate=None,
            ci95=None,
            reference_rate=None,
            lost=lost,
            gained=0,
            delta=None,
            delta_ci95=None,
            mcnemar_p=None,
            detectable_drop=None,
        )

    first, second = matching.candidates
    candidates: tuple[CandidateResult, ...] = (
        first.model_copy(update={"recall": recall(0)}),
        second.model_copy(update={"recall": recall(2)}),
    )
    result = matching.model_copy(update={"candidates": candidates})

    gated = _gated(result, "recall.lost<=0")

    assert [(g.found, g.exceeded) for g in gated.gates] == [(0.0, False), (2.0, True)]
    assert gated.verdict == "differ"


def test_a_gate_never_improves_a_verdict(differing: Result) -> None:
    kept = "layers.topk.overlap_min>=0.5"
    shortfall = differing.model_copy(update={"verdict": "cannot-judge"})

    assert _gated(differing, kept).verdict == "differ"
    assert _gated(shortfall, kept).verdict == "cannot-judge"
    assert _gated(shortfall, "layers.topk.overlap_min>=0.999").verdict == "cannot-judge"


def test_gates_without_candidates_cannot_be_judged(matching: Result) -> None:
    empty = matching.model_copy(update={"candidates": ()})

    assert _gated(empty, "recall.lost<=0").verdict == "cannot-judge"


def test_no_gates_change_nothing(matching: Result) -> None:
    assert apply_gates(matching, ()) is matching


def test_gate_results_are_part_of_the_record(matching: Result) -> None:
    gated = _gated(matching, "layers.topk.invalid==0")

    assert Result.model_validate_json(gated.model_dump_json(by_alias=True)) == gated
    assert isinstance(gated.gates[0], GateResult)
