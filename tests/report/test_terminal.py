from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from needlepoint.verify.report.terminal import FULL_LAYERS, WORST_STAGES, print_report
from needlepoint.verify.schema.result import (
    ErrorStats,
    GateResult,
    LayerResult,
    Result,
    Spread,
    StageRef,
    StageResult,
    WorstRow,
)


def _report(result: Result, width: int = 80, *, brief: bool = False) -> str:
    file = io.StringIO()
    print_report(
        result, Console(file=file, width=width, markup=False, highlight=False), brief=brief
    )
    return file.getvalue()


def _lines(result: Result, width: int = 80) -> list[str]:
    return [re.sub(r"\s+", " ", line).strip() for line in _report(result, width).splitlines()]


def _change_stage(result: Result, **changes: object) -> Result:
    """Return the result with the diverging stage of its second candidate changed."""
    first, second = result.candidates
    layer = second.layers[0]
    stages: list[StageResult] = [
        stage.model_copy(update=changes) if stage.verdict == "differ" else stage
        for stage in layer.stages
    ]
    layers = (layer.model_copy(update={"stages": tuple(stages)}), *second.layers[1:])
    second = second.model_copy(update={"layers": layers})
    return result.model_copy(update={"candidates": (first, second)})


def test_first_line_of_a_difference_names_stage_token_and_error(differing: Result) -> None:
    lines = _lines(differing)

    assert lines[0] == (
        "differ: layer 2 index.stored, request 0 position 511 entry 127: 3.25 x limit"
    )
    assert lines[1:4] == [
        "candidate emulated:fused-fp8: code",
        "expected 0.12345679, found 0.12345678 at dim 17",
        "limit 1 of the a-priori bound",
    ]


def test_first_line_of_a_query_side_divergence_has_no_entry(differing: Result) -> None:
    first, second = differing.candidates
    where = second.first_divergence
    if where is None:
        raise ValueError("the sample diverges")
    moved = where.model_copy(update={"stage": "scores", "entry": None, "error": None})
    second = second.model_copy(update={"first_divergence": moved})
    result = differing.model_copy(update={"candidates": (first, second), "detail": "upstream"})

    assert _lines(result)[0] == ("differ: upstream: layer 2 index.scores, request 0 position 511")


def test_first_line_of_a_match_counts_stages(matching: Result) -> None:
    assert _lines(matching)[0] == "match: 20 of 20 stages compared, 2 candidates"


def test_first_line_of_a_shortfall_names_what_was_skipped(matching: Result) -> None:
    skipped = StageRef(
        candidate="emulated:fused-fp8", layer=2, stage="pooled", path="index", reason="no tensor"
    )
    counts = matching.counts.model_copy(update={"compared": 19, "skipped": (skipped,)})
    result = matching.model_copy(update={"verdict": "cannot-judge", "counts": counts})

    assert _report(result).splitlines()[0] == (
        "cannot-judge: 19 of 20 stages compared; "
        "skipped emulated:fused-fp8 layer 2 index.pooled (no tensor)"
    )


def test_first_line_of_a_shortfall_in_rows_names_the_stage(differing: Result) -> None:
    result = _change_stage(differing, verdict="cannot-judge", rows_compared=2047)
    second = result.candidates[1].model_copy(
        update={"verdict": "cannot-judge", "first_divergence": None}
    )
    result = result.model_copy(
        update={"verdict": "cannot-judge", "candidates": (result.candidates[0], second)}
    )

    assert _report(result).splitlines()[0] == (
        "cannot-judge: emulated:fused-fp8 layer 2 index.stored: 2047 of 2048 rows compared"
    )
    assert "index.stored 2047/2048" in " ".join(_lines(result))


def test_first_line_names_an_exceeded_gate(matching: Result) -> None:
    gate = GateResult(
        path="layers.topk.overlap_min",
        operator=">=",
        limit=0.99,
        found=0.98,
        exceeded=True,
        candidate="emulated:fused-fp8",
    )
    result = matching.model_copy(update={"verdict": "differ", "gates": (gate,)})

    lines = _lines(result)
    assert lines[0] == (
        "differ: gate layers.topk.overlap_min>=0.99 exceeded, found 0.98 (emulated:fused-fp8)"
    )
    assert "layers.topk.overlap_min>=0.99 emulated:fused-fp8 0.98 exceeded" in " ".join(lines)


