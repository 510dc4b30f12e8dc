"""From the stages of a result to its verdicts: of a candidate, of what was compared, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from needlepoint.verify.base.stages import COMPARED, stage_order
from needlepoint.verify.schema.result import (
    CANNOT_JUDGE,
    DIFFER,
    MATCH,
    Counts,
    FirstDivergence,
    LayerResult,
    StageRef,
    StageResult,
    Verdict,
)


class Judged(Protocol):
    """A candidate whose layers were judged."""

    @property
    def name(self) -> str:
        """What it calls itself."""

    @property
    def layers(self) -> Sequence[LayerResult]:
        """Its layers."""


def candidate_verdict(layers: Sequence[LayerResult]) -> Verdict:
    """Return the verdict over layers: a shortfall outweighs a difference."""
    stages = [stage for layer in layers for stage in layer.stages]
    judged = [stage.verdict for stage in stages if stage.verdict is not None]
    if not judged or CANNOT_JUDGE in judged:
        return CANNOT_JUDGE
    if DIFFER in judged or any(_accumulated_failed(stage) for stage in stages):
        return DIFFER
    return MATCH


def first_divergence(layers: Sequence[LayerResult]) -> FirstDivergence | None:
    """Return the first stage that differs, in layer and stage order, and its worst token.

    Where no stage differs by its own doing but an accumulated error leaves its bound, the first
    such stage is named: something between two observed stages was lost.
    """
    for layer in sorted(layers, key=lambda entry: entry.layer):
        ordered = sorted(layer.stages, key=lambda s: stage_order((s.path, s.stage)))
        for fails in (_differs, _accumulated_failed):
            for stage in ordered:
                if fails(stage) and stage.worst:
                    return _divergence(layer, stage, fails is _differs)
    return None


def _divergence(layer: LayerResult, stage: StageResult, local: bool) -> FirstDivergence:
    worst = stage.worst[0]
    statistics = stage.local if local else stage.accumulated
    failed = 0 if statistics is None else statistics.rows_failed
    rows = f"{failed} of {stage.rows_compared} rows beyond the limit"
    alone = None if local else "only the accumulated error: no observed stage shows it by itself"
    notes = [rows, alone, worst.detail, stage.detail]
    if local and not failed:  # what does fail comes first
        notes = [stage.detail, rows, worst.detail]
    return FirstDivergence(
        layer=layer.layer,
        stage=stage.stage,
        path=stage.path,
        request=worst.request,
        position=worst.position,
        entry=worst.entry,
        detail="; ".join(note for note in notes if note),
        error=worst.error,
    )


def _differs(stage: StageResult) -> bool:
    return stage.verdict == DIFFER


def _accumulated_failed(stage: StageResult) -> bool:
    return (
        stage.kind == COMPARED
        and stage.accumulated is not None
        and stage.accumulated.rows_failed > 0
    )


def count_stages(outcomes: Sequence[Judged]) -> Counts:
    """Return how many declared stages were compared, and which were not."""
    skipped, not_covered = [], []
    expected = compared = 0
    for outcome in outcomes:
        for layer in outcome.layers:
            for stage in layer.stages:
                reference = StageRef(
                    candidate=outcome.name,
                    layer=layer.layer,
                    stage=stage.stage,
                    path=stage.path,
                    reason=stage.detail or "",
                )
                if stage.kind == "not covered":
                    not_covered.append(reference)
                elif stage.kind == "skipped":
                    expected += 1
                    skipped.append(reference)
                elif stage.kind == "compared":
                    expected += 1
                    compared += stage.verdict != CANNOT_JUDGE
    return Counts(
        expected=expected,
        compared=compared,
        skipped=tuple(skipped),
        not_covered=tuple(not_covered),
    )
