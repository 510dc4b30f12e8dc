"""Parts of the terminal report that only some runs have: repeats, swaps, the shrunk input."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from needlepoint.verify.base.numbers import number
from needlepoint.verify.report.tables import plain_table
from needlepoint.verify.schema.result import CandidateResult, Result
from needlepoint.verify.schema.shrink import ShrinkResult
from needlepoint.verify.schema.swap import SwapEffect, SwapResult


def extra_parts(result: Result) -> Iterator[RenderableType]:
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


def titled(title: str, *parts: Table | str) -> RenderableType:
    """Return a section of the report: a title, and tables or lines indented under it."""
    lines = [Text(part) if isinstance(part, str) else part for part in parts]
    return Group(Text(title), *(Padding(line, (0, 0, 0, 2), expand=False) for line in lines))


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
