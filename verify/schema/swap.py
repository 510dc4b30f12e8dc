"""Swap part of ``needlepoint.result/1``; null in runs without ``--swap``."""

from __future__ import annotations

from needlepoint.verify.schema.base import Count, Number, Path, Record, StageName


class SwapEffect(Record):
    """What one mixture of candidate and reference does to the end of the layer."""

    attention_error: Number | None
    """Norm of the change of the attention output, relative to the reference's output."""
    lost_picks: Count | None
    """Picks of the reference that are not made; null where the layer selects nothing."""
    lost_needles: Count | None
    """Queries whose best entry by the reference's scores is not picked."""


class SwapStage(Record):
    """One stage, kept alone and replaced alone."""

    stage: StageName
    path: Path
    alone: SwapEffect
    """The candidate's own error of this stage in an otherwise pure reference."""
    replaced: SwapEffect
    """The candidate with this stage alone done by the reference."""
    share_error: Number | None
    """Share of the attention error that goes with the stage.

    Null where there is none, and where replacing the stage makes it larger: another stage undoes
    what this one does.
    """
    share_lost_picks: Number | None
    share_lost_needles: Number | None


class SwapResult(Record):
    """Swaps of one layer of one candidate."""

    total: SwapEffect
    """The candidate as it is."""
    stages: tuple[SwapStage, ...]
    not_swappable: tuple[str, ...] = ()
    """Stages that the candidate does not show: their part belongs to the next one that it does."""
