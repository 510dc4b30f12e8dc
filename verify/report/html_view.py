"""What the HTML report shows, worked out from a result: words, classes and paths, no markup."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from numpy.typing import ArrayLike

from needlepoint.verify.base.numbers import number
from needlepoint.verify.base.stages import is_key_side, stage_order
from needlepoint.verify.report.html_strips import Strip, Strips
from needlepoint.verify.report.summary import exact_number, token
from needlepoint.verify.schema.result import (
    DIFFER,
    CandidateResult,
    ErrorStats,
    LayerResult,
    Result,
    StageResult,
)

WORST_MATCHING: Final = 1
WORST_DIFFERING: Final = 16
WORST_ROWS: Final = 1000
"""Worst tokens of all stages that differ together; each has at least one."""


@dataclass(frozen=True)
class Cell:
    """One stage of one layer in the matrix.

    Attributes
    ----------
    anchor
        Where its details are.
    shade
        Class of its colour: ``none``, ``e0`` to ``e4`` by how near the limit, ``over`` or
        ``unknown``.
    local, accumulated
        Largest errors as text.
    label
        The whole in words, for a screen reader.
    """

    anchor: str
    shade: str
    local: str
    accumulated: str
    label: str


@dataclass(frozen=True)
class StageView:
    """Details of one stage."""

    anchor: str
    name: str
    kind: str
    verdict: str
    rows: str
    local: str
    accumulated: str
    steps: str
    limit: str
    detail: str
    ratio: int
    local_strip: Strip | None
    accumulated_strip: Strip | None
    worst: tuple[tuple[str, str, str, str, str], ...]


@dataclass(frozen=True)
class LayerView:
    """One layer of one candidate."""

    anchor: str
    title: str
    differs: bool
    cells: tuple[Cell | None, ...]
    stages: tuple[StageView, ...]


@dataclass(frozen=True)
class SwapsView:
    """Selection of one layer."""

    layer: int
    k: int
    rows: int
    discarded: str
    overlap: str
    overlap_min: str
    lost: str
    swaps: tuple[tuple[str, int], ...]
    total: int


@dataclass(frozen=True)
class CandidateView:
    """One candidate."""

    anchor: str
    name: str
    verdict: str
    identity: tuple[tuple[str, str], ...]
    columns: tuple[str, ...]
    layers: tuple[LayerView, ...]
    swaps: tuple[SwapsView, ...]


@dataclass(frozen=True)
class Details:
    """What a stage may show: its strips, and how many worst tokens where it differs."""

    strips: Strips
    worst: int


def candidate_views(result: Result, rows: Mapping[str, ArrayLike]) -> list[CandidateView]:
    """Return every candidate of a result.

    Parameters
    ----------
    result
        The result.
    rows
        Its row errors by ``candidate/layerN/path/stage/local|accumulated``; without them there are
        no strips.
    """
    differing = sum(
        stage.verdict == DIFFER
        for candidate in result.candidates
        for layer in candidate.layers
        for stage in layer.stages
    )
    details = Details(
        Strips.of_report(rows, differing),
        max(1, min(WORST_DIFFERING, WORST_ROWS // max(1, differing))),
    )
    return [
        _candidate(f"c{index}", candidate, details)
        for index, candidate in enumerate(result.candidates)
    ]


def shade(stage: StageResult) -> str:
    """Return the colour class of a stage: by verdict first, then by how near the limit."""
    if stage.verdict == DIFFER:
        return "over"
    if stage.verdict == "cannot-judge":
        return "unknown"
    if stage.verdict is None:
        return "none"
    errors = [s.error.max for s in (stage.local, stage.accumulated) if s is not None]
    worst = max((error for error in errors if error is not None), default=0.0)
    if worst <= 0:
        return "e0"
    return f"e{min(4, max(1, 5 + math.ceil(math.log10(min(worst, 1.0)) - 1)))}"


def _candidate(anchor: str, candidate: CandidateResult, details: Details) -> CandidateView:
    keys = sorted(
        {(s.path, s.stage) for layer in candidate.layers for s in layer.stages}, key=stage_order
    )
    kernel, profile = candidate.kernel, candidate.profile
    switches = ", ".join(f"{name} {value}" for name, value in profile.switches.items())
    identity = (
        ("format", candidate.format),
        ("device", candidate.device),
        ("profile", profile.name),
        ("switches", switches),
        ("kernel", kernel.variant),
        ("path taken", kernel.path_taken or "-"),
        ("source sha256", kernel.source_sha256 or "-"),
    )
    layers = [
        _layer(f"{anchor}-l{layer.layer}", candidate.name, layer, keys, details)
        for layer in candidate.layers
    ]
    return CandidateView(
        anchor=anchor,
        name=candidate.name,
        verdict=candidate.verdict,
        identity=identity,
        columns=tuple(".".join(key) for key in keys),
        layers=tuple(layers),
        swaps=tuple(_swaps(layer) for layer in candidate.layers if layer.topk is not None),
    )


def _layer(
    anchor: str,
    candidate: str,
    layer: LayerResult,
    keys: Sequence[tuple[str, str]],
    details: Details,
) -> LayerView:
    stages = {(s.path, s.stage): s for s in layer.stages}
    views = {
        key: _stage(f"{anchor}-{key[0]}-{key[1]}", candidate, layer, stage, details)
        for key, stage in stages.items()
    }
    cells = [_cell(views[key], stages[key]) if key in stages else None for key in keys]
    ratio = f"ratio {layer.ratio}" if layer.ratio else "no compressor"
    return LayerView(
        anchor=anchor,
        title=f"layer {layer.layer}, {ratio}",
        differs=any(s.verdict not in (None, "match") for s in layer.stages),
        cells=tuple(cells),
        stages=tuple(views[key] for key in keys if key in views and _says_something(stages[key])),
    )


def _says_something(stage: StageResult) -> bool:
    return stage.verdict is not None or stage.local is not None or stage.accumulated is not None


def _cell(view: StageView, stage: StageResult) -> Cell:
    verdict = stage.verdict or stage.kind
    told = f"{view.name}: {verdict}"
    if _says_something(stage):
        told += f", local {view.local}, accumulated {view.accumulated}"
    return Cell(view.anchor, shade(stage), view.local, view.accumulated, told)


def _stage(
    anchor: str,
    candidate: str,
    layer: LayerResult,
    stage: StageResult,
    details: Details,
) -> StageView:
    prefix = f"{candidate}/layer{layer.layer}/{stage.path}/{stage.stage}"
    differs = stage.verdict == DIFFER
    shown = details.worst if differs else WORST_MATCHING
    stats = stage.local or stage.accumulated
    steps = "-"
    if stats is not None and stats.distance_max is not None:
        steps = f"{stats.distance_max:,} {stats.distance_unit or ''}".strip()
    limit = "-"
    if stage.limit is not None:
        limit = f"{stage.limit.value:g} {stage.limit.unit}: {stage.limit.derivation}"
    counted = f"{stage.rows_compared:,}"
    if stage.rows_compared != stage.rows_expected:
        counted += f" of {stage.rows_expected:,}"
    worst = [
        (
            token(row),
            "-" if row.dim is None else str(row.dim),
            "inf" if row.error is None else number(row.error),
            exact_number(row.expected),
            f"{exact_number(row.found)} {row.detail or ''}".strip(),
        )
        for row in stage.worst[:shown]
    ]
    return StageView(
        anchor=anchor,
        name=f"{stage.path}.{stage.stage}",
        kind=stage.kind,
        verdict=stage.verdict or "",
        rows=counted,
        local=_largest(stage.local),
        accumulated=_largest(stage.accumulated),
        steps=steps,
        limit=limit,
        detail=stage.detail or "",
        ratio=layer.ratio if is_key_side((stage.path, stage.stage)) else 1,
        local_strip=details.strips.of(prefix, "local", differs=differs),
        accumulated_strip=details.strips.of(prefix, "accumulated", differs=differs),
        worst=tuple(worst),
    )


def _largest(stats: ErrorStats | None) -> str:
    if stats is None:
        return "-"
    return "inf" if stats.rows_not_finite else number(stats.error.max)


def _swaps(layer: LayerResult) -> SwapsView:
    topk = layer.topk
    if topk is None:
        raise ValueError(f"layer {layer.layer} has no selection")
    swaps = {**topk.swaps.model_dump(), "invalid": topk.invalid}
    return SwapsView(
        layer=layer.layer,
        k=topk.k,
        rows=topk.rows,
        discarded=number(topk.discarded_mean),
        overlap=exact_number(topk.overlap_mean),
        overlap_min=exact_number(topk.overlap_min),
        lost=number(topk.score_lost_max),
        swaps=tuple((name, count) for name, count in swaps.items()),
        total=sum(swaps.values()),
    )
