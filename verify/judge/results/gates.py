"""Gates: limits a user sets on figures of the result, ``--gate 'PATH<=VALUE'``.

A path is a chain of field names of ``needlepoint.result/1`` joined by dots. It starts at one
candidate (``format_cost.bf16.overlap_mean``, ``layers.topk.overlap_min``) and is applied to every
candidate in turn. A list on the way is expanded over all its elements, and every element must
satisfy the gate; elements that have null where the path goes on are skipped (a ratio-128 layer has
no ``topk``), but a path that reaches no number at all, or whose last value is null, cannot be
judged. An unknown field is an error before the run.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from needlepoint.verify.schema.result import (
    CANNOT_JUDGE,
    DIFFER,
    CandidateResult,
    GateResult,
    Result,
    Verdict,
)

Operator = Literal["<=", "<", ">=", ">", "=="]

_COMPARE: Mapping[Operator, Callable[[float, float], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
}
_GATE = re.compile(r"\s*([A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*)\s*(<=|>=|==|<|>)\s*([^\s<>=]+)\s*")


@dataclass(frozen=True)
class Gate:
    """One gate as parsed: ``path operator limit``."""

    path: str
    operator: Operator
    limit: float


def parse_gate(text: str) -> Gate:
    """Parse ``PATH<=VALUE`` (also ``<``, ``>=``, ``>``, ``==``) and check the path.

    Raises
    ------
    ValueError
        Where the form, the number or a field name is wrong; a wrong field is named together with
        the fields that exist there.
    """
    match = _GATE.fullmatch(text)
    if match is None:
        raise ValueError(
            f"gate {text!r}: expected PATH<=VALUE (or <, >=, >, ==), for example 'recall.lost<=0'"
        )
    path, sign, number = match.groups()
    try:
        limit = float(number)
    except ValueError:
        limit = math.nan
    if not math.isfinite(limit):
        raise ValueError(f"gate {text!r}: {number!r} is not a finite number")
    _check_path(text, path.split("."))
    return Gate(path=path, operator=cast(Operator, sign), limit=limit)


def apply_gates(result: Result, gates: tuple[Gate, ...]) -> Result:
    """Return the result with every gate judged for every candidate, and its verdict updated.

    An exceeded gate turns a match into ``differ``; a gate that cannot be judged makes the result
    ``cannot-judge``. Verdicts of candidates stay as they are.
    """
    if not gates:
        return result
    judged = tuple(_judge(gate, c) for gate in gates for c in result.candidates)
    verdict: Verdict = result.verdict
    if any(g.exceeded is None for g in judged) or not judged:
        verdict = CANNOT_JUDGE
    elif verdict != CANNOT_JUDGE and any(g.exceeded for g in judged):
        verdict = DIFFER
    return result.model_copy(update={"gates": result.gates + judged, "verdict": verdict})


def _judge(gate: Gate, candidate: CandidateResult) -> GateResult:
    """Judge one gate for one candidate; ``found`` is the value furthest past the limit."""
    values = list(_values(candidate.model_dump(by_alias=True), gate.path.split(".")))
    numbers = [v for v in values if v is not None]
    compare = _COMPARE[gate.operator]
    failing = [v for v in numbers if not compare(v, gate.limit)]
    found: float | None = None
    exceeded: bool | None = None
    detail: str | None = None
    if failing:
        # One null beside a value past the limit does not soften the answer.
        found, exceeded = max(failing, key=lambda v: abs(v - gate.limit)), True
    elif not numbers:
        detail = f"{gate.path} holds no number in this result: nothing to compare with the limit"
    elif len(numbers) < len(values):
        detail = f"{gate.path} is null in {len(values) - len(numbers)} of {len(values)} places"
    else:
        worst = min if gate.operator in (">=", ">") else max
        found, exceeded = worst(numbers), False
    return GateResult(
        path=gate.path,
        operator=gate.operator,
        limit=gate.limit,
        found=found,
        exceeded=exceeded,
        candidate=candidate.name,
        detail=detail,
    )


def _values(node: object, path: list[str]) -> Iterator[float | None]:
    """Yield every value under ``path``, lists expanded; None for a null at the end of the path."""
    if isinstance(node, list | tuple):
        for element in node:
            yield from _values(element, path)
    elif not path:
        if node is None or isinstance(node, int | float):
            yield None if node is None else float(node)
    elif isinstance(node, dict) and path[0] in node:
        yield from _values(node[path[0]], path[1:])


def _check_path(text: str, path: list[str]) -> None:
    """Follow the path through the models, so that a typing error fails before the run."""
    models: list[type[BaseModel]] = [CandidateResult]
    for depth, name in enumerate(path):
        fields: dict[str, FieldInfo] = {}
        for model in models:
            fields |= model.model_fields
        if name not in fields:
            place = ".".join(path[:depth]) or "a candidate"
            raise ValueError(
                f"gate {text!r}: {place} has no field {name!r}; expected one of {sorted(fields)}"
            )
        last = depth == len(path) - 1
        leaves = list(_leaves(fields[name].annotation))
        models = [t for t in leaves if isinstance(t, type) and issubclass(t, BaseModel)]
        if dict in leaves and depth == len(path) - 2:
            return  # keys of a mapping are data, known after the run only
        if last and not any(t in (int, float, bool) for t in leaves):
            raise ValueError(
                f"gate {text!r}: {name!r} is not a number; "
                f"expected a path to one, for example 'layers.topk.overlap_min>=0.99'"
            )
        if not last and not models:
            raise ValueError(f"gate {text!r}: {name!r} has no fields; end the path there")


def _leaves(annotation: object) -> Iterator[object]:
    """Yield the plain types inside unions, tuples and annotations; ``dict`` stands for itself."""
    if get_origin(annotation) is dict:
        yield dict
        return
    arguments = get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _leaves(argument)