def test_a_gate_that_was_not_judged_is_said(matching: Result) -> None:
    gate = GateResult(
        path="recall.lost",
        limit=0.0,
        found=None,
        exceeded=None,
        candidate="x",
        detail="recall.lost holds no number",
    )
    result = matching.model_copy(update={"verdict": "cannot-judge", "gates": (gate,)})

    assert _lines(result)[0] == ("cannot-judge: gate not judged: x: recall.lost holds no number")


def test_stages_show_rows_errors_distance_token_and_verdict(differing: Result) -> None:
    lines = _lines(differing)

    assert "index.stored 2048 3.250 3.250 2 codes r0 p511 e127 differ" in lines
    assert "layer 2 (1/4)" in lines
    assert "index.pooled 2048 0.400 0.400 2 codes r0 p511 e127 match" in lines
    assert "index.scores 8192 0.400 0.400 2 codes r0 p511 match" in lines
    assert "2 index.stored r0 p511 e127 17 3.250 0.12345679 0.12345678" in lines


def test_an_error_without_a_number_reads_inf(differing: Result) -> None:
    none = Spread(max=None, mean=None, p99=None)
    stats = ErrorStats(error=none, rows_failed=1, rows_not_finite=1)
    worst = WorstRow(
        request=0,
        position=511,
        entry=127,
        dim=17,
        error=None,
        expected=0.5,
        found=None,
        detail="found is nan",
    )
    lines = _lines(_change_stage(differing, local=stats, accumulated=None, worst=(worst,)))

    assert "index.stored 2048 inf - r0 p511 e127 differ" in lines
    assert "2 index.stored r0 p511 e127 17 inf 0.5 found is nan" in lines


def test_the_kind_of_a_fault_stands_beside_the_value(differing: Result) -> None:
    stage = next(s for s in differing.candidates[1].layers[0].stages if s.verdict == "differ")
    worst = stage.worst[0].model_copy(update={"detail": "scale"})

    assert "2 index.stored r0 p511 e127 17 3.250 0.12345679 0.12345678 (scale)" in _lines(
        _change_stage(differing, worst=(worst,)), 100
    )


def test_selection_shows_overlap_beside_score_lost_and_swaps(differing: Result) -> None:
    text = " ".join(_lines(differing))

    assert "2 128 8192 0.750 0.9991 0.9800 2.0e-03 1 tie, 2 explained, 3 upstream" in _lines(
        differing, 100
    )
    assert "discarded overlap min lost swaps" in text


def test_cost_memory_coverage_input_and_environment_are_there(matching: Result) -> None:
    lines = _lines(matching, 120)

    assert "emulated:fused-fp8 bf16 0.020 0.040 0.9850 0.010 179.000" in lines
    assert "emulated:fused-fp8: peak 1,048,576 B" in lines
    assert "chunk of 22,528 tokens with 64 heads (not allocated): 8.25 GiB" in " ".join(lines)
    assert "compared: 20 of 20 stages" in lines
    assert "given: index.projected" in lines
    assert "consequence: main.attention" in lines
    assert "not covered: main.input (layer 2)" in lines
    assert "skipped: none" in lines
    assert any(line.startswith("input mini, 8,192 tokens in 1 request,") for line in lines)
    assert any("torch 2.13.0" in line for line in lines)


def test_uncovered_stages_of_one_candidate_name_it(matching: Result) -> None:
    refs = (
        StageRef(candidate="emulated:fused-fp8", layer=2, stage="rotated", path="index"),
        StageRef(candidate="emulated:fused-fp8", layer=3, stage="rotated", path="index"),
    )
    counts = matching.counts.model_copy(update={"not_covered": refs})
    lines = _lines(matching.model_copy(update={"counts": counts}))

    assert "not covered: index.rotated (layer 2-3) of emulated:fused-fp8" in lines


def _deep(result: Result, numbers: range) -> Result:
    """Return the result with many copies of its first matching layer."""
    candidate = result.candidates[0]
    layers: tuple[LayerResult, ...] = tuple(
        candidate.layers[0].model_copy(update={"layer": number}) for number in numbers
    )
    candidate = candidate.model_copy(update={"layers": layers})
    return result.model_copy(update={"candidates": (candidate,)})


def test_many_matching_layers_fold_into_one_line(matching: Result) -> None:
    lines = _lines(_deep(matching, range(43)))

    assert "layers 0-42: match; closest to its limit: layer 0 query.weights at 0.400" in lines
    assert len(lines) < 40


def test_few_matching_layers_are_printed_in_full(matching: Result) -> None:
    lines = _lines(_deep(matching, range(FULL_LAYERS)))

    assert sum("index.pooled" in line for line in lines) == FULL_LAYERS


