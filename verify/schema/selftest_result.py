"""``needlepoint.selftest/1``: what was planted, and which gates fired."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from needlepoint.verify.schema.base import Count, Number, Record, Verdict

SCHEMA: Final = "needlepoint.selftest/1"


class Others(Record):
    """What usual comparisons say of the tensor in which a fault is born; null without one."""

    assert_close: Verdict | None
    """``torch.testing.assert_close`` with the default tolerances of the dtype."""
    calc_diff: Verdict | None
    """``1 - 2<x,y> / (<x,x> + <y,y>)`` below 1e-3, over the whole tensor."""
    cosine: Verdict | None
    """Cosine of at least 0.999, over the whole tensor."""
    overlap: Verdict | None
    """Mean overlap of the picks with the reference's of at least 0.99."""


class CaseResult(Record):
    """One fault or control at one scale."""

    id: str
    """Unique; that of the catalogue, with ``@1e-3`` for stored rows at scale 1e-3."""
    case: str
    """Id in the catalogue."""
    class_: Annotated[str, Field(alias="class", pattern="^[A-Q]$")]
    """Class of the fault log."""
    kind: Literal["fault", "control"]
    text: str
    scale: Number
    log: tuple[str, ...]
    """Rows of the fault log whose mechanism this is."""
    expected: tuple[str, ...]
    """Gates that have to fire."""
    gates: tuple[str, ...]
    """Gates that fired."""
    caught: bool | None
    """Of a fault: whether every expected gate fired and none that had to stay silent. Of a control:
    whether it was flagged. Null where so few rows cannot show it."""
    verdict: Verdict
    """What ``verify`` says of such a candidate."""
    rows: Count
    """Rows that were judged in the stage of the first expected gate."""
    needs: Count | None = None
    """Entries of a request that the fault needs; null where there are enough."""
    needs_requests: Count | None = None
    """Requests that the fault needs; null where there are enough."""
    detail: str | None = None
    others: Others


class SelftestResult(Record):
    """The whole self-test."""

    schema_: Annotated[Literal["needlepoint.selftest/1"], Field(alias="schema")] = SCHEMA
    verdict: Verdict
    """Match if all faults are caught and no control is flagged."""
    input: str
    tokens: Count
    requests: Count
    seed: Count
    faults: Count
    caught: Count
    controls: Count
    false_alarms: Count
    too_few_rows: Count
    """Faults that the rows of this input cannot show; neither caught nor missed."""
    gates: tuple[str, ...]
    """Every gate, in the order of the matrix."""
    cases: tuple[CaseResult, ...]
