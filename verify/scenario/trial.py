"""One scenario on the reference and on candidates, at both ratios."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from needlepoint.optimized.protocol.interface import Candidate, CandidateInfo, StageKey
from needlepoint.optimized.protocol.serving import (
    BF16_STATE,
    FP32_STATE,
    CacheSpec,
    CannotServe,
    Server,
    StatefulCandidate,
)
from needlepoint.verify.base.progress import NoProgress, Progress
from needlepoint.verify.judge.candidate_run import CandidateFailed
from needlepoint.verify.judge.profiles import NEEDLEPOINT
from needlepoint.verify.scenario.actions import Action
from needlepoint.verify.scenario.bank import RATIOS, Bank, bank
from needlepoint.verify.scenario.events import Scenario
from needlepoint.verify.scenario.expected import specification_rows
from needlepoint.verify.scenario.judge import ByteJudge, Judge, LimitJudge
from needlepoint.verify.scenario.reference import ReferenceCandidate, reference_expected
from needlepoint.verify.scenario.rules import check
from needlepoint.verify.scenario.run import Failure, run_scenario

QUIET: Final = NoProgress()
Compared = Counter[tuple[str, int, StageKey]]
"""Rows compared by candidate, ratio and stage."""


@dataclass(frozen=True)
class TrialFailure:
    """A scenario that failed on one candidate."""

    # Who, and in which layer.
    candidate: str
    ratio: int
    failure: Failure  # Event, token and stage.
    scenario: Scenario  # The scenario.


@dataclass
class Trial:
    """What one scenario showed: the first failure of each candidate, and rows compared."""

    failures: list[TrialFailure] = field(default_factory=list)
    compared: Compared = field(default_factory=Counter)


def try_scenario(
    scenario: Scenario,
    candidates: Sequence[StatefulCandidate],
    *,
    reference: bool = True,
    progress: Progress = QUIET,
) -> Trial:
    """Run a scenario on the reference, where asked for, then on every candidate.

    Parameters
    ----------
    scenario, candidates
        What, and on whom; a candidate that does not cover it is left out.
    reference
        Whether the reference runs first.
    progress
        Told of every event on every server.

    Raises
    ------
    ScenarioError
        If an event is not possible.
    CandidateFailed
        If a candidate raises, or the reference itself does not hold to the oracle.
    """
    actions = check(scenario)
    driven = [candidate for candidate in candidates if covers(candidate, scenario)]
    servers = (len(driven) + reference) * len(_banks(scenario, actions))
    progress.start("scenario: events of all servers", servers * len(actions))
    if reference:
        _require_reference(scenario, actions, progress)
    trial = Trial()
    for candidate in driven:
        found_here = try_candidate(scenario, actions, candidate, progress)
        trial.failures += found_here.failures
        trial.compared += found_here.compared
    return trial


def _require_reference(scenario: Scenario, actions: Sequence[Action], progress: Progress) -> None:
    """Raise unless the reference itself holds to the oracle."""
    reference = ReferenceCandidate(scenario.seed)
    for found in try_candidate(scenario, actions, reference, progress).failures:
        raise CandidateFailed(
            f"{scenario.name}: the reference fails its own oracle at event "
            f"{found.failure.event} (ratio {found.ratio}): {found.failure.problem.detail}"
        )


def try_candidate(
    scenario: Scenario,
    actions: Sequence[Action],
    candidate: StatefulCandidate,
    progress: Progress = QUIET,
) -> Trial:
    """Run checked actions on one candidate, layer by layer; the first failure ends it.

    Raises
    ------
    CandidateFailed
        If the candidate raises.
    """
    trial = Trial()
    info = candidate.info
    name = info.name
    for tokens in _banks(scenario, actions):
        ratio = tokens.ratio
        server = _server(scenario, candidate, tokens)
        judge = _judge(scenario, candidate, info, tokens)
        outcome = run_scenario(actions, server, tokens, judge, name, progress)
        for stage, rows in outcome.compared.items():
            trial.compared[name, ratio, stage] += rows
        if outcome.failure is not None:
            trial.failures.append(TrialFailure(name, ratio, outcome.failure, scenario))
            return trial
    return trial


def _banks(scenario: Scenario, actions: Sequence[Action]) -> list[Bank]:
    """Return the layers in which a scenario has anything to compare: an entry, or queries."""
    longest = _longest(actions)
    banks = [bank(ratio, scenario.seed) for ratio in RATIOS]
    return [own for own in banks if longest >= own.ratio or own.inputs.query is not None]


def _longest(actions: Sequence[Action]) -> int:
    """Return the tokens of the longest request, rejected drafts included."""
    parts = [part for action in actions for part in action.parts]
    return max((len(part.before.texts) + len(part.texts) for part in parts), default=0)


def not_covering(candidate: Candidate) -> str | None:
    """Return why a candidate cannot be driven through scenarios, or None."""
    if not isinstance(candidate, StatefulCandidate):
        return "has no serve(): it does not compute step by step"
    try:
        candidate.serve(bank(4, 0).parameters(), CacheSpec(1, 1, 64, 1, FP32_STATE))
    except CannotServe as error:
        return str(error)
    return None


def covers(candidate: StatefulCandidate, scenario: Scenario) -> bool:
    """Return whether a candidate can be judged on a scenario.

    What a bf16 state makes of a row is said by the specification alone.
    """
    return scenario.state != BF16_STATE or candidate.info.profile == NEEDLEPOINT


def _server(scenario: Scenario, candidate: StatefulCandidate, tokens: Bank) -> Server:
    spec = CacheSpec(
        slots=scenario.slots,
        pages=scenario.pages,
        page_size=scenario.page_tokens // tokens.ratio,
        pools=scenario.pools,
        state=scenario.state,
    )
    try:
        return candidate.serve(tokens.parameters(), spec)
    except Exception as error:
        name = candidate.info.name
        raise CandidateFailed(f"candidate {name}, {scenario.name}: serve: {error}") from error


def _judge(
    scenario: Scenario, candidate: StatefulCandidate, info: CandidateInfo, tokens: Bank
) -> Judge:
    """Return the judge of a candidate: bytes where the specification says them, else limits."""
    if isinstance(candidate, ReferenceCandidate):
        own = reference_expected(tokens.ratio, scenario.seed, scenario.state)
        return ByteJudge(tokens, own)
    if info.profile == NEEDLEPOINT:
        expected = specification_rows(tokens.ratio, scenario.seed, info.format, scenario.state)
        return ByteJudge(tokens, expected)
    return LimitJudge(tokens, info)
