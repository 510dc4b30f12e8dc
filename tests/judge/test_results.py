"""From row errors to stages, verdicts and the first divergence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import CandidateInfo
from needlepoint.verify.base.rows import Rows
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.memory_law import transient_law
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.judge.results.stages import (
    WORST_ROWS,
    accumulated_only,
    compared_stage,
    row_tensors,
    uncompared_stage,
    zero_errors,
)
from needlepoint.verify.judge.results.verdicts import (
    candidate_verdict,
    count_stages,
    first_divergence,
)
from needlepoint.verify.numerics.limits import Limit
from needlepoint.verify.numerics.row_errors import RowErrors, StageErrors
from needlepoint.verify.run.candidates import CandidateOutcome, candidate_result
from needlepoint.verify.schema.result import ErrorStats, LayerResult, Result, StageResult

LIMIT = Limit(2.0, "of something", "made up")
ROWS = Rows((8, 3, 9), 4)  # entries 2, 0, 2


def errors(*ratio: float) -> RowErrors:
    return zero_errors(len(ratio)).with_ratio(torch.tensor(ratio, dtype=torch.float64))


def stage(local: RowErrors, accumulated: RowErrors, rows: Rows = ROWS) -> StageResult:
    return compared_stage(StageErrors(("index", "pooled"), local, accumulated), rows, LIMIT)


@pytest.mark.parametrize(
    ("local", "verdict", "failed", "not_finite"),
    [
        ((0.0, 1.0, 2.0, 0.5), "match", 0, 0),
        ((0.0, 1.0, 2.0000001, 0.5), "differ", 1, 0),
        ((math.inf, 1.0, 3.0, 0.5), "differ", 2, 1),
        ((math.nan, 0.0, 0.0, 0.0), "differ", 1, 1),
        ((0.0, 0.0, 0.0), "cannot-judge", 0, 0),
        ((), "cannot-judge", 0, 0),
    ],
)
def test_a_stage_is_judged_by_its_local_errors(
    local: tuple[float, ...], verdict: str, failed: int, not_finite: int
) -> None:
    result = stage(errors(*local), errors(*[9.0] * len(local)))

    assert result.verdict == verdict
    assert (result.rows_expected, result.rows_compared) == (4, len(local))
    assert result.local is not None
    assert (result.local.rows_failed, result.local.rows_not_finite) == (failed, not_finite)
    if verdict == "match":
        assert result.local.error.max == 1.0  # in units of the limit


def test_nothing_to_compare_is_no_match() -> None:
    assert stage(errors(), errors(), Rows((3, 2), 4)).verdict == "cannot-judge"


def test_the_worst_rows_are_named_by_token() -> None:
    local = replace(
        errors(0.5, 3.0, math.nan, math.inf),
        dim=torch.tensor([1, 2, 3, 4]),
        expected=torch.tensor([1.0, 2.0, 3.0, 4.0]).double(),
        found=torch.tensor([1.0, 2.5, math.nan, math.inf]).double(),
        scale_fault=torch.tensor([False, True, False, False]),
    )

    worst = stage(local, errors(0, 0, 0, 0)).worst

    tokens = [(row.request, row.position, row.entry, row.dim) for row in worst]
    assert tokens == [(2, 3, 0, 3), (2, 7, 1, 4), (0, 7, 1, 2), (0, 3, 0, 1)]
    assert [row.error for row in worst] == [None, None, 1.5, 0.25]
    assert [row.detail for row in worst] == ["found is nan", "found is inf", "scale", None]
    assert [row.found for row in worst] == [None, None, 2.5, 1.0]


def test_many_rows_are_cut_and_equal_ones_stay_in_order() -> None:
    many = Rows((400,))

    worst = stage(errors(*[1.0] * 400), errors(*[0.0] * 400), many).worst

    assert [row.position for row in worst] == list(range(WORST_ROWS))


def test_an_accumulated_failure_alone_shows_its_own_rows() -> None:
    lost = StageErrors(("index", "normed"), errors(1.9, 0, 0, 0), errors(0, 0, 5.0, 0))
    found = compared_stage(lost, ROWS, LIMIT)

    assert accumulated_only(lost, LIMIT)
    assert found.verdict == "match"
    assert (found.worst[0].request, found.worst[0].entry) == (2, 0)
    assert not accumulated_only(
        StageErrors(("index", "normed"), errors(3.0, 0, 0, 0), errors(5.0, 0, 0, 0)), LIMIT
    )


def test_per_row_errors_by_name() -> None:
    local = replace(
        errors(0.5, 0, 0, 0),
        error_norm=torch.ones(4).double(),
        reference_norm=torch.ones(4).double() * 4,
    )
    found = row_tensors(StageErrors(("main", "roped"), local, local), "c/layer2")

    assert {name: (t.dtype, len(t)) for name, t in found.items()} == {
        f"c/layer2/main/roped/{what}": (torch.float32, 4)
        for what in ("local", "accumulated", "relative")
    }
    assert found["c/layer2/main/roped/relative"].tolist() == [0.25] * 4


def layers_of(result: Result) -> list[LayerResult]:
    return list(result.candidates[0].layers)


def with_stage(layers: list[LayerResult], index: int, **changes: object) -> list[LayerResult]:
    """Change one stage of the first layer."""
    stages = list(layers[0].stages)
    stages[index] = stages[index].model_copy(update=changes)
    return [layers[0].model_copy(update={"stages": tuple(stages)}), *layers[1:]]


def index_of(layers: list[LayerResult], path: str, name: str) -> int:
    return [(s.path, s.stage) for s in layers[0].stages].index((path, name))  # type: ignore[arg-type]


def broken(stats: ErrorStats | None) -> ErrorStats:
    assert stats is not None
    return stats.model_copy(update={"rows_failed": 3})


def test_an_accumulated_failure_is_a_difference_and_says_so(matching: Result) -> None:
    layers = layers_of(matching)
    assert candidate_verdict(layers) == "match"
    assert first_divergence(layers) is None
    at = index_of(layers, "index", "stored")
    lost = with_stage(layers, at, accumulated=broken(layers[0].stages[at].accumulated))

    assert candidate_verdict(lost) == "differ"
    first = first_divergence(lost)
    assert first is not None
    assert (first.path, first.stage) == ("index", "stored")
    assert first.detail.startswith("3 of 2048 rows beyond the limit; only the accumulated error")


def test_a_local_failure_goes_before_an_earlier_accumulated_one(matching: Result) -> None:
    layers = layers_of(matching)
    early = index_of(layers, "index", "pooled")
    late = index_of(layers, "index", "scores")
    lost = with_stage(layers, early, accumulated=broken(layers[0].stages[early].accumulated))
    both = with_stage(lost, late, verdict="differ", local=broken(layers[0].stages[late].local))

    first = first_divergence(both)

    assert first is not None
    assert first.stage == "scores"


def test_layers_are_ranked_by_number_and_not_by_order(matching: Result) -> None:
    layers = layers_of(matching)
    at = index_of(layers, "main", "stored")
    bad = with_stage(layers, at, verdict="differ")
    later = bad[0].model_copy(update={"layer": 9})

    first = first_divergence([later, bad[1], bad[0]])

    assert first is not None
    assert first.layer == 2


@pytest.mark.parametrize(
    ("kinds", "verdict"),
    [
        ((), "cannot-judge"),
        (("given", "not covered"), "cannot-judge"),
        (("skipped", "given"), "cannot-judge"),
    ],
)
def test_a_candidate_that_nothing_was_compared_of(kinds: tuple[str, ...], verdict: str) -> None:
    stages = tuple(uncompared_stage(("main", "pooled"), kind, 5) for kind in kinds)  # type: ignore[arg-type]

    assert candidate_verdict([LayerResult(layer=0, ratio=4, stages=stages)]) == verdict


def test_counts_tell_skipped_from_not_covered(matching: Result) -> None:
    info = CandidateInfo("x:y", "fp8", "cpu", "needlepoint", "v", "0" * 64)
    outcome = CandidateOutcome(info)
    stages = (
        uncompared_stage(("main", "pooled"), "skipped", 5, "declared, but not returned"),
        uncompared_stage(("main", "normed"), "not covered", 5, "not declared"),
        uncompared_stage(("main", "projected"), "given", 5),
        stage(errors(0, 0, 0, 0), errors(0, 0, 0, 0)),
        stage(errors(0), errors(0)),
    )
    outcome.layers.append(LayerResult(layer=3, ratio=4, stages=stages))

    counts = count_stages([outcome])

    # One was compared in full, one in part: a part is not a comparison.
    assert (counts.expected, counts.compared) == (3, 1)
    assert [(s.candidate, s.layer, s.stage, s.reason) for s in counts.skipped] == [
        ("x:y", 3, "pooled", "declared, but not returned")
    ]
    assert [s.stage for s in counts.not_covered] == ["normed"]
    assert candidate_result(outcome).verdict == "cannot-judge"


def test_a_candidate_adds_up_over_its_layers(
    small_inputs: Callable[..., Inputs], judge: Callable[..., PipelineOutput]
) -> None:
    one = judge(small_inputs(layers=(0, 1)), create("emulated:fused-fp8")).result.candidates[0]
    two = judge(small_inputs(layers=(0, 1, 3)), create("emulated:fused-fp8")).result.candidates[0]

    # 132 and 584 bytes an entry of 4 tokens in every ratio-4 layer; 64 rows of 584 bytes are
    # 37,376 bytes, rounded up to 37,440; at ratio 128 two rows make a page of 1,728 bytes.
    four, many = (132 + 37440 / 64) / 4, 1728 / 2 / 128
    assert one.format_cost.cache_bytes_per_token == pytest.approx(four + many)
    assert two.format_cost.cache_bytes_per_token == pytest.approx(2 * four + many)
    assert one.kernel.path_taken == (
        "fused store, 4 tokens an entry; scores in blocks of 256 queries; "
        "fused store, 128 tokens an entry"
    )
    assert two.kernel == one.kernel
    assert one.memory.peak_transient_bytes == two.memory.peak_transient_bytes


def test_the_law_of_unfused_scoring_predicts_a_prompt_that_is_never_run() -> None:
    law = transient_law(create("emulated:unfused-bf16"))

    assert law is not None
    assert law.bytes_per_product == pytest.approx(4, rel=0.01)
    assert len(law.points) == 4
    assert max(point.bytes for point in law.points) < 1 << 24
    assert law.predicted_tokens == 22_528
    # Queries of the last chunk of 8,192, 64 heads, 5,632 keys, 4 bytes each.
    assert law.predicted_bytes == pytest.approx(6144 * 64 * 5632 * 4, rel=0.01)
    assert transient_law(create("emulated:fused-fp8")) is None


def test_an_invalid_pick_without_a_swap_shows_no_entries() -> None:
    alone = torch.full((1,), -1, dtype=torch.int64)
    picks = errors(0.0).with_entries(
        torch.tensor([math.inf], dtype=torch.float64),
        torch.zeros(1, dtype=torch.int64),
        alone,
        alone,
    )

    found = compared_stage(StageErrors(("index", "topk"), picks, picks), Rows((1,), 1), LIMIT)

    assert found.verdict == "differ"
    worst = found.worst[0]
    assert (worst.request, worst.position, worst.expected, worst.found) == (0, 0, None, None)
    assert worst.detail == "picks that are invalid, and none that was swapped"
    assert found.local is not None
    assert found.local.distance_unit is None
