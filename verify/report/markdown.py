"""The Markdown summary: a result short enough for a comment on a pull request."""

from __future__ import annotations

from collections.abc import Iterator

from needlepoint.verify.base.numbers import number
from needlepoint.verify.report.summary import details, headline
from needlepoint.verify.report.words import (
    differing,
    exact_number,
    gate_name,
    gate_word,
    local_errors,
    row_error,
    stage_name,
    token,
)
from needlepoint.verify.schema.result import CandidateResult, Result

MOST_STAGES = 20
"""Stages that differ and are listed; the rest is counted."""


def markdown_summary(result: Result) -> bytes:
    """Return a result as Markdown: verdict, candidates, what differs, gates, where it ran."""
    return ("\n".join(_lines(result)) + "\n").encode()


def _lines(result: Result) -> Iterator[str]:
    yield f"### needlepoint: {_text(headline(result))}"
    yield ""
    for line in details(result):
        yield f"* {_text(line)}"
    if details(result):
        yield ""
    yield "| candidate | verdict | stages | closest to its limit | overlap | score lost | B/token |"
    yield "|---|---|---|---|---|---|---|"
    for candidate in result.candidates:
        yield _candidate(candidate, result.contract)
    yield from _differing(result)
    if result.gates:
        yield ""
        for gate in result.gates:
            kept, by = gate_word(gate), _text(gate.candidate or "")
            yield f"* gate `{gate_name(gate)}` {kept} by {by}: found {exact_number(gate.found)}"
    given, env = result.input, result.environment
    yield ""
    yield (
        f"{_text(given.name)}, {given.tokens:,} tokens, contract {result.contract}; "
        f"{result.counts.compared} of {result.counts.expected} stages compared; needlepoint "
        f"{env.needlepoint}, torch {env.torch}, {_text(env.device)}"
    )


def _candidate(candidate: CandidateResult, contract: str) -> str:
    judged = [s for layer in candidate.layers for s in layer.stages if s.verdict is not None]
    passed = sum(stage.verdict == "match" for stage in judged)
    errors = local_errors(candidate.layers)
    closest = max(
        ((error, f"{stage}, layer {layer}") for error, layer, stage in errors), default=(None, "")
    )
    cost = getattr(candidate.format_cost, contract)
    cells = (
        _text(candidate.name),
        f"**{candidate.verdict}**",
        f"{passed} of {len(judged)}",
        f"{number(closest[0])} {closest[1]}".strip(),
        "-" if cost is None else exact_number(cost.overlap_mean),
        "-" if cost is None else number(cost.score_lost_max),
        number(candidate.format_cost.cache_bytes_per_token),
    )
    return f"| {' | '.join(cells)} |"


def _differing(result: Result) -> Iterator[str]:
    """Yield a table of the stages that differ, with their worst tokens."""
    found = differing(result)
    if not found:
        return
    yield ""
    yield "| candidate | layer | stage | rows beyond | worst token | error | expected | found |"
    yield "|---|---|---|---|---|---|---|---|"
    for candidate, layer, stage in found[:MOST_STAGES]:
        stats = stage.local or stage.accumulated
        rows = "-" if stats is None else f"{stats.rows_failed} of {stage.rows_compared}"
        where, error, expected, value = "-", "-", "-", "-"
        if stage.worst:
            row = stage.worst[0]
            where = token(row)
            error = row_error(row)
            expected, value = exact_number(row.expected), exact_number(row.found)
        yield (
            f"| {_text(candidate.name)} | {layer.layer} | {stage_name(stage)} | {rows} | "
            f"{where} | {error} | {expected} | {value} |"
        )
    if len(found) > MOST_STAGES:
        yield ""
        yield f"and {len(found) - MOST_STAGES} more stages"


def _text(text: str) -> str:
    """Return a name or message that Markdown shows as it is."""
    out = text.replace("\\", "\\\\").replace("\n", " ").replace("&", "&amp;").replace("<", "&lt;")
    for mark in "|*_`[]":
        out = out.replace(mark, f"\\{mark}")
    return out
