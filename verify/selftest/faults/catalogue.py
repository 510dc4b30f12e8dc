"""All faults and controls of the self-test, by id."""

from __future__ import annotations

from needlepoint.verify.selftest.faults import compressor as faults_compressor
from needlepoint.verify.selftest.faults import controls as faults_controls
from needlepoint.verify.selftest.faults import handover as faults_handover
from needlepoint.verify.selftest.faults import pages as faults_pages
from needlepoint.verify.selftest.faults import picks as faults_picks
from needlepoint.verify.selftest.faults import queries as faults_queries
from needlepoint.verify.selftest.faults import rows as faults_rows
from needlepoint.verify.selftest.faults import scores as faults_scores
from needlepoint.verify.selftest.faults import store as faults_store
from needlepoint.verify.selftest.faults.fault import Case

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
