"""The law of a candidate's transient memory, and its figure for a prompt that is never run."""

from __future__ import annotations

from needlepoint.optimized.protocol.interface import Candidate
from needlepoint.optimized.protocol.optional import MeasuresTransients
from needlepoint.verify.schema.result import MemoryLaw, MemoryPoint

PROMPT_TOKENS = 22_528
"""The prompt at which an unfused bf16 path was seen to run out of memory."""
PROMPT_HEADS = 64


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
