"""The main job: inputs, reference and candidates in; one result and its per-row errors out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from needlepoint.optimized.protocol.interface import Candidate, StageKey
from needlepoint.optimized.protocol.optional import SpreadsLayers
from needlepoint.reference.profile import CONTRACTS, Arithmetic
from needlepoint.verify.base.placement import CPU, require_device
from needlepoint.verify.base.progress import Progress
from needlepoint.verify.inputs.layer_inputs import fingerprint
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.candidate_run import observe, require_unchanged
from needlepoint.verify.judge.degenerate import require_apart, require_moving
from needlepoint.verify.judge.layer_run import LayerRun
from needlepoint.verify.judge.memory_law import transient_law
from needlepoint.verify.judge.repeat import RepeatTally, repeated
from needlepoint.verify.judge.results.layers import layer_result
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.judge.results.verdicts import count_stages, first_divergence
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recall.marked import layer_recall
from needlepoint.verify.run.candidates import CandidateOutcome, candidate_result
from needlepoint.verify.run.distributed import share_out
from needlepoint.verify.run.failures_saved import SavedFailures
from needlepoint.verify.run.preflight import (
    require_asked,
    require_distinct,
    require_known,
    require_per_token,
    require_selection,
)
from needlepoint.verify.schema.environment import collect_environment
from needlepoint.verify.schema.result import (
    CANNOT_JUDGE,
    SCHEMA,
    Environment,
    InputInfo,
    Result,
    Verdict,
    worst_verdict,
)


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
    saved: SavedFailures | None = None,
    device: str = CPU,
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
    saved
        Given every layer in which a candidate differs.
    device
        Where reference and comparisons run: ``cpu`` or ``cuda``.

    Raises
    ------
    ValueError
        If nothing can be judged: no such device, no candidate, one of unknown profile, one that
        raises or breaks the protocol or returns memory that is not its own, constant stages that
        the input does not declare, a k that no request has more entries than, or stages that a
        candidate does not declare.
    """
    require_device(device)
    require_distinct(candidates)
    for candidate in candidates:
        require_known(candidate.info)
    require_asked(inputs, candidates, stages)
    require_selection(inputs, candidates, stages)
    require_per_token(inputs, candidates, swap=swap)
    options = _Options(contract.name, limits, stages, swap, saved, device)

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

    together = any(isinstance(c, SpreadsLayers) and c.spreads_layers for c in candidates)
    together |= repeat > 1  # hashes of repeated runs are not merged
    shared = share_out(inputs.layers, inputs.config.ratio, judge, together=together)
    on_card = "cuda" in {device, *(candidate.info.device for candidate in candidates)}
    source = InputInfo(
        name=inputs.name,
        sha256=inputs.sha256,
        tokens=inputs.tokens,
        requests=len(inputs.requests),
        lengths=inputs.requests,
        model=inputs.config.name,
        seed=inputs.seed,
    )
    output = pipeline_output(
        shared.outcomes,
        contract.name,
        collect_environment("cuda" if on_card else CPU),
        source,
    )
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
    saved: SavedFailures | None
    device: str


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
    run = LayerRun(inputs, layer, options.limits, options.device)
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
    recalls = layer_recall(inputs, run, observed, CONTRACTS[options.contract], options.limits)
    require_unchanged(before, run.given, [candidate.info.name for candidate in candidates])
    for outcome, recall in zip(outcomes, recalls, strict=True):
        outcome.add_recall(recall, run.given.topk)
    for outcome, (candidate, first), part in zip(outcomes, observed, found, strict=True):
        if not inputs.constant:
            require_moving(run.given, part.errors, options.stages)
        declared = candidate.stages(run.given.ratio)
        entry = layer_result(
            part, declared, run.given, options.limits, options.contract, wanted=options.stages
        )
        outcome.add(part, entry)
        if options.saved is not None and first_divergence([entry]) is not None:
            options.saved.add(inputs, candidate, run.given, first)


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
