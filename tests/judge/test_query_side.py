from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.reference.profile import needlepoint_profile
from needlepoint.reference.topk import select_topk
from needlepoint.verify.base.stage_blocks import Block
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.layer_run import LayerRun
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.judge.sides.query_reference import unrounded_fp32
from needlepoint.verify.judge.sides.query_side import compare_scores, pick_rows, usable_scores
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.numerics.selection import PickErrors, judge_picks
from needlepoint.verify.run import pipeline

INF, NAN = torch.inf, torch.nan


def block_of(visible: list[int], entries: int) -> Block:
    count = len(visible)
    return Block(0, 0, count, slice(0, count), torch.tensor(visible), entries)


def test_unusable_scores_count_as_the_lowest() -> None:
    scores = torch.tensor([[1.0, NAN, INF, 9.0, 9.0], [NAN, 2.0, -INF, NAN, 0.0]])

    usable = usable_scores(scores, block_of([3, 2], 5))

    low = torch.finfo(torch.float32).min
    assert usable.dtype == torch.float64
    assert usable.tolist() == [[1.0, low, low], [low, 2.0, -INF]]


@pytest.mark.parametrize(
    ("own", "failed"),
    [
        ([[1.0, 2.0, -INF, -INF], [1.0, -INF, -INF, -INF]], [False, False]),
        ([[1.0, 2.5, -INF, -INF], [1.0, -INF, -INF, -INF]], [True, False]),
        # A column that no query of the block sees must still be masked.
        ([[1.0, 2.0, -INF, 0.0], [1.0, -INF, -INF, -INF]], [True, False]),
        ([[1.0, 2.0, -INF, NAN], [1.0, 0.0, -INF, -INF]], [True, True]),
    ],
)
def test_scores_are_compared_in_every_column(own: list[list[float]], failed: list[bool]) -> None:
    reference = torch.tensor([[1.0, 2.0], [1.0, -INF]], dtype=torch.float64)
    bound = torch.full((2, 2), 0.1)

    rows = compare_scores(torch.tensor(own), reference, bound, block_of([2, 1], 4))

    assert rows.failed(1.0).tolist() == failed


def test_a_block_that_sees_nothing_must_be_masked() -> None:
    empty = torch.empty(2, 0, dtype=torch.float64)
    own = torch.tensor([[-INF], [1.0]])

    rows = compare_scores(own, empty, empty, block_of([0, 0], 1))

    assert rows.ratio.tolist() == [0.0, math.inf]


def picks_of(own: Tensor, scores: Tensor, reference: Tensor, bound: float) -> PickErrors:
    visible = torch.full((len(own),), scores.shape[1])
    return judge_picks(
        own,
        select_topk(reference, 2),
        scores,
        reference,
        torch.full_like(reference, bound),
        visible,
        2,
    )


def test_picks_become_rows_with_the_entry_lost_and_the_entry_gained() -> None:
    reference = torch.tensor([[5.0, 4.0, 3.9, 1.0]] * 4, dtype=torch.float64)
    swapped = torch.tensor([[5.0, 3.9, 4.0, 1.0]] * 4, dtype=torch.float64)
    own = torch.tensor([[1, 0], [0, 2], [3, 2], [0, 9]])

    rows = pick_rows(picks_of(own, swapped, reference, 0.1))

    # Equal sets; an explained swap at half of both bounds; a wrong selection; an impossible pick.
    assert rows.ratio.tolist() == [0.0, pytest.approx(0.5), math.inf, math.inf]
    assert rows.expected.tolist()[:3] == [-1.0, 1.0, 0.0]
    assert rows.found.tolist()[:3] == [-1.0, 2.0, 2.0]
    assert rows.distance.tolist() == [0, 1, 2, 0]


def test_only_roundings_to_bf16_stay_in_the_reference_s_scores() -> None:
    profile = needlepoint_profile("fp8")
    free = unrounded_fp32(profile)

    assert {str(getattr(free, p).value) for p in ("dot", "weighted", "head_sum")} == {"float64"}
    assert (
        replace(free, dot=profile.dot, weighted=profile.weighted, head_sum=profile.head_sum)
        == profile
    )


def test_blocks_of_queries_change_no_error(
    small_inputs: Callable[..., Inputs],
    judge: Callable[..., PipelineOutput],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A budget that forces the smallest blocks gives the errors of one large block."""
    inputs = small_inputs(tokens=260, layers=(0,))
    candidates = [create("emulated:fused-fp4"), create("emulated:unfused-bf16")]
    whole = judge(inputs, *candidates)

    class Small(LayerRun):
        def __init__(self, inputs: Inputs, layer: int, limits: Limits, device: str) -> None:
            super().__init__(inputs, layer, limits, device, budget_bytes=1)

    monkeypatch.setattr(pipeline, "LayerRun", Small)
    parts = judge(inputs, *candidates)

    assert parts.rows.keys() == whole.rows.keys()
    for name, errors in whole.rows.items():
        torch.testing.assert_close(parts.rows[name], errors, rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(parts.result.candidates, whole.result.candidates, strict=True):
        picks, whole_picks = mine.layers[0].topk, theirs.layers[0].topk
        assert picks is not None
        assert whole_picks is not None
        # Scores of a contract are fp32 products, whose order may follow the block on some CPUs.
        lost = whole_picks.score_lost_max
        assert picks.score_lost_max == pytest.approx(lost, rel=1e-5, abs=1e-5)
        assert picks.model_copy(update={"score_lost_max": lost}) == whole_picks
        one, other = mine.format_cost.official, theirs.format_cost.official
        assert one is not None
        assert other is not None
        assert (one.rel_mean, one.overlap_mean) == (other.rel_mean, other.overlap_mean)
        assert one.score_lost_max == pytest.approx(other.score_lost_max, rel=1e-4)
