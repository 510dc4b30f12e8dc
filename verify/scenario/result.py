"""From what scenarios showed to ``needlepoint.result/1``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from needlepoint.optimized.protocol.interface import Candidate
from needlepoint.optimized.protocol.stages import stage_named
from needlepoint.verify.base.stages import COMPARED, SCORES, TOPK, declared_stages
from needlepoint.verify.judge.profiles import NEEDLEPOINT, profile_of
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.judge.results.verdicts import count_stages
from needlepoint.verify.run.candidates import CandidateOutcome
from needlepoint.verify.scenario.bank import CONFIG, RATIOS, bank
from needlepoint.verify.scenario.events import Scenario
from needlepoint.verify.scenario.file import dump_scenario, scenario_digest
from needlepoint.verify.scenario.sweep import Tally
from needlepoint.verify.scenario.trial import TrialFailure
from needlepoint.verify.schema.environment import collect_environment
from needlepoint.verify.schema.recall import ScenarioFailure, ScenarioGap
from needlepoint.verify.schema.result import (
    CANNOT_JUDGE,
    DIFFER,
    MATCH,
    SCHEMA,
    CandidateResult,
    FirstDivergence,
    InputInfo,
    Kernel,
    LayerResult,
    Profile,
    Result,
    ScenarioResult,
    StageLimit,
    StageResult,
    Verdict,
)

_ALONE = "the same tokens run alone from scratch"


@dataclass(frozen=True)
class ScenarioRun:
    """A finished run."""

    tally: Tally  # What histories covered and where they failed.
    candidates: Sequence[Candidate]  # Everyone who was named, in order.
    gaps: Sequence[ScenarioGap]  # Who was not driven, and why.
    seed: int  # Of the bank.
    replayed: Scenario | None  # The scenario of a run over one file; None for a sweep.


def scenario_output(run: ScenarioRun, contract: str) -> PipelineOutput:
    """Return the result of a run; it has no row errors."""
    tally = run.tally
    results = tuple(_candidate(run, c) for c in run.candidates if _driven(run, c))
    outcomes = [CandidateOutcome(c.info, layers=_layers(run, c)) for c in run.candidates]
    counts = count_stages(outcomes)
    verdict: Verdict = DIFFER if tally.failing else MATCH
    detail = None
    if not counts.compared:
        verdict, detail = CANNOT_JUDGE, "no candidate was driven through a scenario"
        if run.gaps:
            detail += f": {run.gaps[0].candidate} {run.gaps[0].reason}"
    on_card = any(c.info.device == "cuda" for c in run.candidates)
    result = Result.model_validate(
        {
            "schema": SCHEMA,
            "verdict": verdict,
            "detail": detail,
            "contract": contract,
            "environment": collect_environment("cuda" if on_card else "cpu"),
            "input": _input(run),
            "counts": counts,
            "candidates": results,
            "scenario": _scenario(run),
            # Silence would pass for coverage, so these are notes: printed even with --quiet.
            "notes": tuple(
                f"not covered: {gap.candidate}, {gap.histories} histories: {gap.reason}"
                for gap in run.gaps
            ),
        }
    )
    return PipelineOutput(result, {})


def _driven(run: ScenarioRun, candidate: Candidate) -> bool:
    return any(name == candidate.info.name for name, _, _ in run.tally.compared)


def _input(run: ScenarioRun) -> InputInfo:
    replayed = run.replayed
    return InputInfo(
        name="scenarios" if replayed is None else f"scenario {replayed.name}",
        sha256=bank(4, run.seed).sha256 if replayed is None else scenario_digest(replayed),
        tokens=run.tally.tokens,
        requests=run.tally.requests,
        model=CONFIG.name,
        seed=run.seed,
    )


def _scenario(run: ScenarioRun) -> ScenarioResult:
    tally = run.tally
    return ScenarioResult(
        histories=tally.histories,
        distinct=len(tally.digests),
        events=dict(sorted(tally.events.items())),
        residues4=len({length % 4 for length in tally.lengths}),
        residues128=len(tally.lengths),
        failures=tally.failing,
        failing=tuple(_failure(failure) for failure in tally.failures),
        not_covered=tuple(run.gaps),
        replayed=None if run.replayed is None else dump_scenario(run.replayed),
    )


def _failure(found: TrialFailure) -> ScenarioFailure:
    failure = found.failure
    return ScenarioFailure.model_validate(
        {
            "candidate": found.candidate,
            "ratio": found.ratio,
            "event": failure.event,
            "request": failure.request,
            "path": failure.problem.path,
            "stage": failure.problem.stage,
            "position": failure.problem.position,
            "entry": failure.problem.entry,
            "detail": failure.problem.detail,
            "history": dump_scenario(found.scenario),
        }
    )


def _candidate(run: ScenarioRun, candidate: Candidate) -> CandidateResult:
    info = candidate.info
    failed = [f for f in run.tally.failures if f.candidate == info.name]
    profile = profile_of(info)
    return CandidateResult.model_validate(
        {
            "name": info.name,
            "format": info.format,
            "device": info.device,
            "kernel": Kernel(
                variant=info.variant, source_sha256=info.source_sha256, path_taken="step by step"
            ),
            "profile": Profile(name=profile.name, switches=profile.switches()),
            "verdict": DIFFER if failed else MATCH,
            "first_divergence": _divergence(failed[0]) if failed else None,
            "layers": tuple(_layers(run, candidate)),
        }
    )


def _layers(run: ScenarioRun, candidate: Candidate) -> list[LayerResult]:
    failed = [f for f in run.tally.failures if f.candidate == candidate.info.name]
    return [
        LayerResult(layer=i, ratio=ratio, stages=_stages(run, candidate, ratio, failed))
        for i, ratio in enumerate(RATIOS)
    ]


def _stages(
    run: ScenarioRun, candidate: Candidate, ratio: int, failed: Sequence[TrialFailure]
) -> tuple[StageResult, ...]:
    name, declared = candidate.info.name, candidate.stages(ratio)
    gap = next((gap.reason for gap in run.gaps if gap.candidate == name), None)
    exact = candidate.info.profile == NEEDLEPOINT
    found = []
    for key in declared_stages(ratio):
        if stage_named(key[1]).dense or stage_named(key[1]).kind != COMPARED:
            continue  # nothing of it outlives a call
        path, stage = key
        rows = run.tally.compared[name, ratio, key]
        bytewise = exact and stage not in (SCORES, TOPK)
        wrong = any(
            f.ratio == ratio and (f.failure.problem.path, f.failure.problem.stage) == key
            for f in failed
        )
        reason = "no row of this stage in the histories" if key in declared else None
        if reason and failed:
            reason = "not reached: a history ends at its first failure"
        limit = StageLimit(
            value=0.0 if bytewise else 1.0,
            unit="bytes" if bytewise else "of the a-priori bound",
            derivation=f"equal to {_ALONE}" if bytewise else f"within the limits of {_ALONE}",
        )
        compared = bool(rows) or wrong
        found.append(
            StageResult.model_validate(
                {
                    "stage": stage,
                    "path": path,
                    "kind": "compared" if compared else "not covered",
                    "verdict": (DIFFER if wrong else MATCH) if compared else None,
                    "rows_expected": rows,
                    "rows_compared": rows,
                    "limit": limit if compared else None,
                    "detail": None if compared else gap or reason,
                }
            )
        )
    return tuple(found)


def _divergence(found: TrialFailure) -> FirstDivergence:
    failure = found.failure
    names = [request.name for request in found.scenario.requests]
    problem = failure.problem
    known = failure.request in names
    return FirstDivergence.model_validate(
        {
            "layer": RATIOS.index(found.ratio),
            "stage": problem.stage,
            "path": problem.path,
            "request": names.index(failure.request) if known else None,
            "position": problem.position if known else None,
            "entry": problem.entry,
            "detail": f"event {failure.event} of the history: {problem.detail}",
        }
    )
