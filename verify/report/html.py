"""The HTML report: one file that loads nothing, made from a result and its row errors.

The template reads the records of the result; what it cannot work out stands in views: anchors,
colour classes, strips and texts of a stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import ArrayLike

from needlepoint.verify.base.numbers import number
from needlepoint.verify.base.stages import is_key_side, stage_order
from needlepoint.verify.report.html_strips import HEIGHT, LIMIT_Y, Strip, Strips
from needlepoint.verify.report.recall_svg import recall_pictures
from needlepoint.verify.report.summary import details, headline
from needlepoint.verify.report.words import (
    costs,
    differing,
    exact_number,
    gate_name,
    gate_word,
    interval,
    largest_error,
    row_error,
    says_something,
    stage_name,
    swap_counts,
    token,
)
from needlepoint.verify.schema.base import Interval
from needlepoint.verify.schema.recall import RecallCell, RecallResult
from needlepoint.verify.schema.result import (
    CANNOT_JUDGE,
    DIFFER,
    CandidateResult,
    LayerResult,
    MemoryResult,
    Result,
    StageResult,
    TopkResult,
    WorstRow,
)

TEMPLATE = "report.html.j2"
MOST_LENGTHS: Final = 4096
"""Beyond this the positions of a strip's bins are not told."""
WORST_MATCHING: Final = 1
WORST_DIFFERING: Final = 16
WORST_ROWS: Final = 1000
"""Worst tokens of all stages that differ together; each has at least one."""


@dataclass(frozen=True)
class StageView:
    """One stage: a cell of the matrix, and its details."""

    anchor: str  # Where its details are.
    name: str
    record: StageResult  # What the result says of it.
    # Class of its colour: ``none``, ``e0`` to ``e4`` by how near the limit, ``over`` or
    # ``unknown``.
    shade: str
    label: str  # The cell in words, for a screen reader.
    rows: str
    local: str
    accumulated: str
    steps: str
    limit: str
    ratio: int  # Tokens of a row.
    local_strip: Strip | None
    accumulated_strip: Strip | None
    # Token, dim, error, expected and found of the worst rows.
    worst: tuple[tuple[str, str, str, str, str], ...]


@dataclass(frozen=True)
class LayerView:
    """One layer of one candidate: a cell for every column, and the stages with details."""

    anchor: str
    title: str
    differs: bool
    cells: tuple[StageView | None, ...]
    stages: tuple[StageView, ...]


@dataclass(frozen=True)
class CandidateView:
    """One candidate; ``swaps`` are layer, selection, swaps by class and their sum."""

    anchor: str
    record: CandidateResult
    identity: tuple[tuple[str, str], ...]
    columns: tuple[str, ...]
    layers: tuple[LayerView, ...]
    swaps: tuple[tuple[int, TopkResult, dict[str, int], int], ...]


@dataclass(frozen=True)
class Details:
    """What a stage may show: its strips, and how many worst tokens where it differs."""

    strips: Strips
    worst: int


def html_report(result: Result, rows: Mapping[str, ArrayLike]) -> bytes:
    """Return the report of a result as one HTML document.

    Parameters
    ----------
    result
        The result, its gates applied.
    rows
        Row errors by ``candidate/layerN/path/stage/local|accumulated``; may be empty.
    """
    candidates = candidate_views(result, rows)
    environment = Environment(
        loader=FunctionLoader(template_text),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "exact": exact_number}
    lengths = result.input.lengths or ()
    text = environment.get_template(TEMPLATE).render(
        result=result,
        headline=headline(result),
        details=details(result),
        candidates=candidates,
        first=_first(candidates),
        gates=[(gate, gate_name(gate), gate_word(gate)) for gate in result.gates],
        costs=[(c, name, cost) for c in result.candidates for name, cost in costs(c)],
        memory=[(candidate.name, *_memory(candidate.memory)) for candidate in result.candidates],
        recalls=[
            recall_view(candidate.name, candidate.recall)
            for candidate in result.candidates
            if candidate.recall is not None
        ],
        machine=_machine(result),
        lengths=",".join(map(str, lengths if len(lengths) <= MOST_LENGTHS else ())),
        height=HEIGHT,
        limit_y=LIMIT_Y,
        has_rows=bool(rows),
    )
    return text.encode()


