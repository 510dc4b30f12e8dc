"""JUnit XML of a result: one test case per candidate, layer and stage, and one per gate."""

from __future__ import annotations

import math
import re
from typing import Any

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from needlepoint.verify.base.numbers import short
from needlepoint.verify.report.summary import details, headline
from needlepoint.verify.report.words import exact_number, gate_name, stage_name, token
from needlepoint.verify.schema.result import (
    CANNOT_JUDGE,
    DIFFER,
    MATCH,
    CandidateResult,
    GateResult,
    LayerResult,
    Result,
    StageResult,
)

Outcome = Error | Failure | Skipped

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(result: Result) -> bytes:
    """Return the result as JUnit XML.

    A stage that differs and an exceeded gate are failures; whatever could not be judged is an
    error; given, consequence and uncovered stages are skipped with their kind as the reason. A
    result that cannot be judged for a reason of its own always holds an error.
    """
    document: Any = JUnitXml("needlepoint")  # its totals and bytes come from untyped methods
    for candidate in result.candidates:
        suite = TestSuite(_clean(candidate.name))
        for layer in candidate.layers:
            for stage in layer.stages:
                suite.add_testcase(_stage_case(candidate, layer, stage))
        for gate in result.gates:
            if gate.candidate == candidate.name:
                suite.add_testcase(_gate_case(gate))
        document.add_testsuite(suite)
    run = TestSuite("needlepoint")
    run.add_testcase(_run_case(result))
    document.add_testsuite(run)
    document.update_statistics()
    text: bytes = document.tostring()
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + text.split(b"?>\n", 1)[-1] + b"\n"


def _stage_case(candidate: CandidateResult, layer: LayerResult, stage: StageResult) -> TestCase:
    """Return the case of one stage."""
    case = _case(stage_name(stage), f"{candidate.name}.layer{layer.layer}")
    rows = f"{stage.rows_compared} of {stage.rows_expected} rows compared"
    if stage.verdict is None:
        case.result = [_outcome(Skipped, stage.kind)]
    elif stage.verdict == CANNOT_JUDGE:
        case.result = [_outcome(Error, stage.detail or rows)]
    elif stage.verdict == DIFFER:
        case.result = [_outcome(Failure, _worst(stage) or stage.detail or rows)]
    return case


def _worst(stage: StageResult) -> str:
    """Return the worst row of a stage in one line; nothing where no row fails by itself."""
    if not stage.worst or (stage.worst[0].error or math.inf) <= 1:
        return ""
    row = stage.worst[0]
    error = "no finite error" if row.error is None else f"{short(row.error)} x limit"
    return (
        f"{token(row)}: {error}, expected {exact_number(row.expected)}, "
        f"found {exact_number(row.found)}"
    )


def _gate_case(gate: GateResult) -> TestCase:
    """Return the case of one gate."""
    case = _case(gate_name(gate), f"{gate.candidate}.gates")
    if gate.exceeded is None:
        case.result = [_outcome(Error, gate.detail or "not judged")]
    elif gate.exceeded:
        case.result = [_outcome(Failure, f"found {exact_number(gate.found)}")]
    return case


def _run_case(result: Result) -> TestCase:
    """Return the case of the verdict as a whole; its output is what every surface says under it."""
    case = _case("verdict", "needlepoint")
    if result.verdict != MATCH:
        kind = Failure if result.verdict == DIFFER else Error
        case.result = [_outcome(kind, headline(result))]
    if lines := details(result):  # last: schemas of JUnit want output after the outcome
        case.system_out = _clean("\n".join(lines))
    return case


def _case(name: str, classname: str) -> TestCase:
    case = TestCase(_clean(name))
    case.classname = _clean(classname)
    return case


def _outcome(kind: type[Error] | type[Failure] | type[Skipped], message: str) -> Outcome:
    return kind(_clean(message))


def _clean(text: str) -> str:
    """Return the text without characters that XML cannot hold."""
    return _NOT_XML.sub("?", text)
