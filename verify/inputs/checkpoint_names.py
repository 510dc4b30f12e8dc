"""How a checkpoint calls the tensors of a layer, and which dtypes they may have.

Two spellings of DeepSeek-V4 are published: the official one
(``layers.2.attn.compressor.wkv.weight``) and that of transformers
(``model.layers.2.self_attn.compressor.kv_proj.weight``). DeepSeek-V3.2 and GLM-5 have one
(``model.layers.2.self_attn.indexer.wk.weight``). Each may have ``model.`` in front or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

MATRIX_DTYPES: Final = ("BF16", "F32", "F8_E4M3")
NORM_DTYPES: Final = ("BF16", "F32")
FP32: Final = ("F32",)
SCALE_DTYPES: Final = ("F8_E8M0", "F32")
SCALE_SUFFIXES: Final = ("scale", "weight_scale_inv")
"""What stands in the place of ``weight`` for the scales of an FP8 matrix."""

BLOCK: Final = 128
"""Rows and columns of an FP8 matrix that share a scale."""


@dataclass(frozen=True)
class Spelling:
    """One family of names.

    Attributes
    ----------
    name
        What to call it in messages.
    attention
        What stands between the layer and its tensors.
    parts
        Our name of a tensor to its name behind ``attention``.
    owned
        Prefixes behind ``attention`` under which every tensor must be known.
    """

    name: str
    attention: str
    parts: Mapping[str, str]
    owned: tuple[str, ...]


def _compressor(path: str, prefix: str, names: tuple[str, str, str, str]) -> dict[str, str]:
    return {
        f"{path}.{own}": f"{prefix}.{theirs}"
        for own, theirs in zip(("wkv", "wgate", "ape", "norm"), names, strict=True)
    }


_OFFICIAL_PARTS = ("wkv.weight", "wgate.weight", "ape", "norm.weight")
_THEIR_PARTS = ("kv_proj.weight", "gate_proj.weight", "position_bias", "kv_norm.weight")

SPELLINGS: Final = (
    Spelling(
        "official",
        "attn",
        {
            **_compressor("main", "compressor", _OFFICIAL_PARTS),
            **_compressor("index", "indexer.compressor", _OFFICIAL_PARTS),
            "index_wq_b": "indexer.wq_b.weight",
            "weights_proj": "indexer.weights_proj.weight",
            "wq_a": "wq_a.weight",
            "q_norm": "q_norm.weight",
            "wq_b": "wq_b.weight",
            "wkv": "wkv.weight",
            "kv_norm": "kv_norm.weight",
            "attn_sink": "attn_sink",
        },
        ("compressor.", "indexer."),
    ),
    Spelling(
        "transformers",
        "self_attn",
        {
            **_compressor("main", "compressor", _THEIR_PARTS),
            **_compressor("index", "compressor.indexer", _THEIR_PARTS),
            "index_wq_b": "compressor.indexer.q_b_proj.weight",
            "weights_proj": "compressor.indexer.scorer.weights_proj.weight",
            "wq_a": "q_a_proj.weight",
            "q_norm": "q_a_norm.weight",
            "wq_b": "q_b_proj.weight",
            "wkv": "kv_proj.weight",
            "kv_norm": "kv_norm.weight",
            "attn_sink": "sinks",
        },
        ("compressor.",),
    ),
    Spelling(
        "DeepSeek-V3.2 and GLM-5",
        "self_attn",
        {
            "index.wkv": "indexer.wk.weight",
            "index.norm": "indexer.k_norm.weight",
            "index.norm_bias": "indexer.k_norm.bias",
            "index_wq_b": "indexer.wq_b.weight",
            "weights_proj": "indexer.weights_proj.weight",
            "wq_a": "q_a_proj.weight",
            "q_norm": "q_a_layernorm.weight",
        },
        ("indexer.",),
    ),
)


def allowed_dtypes(part: str) -> tuple[str, ...]:
    """Return the dtypes that a tensor may have, by our name of it."""
    last = part.rpartition(".")[2]
    if last in ("ape", "attn_sink"):
        return FP32
    return NORM_DTYPES if "norm" in last else MATRIX_DTYPES


def layer_names(names: Iterable[str], layer: int) -> tuple[Spelling, str, frozenset[str]] | None:
    """Find a layer's attention tensors in a list of names.

    Returns
    -------
    tuple or None
        The spelling of which most tensors are there, the prefix that stands before
        ``Spelling.parts``, and every name that begins with it. None where no spelling has any.
    """
    pattern = re.compile(rf"(model\.)?layers\.{layer}\.(attn|self_attn)\.")
    own = frozenset(name for name in names if pattern.match(name))
    best: tuple[int, Spelling, str] | None = None
    for spelling in SPELLINGS:
        for front in ("", "model."):
            prefix = f"{front}layers.{layer}.{spelling.attention}."
            known = sum(prefix + part in own for part in spelling.parts.values())
            if known and (best is None or known > best[0]):
                best = (known, spelling, prefix)
    if best is None:
        return None
    _, spelling, prefix = best
    return spelling, prefix, frozenset(name for name in own if name.startswith(prefix))


def scale_name(weight: str, names: frozenset[str]) -> str | None:
    """Return the name of an FP8 matrix's scales, None where there is none."""
    stem = weight.removesuffix("weight")
    return next((stem + s for s in SCALE_SUFFIXES if stem + s in names), None)
