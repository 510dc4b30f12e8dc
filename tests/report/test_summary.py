from __future__ import annotations

import pytest

from needlepoint.verify.base.numbers import number
from needlepoint.verify.judge.results.gates import apply_gates, parse_gate
from needlepoint.verify.report.summary import details, headline, layers_with, some
from needlepoint.verify.schema.result import Result, with_notes


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.01, "0.010"),
        (0.4, "0.400"),
        (999.5, "999.500"),
        (1000.0, "1.0e+03"),
        (0.0099, "9.9e-03"),
        (-3.25, "-3.250"),
    ],
)
def test_numbers_of_tables(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (set(), ""),
        ({2}, "2"),
        ({2, 5}, "2-5"),
        ({2, 9}, "2, 9"),
        ({2, 5, 8, 9}, "2-9"),
        ({5, 9}, "5, 9"),
    ],
)
def test_neighbours_are_the_layers_of_the_run(
    chosen: set[int], text: str, matching: Result
) -> None:
    layer = matching.candidates[0].layers[0]
    layers = tuple(layer.model_copy(update={"layer": n}) for n in (2, 5, 8, 9))

    assert layers_with(layers, chosen) == text


def test_long_lists_are_counted() -> None:
    assert some(["a", "b"]) == "a, b"
    assert some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert some([]) == ""


def test_a_run_without_candidates_says_so(matching: Result) -> None:
    empty = matching.model_copy(update={"candidates": (), "verdict": "cannot-judge"})

    assert headline(empty) == "cannot-judge: no candidate was run"


def test_a_candidate_without_a_reason_is_named(matching: Result) -> None:
    first, second = matching.candidates
    first = first.model_copy(update={"verdict": "cannot-judge"})
    result = matching.model_copy(update={"candidates": (first, second), "verdict": "cannot-judge"})

    assert headline(result) == "cannot-judge: emulated:fused-bf16"


def test_a_divergence_beside_a_shortfall_is_still_told(differing: Result) -> None:
    counts = differing.counts.model_copy(update={"compared": 19})
    result = differing.model_copy(update={"verdict": "cannot-judge", "counts": counts})

    assert headline(result) == "cannot-judge: 19 of 20 stages compared"
    assert details(result)[:2] == [
        "differs besides: layer 2 index.stored, request 0 position 511 entry 127: 3.25 x limit",
        "candidate emulated:fused-fp8: code",
    ]


def test_every_candidate_that_differs_is_named(differing: Result) -> None:
    broken = differing.candidates[1]
    other = broken.model_copy(update={"name": "emulated:fused-fp4"})
    result = differing.model_copy(update={"candidates": (broken, other)})

    assert details(result)[-1] == "also differ: emulated:fused-fp4"


def test_a_divergence_without_its_row_or_stage_is_told_without_values(differing: Result) -> None:
    broken = differing.candidates[1]
    where = broken.first_divergence
    if where is None:
        raise ValueError("the sample diverges")
    for change in ({"position": 515}, {"layer": 7}):
        moved = broken.model_copy(update={"first_divergence": where.model_copy(update=change)})
        lines = details(differing.model_copy(update={"candidates": (moved,)}))
        assert lines[0] == "candidate emulated:fused-fp8: code"
        assert not any(line.startswith("expected") for line in lines)


def test_a_match_has_no_details(matching: Result) -> None:
    assert details(matching) == []


def test_kept_gates_are_counted(matching: Result) -> None:
    gated = apply_gates(matching, (parse_gate("layers.topk.invalid<=0"),))

    assert headline(gated).endswith("2 candidates, 2 gates kept")


def test_what_fails_by_a_test_and_not_by_its_size_is_named_first(differing: Result) -> None:
    note = "code-flip test, a balance of +0.41: rows err away from zero, z 9.1 of at most 7"
    *others, first = differing.candidates
    assert first.first_divergence is not None
    where = first.first_divergence.model_copy(update={"error": 0.93, "detail": note})
    candidate = first.model_copy(update={"first_divergence": where})
    result = differing.model_copy(update={"candidates": (*others, candidate)})

    assert headline(differing).endswith("x limit")
    assert headline(result).startswith("differ: layer ")
    assert headline(result).endswith(f": {note}")


def test_notes_stand_under_the_headline(matching: Result, differing: Result) -> None:
    for result in (matching, differing):
        noted = with_notes(result, "shrink: nothing\nto do")
        assert details(noted) == [*details(result), "note: shrink: nothing to do"]
