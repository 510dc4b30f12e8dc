"""All faults and controls of the self-test, by id."""

from __future__ import annotations

from needlepoint.verify import (
    faults_compressor,
    faults_controls,
    faults_handover,
    faults_pages,
    faults_picks,
    faults_queries,
    faults_rows,
    faults_scores,
    faults_store,
)
from needlepoint.verify.faults import Case

FAULTS: tuple[Case, ...] = (
    *faults_compressor.FAULTS,
    *faults_rows.FAULTS,
    *faults_store.FAULTS,
    *faults_pages.FAULTS,
    *faults_queries.FAULTS,
    *faults_scores.FAULTS,
    *faults_picks.FAULTS,
    *faults_handover.FAULTS,
)
CONTROLS: tuple[Case, ...] = faults_controls.CONTROLS

CATALOGUE: dict[str, Case] = {case.id: case for case in (*FAULTS, *CONTROLS)}
