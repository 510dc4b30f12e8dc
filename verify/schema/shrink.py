"""Shrink part of ``needlepoint.result/1``; null in runs without ``--shrink`` or a failing stage."""

from __future__ import annotations

from needlepoint.verify.schema.base import Count, Path, Record, StageName


class ShrinkResult(Record):
    """The smallest input found that still fails at the same stage."""

    candidate: str
    layer: Count
    stage: StageName
    path: Path
    tokens: Count
    requests: Count
    windows: Count
    """Complete windows of the layer: its entries."""
    heads: Count
    """Indexer heads."""
    topk: Count
    pages: Count
    """Pages that hold the entries, over the candidate's pools."""
    trials: Count
    complete: bool
    """Whether no single window, request, half of the heads or of k can still go."""
    command: str
    """Replays the failure."""
