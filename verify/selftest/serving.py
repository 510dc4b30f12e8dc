"""Faults between calls, as cases of the self-test: a scenario on a server that has the fault."""

from __future__ import annotations

from needlepoint.optimized.candidates.emulated import EmulatedCandidate, Order
from needlepoint.verify.base.workers import Workers
from needlepoint.verify.scenario.run import Failure
from needlepoint.verify.schema.base import DIFFER, MATCH
from needlepoint.verify.schema.selftest_result import CaseResult, Others
from needlepoint.verify.selftest.faults.scenario import FAULTS, ScenarioFault, seen
from needlepoint.verify.selftest.gates import SCENARIO

SOUND = "sound-server"
_FORMAT = "fp8"
_NOTHING = Others(assert_close=None, calc_diff=None, cosine=None, overlap=None)


def serving_cases(pool: Workers) -> list[CaseResult]:
    """Run the scenario of every fault on a server that has it, and on the sound one.

    The usual comparisons are not asked: they have no notion of a request's history.
    """
    faulty = pool.map(lambda fault: fault.caught(_FORMAT), FAULTS)
    candidate = EmulatedCandidate(_FORMAT, Order.FUSED)
    sound = pool.map(lambda fault: seen(fault.scenario, candidate), FAULTS)
    return [
        *(_fault(fault, found) for fault, found in zip(FAULTS, faulty, strict=True)),
        *(_control(fault, found) for fault, found in zip(FAULTS, sound, strict=True)),
    ]


def _fault(fault: ScenarioFault, found: Failure | None) -> CaseResult:
    name = f"server-{fault.id}"
    return _result(fault, found, name, name, "fault", (SCENARIO,), fault.text.rstrip("."))


def _control(fault: ScenarioFault, found: Failure | None) -> CaseResult:
    text = "the sound server in the scenario of every fault"
    return _result(fault, found, f"{SOUND}:{fault.id}", SOUND, "control", (), text)


def _result(
    fault: ScenarioFault,
    found: Failure | None,
    id: str,
    case: str,
    kind: str,
    expected: tuple[str, ...],
    text: str,
) -> CaseResult:
    return CaseResult.model_validate(
        {
            "id": id,
            "case": case,
            "class": fault.letter,
            "kind": kind,
            "text": text,
            "scale": 1.0,
            "log": fault.log if kind == "fault" else (),
            "expected": expected,
            "gates": () if found is None else (SCENARIO,),
            "caught": found is not None,
            "verdict": MATCH if found is None else DIFFER,
            "rows": len(fault.events),
            "detail": None if found is None else found.problem.detail,
            "others": _NOTHING,
        }
    )