def template_text(name: str) -> str:
    """Return the text of a template that ships in the package."""
    return (
        files("needlepoint.verify.report").joinpath("templates", name).read_text(encoding="utf-8")
    )


def candidate_views(result: Result, rows: Mapping[str, ArrayLike]) -> list[CandidateView]:
    """Return every candidate of a result.

    Parameters
    ----------
    result
        The result.
    rows
        Its row errors, as in :func:`html_report`; without them there are no strips.
    """
    count = len(differing(result))
    shown = Details(
        Strips.of_report(rows, count), max(1, min(WORST_DIFFERING, WORST_ROWS // max(1, count)))
    )
    return [_candidate(f"c{i}", candidate, shown) for i, candidate in enumerate(result.candidates)]


def _candidate(anchor: str, candidate: CandidateResult, shown: Details) -> CandidateView:
    keys = sorted(
        {(s.path, s.stage) for layer in candidate.layers for s in layer.stages}, key=stage_order
    )
    layers = [_layer(anchor, candidate.name, layer, keys, shown) for layer in candidate.layers]
    counted = [(layer.layer, layer.topk) for layer in candidate.layers if layer.topk is not None]
    swaps = [(layer, topk, swap_counts(topk)) for layer, topk in counted]
    return CandidateView(
        anchor=anchor,
        record=candidate,
        identity=_identity(candidate),
        columns=tuple(".".join(key) for key in keys),
        layers=tuple(layers),
        swaps=tuple((*row, sum(row[2].values())) for row in swaps),
    )


def _identity(candidate: CandidateResult) -> tuple[tuple[str, str], ...]:
    kernel, profile = candidate.kernel, candidate.profile
    return (
        ("format", candidate.format),
        ("device", candidate.device),
        ("profile", profile.name),
        ("switches", ", ".join(f"{name} {value}" for name, value in profile.switches.items())),
        ("kernel", kernel.variant),
        ("path taken", kernel.path_taken or "-"),
        ("source sha256", kernel.source_sha256 or "-"),
    )


def _layer(
    anchor: str,
    candidate: str,
    layer: LayerResult,
    keys: Sequence[tuple[str, str]],
    shown: Details,
) -> LayerView:
    anchor = f"{anchor}-l{layer.layer}"
    views: dict[tuple[str, str], StageView] = {
        (s.path, s.stage): _stage(anchor, candidate, layer, s, shown) for s in layer.stages
    }
    ratio = f"ratio {layer.ratio}" if layer.ratio else "no compressor"
    return LayerView(
        anchor=anchor,
        title=f"layer {layer.layer}, {ratio}",
        differs=any(s.verdict not in (None, "match") for s in layer.stages),
        cells=tuple(views.get(key) for key in keys),
        stages=tuple(views[k] for k in keys if k in views and says_something(views[k].record)),
    )


def _stage(
    anchor: str, candidate: str, layer: LayerResult, stage: StageResult, shown: Details
) -> StageView:
    prefix = f"{candidate}/layer{layer.layer}/{stage.path}/{stage.stage}"
    name, differs = stage_name(stage), stage.verdict == DIFFER
    local, accumulated = largest_error(stage.local), largest_error(stage.accumulated)
    label = f"{name}: {stage.verdict or stage.kind}"
    if says_something(stage):
        label += f", local {local}, accumulated {accumulated}"
    stats = stage.local or stage.accumulated
    steps = "-"
    if stats is not None and stats.distance_max is not None:
        steps = f"{stats.distance_max:,} {stats.distance_unit or ''}".strip()
    limit = "-"
    if stage.limit is not None:
        limit = f"{stage.limit.value:g} {stage.limit.unit}: {stage.limit.derivation}"
    rows = f"{stage.rows_compared:,}"
    if stage.rows_compared != stage.rows_expected:
        rows += f" of {stage.rows_expected:,}"
    return StageView(
        anchor=f"{anchor}-{stage.path}-{stage.stage}",
        name=name,
        record=stage,
        shade=shade(stage),
        label=label,
        rows=rows,
        local=local,
        accumulated=accumulated,
        steps=steps,
        limit=limit,
        ratio=layer.ratio if is_key_side((stage.path, stage.stage)) else 1,
        local_strip=shown.strips.of(prefix, "local", differs=differs),
        accumulated_strip=shown.strips.of(prefix, "accumulated", differs=differs),
        worst=tuple(map(_worst, stage.worst[: shown.worst if differs else WORST_MATCHING])),
    )


def _worst(row: WorstRow) -> tuple[str, str, str, str, str]:
    return (
        token(row),
        "-" if row.dim is None else str(row.dim),
        row_error(row),
        exact_number(row.expected),
        f"{exact_number(row.found)} {row.detail or ''}".strip(),
    )


def shade(stage: StageResult) -> str:
    """Return the colour class of a stage: by verdict first, then by how near the limit."""
    if stage.verdict in (DIFFER, CANNOT_JUDGE, None):
        return {DIFFER: "over", CANNOT_JUDGE: "unknown", None: "none"}[stage.verdict]
    errors = [s.error.max for s in (stage.local, stage.accumulated) if s is not None]
    worst = max((error for error in errors if error is not None), default=0.0)
    if worst <= 0:
        return "e0"
    return f"e{min(4, max(1, 5 + math.ceil(math.log10(min(worst, 1.0)) - 1)))}"


def _first(candidates: Sequence[CandidateView]) -> str | None:
    """Return the anchor of the first divergence."""
    for view in candidates:
        where = view.record.first_divergence
        if where is not None:
            return f"{view.anchor}-l{where.layer}-{where.path}-{where.stage}"
    return None


def _memory(memory: MemoryResult) -> tuple[str, str]:
    """Return the measured peak, and the law where one was fitted."""
    peak = "-" if memory.peak_transient_bytes is None else f"{memory.peak_transient_bytes:,}"
    if memory.law is None:
        return peak, ""
    return peak, (
        f"{number(memory.law.bytes_per_product)} bytes x queries x heads x keys, fitted to "
        f"{len(memory.law.points)} sizes; predicted for {memory.law.predicted_tokens:,} "
        f"tokens, not allocated: {memory.law.predicted_bytes / 2**30:.2f} GiB"
    )


def _machine(result: Result) -> list[tuple[str, str]]:
    source = result.input
    facts = [
        ("input", f"{source.name}, {source.tokens:,} tokens in {source.requests} requests"),
        ("input sha256", source.sha256),
        ("model", source.model or "-"),
        ("seed", "-" if source.seed is None else str(source.seed)),
    ]
    return facts + [
        (name, str(value)) for name, value in result.environment.model_dump(mode="json").items()
    ]


@dataclass(frozen=True)
class RecallView:
    """Recall of one candidate."""

    candidate: str
    facts: tuple[str, ...]  # Figures in words.
    pictures: tuple[Markup, ...]  # Heat maps and the curve by margin: SVG elements.
    # What the heat maps show, one line a point: length, depth, k, near-duplicates, hits of rows,
    # interval, reference hits, lost, gained, note.
    cells: tuple[tuple[str, ...], ...]
    causes: tuple[tuple[str, int], ...]  # Misses by cause.


def recall_view(candidate: str, recall: RecallResult) -> RecallView:
    """Return what the report shows of a candidate's recall."""
    facts = [
        f"{recall.hits} of {recall.rows} needles hit, rate {number(recall.rate)}"
        f"{_aside(recall.ci95)}, reference {number(recall.reference_rate)}",
        f"lost {recall.lost}, gained {recall.gained}, difference {number(recall.delta)}"
        f"{_aside(recall.delta_ci95)}",
        f"p {number(recall.mcnemar_p)}; a drop of {number(recall.detectable_drop)} would be seen",
    ]
    return RecallView(
        candidate,
        tuple([recall.label, *facts] if recall.label else facts),
        # The pictures escape the names in them.
        tuple(Markup(picture) for picture in recall_pictures(recall, candidate)),
        tuple(_line(cell) for cell in recall.cells),
        tuple(recall.causes.items()),
    )


def _line(cell: RecallCell) -> tuple[str, ...]:
    return (
        f"{cell.length:,}",
        f"{100 * cell.depth:.3g} %",
        str(cell.k),
        str(cell.distractors),
        f"{cell.hits} of {cell.rows}",
        interval(cell.ci95),
        str(cell.reference_hits),
        str(cell.lost),
        str(cell.gained),
        "" if cell.exercised else "not exercised",
    )


def _aside(ci: Interval | None) -> str:
    return "" if ci is None else f" ({interval(ci)})"
