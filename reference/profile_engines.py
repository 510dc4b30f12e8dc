"""Profiles of serving engines: how each engine rounds on purpose, as settings of `Arithmetic`.

A kernel is compared with the arithmetic of its engine. Each profile below says where the engine
rounds, which format and floor it stores in, and whether it rotates. ``docs/engines.md`` names the
source that each setting was read from. The contracts show what a profile costs.
"""

from __future__ import annotations

from dataclasses import replace

from needlepoint.reference.formats import (
    BF16,
    FP4_OFFICIAL,
    FP4_SGLANG,
    FP8_NO_FLOOR,
    FP8_PLAIN,
    FP8_POW2,
    MAIN_FP8,
    MAIN_FP8_SCALE_FLOOR,
    Format,
)
from needlepoint.reference.profile import (
    BF16_CONTRACT,
    OFFICIAL_PER_TOKEN,
    Accumulator,
    ApePlacement,
    Arithmetic,
    Precision,
)

FP32, BF = Precision.FP32, Precision.BF16

_FP32_ROW = replace(BF16_CONTRACT, pooled=FP32, normed=FP32, roped=FP32, rotated=FP32)
"""A row that stays in fp32 from the projections to the store."""

_SGLANG = replace(_FP32_ROW, name="sglang", query_input=BF, main_nope=MAIN_FP8)
_VLLM = replace(
    _FP32_ROW,
    name="vllm",
    roped=BF,
    hadamard=False,
    ape=ApePlacement.WRITE,
    query_input=BF,
    main_nope=MAIN_FP8,
)
_TENSORRT = replace(
    _FP32_ROW,
    name="tensorrt-llm",
    key_input=BF,
    pooled=BF,
    ape=ApePlacement.WRITE,
    query_input=BF,
)
_LMDEPLOY = replace(
    BF16_CONTRACT,
    name="lmdeploy",
    ape=ApePlacement.WRITE,
    query_input=BF,
    main_nope=MAIN_FP8_SCALE_FLOOR,
)
_LLAMA_CPP = replace(_FP32_ROW, name="llama.cpp", ape=ApePlacement.WRITE)
_TRANSFORMERS = replace(
    BF16_CONTRACT,
    name="transformers",
    key_input=BF,
    query_input=BF,
    pool_weights=BF,
    pool_terms=BF,
    rope_table=BF,
    hadamard=False,
)


def _stored(base: Arithmetic, fmt: Format, **switches: Precision | Accumulator) -> Arithmetic:
    return replace(base, index_key=fmt, index_query=fmt, **switches)  # type: ignore[arg-type]


ENGINES: dict[str, dict[str, Arithmetic]] = {
    "sglang": {
        "fp8": _stored(_SGLANG, FP8_PLAIN, accumulator=Accumulator.SM90_FP8),
        "fp4": _stored(_SGLANG, FP4_SGLANG, query_roped=BF, query_rotated=BF),
    },
    "vllm": {
        "fp8": _stored(_VLLM, FP8_POW2, accumulator=Accumulator.SM90_FP8),
        "fp4": _stored(_VLLM, FP4_OFFICIAL),
    },
    "tensorrt-llm": {
        "fp8": _stored(_TENSORRT, FP8_NO_FLOOR, accumulator=Accumulator.SM90_FP8),
        "fp4": _stored(_TENSORRT, FP4_OFFICIAL),
    },
    "lmdeploy": {"fp8": _stored(_LMDEPLOY, FP8_POW2, accumulator=Accumulator.SM90_FP8)},
    "llama.cpp": {"bf16": _stored(_LLAMA_CPP, BF16)},
    "transformers": {"bf16": _stored(_TRANSFORMERS, BF16)},
}
"""Engine to key format to arithmetic, for DeepSeek-V4."""

_PUBLISHED = replace(OFFICIAL_PER_TOKEN, name="deepseek-v3.2")
_SGLANG_TOKEN = replace(
    _FP32_ROW,
    name="sglang-v3.2",
    key_input=BF,
    query_input=BF,
    roped=BF,
    query_roped=FP32,
    hadamard=False,
)

TOKEN_ENGINES: dict[str, dict[str, Arithmetic]] = {
    "deepseek-v3.2": {"fp8": _PUBLISHED},
    "sglang-v3.2": {"fp8": _stored(_SGLANG_TOKEN, FP8_PLAIN, accumulator=Accumulator.SM90_FP8)},
}
"""The same for layers of one index key a token: DeepSeek-V3.2 as published, and SGLang's kernels
for it and for GLM-5. ``transformers`` means in both modules what it means in DeepSeek-V4's."""


def engine_profile(engine: str, key_format: str) -> Arithmetic:
    """Return the profile of an engine for one index-key format.

    Parameters
    ----------
    engine
        A name of :data:`ENGINES` or :data:`TOKEN_ENGINES`.
    key_format
        ``"bf16"``, ``"fp8"`` or ``"fp4"``.

    Raises
    ------
    ValueError
        For an unknown engine, or a format that the engine does not store.
    """
    known = ENGINES | TOKEN_ENGINES
    if engine not in known:
        raise ValueError(f"engine {engine!r}: expected one of {', '.join(known)}")
    formats = known[engine]
    if key_format not in formats:
        raise ValueError(
            f"engine {engine}: key format {key_format!r}, expected one of {', '.join(formats)}: it "
            "stores no other index keys"
        )
    return formats[key_format]
