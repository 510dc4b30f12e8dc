"""Can the format be afforded: bytes of its keys, transients of its scoring, beside its recall."""

from __future__ import annotations

import re
from typing import Final

from needlepoint.optimized.protocol.interface import Candidate
from needlepoint.optimized.protocol.optional import MeasuresPrompts
from needlepoint.reference.config import MODELS
from needlepoint.verify.judge.memory_law import PROMPT_HEADS, PROMPT_TOKENS
from needlepoint.verify.schema.recall import RecallCost

MEMORY_BYTES: Final = 8 << 30
LAYERS: Final = MODELS["v4-flash"].compress_ratios.count(4)
_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def recall_cost(candidate: Candidate, key_bytes: float | None, memory: int) -> RecallCost:
    """Return the cost of one candidate.

    Parameters
    ----------
    candidate
        Who is asked.
    key_bytes
        Bytes of one index key in its pages; None where it has none.
    memory
        Bytes to be filled with index keys.
    """
    measured = predicted = None
    if isinstance(candidate, MeasuresPrompts):
        measured, predicted = candidate.prompt_transients(PROMPT_TOKENS, PROMPT_HEADS)
    a_token = None if key_bytes is None else key_bytes / 4
    return RecallCost(
        key_bytes=key_bytes,
        bytes_per_token=a_token,
        layers=LAYERS,
        memory_bytes=memory,
        tokens_that_fit=None if a_token is None else int(memory / (a_token * LAYERS)),
        prompt_tokens=PROMPT_TOKENS,
        transient_measured=measured,
        transient_predicted=predicted,
    )


def parse_memory(text: str) -> int:
    """Return the bytes of ``8GiB``.

    Raises
    ------
    ValueError
        Where the text has another form.
    """
    match = re.fullmatch(r"([0-9]{1,15})(KiB|MiB|GiB|)", text.replace(" ", ""))
    if match is None or int(match[1]) == 0:
        raise ValueError(f"--memory {text!r}: expected a size such as 8GiB")
    return int(match[1]) * _UNITS[match[2]]
