"""Scenarios in the terminal report: what was covered, and failing histories to replay."""

from __future__ import annotations

from collections.abc import Iterator

from needlepoint.verify.scenario.file import parse_scenario
from needlepoint.verify.scenario.timeline import timeline
from needlepoint.verify.schema.recall import ScenarioFailure, ScenarioResult


def scenario_sections(scenario: ScenarioResult) -> Iterator[tuple[str, list[str]]]:
    """Yield titled lists of lines."""
    lines = [
        f"histories: {scenario.histories}, {scenario.distinct} distinct, "
        f"{scenario.failures} with a failure",
        "events: " + ", ".join(f"{kind} {count}" for kind, count in scenario.events.items()),
        f"lengths: {scenario.residues4} of 4 residues modulo 4, {scenario.residues128} of 128 "
        "modulo 128",
    ]
    yield "Scenarios", lines
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
