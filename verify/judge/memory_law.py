"""The law of a candidate's transient memory, and its figure for a prompt that is never run."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from needlepoint.optimized.emulation.memory import TransientLaw
from needlepoint.optimized.protocol.interface import Candidate
from needlepoint.verify.schema.result import MemoryLaw, MemoryPoint

PROMPT_TOKENS = 22_528
"""The prompt at which an unfused bf16 path was seen to run out of memory."""
PROMPT_HEADS = 64


@runtime_checkable
class MeasuresTransients(Protocol):
    """A candidate that can measure its own transients at several sizes and fit their law."""

    def transient_law(self) -> TransientLaw | None:
        """Measure and fit; None where transients do not grow with queries x heads x keys."""
        ...


def transient_law(candidate: Candidate) -> MemoryLaw | None:
    """Return the measured law of a candidate with its prediction; None where it has none."""
    if not isinstance(candidate, MeasuresTransients):
        return None
    law = candidate.transient_law()
    if law is None:
        return None
    return MemoryLaw(
        bytes_per_product=law.bytes_per_product,
        points=tuple(
            MemoryPoint(queries=s.queries, heads=s.heads, keys=s.keys, bytes=s.bytes)
            for s in law.samples
        ),
        predicted_tokens=PROMPT_TOKENS,
        predicted_bytes=law.predict_prompt(PROMPT_TOKENS, PROMPT_HEADS),
    )
