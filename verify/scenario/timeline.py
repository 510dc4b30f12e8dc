"""A scenario as a timeline: one line an event, and what every request holds after it."""

from __future__ import annotations

from collections.abc import Iterator

from needlepoint.verify.scenario.actions import Action
from needlepoint.verify.scenario.events import Evict, Free, Offload, Pad, Scenario, Split
from needlepoint.verify.scenario.file import parse_scenario
from needlepoint.verify.scenario.rules import check
from needlepoint.verify.schema.recall import ScenarioFailure, ScenarioResult


def timeline(scenario: Scenario, failed: int | None = None) -> list[str]:
    """Return the lines of a timeline.

    A request is shown as its tokens and its slot: ``21@0``. ``-`` has no tokens, ``out`` is
    offloaded, ``end`` is over; ``+5`` are drafts that wait.

    Parameters
    ----------
    scenario
        A possible scenario.
    failed
        Index of an event to mark with ``>``.

    Raises
    ------
    ScenarioError
        If an event is not possible.
    """
    names = [request.name for request in scenario.requests]
    actions: dict[int, list[Action]] = {}
    for action in check(scenario):
        actions.setdefault(action.index, []).append(action)
    held = dict.fromkeys(names, "-")
    rows = []
    for index, event in enumerate(scenario.events):
        for action in actions.get(index, []):
            _apply(action, held)
        shown = [""] * len(names) if isinstance(event, Pad | Split) else [held[n] for n in names]
        rows.append((index, event.describe(), shown))
    words = max([len("event"), *(len(text) for _, text, _ in rows)])
    columns = [max(len(n), *(len(shown[i]) for _, _, shown in rows)) for i, n in enumerate(names)]
    lines = ["    # " + _line("event", words, names, columns)]
    for index, text, shown in rows:
        mark = ">" if index == failed else " "
        lines.append(f"{mark} {index:>3} {_line(text, words, shown, columns)}")
    return [line.rstrip() for line in lines]


def _line(text: str, words: int, cells: list[str], columns: list[int]) -> str:
    parts = (cell.ljust(width) for cell, width in zip(cells, columns, strict=True))
    return f"{text.ljust(words)}  {'  '.join(parts)}"


def _apply(action: Action, held: dict[str, str]) -> None:
    for part in action.parts:
        view = part.before if part.draft else part.after
        waiting = f"+{len(part.texts)}" if part.draft else ""
        held[view.request] = f"{len(view.texts)}{waiting}@{view.place.slot}"
    if action.before is None:
        return
    if action.after is not None:
        view = action.after
        held[view.request] = f"{len(view.texts)}@{view.place.slot}"
        return
    for kind, word in ((Free, "end"), (Evict, "-"), (Offload, "out")):
        if isinstance(action.event, kind):
            held[action.before.request] = word


def timelines(scenario: ScenarioResult) -> Iterator[tuple[str, list[str]]]:
    """Yield titled lines of a report: the history that was replayed, or each that failed."""
    if scenario.replayed is not None:
        # The mark belongs to this history; a sweep's failures have their own below.
        failed = scenario.failing[0].event if scenario.failing else None
        yield "Timeline", timeline(parse_scenario(scenario.replayed), failed)
        return
    for failure in scenario.failing:
        yield _title(failure), timeline(parse_scenario(failure.history), failure.event)
        yield "The same as a file for --scenario FILE", failure.history.splitlines()


def _title(failure: ScenarioFailure) -> str:
    who = f"request {failure.request} position {failure.position}" if failure.request else "a byte"
    return (
        f"{failure.candidate}, ratio {failure.ratio}: event {failure.event}, {who}: "
        f"{failure.path}.{failure.stage}, {failure.detail}"
    )
