"""Names that the reference and the optimized side share; nothing here computes."""

from __future__ import annotations

from enum import Enum
from typing import Final

PER_TOKEN: Final = 1
"""Ratio of a layer whose indexer has a key for every token: DeepSeek-V3.2 and GLM-5. Its key is
normalised by a LayerNorm with bias. Its main attention is another one and not modelled."""


class RopeLayout(Enum):
    """Rotated dims of a row, and the two dims of a pair."""

    TRAILING_PAIRS = "trailing-pairs"  # the last dims, (2i, 2i + 1): DeepSeek-V4
    LEADING_PAIRS = "leading-pairs"  # the first dims, (2i, 2i + 1): indexer of GLM-5
    LEADING_HALVES = "leading-halves"  # the first dims, (i, i + pairs): indexer of DeepSeek-V3.2
