"""Recall in the terminal report, made from a result alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table

from needlepoint.verify.base.numbers import number, short
from needlepoint.verify.report.tables import plain_table, titled
from needlepoint.verify.report.words import interval
from needlepoint.verify.schema.recall import ATTENUATED, RecallCell, RecallMiss, RecallResult
from needlepoint.verify.schema.result import CandidateResult, Result

MISSES_SHOWN = 5


def recall_parts(result: Result) -> Iterator[RenderableType]:
    """Yield the sections of recall; nothing where none was measured."""
    found = list(_measured(result))
    if not found:
        return
    recall = found[0][1]
    title = f"Recall at k = {recall.k}, needles paired with the reference ({result.contract})"
    yield titled(title, recall.label, _summary(found))
    for candidate, recall in found:
        parts: list[Table | str] = [_grid(recall), *_asides(recall)]
        if recall.causes and ATTENUATED not in recall.causes:
            parts.append("attention lost on picked needles: not judged, no main rows")
        if recall.misses:
            counts = ", ".join(f"{n} {cause}" for cause, n in recall.causes.items() if n)
            parts += [f"causes: {counts}", *(_miss(m) for m in recall.misses[:MISSES_SHOWN])]
            rest = len(recall.misses) - MISSES_SHOWN
            parts += [f"and {rest} more in the result"] if rest > 0 else []
        yield titled(f"Recall of {candidate.name}: hits of needles (reference)", *parts)
    if any(m.rows for _, r in found for m in r.margins):
        title = "Hit rate by score margin, in units of each format's own score noise"
        yield titled(title, _margins(found))
    if any(r.cost is not None for _, r in found):
        cost = next(r.cost for _, r in found if r.cost is not None)
        title = (
            f"What index keys cost: bytes of one layer, tokens that fit with {cost.layers} layers,"
            f"\ntransients of scoring the end of {cost.prompt_tokens:,} tokens, recall difference"
        )
        yield titled(title, _costs(found))


def _measured(result: Result) -> Iterator[tuple[CandidateResult, RecallResult]]:
    for candidate in result.candidates:
        if candidate.recall is not None:
            yield candidate, candidate.recall


def _summary(found: Sequence[tuple[CandidateResult, RecallResult]]) -> Table:
    table = plain_table("candidate", "hits>", "rate>", "95 %", "lost>", "gained>", "p>", "")
    for candidate, r in found:
        table.add_row(
            candidate.name,
            f"{r.hits}/{r.rows}",
            "-" if r.rate is None else f"{r.rate:.3f}",
            interval(r.ci95, "-"),
            str(r.lost),
            str(r.gained),
            number(r.mcnemar_p),
            r.conclusion,
        )
    return table


def _grid(recall: RecallResult) -> Table:
    """Return one row a length, density and k; a column a depth."""
    cells = [cell for cell in recall.cells if cell.exercised]
    depths = sorted({cell.depth for cell in cells})
    if len(depths) > 6:  # marked needles stand anywhere
        depths = []
    table = plain_table("tokens>", "near>", "k>", *(f"{100 * d:.3g} %>" for d in depths), "all>")
    order = dict.fromkeys((c.length, c.distractors, c.k) for c in cells)
    for length, distractors, k in sorted(order, key=lambda o: (o[0], o[1], -o[2])):
        row = [c for c in cells if (c.length, c.distractors, c.k) == (length, distractors, k)]
        by_depth = [[c for c in row if c.depth == depth] for depth in depths]
        table.add_row(str(length), str(distractors), str(k), *map(_hits, by_depth), _hits(row))
    return table


def _hits(cells: Sequence[RecallCell]) -> str:
    rows, hits = sum(c.rows for c in cells), sum(c.hits for c in cells)
    reference = sum(c.reference_hits for c in cells)
    return f"{hits}/{rows}" + ("" if reference == hits else f" ({reference})") if rows else ""


def _asides(recall: RecallResult) -> list[str]:
    lines = [
        f"difference {short(recall.delta)}, 95 % {interval(recall.delta_ci95)}, detectable drop "
        f"{short(recall.detectable_drop)}",
        f"{recall.haystacks} haystacks, design effect {number(recall.design_effect)}, p over "
        f"haystacks {number(recall.cluster_p)}",
    ]
    aside = recall.not_exercised
    if aside.rows:
        lines.append(
            f"not exercised: {aside.rows} needles see at most k entries and are not counted; "
            f"{aside.picked} picked"
        )
    aside = recall.window
    if aside.rows:
        lines.append(
            f"window: {aside.rows} needles are read through the sliding window and not counted; "
            f"{aside.picked} picked besides"
        )
    for layer in recall.layers if len(recall.layers) > 1 else ():
        lines.append(
            f"layer {layer.layer}: {layer.hits} of {layer.rows}, reference "
            f"{layer.reference_hits}, median rank {short(layer.rank_median)}"
        )
    if recall.reach:
        counts = ", ".join(f"{n} in {i}" for i, n in enumerate(recall.reach) if n)
        lines.append(f"needles by the number of layers that pick them: {counts}")
    return lines


def _miss(miss: RecallMiss) -> str:
    by = f" ({miss.by})" if miss.by else ""
    line = (
        f"{miss.length} tokens, needle at {miss.start}, layer {miss.layer}: {miss.cause}{by}, rank "
        f"{miss.rank} beside {miss.reference_rank}"
    )
    if miss.gap is not None:
        line += f", gap {short(miss.gap)} of allowed {short(miss.allowed)}"
    if miss.page is not None:
        line += f", page {miss.page}"
    if miss.mass_kept is not None:
        line += f", attention kept {miss.mass_kept:.2f}, output error {short(miss.output_error)}"
    return line


def _margins(found: Sequence[tuple[CandidateResult, RecallResult]]) -> Table:
    margins = [m.margin for m in found[0][1].margins]
    table = plain_table("candidate", *(f"{m:+g}>" for m in margins))
    for candidate, recall in found:
        table.add_row(
            candidate.name,
            *(f"{m.hits / m.rows:.2f}" if m.rows else "-" for m in recall.margins),
        )
        table.add_row("  needles", *(str(m.rows) for m in recall.margins))
    return table


def _costs(found: Sequence[tuple[CandidateResult, RecallResult]]) -> Table:
    first = next(r.cost for _, r in found if r.cost is not None)
    memory = f"{first.memory_bytes / 2**30:.3g} GiB"
    table = plain_table(
        "candidate", "B/key>", "B/token>", f"fit {memory}>", "measured>", "predicted>", "recall>"
    )
    for candidate, recall in found:
        cost = recall.cost
        if cost is None:
            continue
        fit = "-" if cost.tokens_that_fit is None else f"{cost.tokens_that_fit:,}"
        table.add_row(
            candidate.name,
            short(cost.key_bytes),
            short(cost.bytes_per_token),
            fit,
            _mib(cost.transient_measured),
            _mib(cost.transient_predicted),
            "-" if recall.delta is None else f"{recall.delta:+.3f}",
        )
    return table


def _mib(size: int | None) -> str:
    return "not run" if size is None else f"{size / 2**20:,.0f} MiB"
