from __future__ import annotations

from collections.abc import Iterator

import pytest
from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from needlepoint.verify.judge.results.gates import apply_gates, parse_gate
from needlepoint.verify.report.junit import junit_xml
from needlepoint.verify.schema.result import Result, with_notes


def _cases(result: Result) -> Iterator[tuple[str, str, type | None, str]]:
    """Yield class, name, outcome and message of every case."""
    for suite in JUnitXml.fromstring(junit_xml(result)):
        if not isinstance(suite, TestSuite):
            raise ValueError("expected suites")
        for case in suite:
            if not isinstance(case, TestCase):
                raise ValueError("expected cases")
            outcome = case.result[0] if case.result else None
            message = "" if outcome is None else str(outcome.message)
            yield str(case.classname), str(case.name), type(outcome) if outcome else None, message


def test_every_stage_of_every_layer_and_candidate_is_a_case(matching: Result) -> None:
    expected = {
        (f"{c.name}.layer{layer.layer}", f"{s.path}.{s.stage}")
        for c in matching.candidates
        for layer in c.layers
        for s in layer.stages
    }
    cases = list(_cases(matching))

    assert {(where, name) for where, name, *_ in cases} == expected | {("needlepoint", "verdict")}
    assert len(cases) == len(expected) + 1


def test_passing_and_skipped_stages(matching: Result) -> None:
    outcomes = {(where, name): (kind, why) for where, name, kind, why in _cases(matching)}
    layer = "emulated:fused-fp8.layer2"

    assert outcomes[layer, "index.stored"] == (None, "")
    assert outcomes[layer, "index.projected"] == (Skipped, "given")
    assert outcomes[layer, "main.attention"] == (Skipped, "consequence")
    assert outcomes["needlepoint", "verdict"] == (None, "")


def test_a_stage_that_differs_is_a_failure_with_its_token(differing: Result) -> None:
    failures = [case for case in _cases(differing) if case[2] is Failure]

    assert [case[:2] for case in failures] == [
        ("emulated:fused-fp8.layer2", "index.stored"),
        ("needlepoint", "verdict"),
    ]
    assert "request 0 position 511 entry 127: 3.25 x limit" in failures[0][3]
    assert "layer 2 index.stored" in failures[1][3]


def test_what_could_not_be_judged_is_an_error(matching: Result) -> None:
    first, second = matching.candidates
    layer = first.layers[0]
    stage = layer.stages[1].model_copy(update={"verdict": "cannot-judge", "rows_compared": 0})
    layers = (layer.model_copy(update={"stages": (stage, *layer.stages[2:])}), *first.layers[1:])
    first = first.model_copy(update={"layers": layers, "verdict": "cannot-judge"})
    result = matching.model_copy(update={"candidates": (first, second), "verdict": "cannot-judge"})

    errors = [case for case in _cases(result) if case[2] is Error]

    assert [case[:2] for case in errors] == [
        ("emulated:fused-bf16.layer2", "index.pooled"),
        ("needlepoint", "verdict"),
    ]
    assert errors[0][3] == "0 of 2048 rows compared"


@pytest.mark.parametrize(
    ("gate", "kind"),
    [
        ("layers.topk.overlap_min>=0.5", None),
        ("layers.topk.overlap_min>=0.99", Failure),
        ("recall.lost<=0", Error),
    ],
)
def test_gates_are_cases(gate: str, kind: type | None, matching: Result) -> None:
    gated = apply_gates(matching, (parse_gate(gate),))
    outcomes = {(where, name): found for where, name, found, _ in _cases(gated)}

    for candidate in matching.candidates:
        assert outcomes[f"{candidate.name}.gates", gate] is kind
    assert outcomes["needlepoint", "verdict"] is kind


def test_notes_and_the_values_of_the_divergence_are_output_of_the_verdict(
    matching: Result, differing: Result
) -> None:
    def output(result: Result) -> list[str] | None:
        case = next(
            case
            for suite in JUnitXml.fromstring(junit_xml(result))
            for case in suite
            if case.classname == "needlepoint"
        )
        return None if case.system_out is None else str(case.system_out).splitlines()

    assert output(matching) is None
    assert output(with_notes(matching, "shrink: nothing to <shrink>", "b\x00c")) == [
        "note: shrink: nothing to <shrink>",
        "note: b?c",
    ]
    assert output(with_notes(differing, "one more")) == [
        "candidate emulated:fused-fp8: code",
        "expected 0.12345679, found 0.12345678 at dim 17",
        "limit 1 of the a-priori bound",
        "note: one more",
    ]
    assert junit_xml(differing).index(b'<failure message="differ: ') < junit_xml(differing).index(
        b"<system-out>"
    )


def test_totals_agree_with_the_cases(differing: Result) -> None:
    cases = list(_cases(differing))
    document = JUnitXml.fromstring(junit_xml(differing))

    assert document.tests == len(cases)
    assert document.failures == sum(case[2] is Failure for case in cases) == 2
    assert document.errors == 0
    assert document.skipped == sum(case[2] is Skipped for case in cases)


def test_characters_that_xml_cannot_hold_are_replaced(matching: Result) -> None:
    odd = matching.candidates[0].model_copy(update={"name": "a\x00b\x1b<&>"})
    result = matching.model_copy(update={"candidates": (odd,)})

    assert {where for where, *_ in _cases(result)} >= {"a?b?<&>.layer2"}


def test_same_result_gives_the_same_bytes(differing: Result) -> None:
    assert junit_xml(differing) == junit_xml(differing)
    assert junit_xml(differing).startswith(b"<?xml")
