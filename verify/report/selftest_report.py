"""The table of the self-test: faults, the gates that fired, and what usual comparisons say."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from needlepoint.verify.schema.base import DIFFER, Verdict
from needlepoint.verify.schema.selftest_result import CaseResult, SelftestResult

_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "index",
        ("index.pooled", "index.normed", "index.roped", "index.rotated", "index.stored"),
    ),
    ("main", ("main.pooled", "main.normed", "main.roped", "main.stored")),
    ("qws", ("query.query", "query.weights", "index.scores")),
    ("topk", ("topk.selector", "topk.invalid", "topk.unknown")),
)
"""Columns of the matrix; gates that are in none of them stand under ``more``."""

_RIVALS = ("assert_close", "calc_diff", "cosine", "overlap")


def print_selftest(result: SelftestResult, console: Console, *, brief: bool) -> None:
    """Print the matrix and the verdict, or the verdict alone."""
    if not brief:
        console.print(
            f"{result.input}: {result.tokens} tokens in {result.requests} requests, "
            f"seed {result.seed}"
        )
        console.print()
        rest = _rest(result.gates)
        for kind in ("fault", "control"):
            console.print(_matrix(result, kind, rest))
            console.print()
        for line in _legend(rest):
            console.print(line)
        console.print()
        for case in _by_case(result.cases):
            for line in _remarks(case):
                console.print(line)
    console.print(verdict_line(result))


def verdict_line(result: SelftestResult) -> str:
    """Return the verdict in one line."""
    few = f", {result.too_few_rows} need more rows" if result.too_few_rows else ""
    return (
        f"{result.verdict}: {result.caught} of {result.faults} faults caught{few}, "
        f"{result.false_alarms} of {result.controls} controls flagged"
    )


def _by_case(cases: Sequence[CaseResult]) -> list[list[CaseResult]]:
    """Return the cases grouped by what was planted, scales side by side."""
    found: dict[str, list[CaseResult]] = {}
    for case in cases:
        found.setdefault(case.case, []).append(case)
    return list(found.values())


def _rest(gates: Sequence[str]) -> tuple[str, ...]:
    placed = {gate for _, group in _GROUPS for gate in group}
    return tuple(gate for gate in gates if gate not in placed)


def _matrix(result: SelftestResult, kind: str, rest: tuple[str, ...]) -> Table:
    table = Table(box=box.ASCII2, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(kind, no_wrap=True)
    for name, _ in _GROUPS:
        table.add_column(name, no_wrap=True)
    table.add_column("more", no_wrap=True)
    table.add_column("acco", no_wrap=True)
    table.add_column("", no_wrap=True)
    for scales in _by_case([case for case in result.cases if case.kind == kind]):
        marks = ["".join(_mark(scales, gate) for gate in group) for _, group in _GROUPS]
        others = "".join(_other(scales, name) for name in _RIVALS)
        more = "".join(_mark(scales, gate) for gate in rest)
        table.add_row(scales[0].case, *marks, more, others, _end(scales))
    return table


def _mark(scales: Sequence[CaseResult], gate: str) -> str:
    """Return ``x`` where a gate fired at every scale, ``-`` at some, ``.`` at none."""
    fired = [gate in case.gates for case in scales]
    return "x" if all(fired) else "-" if any(fired) else "."


def _other(scales: Sequence[CaseResult], name: str) -> str:
    said: list[Verdict] = [v for c in scales if (v := getattr(c.others, name)) is not None]
    if not said:
        return " "
    differ = [verdict == DIFFER for verdict in said]
    return "x" if all(differ) else "-" if any(differ) else "."


def _end(scales: Sequence[CaseResult]) -> str:
    if any(case.caught is None for case in scales):
        return "few rows"
    flagged = [case.caught is True for case in scales]
    if scales[0].kind == "control":
        return "FLAGGED" if any(flagged) else ""
    return "" if all(flagged) else "MISSED"


def _legend(rest: tuple[str, ...]) -> list[str]:
    words = {name: [gate.split(".")[-1] for gate in group] for name, group in _GROUPS}
    words["more"] = list(rest)
    lines = [f"{name}: {' '.join(gates)}" for name, gates in words.items()]
    lines.append(f"acco: {' '.join(_RIVALS)}, where the fault is born")
    lines.append("x fires at every scale of stored rows (1 and 1e-3), - at one, . at none")
    return lines


def _remarks(scales: Sequence[CaseResult]) -> list[str]:
    """Return a line for a case that was not shown, missed or flagged."""
    lines = []
    first = scales[0]
    needs = [case.needs for case in scales if case.needs is not None]
    if needs:
        lines.append(f"{first.case}: needs at least {max(needs)} rows")
    if first.needs_requests is not None:
        lines.append(f"{first.case}: needs at least {first.needs_requests} requests")
    for case in scales:
        if case.kind == "fault" and case.caught is False:
            fired = ", ".join(case.gates) or "none"
            lines.append(f"{case.id}: missed; expected {', '.join(case.expected)}, fired {fired}")
        if case.kind == "control" and case.caught:
            lines.append(f"{case.id}: flagged by {', '.join(case.gates)}")
    return lines
