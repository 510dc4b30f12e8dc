"""The terminal report, made from a result alone.

The first line holds the verdict and the first divergence. Everything after it is for the reader who
goes on: stages by layer, selection, cost, memory, what was not looked at, and where it ran. Plain
text carries all meaning; colour repeats it. Order follows the result and never a set or the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from needlepoint.verify.base.numbers import number
from needlepoint.verify.report.recall_report import recall_parts
from needlepoint.verify.report.summary import details, headline, layers_with, some
from needlepoint.verify.report.tables import (
    cost_table,
    gate_table,
    indent,
    limit_table,
    plain_table,
    stage_table,
    titled,
    topk_table,
    worst_table,
)
from needlepoint.verify.report.words import local_errors, skipped, stage_name, stages_of
from needlepoint.verify.schema.recall import ScenarioResult
from needlepoint.verify.schema.result import (
    CANNOT_JUDGE,
    DIFFER,
    MATCH,
    CandidateResult,
    LayerResult,
    Result,
    Verdict,
)
from needlepoint.verify.schema.shrink import ShrinkResult
from needlepoint.verify.schema.swap import SwapEffect, SwapResult

STYLES: dict[Verdict, str] = {
    "match": "bold green",
    "differ": "bold red",
    "cannot-judge": "bold yellow",
}
FULL_LAYERS = 4
"""More matching layers than this are folded into one line, and so are those beyond this number that
are no match, so that a deep model stays readable."""
WORST_STAGES = 6
"""Stages that differ and have their worst tokens listed; the rest is counted."""
_WHERE_ALL_IS = "see --json or --html"


def print_report(
    result: Result,
    console: Console,
    *,
    brief: bool = False,
    limits: bool = False,
    timelines: Iterable[tuple[str, list[str]]] = (),
) -> None:
    """Print the report of a result.

    Parameters
    ----------
    result
        The result.
    console
        Where to print; its width is respected down to 80 columns.
    brief
        Print the first line alone.
    limits
        List the smallest limit that each stage passes.
    timelines
        Titled lines about failing histories, which ``verify.scenario.timeline`` makes; read only
        where the whole report is printed.
    """
    console.print(_styled(result.verdict, headline(result)), soft_wrap=True)
    if brief:
        return
    for line in details(result):
        console.print(indent(line))
    if limits:
        console.print()
        console.print(titled("Smallest limit that every row passes", limit_table(result)))
    for part in _parts(result, timelines):
        console.print()
        console.print(part)
    if result.shrink is not None:
        console.print()
        # To be copied: never wrapped.
        console.print(Text(f"replay: {result.shrink.command}"), soft_wrap=True)


def _parts(result: Result, timelines: Iterable[tuple[str, list[str]]]) -> Iterable[RenderableType]:
    """Yield the sections in order."""
    for candidate in result.candidates:
        yield _candidate(candidate)
    if any(c.layers for c in result.candidates) and result.scenario is None:
        title = f"Cost against the contracts (this run's contract: {result.contract})"
        yield titled(title, cost_table(result))
    memory = [line for c in result.candidates for line in _memory(c)]
    if memory:
        yield titled("Transient memory", *memory)
    if result.scenario is not None:
        yield titled("Scenarios", *_scenarios(result.scenario))
    for title, lines in timelines:
        yield titled(title, *lines)
    yield from recall_parts(result)
    yield from _asked_for(result)
    if result.gates:
        yield titled("Gates", gate_table(result.gates))
    yield titled("Coverage", *_coverage(result))
    yield titled("Run", *_run(result))


def _styled(verdict: Verdict, line: str) -> Text:
    """Return a line whose verdict word is coloured."""
    text = Text(line)
    text.highlight_words([verdict], STYLES[verdict])
    return text


def _candidate(candidate: CandidateResult) -> RenderableType:
    """Return one candidate: identity, stages by layer, selection, worst tokens."""
    kernel, profile = candidate.kernel, candidate.profile
    parts: list[RenderableType] = [
        _styled(candidate.verdict, f"{candidate.name}  {candidate.verdict}"),
        indent(
            f"{candidate.format} on {candidate.device}, profile {profile.name}, "
            f"kernel {kernel.variant}, path {kernel.path_taken or '-'}, "
            f"source {kernel.source_sha256[:12] or '-'}"
        ),
    ]
    shown, folded, others = _fold(candidate.layers)
    if shown:
        title = "worst row of each stage, errors in units of the limit"
        parts += [indent(title), indent(stage_table(shown))]
    if folded:
        parts.append(indent(_folded_line(candidate, folded)))
    if others:
        parts.append(indent(_others_line(candidate, others)))
    failing = [
        (layer.layer, stage)
        for layer in candidate.layers
        for stage in layer.stages
        if stage.verdict == DIFFER
    ]
    if failing:
        table = worst_table(failing[:WORST_STAGES])
        parts += [indent("worst tokens of stages that differ"), indent(table)]
    if len(failing) > WORST_STAGES:
        parts.append(indent(f"... and {len(failing) - WORST_STAGES} more stages; {_WHERE_ALL_IS}"))
    if any(layer.topk is not None for layer in shown):
        title = "selection: overlap and score lost (score RMS) against the contract"
        parts += [indent(title), indent(topk_table(shown))]
    return Group(*parts)


def _differs(layer: LayerResult) -> bool:
    return any(stage.verdict == DIFFER for stage in layer.stages)


def _clean(layer: LayerResult) -> bool:
    return all(stage.verdict in (None, MATCH) for stage in layer.stages)


def _fold(
    layers: tuple[LayerResult, ...],
) -> tuple[list[LayerResult], list[LayerResult], list[LayerResult]]:
    """Return layers to print in full, and matching layers and others to fold into a line each."""
    clean = [layer for layer in layers if _clean(layer)]
    # Those that differ come before those that could not be judged: the headline names the first.
    rest = sorted((layer for layer in layers if not _clean(layer)), key=lambda x: not _differs(x))
    folded, others = clean[: len(clean) if len(clean) > FULL_LAYERS else 0], rest[FULL_LAYERS:]
    gone = {layer.layer for layer in (*folded, *others)}
    return [layer for layer in layers if layer.layer not in gone], folded, others


def _others_line(candidate: CandidateResult, others: list[LayerResult]) -> str:
    """Return the one line of folded layers that are no match: which, and in which stages."""
    names = layers_with(candidate.layers, {layer.layer for layer in others})
    told = []
    for verdict in (DIFFER, CANNOT_JUDGE):
        stages = dict.fromkeys(
            stage_name(stage)
            for layer in others
            for stage in layer.stages
            if stage.verdict == verdict
        )
        told += [f"{verdict} in {some(list(stages))}"] if stages else []
    return f"layers {names}: {', '.join(told)}; {_WHERE_ALL_IS}"


def _folded_line(candidate: CandidateResult, folded: list[LayerResult]) -> str:
    """Return the one line of folded layers, with the row that came closest to its limit."""
    names = layers_with(candidate.layers, {layer.layer for layer in folded})
    line = f"layers {names}: match"
    found = local_errors(folded)
    closest = max(found, key=lambda item: (item[0], -item[1], item[2]), default=None)
    if closest is None:
        return line
    error, layer, stage = closest
    return f"{line}; closest to its limit: layer {layer} {stage} at {number(error)}"


def _scenarios(scenario: ScenarioResult) -> list[str]:
    """Return what the histories covered."""
    return [
        f"histories: {scenario.histories}, {scenario.distinct} distinct, "
        f"{scenario.failures} with a failure",
        "events: " + ", ".join(f"{kind} {count}" for kind, count in scenario.events.items()),
        f"lengths: {scenario.residues4} of 4 residues modulo 4, {scenario.residues128} of 128 "
        "modulo 128",
    ]


def _memory(candidate: CandidateResult) -> list[str]:
    """Return measured and predicted transient memory."""
    memory = candidate.memory
    lines: list[str] = []
    if memory.peak_transient_bytes is not None:
        lines.append(f"{candidate.name}: peak {memory.peak_transient_bytes:,} B")
    law = memory.law
    if law is not None:
        lines.append(
            f"{candidate.name}: {number(law.bytes_per_product)} B x queries x heads x keys, "
            f"fitted to {len(law.points)} sizes; predicted for the last prefill chunk of "
            f"{law.predicted_tokens:,} tokens with 64 heads "
            f"(not allocated): {law.predicted_bytes / 2**30:.2f} GiB"
        )
    return lines


def _coverage(result: Result) -> list[str]:
    """Return what was compared, given, not covered and skipped."""
    counts = result.counts
    lines = [f"compared: {counts.compared} of {counts.expected} stages"]
    for kind in ("given", "consequence"):
        names = dict.fromkeys(stage_name(s) for _, _, s in stages_of(result) if s.kind == kind)
        lines.append(f"{kind}: {', '.join(names) or 'none'}")
    lines.append(f"not covered: {_not_covered(result)}")
    lines.append(f"skipped: {some(skipped(result)) or 'none'}")
    return lines


def _not_covered(result: Result) -> str:
    """Return undeclared stages, each with its layers and, where not all, its candidates."""
    layers_of: dict[tuple[str, str], set[int]] = {}
    for ref in result.counts.not_covered:
        layers_of.setdefault((stage_name(ref), ref.candidate), set()).add(ref.layer)
    every = {c.name: c.layers for c in result.candidates}
    candidates_of: dict[str, list[str]] = {}
    for (stage, candidate), numbers in layers_of.items():
        item = f"{stage} (layer {layers_with(every.get(candidate, ()), numbers)})"
        candidates_of.setdefault(item, []).append(candidate)
    items = [
        item if len(names) == len(every) else f"{item} of {', '.join(names)}"
        for item, names in candidates_of.items()
    ]
    return "; ".join(items) or "none"


def _run(result: Result) -> list[str]:
    """Return input and environment."""
    given, env = result.input, result.environment
    extra = [f"model {given.model}"] if given.model is not None else []
    extra += [f"seed {given.seed}"] if given.seed is not None else []
    requests = f"{given.requests} request" + ("" if given.requests == 1 else "s")
    extra.append(f"sha256 {given.sha256[:12]}")
    return [
        f"input {given.name}, {given.tokens:,} tokens in {requests}, {', '.join(extra)}",
        f"needlepoint {env.needlepoint}, torch {env.torch}, numpy {env.numpy}, python {env.python}",
        f"{env.platform}, {env.cpu}, {env.threads} threads, device {env.device}, world {env.world}",
    ]


def _asked_for(result: Result) -> Iterator[RenderableType]:
    """Yield what repeats, swaps and shrinking found; nothing where none was asked for."""
    for candidate in result.candidates:
        for layer in candidate.layers:
            if layer.swap is not None:
                title = f"Swaps of {candidate.name}, layer {layer.layer}: errors of the attention"
                yield titled(f"{title} output, picks lost", _swaps(layer.swap))
    repeats = [line for candidate in result.candidates for line in _repeat(candidate)]
    if repeats:
        yield titled("Repeats", *repeats)
    if result.shrink is not None:
        yield titled("Smallest input that still differs", *_shrunk(result.shrink))


def _swaps(swap: SwapResult) -> Table:
    table = plain_table("stage", "alone>", "lost>", "replaced>", "lost>", "share>", "of lost>")
    table.add_row("candidate", "", "", *_effect(swap.total), "", "")
    for stage in swap.stages:
        table.add_row(
            f"{stage.path}.{stage.stage}",
            *_effect(stage.alone),
            *_effect(stage.replaced),
            number(stage.share_error),
            number(stage.share_lost_picks),
        )
    for name in swap.not_swappable:
        table.add_row(name, "not shown by the candidate")
    return table


def _effect(effect: SwapEffect) -> tuple[str, str]:
    lost = "" if effect.lost_picks is None else str(effect.lost_picks)
    return number(effect.attention_error), lost


def _repeat(candidate: CandidateResult) -> list[str]:
    repeat = candidate.repeat
    if repeat is None:
        return []
    same = len(repeat.stages) - repeat.changed
    line = f"{candidate.name}: {same} of {len(repeat.stages)} stages equal in {repeat.runs} runs"
    moved = repeat.moved_first
    if moved is None:
        return [line]
    return [
        f"{line}; first to move: {moved.what}, layer {moved.layer} {moved.path}.{moved.stage}",
        f"  {repeat.picks_changed} picks changed in {repeat.rows_changed} queries",
    ]


def _shrunk(found: ShrinkResult) -> list[str]:
    size = (
        f"tokens {found.tokens}, requests {found.requests}, windows {found.windows}, pages "
        f"{found.pages}, heads {found.heads}, k {found.topk}; found in {found.trials} trials"
    )
    return [size + ("" if found.complete else ", not finished")]
