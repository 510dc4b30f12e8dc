"""The main job: inputs, reference and candidates in; one result and its per-row errors out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from torch import Tensor

from needlepoint.optimized.interface import INDEX, Candidate, CandidateInfo, StageKey
from needlepoint.reference.profile import CONTRACTS, Arithmetic
from needlepoint.verify.candidate_results import CandidateOutcome, candidate_result
from needlepoint.verify.candidate_run import CandidateFailed, observe, require_unchanged
from needlepoint.verify.distributed import share_out
from needlepoint.verify.environment import collect_environment
from needlepoint.verify.given import fingerprint
from needlepoint.verify.inputs import Inputs
from needlepoint.verify.layer_results import layer_result
from needlepoint.verify.layer_run import LayerRun
from needlepoint.verify.limits import Limits
from needlepoint.verify.memory_law import transient_law
from needlepoint.verify.profiles import profile_of
from needlepoint.verify.progress import Progress
from needlepoint.verify.recall_verify import layer_recall
from needlepoint.verify.repeat import RepeatTally, repeated
from needlepoint.verify.result import (
    CANNOT_JUDGE,
    SCHEMA,
    CandidateResult,
    Counts,
    Environment,
    InputInfo,
    KeyFormat,
    Result,
    StageRef,
    Verdict,
    worst_verdict,
)
from needlepoint.verify.stages import TOPK
from needlepoint.verify.vacuity import require_apart, require_moving


@dataclass(frozen=True)
class PipelineOutput:
    """A result and the per-row errors that go beside it.

    Attributes
    ----------
    result
        The record that every surface is made from.
    rows
        ``candidate/layerN/path/stage/local|accumulated|relative`` to row errors, [rows].
    reports
        Whether this process is the one that writes the result; under torchrun one rank is.
    """

    result: Result
    rows: Mapping[str, Tensor]
    reports: bool = True


def verify(
    inputs: Inputs,
    candidates: Sequence[Candidate],
    *,
    contract: Arithmetic,
    limits: Limits,
    stages: frozenset[StageKey] | None,
    progress: Progress,
    repeat: int = 1,
    swap: bool = False,
) -> PipelineOutput:
    """Run reference and candidates over an input and judge every stage of every layer.

    Parameters
    ----------
    inputs
        Hidden states, weights, layers and requests.
    candidates
        What to judge, each by the profile that it declares.
    contract
        What overlap and score lost are reported against; never decides the verdict.
    limits
        Limits, fixed before the run.
    stages
        Stages to compare; None for all that a candidate declares.
    progress
        Told of long work.
    repeat
        Runs of every candidate; the first is judged, all are compared.
    swap
        Whether to replace one stage at a time by the reference, and the reverse.

    Raises
    ------
    ValueError
        If nothing can be judged: no candidate, one of unknown profile, one that raises or breaks
        the protocol or returns memory that is not its own, constant stages that the input does not
        declare, or a k that no request has more entries than.
    """
    _require_distinct(candidates)
    for candidate in candidates:
        _require_known(candidate.info)
    _require_selection(inputs, candidates, stages)
    options = _Options(contract.name, limits, stages, swap)

    def judge(layers: tuple[int, ...]) -> list[CandidateOutcome]:
        outcomes = [CandidateOutcome(c.info, transient_law(c)) for c in candidates]
        if repeat > 1:
            for outcome in outcomes:
                outcome.repeat = RepeatTally(repeat)
        for layer in layers:
            if inputs.config.ratio(layer) == 0:
                for outcome in outcomes:
                    outcome.add_uncompressed(layer, inputs.requests)
                continue
            _run_layer(inputs, layer, candidates, outcomes, options, progress)
        return outcomes

    together = any(getattr(candidate, "spreads_layers", False) for candidate in candidates)
    together |= repeat > 1  # hashes of repeated runs are not merged
    shared = share_out(inputs.layers, inputs.config.ratio, judge, together=together)
    device = "cuda" if any(c.info.device == "cuda" for c in candidates) else "cpu"
    source = InputInfo(
        name=inputs.name,
        sha256=inputs.sha256,
        tokens=inputs.tokens,
        requests=len(inputs.requests),
        lengths=inputs.requests,
        model=inputs.config.name,
        seed=inputs.seed,
    )
    output = pipeline_output(shared.outcomes, contract.name, collect_environment(device), source)
    if shared.lost is None:
        return replace(output, reports=shared.reports)
    update = {"verdict": CANNOT_JUDGE, "detail": shared.lost}
    return replace(output, result=output.result.model_copy(update=update))


@dataclass(frozen=True)
class _Options:
    """What every layer is judged with."""

    contract: str
    limits: Limits
    stages: frozenset[StageKey] | None
    swap: bool


def _run_layer(
    inputs: Inputs,
    layer: int,
    candidates: Sequence[Candidate],
    outcomes: Sequence[CandidateOutcome],
    options: _Options,
    progress: Progress,
) -> None:
    """Judge one layer; everything it held is free when it returns."""
    progress.start(f"layer {layer}: projections and candidates", 1 + len(candidates))
    run = LayerRun(inputs, layer, options.limits)
    before = fingerprint(run.given)
    observed = []
    for candidate, outcome in zip(candidates, outcomes, strict=True):
        progress.advance()
        first = observe(candidate, run.given)
        observed.append((candidate, first))
        if outcome.repeat is not None:
            again = repeated(candidate, run.given, first, outcome.repeat.runs)
            outcome.repeat.add(layer, again)
    require_apart(layer, {candidate.info.name: part for candidate, part in observed})
    found = run.judge(observed, progress, swap=options.swap)
    recalls = layer_recall(inputs, layer, observed, CONTRACTS[options.contract], options.limits)
    require_unchanged(before, run.given, [candidate.info.name for candidate in candidates])
    for outcome, recall in zip(outcomes, recalls, strict=True):
        outcome.add_recall(recall, run.given.topk)
    for outcome, candidate, part in zip(outcomes, candidates, found, strict=True):
        if not inputs.constant:
            require_moving(run.given, part.errors)
        declared = candidate.stages(run.given.ratio)
        entry = layer_result(
            part, declared, run.given, options.limits, options.contract, wanted=options.stages
        )
        outcome.add(part, entry)


def pipeline_output(
    outcomes: Sequence[CandidateOutcome],
    contract: str,
    environment: Environment,
    source: InputInfo,
) -> PipelineOutput:
    """Return the result of judged candidates, and their row errors.

    Parameters
    ----------
    outcomes
        One for each candidate, all layers added.
    contract
        Name of the contract of the run.
    environment
        Where the run was made.
    source
        What both sides were given.
    """
    results = tuple(candidate_result(outcome) for outcome in outcomes)
    counts = count_stages(outcomes)
    verdict: Verdict = worst_verdict(result.verdict for result in results)
    if counts.compared == 0 or counts.compared < counts.expected:
        verdict = CANNOT_JUDGE
    result = Result.model_validate(
        {
            "schema": SCHEMA,
            "verdict": verdict,
            "detail": None if counts.compared else "nothing was compared",
            "contract": contract,
            "environment": environment,
            "input": source,
            "counts": counts,
            "candidates": results,
        }
    )
    rows = {name: row for outcome in outcomes for name, row in outcome.rows.items()}
    return PipelineOutput(result, rows)


def count_stages(outcomes: Sequence[CandidateOutcome | CandidateResult]) -> Counts:
    """Return how many declared stages were compared, and which were not."""
    skipped, not_covered = [], []
    expected = compared = 0
    for outcome in outcomes:
        for layer in outcome.layers:
            for stage in layer.stages:
                reference = StageRef(
                    candidate=outcome.name,
                    layer=layer.layer,
                    stage=stage.stage,
                    path=stage.path,
                    reason=stage.detail or "",
                )
                if stage.kind == "not covered":
                    not_covered.append(reference)
                elif stage.kind == "skipped":
                    expected += 1
                    skipped.append(reference)
                elif stage.kind == "compared":
                    expected += 1
                    compared += stage.verdict != CANNOT_JUDGE
    return Counts(
        expected=expected,
        compared=compared,
        skipped=tuple(skipped),
        not_covered=tuple(not_covered),
    )


def _require_distinct(candidates: Sequence[Candidate]) -> None:
    names = [candidate.info.name for candidate in candidates]
    if not names:
        raise ValueError("no candidate: name at least one with --candidate")
    unprintable = [name for name in names if not name or not name.isprintable()]
    if unprintable:
        raise ValueError(f"candidate name {unprintable[0]!r}: expected printable text on one line")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"candidate {repeated[0]} is named twice; name every candidate once")


def _require_known(info: CandidateInfo) -> None:
    """Refuse a candidate that could not be judged, before anything has run."""
    if info.format not in get_args(KeyFormat):
        raise CandidateFailed(
            f"candidate {info.name}: key format {info.format!r}, expected one of "
            f"{', '.join(get_args(KeyFormat))}"
        )
    profile_of(info)


def _require_selection(
    inputs: Inputs, candidates: Sequence[Candidate], stages: frozenset[StageKey] | None
) -> None:
    """Refuse picks that cannot be wrong: with fewer entries than k every query picks all it sees.

    Such a comparison would pass whatever the scores and the selection do.
    """
    asked = stages is None or (INDEX, TOPK) in stages
    k, most = inputs.config.index_topk, max(inputs.requests) // 4
    if not asked or k < most or not any((INDEX, TOPK) in c.stages(4) for c in candidates):
        return
    for layer in inputs.layers:
        if inputs.config.ratio(layer) == 4:
            raise ValueError(
                f"layer {layer}: k {k} is {'larger' if k > most else 'no smaller'} than the pool, "
                f"the longest request has {most} "
                "entries: every query would pick all it sees and no selection would be tested; "
                "give more tokens, a model of smaller index_topk, or name --stages without topk"
            )
