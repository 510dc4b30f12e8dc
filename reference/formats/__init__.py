"""Number formats of index keys, queries and main KV.

A :class:`Format` is an element type, a scale rule and a block. Engines use the same elements and
different scale rules, floors and tie rules, so each of these is one field. Nothing here imports
anything else of Needlepoint.
"""

from __future__ import annotations

from needlepoint.reference.formats.codec import (
    block_scales,
    decode,
    encode,
    rounding_cell,
    scale_values,
)
from needlepoint.reference.formats.elements import (
    Ties,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
    pack_e2m1,
    round_to_bf16,
    to_bf16,
    unpack_e2m1,
)
from needlepoint.reference.formats.scales import (
    ue8m0_decode,
    ue8m0_encode,
    ue8m0_exponent,
)
from needlepoint.reference.formats.types import (
    BF16,
    FLOAT64,
    FORMATS,
    FP4_OFFICIAL,
    FP4_SGLANG,
    FP8_NO_FLOOR,
    FP8_PLAIN,
    FP8_POW2,
    FP32,
    MAIN_FP8,
    MAIN_FP8_SCALE_FLOOR,
    Encoded,
    Floor,
    Format,
    ScaleKind,
)

__all__ = [
    "BF16",
    "FLOAT64",
    "FORMATS",
    "FP4_OFFICIAL",
    "FP4_SGLANG",
    "FP8_NO_FLOOR",
    "FP8_PLAIN",
    "FP8_POW2",
    "FP32",
    "MAIN_FP8",
    "MAIN_FP8_SCALE_FLOOR",
    "Encoded",
    "Floor",
    "Format",
    "ScaleKind",
    "Ties",
    "block_scales",
    "decode",
    "e2m1_decode",
    "e2m1_encode",
    "e4m3_decode",
    "e4m3_encode",
    "encode",
    "pack_e2m1",
    "round_to_bf16",
    "rounding_cell",
    "scale_values",
    "to_bf16",
    "ue8m0_decode",
    "ue8m0_encode",
    "ue8m0_exponent",
    "unpack_e2m1",
]
