"""``needlepoint selftest``: plant every fault and control, and say which gates fire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from needlepoint.optimized.candidates.emulated import EmulatedCandidate, Order
from needlepoint.verify.base.progress import Progress
from needlepoint.verify.base.stages import is_key_side
from needlepoint.verify.base.workers import Workers, workers
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.scenario.run import Failure
from needlepoint.verify.schema.base import CANNOT_JUDGE, DIFFER, MATCH, Verdict
from needlepoint.verify.schema.selftest_result import CaseResult, Others, SelftestResult
from needlepoint.verify.selftest.faults.fault import Case, Setting
from needlepoint.verify.selftest.faults.scenario import FAULTS as SERVER_FAULTS
from needlepoint.verify.selftest.faults.scenario import ScenarioFault, seen
from needlepoint.verify.selftest.gates import GATES, REFUSALS, SCENARIO, STAGE_GATES
from needlepoint.verify.selftest.input import SCALES, SMALL_ROWS, SelftestInput
from needlepoint.verify.selftest.judge import Finding, GroundJudge
from needlepoint.verify.selftest.others import ask

Key = tuple[Setting, float]


@dataclass(frozen=True)
class Needs:
    """Entries of a request, or requests, that a fault needs and these rows lack."""

    rows: int | None
    requests: int | None


_NOTHING = Others(assert_close=None, calc_diff=None, cosine=None, overlap=None)


def selftest(
    source: SelftestInput,
    cases: Sequence[Case],
    limits: Limits,
    progress: Progress,
    scales: Sequence[float] = SCALES,
    *,
    serving: bool = True,
) -> SelftestResult:
    """Plant every case and judge it.

    Parameters
    ----------
    source
        Rows to plant on.
    cases
        Faults and controls of the catalogue.
    limits
        Limits of the judge.
    progress
        Told of every case.
    scales
        Scales of stored rows; every case is planted at each.
    serving
        Whether faults between calls are planted in servers too.

    Raises
    ------
    ValueError
        If a case of the self-test's own input changed nothing: it would show nothing.
    """
    planned = [(case, scale) for case in cases for scale in scales]
    short = {item: needed for item in planned if (needed := _shortfall(source, item[0]))}
    keys = list(dict.fromkeys((c.setting, s) for c, s in planned if (c, s) not in short))
    progress.start("sound runs and faults", len(keys) + len(planned))
    with workers() as pool:

        def make(key: Key) -> GroundJudge:
            judge = source.judge(*key, limits)
            progress.advance()
            return judge

        judges = dict(zip(keys, pool.map(make, keys), strict=True))

        def run(item: tuple[Case, float]) -> CaseResult:
            case, scale = item
            if item in short:
                found = _unshown(case, scale, source, short[item])
            else:
                found = _run(case, scale, judges[case.setting, scale], recorded=source.recorded)
            progress.advance()
            return found

        results = pool.map(run, planned) + (serving_cases(pool) if serving else [])
    return _summed(source, results)


def _run(case: Case, scale: float, judge: GroundJudge, *, recorded: bool) -> CaseResult:
    found = judge.find(case)
    if not found.changed:
        if recorded:
            rows = judge.ground.entries
            return _result(
                case, scale, found, _rows(case, judge), None, Needs(rows + 1, None), _NOTHING
            )
        raise ValueError(
            f"self-test: {case.id} at scale {scale:g} changed nothing, so it shows "
            "nothing; this is a fault of the self-test"
        )
    if case.control:
        caught = bool(found.gates)
    else:
        fired = set(found.gates)
        silent = not any(_cleared(gate, case.clear) for gate in fired)
        caught = fired.issuperset(case.gates) and silent
    return _result(
        case, scale, found, _rows(case, judge), caught, None, _others(case, found, judge)
    )


def _cleared(gate: str, clear: Sequence[str]) -> bool:
    return gate in clear or gate.split(".")[0] in clear


def _others(case: Case, found: Finding, judge: GroundJudge) -> Others:
    """Ask the usual comparisons about the tensor in which the fault is born."""
    if found.observed is None:
        return _NOTHING
    born = [gate for gate in case.gates if gate in STAGE_GATES and gate in found.changed]
    names = born or [name for name in STAGE_GATES if name in found.changed]
    pairs = {name: pair for name in names if (pair := judge.pair(name, found.observed))}
    return ask(pairs, judge.picks(found.observed))


def _shortfall(source: SelftestInput, case: Case) -> Needs | None:
    """Return what a case needs of rows or requests; None where there are enough."""
    ratio = case.setting.ratio
    filled = sum(n >= ratio for n in source.of_kind(case.setting.kind).requests)
    if filled < case.requests:
        return Needs(None, case.requests)
    needed = case.needs
    if any(gate.startswith("topk") for gate in case.gates):
        needed = max(needed, 2 * source.inputs.config.index_topk + 8)
    if source.layer(ratio) is None:
        return Needs(max(1, needed), None)
    return Needs(needed, None) if source.entries(case.setting) < needed else None


def _unshown(case: Case, scale: float, source: SelftestInput, needs: Needs) -> CaseResult:
    rows = source.entries(case.setting)
    return _result(case, scale, Finding((), frozenset(), None), rows, None, needs, _NOTHING)


def _rows(case: Case, judge: GroundJudge) -> int:
    """Return how many rows the stage of the first expected gate has."""
    gate = next((gate for gate in case.gates if gate in STAGE_GATES), None)
    path, stage = gate.split(".") if gate else ("index", "scores")
    key_side = is_key_side((path, stage))
    return sum(judge.ground.counts if key_side else judge.ground.given.lengths)


def _result(
    case: Case,
    scale: float,
    found: Finding,
    rows: int,
    caught: bool | None,
    needs: Needs | None,
    others: Others,
) -> CaseResult:
    verdict: Verdict = MATCH
    if needs is not None or found.gates:
        refused = needs is not None or set(found.gates) <= REFUSALS
        verdict = CANNOT_JUDGE if refused else DIFFER
    return CaseResult.model_validate(
        {
            "id": f"{case.id}@1e-3" if scale == SMALL_ROWS else case.id,
            "case": case.id,
            "class": case.letter,
            "kind": "control" if case.control else "fault",
            "text": case.text,
            "scale": scale,
            "log": case.log,
            "expected": case.gates,
            "gates": found.gates,
            "caught": caught,
            "verdict": verdict,
            "rows": rows,
            "needs": None if needs is None else needs.rows,
            "needs_requests": None if needs is None else needs.requests,
            "detail": found.detail or None,
            "others": others,
        }
    )


def _summed(source: SelftestInput, cases: Sequence[CaseResult]) -> SelftestResult:
    faults = [case for case in cases if case.kind == "fault"]
    controls = [case for case in cases if case.kind == "control"]
    few = sum(case.caught is None for case in cases)
    failed = any(case.caught is False for case in faults) or any(c.caught for c in controls)
    verdict: Verdict = DIFFER if failed else (CANNOT_JUDGE if few else MATCH)
    return SelftestResult.model_validate(
        {
            "schema": "needlepoint.selftest/1",
            "verdict": verdict,
            "input": source.inputs.name,
            "tokens": source.inputs.tokens,
            "requests": len(source.inputs.requests),
            "seed": source.inputs.seed,
            "faults": len(faults),
            "caught": sum(case.caught is True for case in faults),
            "controls": len(controls),
            "false_alarms": sum(case.caught is True for case in controls),
            "too_few_rows": few,
            "gates": GATES,
            "cases": tuple(cases),
        }
    )


SOUND = "sound-server"
_FORMAT = "fp8"


def serving_cases(pool: Workers) -> list[CaseResult]:
    """Run the scenario of every fault between calls on a server that has it, and on the sound one.

    The usual comparisons are not asked: they have no notion of a request's history.
    """
    faulty = pool.map(lambda fault: fault.caught(_FORMAT), SERVER_FAULTS)
    candidate = EmulatedCandidate(_FORMAT, Order.FUSED)
    sound = pool.map(lambda fault: seen(fault.scenario, candidate), SERVER_FAULTS)
    return [
        *(_served(*pair) for pair in zip(SERVER_FAULTS, faulty, strict=True)),
        *(_served(*pair, control=True) for pair in zip(SERVER_FAULTS, sound, strict=True)),
    ]


def _served(fault: ScenarioFault, found: Failure | None, *, control: bool = False) -> CaseResult:
    case = SOUND if control else f"server-{fault.id}"
    sound = "the sound server in the scenario of every fault"
    return CaseResult.model_validate(
        {
            "id": f"{SOUND}:{fault.id}" if control else case,
            "case": case,
            "class": fault.letter,
            "kind": "control" if control else "fault",
            "text": sound if control else fault.text.rstrip("."),
            "scale": 1.0,
            "log": () if control else fault.log,
            "expected": () if control else (SCENARIO,),
            "gates": () if found is None else (SCENARIO,),
            "caught": found is not None,
            "verdict": MATCH if found is None else DIFFER,
            "rows": len(fault.events),
            "detail": None if found is None else found.problem.detail,
            "others": _NOTHING,
        }
    )
