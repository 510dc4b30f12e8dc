from __future__ import annotations

from needlepoint.verify.judge.results.gates import apply_gates, parse_gate
from needlepoint.verify.report.markdown import MOST_STAGES, markdown_summary
from needlepoint.verify.schema.result import Result


def lines(result: Result) -> list[str]:
    return markdown_summary(result).decode().splitlines()


def cells(line: str) -> int:
    return line.replace("\\|", "").count("|") - 1


def test_the_first_line_is_the_verdict_and_its_token(differing: Result) -> None:
    assert lines(differing)[0] == (
        "### needlepoint: differ: layer 2 index.stored, request 0 position 511 entry 127: "
        "3.25 x limit"
    )


def test_what_differs_is_listed_with_its_worst_token(differing: Result) -> None:
    (row,) = [line for line in lines(differing) if "| index.stored |" in line]
    assert row == (
        "| emulated:fused-fp8 | 2 | index.stored | 1 of 2048 | request 0 position 511 entry 127 | "
        "3.250 | 0.12345679 | 0.12345678 |"
    )


def test_an_error_without_a_number_is_nearest_to_its_limit(differing: Result) -> None:
    first, second = differing.candidates
    layer = second.layers[0]
    stages = []
    for stage in layer.stages:
        if stage.verdict == "differ" and stage.local is not None:
            error = stage.local.error.model_copy(update={"max": None})
            local = stage.local.model_copy(update={"error": error, "rows_not_finite": 1})
            stage = stage.model_copy(update={"local": local})
        stages.append(stage)
    layers = (layer.model_copy(update={"stages": tuple(stages)}), *second.layers[1:])
    changed = second.model_copy(update={"layers": layers})
    text = lines(differing.model_copy(update={"candidates": (first, changed)}))
    (row,) = [line for line in text if line.startswith("| emulated:fused-fp8 | **differ**")]
    assert "| inf index.stored, layer 2 |" in row


def test_every_candidate_has_a_line_and_tables_are_even(differing: Result) -> None:
    text = lines(differing)
    for candidate in differing.candidates:
        assert any(
            line.startswith(f"| {candidate.name} | **{candidate.verdict}**") for line in text
        )
    for start in ("| candidate | verdict", "| candidate | layer"):
        at = next(i for i, line in enumerate(text) if line.startswith(start))
        widths = {cells(line) for line in text[at:] if line.startswith("|")} if at else set()
        assert cells(text[at]) == cells(text[at + 1])
        assert widths


def test_long_lists_are_counted(differing: Result) -> None:
    one = differing.candidates[1]
    layers = tuple(one.layers[0].model_copy(update={"layer": n}) for n in range(MOST_STAGES + 5))
    many = differing.model_copy(update={"candidates": (one.model_copy(update={"layers": layers}),)})
    assert "and 5 more stages" in lines(many)


def test_gates_are_listed(matching: Result) -> None:
    gated = apply_gates(matching, (parse_gate("layers.topk.overlap_min>=0.99"),))
    told = [line for line in lines(gated) if line.startswith("* gate")]
    assert len(told) == 2
    assert "`layers.topk.overlap_min>=0.99` exceeded by emulated:fused-bf16: found 0.98" in told[0]


def test_names_cannot_break_the_tables(matching: Result) -> None:
    odd = matching.candidates[0].model_copy(update={"name": "a|b<img>`*_\n[x](y)"})
    text = lines(matching.model_copy(update={"candidates": (odd,)}))
    (row,) = [line for line in text if "&lt;img>" in line]
    assert cells(row) == 7
    assert "<img" not in "\n".join(text)
    assert "\\[x\\](y)" in row
