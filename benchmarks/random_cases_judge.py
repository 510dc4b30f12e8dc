"""Judge random cases: on a correct candidate, anything but a match is a false alarm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from needlepoint.benchmarks.random_cases import RandomCase, case_inputs
from needlepoint.optimized.candidates.catalogue import create
from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.run.pipeline import verify
from needlepoint.verify.schema.result import MATCH, LayerResult, Result


@dataclass(frozen=True)
class CaseOutcome:
    """What the judge said of a case.

    Attributes
    ----------
    case
        The case.
    result
        The pipeline's result; None where it refused to judge.
    alarm
        Why a correct candidate was flagged or refused; None where all is well.
    """

    case: RandomCase
    result: Result | None
    alarm: str | None


def judge_case(case: RandomCase, limits: Limits | None = None) -> CaseOutcome:
    """Run the whole pipeline on a case; a refusal to judge is an alarm too."""
    try:
        result = verify(
            case_inputs(case),
            [create(case.candidate)],
            contract=BF16_CONTRACT,
            limits=limits or Limits.default(),
            stages=None,
            progress=NoProgress(),
        ).result
    except ValueError as error:
        return CaseOutcome(case, None, f"refused: {error}")
    return CaseOutcome(case, result, _alarm(result))


def faulty_swaps(layer: LayerResult) -> Mapping[str, int]:
    """Return the swaps and picks of a layer that a correct candidate never makes."""
    if layer.topk is None:
        return {}
    swaps = layer.topk.swaps
    return {
        "selector": swaps.selector,
        "unknown": swaps.unknown,
        "upstream": swaps.upstream,
        "invalid": layer.topk.invalid,
    }


def _alarm(result: Result) -> str | None:
    (candidate,) = result.candidates
    if result.verdict != MATCH or candidate.verdict != MATCH:
        first = candidate.first_divergence
        where = result.detail if first is None else first.model_dump_json()
        return f"{result.verdict}: {where}"
    for layer in candidate.layers:
        found = {name: count for name, count in faulty_swaps(layer).items() if count}
        if found:
            return f"layer {layer.layer}: {found} although the verdict is {result.verdict}"
    return None
