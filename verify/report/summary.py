"""The first lines of every report: the verdict and the first divergence, in words."""

from __future__ import annotations

from needlepoint.verify.base.numbers import short
from needlepoint.verify.report.words import (
    exact_number,
    gate_name,
    skipped,
    stage_name,
    stages_of,
    token,
)
from needlepoint.verify.schema.result import (
    CANNOT_JUDGE,
    CandidateResult,
    FirstDivergence,
    LayerResult,
    Result,
    StageResult,
)

SHOWN = 3
"""How many items of a list a single line names before it only counts them."""


def headline(result: Result) -> str:
    """Return the verdict and, where there is one, the first divergence and its token."""
    shown = f"{result.verdict}: " + (f"{result.detail}: " if result.detail else "")
    if result.verdict == CANNOT_JUDGE:
        return shown + _shortfall(result)
    for _, where in _diverged(result):
        return shown + _place(where)
    for gate in result.gates:
        if gate.exceeded:
            return shown + (
                f"gate {gate_name(gate)} exceeded, "
                f"found {exact_number(gate.found)} ({gate.candidate})"
            )
    gates = f", {_counted(len(result.gates), 'gate')} kept" if result.gates else ""
    if not result.counts.expected and any(c.recall for c in result.candidates):
        return shown + _recalled(result) + gates
    return shown + (
        f"{result.counts.compared} of {result.counts.expected} stages compared, "
        f"{_counted(len(result.candidates), 'candidate')}{gates}"
    )


def _recalled(result: Result) -> str:
    """Return one clause a candidate: hits, reference, and what the needles show."""
    parts = []
    for candidate in result.candidates:
        recall = candidate.recall
        if recall is None:
            continue
        shown: str = recall.conclusion
        if shown == "not shown" and recall.detectable_drop is not None:
            shown += f" (detectable drop {recall.detectable_drop:.3f})"
        reference = recall.hits + recall.lost - recall.gained
        parts.append(
            f"{candidate.name} {recall.hits} of {recall.rows}, reference {reference}: {shown}"
        )
    return "; ".join(parts)


def details(result: Result) -> list[str]:
    """Return the lines under the headline: values of the divergence, how many others, notes."""
    notes = [f"note: {note}" for note in result.notes]
    diverged = _diverged(result)
    if not diverged:
        return notes
    candidate, where = diverged[0]
    lines = [f"candidate {candidate.name}: {where.detail}"]
    if result.verdict == CANNOT_JUDGE:
        lines.insert(0, f"differs besides: {_place(where)}")
    stage = find_stage(candidate, where)
    if stage is not None:
        lines += _values(stage, where)
    if len(diverged) > 1:
        lines.append(f"also differ: {', '.join(other.name for other, _ in diverged[1:])}")
    return lines + notes


def find_stage(candidate: CandidateResult, where: FirstDivergence) -> StageResult | None:
    """Return the stage that a divergence points at."""
    wanted = (where.layer, where.path, where.stage)
    stages = ((layer.layer, stage) for layer in candidate.layers for stage in layer.stages)
    return next((s for layer, s in stages if (layer, s.path, s.stage) == wanted), None)


def some(items: list[str]) -> str:
    """Join a list, naming at most :data:`SHOWN` items and counting the rest."""
    rest = len(items) - SHOWN
    return ", ".join(items[:SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def layers_with(layers: tuple[LayerResult, ...], numbers: set[int]) -> str:
    """Return layer numbers as ``2, 4-8``; layers between two that are no part of the run join.

    Parameters
    ----------
    layers
        All layers of the run: they decide which numbers are neighbours.
    numbers
        The layers to name.
    """
    ranges: list[list[int]] = []
    previous_in = False
    for layer in sorted(item.layer for item in layers):
        inside = layer in numbers
        if inside and previous_in:
            ranges[-1][1] = layer
        elif inside:
            ranges.append([layer, layer])
        previous_in = inside
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _diverged(result: Result) -> list[tuple[CandidateResult, FirstDivergence]]:
    """Return the candidates that differ, in order, with where they first do."""
    return [
        (candidate, candidate.first_divergence)
        for candidate in result.candidates
        if candidate.first_divergence is not None
    ]


def _place(where: FirstDivergence) -> str:
    """Return layer, stage and token, and the error, or what fails where no row does by itself."""
    place = f"layer {where.layer} {stage_name(where)}, {token(where)}"
    if where.error is None:
        return place
    return f"{place}: {where.detail if where.error <= 1 else f'{short(where.error)} x limit'}"


def _values(stage: StageResult, where: FirstDivergence) -> list[str]:
    """Return what was expected and found at the divergence, and the limit."""
    lines: list[str] = []
    for row in stage.worst:
        if (row.request, row.position, row.entry) == (where.request, where.position, where.entry):
            dim = "" if row.dim is None else f" at dim {row.dim}"
            found = f"found {exact_number(row.found)}"
            values = f"expected {exact_number(row.expected)}, {found}{dim}"
            lines.append(row.detail if row.found is None and row.detail else values)
            break
    if stage.limit is not None:
        lines.append(f"limit {short(stage.limit.value)} {stage.limit.unit}")
    return lines


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _shortfall(result: Result) -> str:
    """Return why the run could not be judged."""
    counts = result.counts
    base = f"{counts.compared} of {counts.expected} stages compared"
    if not result.candidates:
        return "no candidate was run"
    if not counts.expected and any(c.recall for c in result.candidates):
        return _recalled(result)
    if counts.skipped:
        return f"{base}; skipped {some(skipped(result))}"
    reasons = [
        f"{c.name} layer {layer.layer} {stage_name(s)}: "
        + (s.detail or f"{s.rows_compared} of {s.rows_expected} rows compared")
        for c, layer, s in stages_of(result)
        if s.verdict == CANNOT_JUDGE
    ]
    reasons = reasons or [c.name for c in result.candidates if c.verdict == CANNOT_JUDGE]
    gates = [f"{g.candidate}: {g.detail}" for g in result.gates if g.exceeded is None]
    if not reasons and gates:
        return f"gate not judged: {some(gates)}"
    return some(reasons) or base
