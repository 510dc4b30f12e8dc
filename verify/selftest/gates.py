"""The gates of the self-test: every way in which the judge can refuse a candidate."""

from __future__ import annotations

from collections.abc import Collection

from needlepoint.optimized.protocol.stages import REGISTRY
from needlepoint.verify.base.stages import COMPARED, TOPK, declared_stages

PROTOCOL = "protocol"
SKIPPED = "skipped"
UNOWNED = "unowned"
REPEAT = "repeat"
SCENARIO = "scenario"
BIAS = "bias"
SELECTOR, INVALID, UNKNOWN = "topk.selector", "topk.invalid", "topk.unknown"

NOT_OBSERVED = tuple(stage.name for stage in REGISTRY if stage.kind != COMPARED)
"""Stages that are given or a consequence."""

STAGE_GATES: tuple[str, ...] = tuple(
    ".".join(key) for key in declared_stages(4) if key[1] not in (*NOT_OBSERVED, TOPK)
)
GATES: tuple[str, ...] = (
    *STAGE_GATES,
    SELECTOR,
    INVALID,
    UNKNOWN,
    BIAS,
    REPEAT,
    SCENARIO,
    UNOWNED,
    SKIPPED,
    PROTOCOL,
)
"""Every gate, in the order of the matrix."""
REFUSALS = frozenset({SKIPPED, PROTOCOL})
"""Gates that make a run exit 2: nothing was judged, and nothing passes."""


def ordered(gates: Collection[str]) -> tuple[str, ...]:
    """Return gates in the order of the matrix: stages as tokens pass them, then the others."""
    return tuple(sorted(gates, key=lambda gate: GATES.index(gate)))