def test_layers_that_differ_beyond_the_first_are_counted(differing: Result) -> None:
    broken = differing.candidates[1]
    layers = tuple(broken.layers[0].model_copy(update={"layer": n}) for n in range(43))
    candidate = broken.model_copy(update={"layers": layers})
    result = differing.model_copy(update={"candidates": (candidate,)})
    lines = _lines(result)

    assert sum(line.startswith("index.stored") for line in lines) == FULL_LAYERS
    assert "layers 4-42: differ in index.stored; see --json or --html" in lines
    worst = [line for line in lines if re.match(r"\d+ index\.stored r0 p511", line)]
    assert [int(line.split()[0]) for line in worst] == list(range(WORST_STAGES))
    assert f"... and {43 - WORST_STAGES} more stages; see --json or --html" in lines
    assert len(lines) < 120


def test_layers_that_differ_come_before_those_that_could_not_be_judged(differing: Result) -> None:
    broken = differing.candidates[1]
    first = broken.layers[0]
    unjudged = tuple(
        stage.model_copy(update={"verdict": "cannot-judge"}) if stage.verdict else stage
        for stage in first.stages
    )
    layers = [first.model_copy(update={"layer": n, "stages": unjudged}) for n in range(8)]
    layers.append(first.model_copy(update={"layer": 8}))
    candidate = broken.model_copy(update={"layers": tuple(layers)})
    lines = _lines(differing.model_copy(update={"candidates": (candidate,)}))

    assert [line for line in lines if re.match(r"layer \d+ \(1/4\)", line)] == [
        f"layer {n} (1/4)" for n in (0, 1, 2, 8)
    ]
    assert any(line.startswith("layers 3-7: cannot-judge in index.pooled, ") for line in lines)


def test_a_layer_that_differs_is_not_folded_with_those_that_match(differing: Result) -> None:
    broken = differing.candidates[1]
    deep = _deep(differing, range(10, 40)).candidates[0]
    candidate = broken.model_copy(update={"layers": (*broken.layers, *deep.layers)})
    lines = _lines(differing.model_copy(update={"candidates": (candidate,)}))

    assert "index.stored 2048 3.250 3.250 2 codes r0 p511 e127 differ" in lines
    assert any(line.startswith("layers 3, 10-39: match") or "layers 3-39" in line for line in lines)


@pytest.mark.parametrize("name", ["matching", "differing"])
def test_every_line_fits_80_columns(name: str, request: pytest.FixtureRequest) -> None:
    text = _report(request.getfixturevalue(name))

    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_stage_keeps_its_name_beside_long_numbers(matching: Result) -> None:
    candidate = matching.candidates[0]
    layer = candidate.layers[0]
    stages = tuple(
        stage.model_copy(
            update={
                "path": "main",
                "stage": "attention",
                "rows_compared": 1048575,
                "rows_expected": 1048576,
                "worst": tuple(
                    worst.model_copy(update={"request": 12, "position": 1048575, "entry": 262143})
                    for worst in stage.worst
                ),
                "local": stage.local
                and stage.local.model_copy(
                    update={"distance_max": 1919693960, "distance_unit": "ulp"}
                ),
            }
        )
        for stage in layer.stages
    )
    wide = layer.model_copy(update={"stages": stages})
    text = _report(
        matching.model_copy(
            update={"candidates": (candidate.model_copy(update={"layers": (wide,)}),)}
        )
    )

    judged = sum(stage.verdict is not None for stage in stages)
    assert text.count(" main.attention ") >= judged > 0
    assert max(len(line) for line in text.splitlines()) <= 80


def test_no_colour_away_from_a_terminal_and_words_carry_the_meaning(differing: Result) -> None:
    plain = _report(differing)
    assert "\x1b" not in plain

    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system="standard")
    print_report(differing, console)
    assert "\x1b[" in file.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue()) == plain


def test_plain_ascii_where_the_terminal_has_nothing_else(differing: Result) -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")

    print_report(differing, Console(file=file, width=80, highlight=False))
    file.flush()

    assert b"index.stored" in raw.getvalue()


def test_names_are_data_and_not_markup(matching: Result) -> None:
    odd = matching.candidates[0].model_copy(update={"name": "[bold]x[/bold]"})

    assert "[bold]x[/bold]" in _report(matching.model_copy(update={"candidates": (odd,)}))


def test_brief_report_is_the_first_line(differing: Result) -> None:
    assert _report(differing, brief=True) == _report(differing).splitlines(keepends=True)[0]


def test_same_result_prints_the_same_text(differing: Result) -> None:
    again = Result.model_validate_json(differing.model_dump_json(by_alias=True))

    assert _report(again) == _report(differing)
