"""Tables of the terminal report; every one fits 80 columns of plain ASCII."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from needlepoint.verify.base.numbers import number
from needlepoint.verify.report.words import (
    costs,
    exact_number,
    gate_name,
    gate_word,
    largest_error,
    row_error,
    says_something,
    stage_name,
    swap_counts,
)
from needlepoint.verify.schema.result import (
    ErrorStats,
    GateResult,
    LayerResult,
    Result,
    StageResult,
    WorstRow,
)

WORST_SHOWN = 5
_STYLES = {"match": "green", "differ": "red", "cannot-judge": "yellow"}


def stage_table(layers: Sequence[LayerResult]) -> Table:
    """Return one row per judged stage: rows, local and accumulated error, worst token, verdict."""
    table = plain_table("stage", "rows>", "local>", "accum.>", "steps>", "worst", "verdict")
    table.columns[0].no_wrap = True  # a name in two pieces is not found again
    for layer in layers:
        ratio = f" (1/{layer.ratio})" if layer.ratio else ""
        table.add_row(f"layer {layer.layer}{ratio}")
        for stage in layer.stages:
            if not says_something(stage):
                continue
            table.add_row(
                f" {stage_name(stage)}",
                _rows(stage),
                largest_error(stage.local),
                largest_error(stage.accumulated),
                _steps(stage.local or stage.accumulated),
                _token(stage.worst[0]) if stage.worst else "",
                Text(stage.verdict or stage.kind, style=_STYLES.get(stage.verdict or "", "")),
            )
    return table


def worst_table(stages: Sequence[tuple[int, StageResult]]) -> Table:
    """Return the worst tokens of stages, each with its layer, and the values there."""
    table = plain_table("layer", "stage", "token", "dim>", "error>", "expected>", "found>")
    for layer, stage in stages:
        for row in stage.worst[:WORST_SHOWN]:
            table.add_row(
                str(layer),
                stage_name(stage),
                _token(row),
                "" if row.dim is None else str(row.dim),
                row_error(row),
                exact_number(row.expected),
                _found(row),
            )
    return table


def topk_table(layers: Sequence[LayerResult]) -> Table:
    """Return selection by layer: overlap beside score lost and what was discarded, and swaps."""
    table = plain_table("layer", "k>", "rows>", "discarded>", "overlap>", "min>", "lost>", "swaps")
    for layer in layers:
        topk = layer.topk
        if topk is None:
            continue
        swaps = swap_counts(topk)
        table.add_row(
            str(layer.layer),
            str(topk.k),
            str(topk.rows),
            number(topk.discarded_mean),
            _share(topk.overlap_mean),
            _share(topk.overlap_min),
            number(topk.score_lost_max),
            ", ".join(f"{count} {name}" for name, count in swaps.items() if count) or "none",
        )
    return table


def cost_table(result: Result) -> Table:
    """Return what each candidate costs against each contract, and its cache bytes per token."""
    table = plain_table(
        "candidate", "contract", "key mean>", "key max>", "overlap>", "lost>", "B/token>"
    )
    for candidate in result.candidates:
        stored = number(candidate.format_cost.cache_bytes_per_token)
        measured = costs(candidate)
        for place, (name, cost) in enumerate(measured):
            table.add_row(
                "" if place else candidate.name,
                name,
                number(cost.rel_mean),
                number(cost.rel_max),
                _share(cost.overlap_mean),
                number(cost.score_lost_max),
                "" if place else stored,
            )
        if not measured:
            table.add_row(candidate.name, "-", "", "", "", "", stored)
    return table


def gate_table(gates: Sequence[GateResult]) -> Table:
    """Return every gate for every candidate."""
    table = plain_table("gate", "candidate", "found>", "")
    styles = {True: "red", False: "green", None: "yellow"}
    for gate in gates:
        why = f": {gate.detail}" if gate.detail else ""
        table.add_row(
            gate_name(gate),
            gate.candidate or "",
            exact_number(gate.found),
            Text(gate_word(gate, "cannot-judge") + why, style=styles[gate.exceeded]),
        )
    return table


def limit_table(result: Result) -> Table:
    """Return, for each stage, the judged limit and the smallest that passes in every layer."""
    table = plain_table("candidate", "stage", "limit>", "passes from>", "layer>", "too wide>")
    for candidate in result.candidates:
        judged = [
            (stage_name(stage), layer.layer, stage.limit)
            for layer in candidate.layers
            for stage in layer.stages
            if stage.limit is not None
        ]
        for place, name in enumerate(dict.fromkeys(stage for stage, _, _ in judged)):
            of_stage = [(layer, limit) for stage, layer, limit in judged if stage == name]
            layer, worst = max(
                of_stage, key=lambda item: inf if item[1].passing is None else item[1].passing
            )
            widest = min(inf if limit.widest is None else limit.widest for _, limit in of_stage)
            table.add_row(
                candidate.name if not place else "",
                name,
                number(worst.value),
                "none" if worst.passing is None else number(worst.passing),
                str(layer),
                "" if widest == inf else number(widest),
            )
    return table


def titled(title: str, *parts: Table | str) -> RenderableType:
    """Return a section of the report: a title, and tables or lines indented under it."""
    return Group(Text(title), *map(indent, parts))


def indent(part: Table | str) -> Padding:
    """Return a table or line moved right by two columns, wrapped lines included."""
    return Padding(part if isinstance(part, Table) else Text(part), (0, 0, 0, 2), expand=False)


def plain_table(*names: str) -> Table:
    """Return an empty table; a name that ends in ``>`` makes a right-aligned column."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in names:
        table.add_column(
            name.removesuffix(">"),
            justify="right" if name.endswith(">") else "left",
            overflow="fold",
        )
    return table


def _rows(stage: StageResult) -> str:
    """Return the rows compared, with the rows expected where they are more."""
    if stage.rows_compared == stage.rows_expected:
        return str(stage.rows_compared)
    return f"{stage.rows_compared}/{stage.rows_expected}"


def _steps(stats: ErrorStats | None) -> str:
    """Return the largest distance in ULP or codes."""
    if stats is None or stats.distance_max is None:
        return ""
    return f"{stats.distance_max} {stats.distance_unit or ''}".strip()


def _token(row: WorstRow) -> str:
    """Return a token as ``r0 p511 e127``."""
    if row.request is None:
        return "no token"
    entry = "" if row.entry is None else f" e{row.entry}"
    return f"r{row.request} p{row.position}{entry}"


def _found(row: WorstRow) -> str:
    """Return the value found, and what the number cannot say."""
    if row.detail is None:
        return exact_number(row.found)
    return row.detail if row.found is None else f"{exact_number(row.found)} ({row.detail})"


def _share(value: float | None) -> str:
    """Return a share with the digits that matter near one; never rounds up to 1."""
    if value is None:
        return "-"
    return "1" if value == 1 else f"{min(value, 0.9999):.4f}"
