"""Swaps: the planted stage carries the error, the others are cleared one by one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.wrapped import Change, WrappedCandidate, keep, planted, then
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.emulation.compressor import EntryBlock
from needlepoint.optimized.emulation.keyside import KeySide
from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    QUERY,
    Candidate,
    StageKey,
)
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.schema.swap import SwapResult, SwapStage
from needlepoint.verify.selftest.faults.ground import Ground
from needlepoint.verify.selftest.faults.scores import on_scores

Judge = Callable[..., PipelineOutput]
Load = Callable[..., Inputs]


def swaps(judge: Judge, inputs: Inputs, candidate: Candidate) -> SwapResult:
    found = judge(inputs, candidate, swap=True).result.candidates[0].layers[0].swap
    assert found is not None
    return found


def by_stage(swap: SwapResult) -> dict[StageKey, SwapStage]:
    return {(stage.path, stage.stage): stage for stage in swap.stages}


def other_sign(ground: Ground, request: int, scores: Tensor) -> Tensor:
    return torch.where(torch.isneginf(scores), scores, -scores)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (planted("best-entry-lost"), (INDEX, "topk")),
        (planted(on_scores(other_sign)), (INDEX, "scores")),
    ],
    ids=["a selection that loses needles", "scores of the other sign"],
)
def test_the_planted_stage_carries_all_of_the_loss(
    change: Change,
    key: StageKey,
    judge: Judge,
    small_inputs: Load,
) -> None:
    found = swaps(judge, small_inputs(tokens=136, layers=(0,)), WrappedCandidate(change))

    stages = by_stage(found)
    assert found.not_swappable == ()
    assert found.total.lost_picks
    assert found.total.lost_needles
    assert found.total.attention_error is not None
    assert found.total.attention_error > 1e-3
    assert stages[key].share_lost_picks == stages[key].share_lost_needles == 1.0
    assert stages[key].share_error == pytest.approx(1.0, abs=1e-3)
    assert stages[key].alone.lost_picks == found.total.lost_picks
    for other, stage in stages.items():
        if other != key:
            assert not stage.alone.lost_picks
            assert not stage.share_lost_picks
            assert stage.replaced.lost_picks == found.total.lost_picks


def test_a_fault_in_code_is_the_stage_s_where_it_was_born(
    judge: Judge, small_inputs: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every stage behind the fault is sound, and none of the shares is theirs."""
    whole = KeySide._rope

    def sign_lost(self: KeySide, block: EntryBlock) -> None:
        whole(self, block)
        self._rows["roped"][block.rows, -64:] *= -1

    monkeypatch.setattr(KeySide, "_rope", sign_lost)
    found = swaps(judge, small_inputs(tokens=136, layers=(0,)), create("emulated:fused-fp8"))

    stages = by_stage(found)
    index, main = stages[INDEX, "roped"], stages[MAIN, "roped"]
    assert index.share_lost_picks is not None
    assert index.share_lost_picks > 0.99
    assert index.share_lost_needles == 1.0
    assert main.replaced.attention_error is not None
    assert found.total.attention_error is not None
    assert main.replaced.attention_error < found.total.attention_error
    for key in ((INDEX, "rotated"), (INDEX, "stored"), (MAIN, "stored"), (QUERY, "query")):
        assert (stages[key].alone.lost_picks or 0) < 4
        assert (stages[key].share_lost_picks or 0.0) < 0.01


def test_a_sound_candidate_has_nothing_to_share_out(judge: Judge, small_inputs: Load) -> None:
    for swap in (
        judge(small_inputs(tokens=136), create("emulated:fused-bf16"), swap=True)
        .result.candidates[0]
        .layers
    ):
        assert swap.swap is not None
        assert swap.swap.total.attention_error is not None
        assert swap.swap.total.attention_error < 1e-4
        assert (swap.swap.total.lost_picks is None) == (swap.ratio == 128)
        assert not swap.swap.total.lost_needles


def test_what_a_candidate_does_not_show_is_listed(judge: Judge, small_inputs: Load) -> None:
    shown = frozenset({(INDEX, "stored"), (MAIN, "stored"), (INDEX, "topk")})

    change = then(planted("best-entry-lost"), keep(*shown))

    candidate = WrappedCandidate(change, shown=shown)
    found = swaps(judge, small_inputs(tokens=136, layers=(0,)), candidate)

    assert by_stage(found).keys() == shown
    assert "index.pooled" in found.not_swappable
    assert "index.scores" in found.not_swappable
    assert by_stage(found)[INDEX, "topk"].share_lost_needles == 1.0
