"""All faults and controls of the self-test, by id."""

from __future__ import annotations

from needlepoint.verify.selftest.faults import (
    compressor,
    controls,
    handover,
    pages,
    picks,
    queries,
    rows,
    scores,
    store,
)
from needlepoint.verify.selftest.faults.fault import Case

FAULTS: tuple[Case, ...] = tuple(
    case
    for room in (compressor, rows, store, pages, queries, scores, picks, handover)
    for case in room.FAULTS
)
CONTROLS: tuple[Case, ...] = controls.CONTROLS

CATALOGUE: dict[str, Case] = {case.id: case for case in (*FAULTS, *CONTROLS)}
