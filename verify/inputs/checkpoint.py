"""``--checkpoint DIR``: the weights of single layers from a published checkpoint.

Of a few hundred gigabytes only the attention tensors that the compressor, the indexer and the
sparse attention read are looked at, layer by layer, so memory follows one layer. Everything is
checked by name, shape and dtype before the first tensor is read.

Two spellings of DeepSeek-V4 are published: the official one
(``layers.2.attn.compressor.wkv.weight``) and that of transformers
(``model.layers.2.self_attn.compressor.kv_proj.weight``). DeepSeek-V3.2 and GLM-5 have one
(``model.layers.2.self_attn.indexer.wk.weight``). Each may have ``model.`` in front or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.weights import CompressorWeights, LayerWeights, expected_shapes
from needlepoint.verify.inputs.checkpoint_files import CheckpointError, Shards

__all__ = ["Checkpoint", "CheckpointError"]


@dataclass(frozen=True)
class _Source:
    """Where a tensor and its scales are."""

    weight: str
    scale: str | None


class Checkpoint:
    """A checkpoint whose layers have been checked against a model's shapes.

    Parameters
    ----------
    directory
        Folder of the checkpoint.
    config
        Model shapes.
    layers
        Layers that will be asked for.

    Raises
    ------
    CheckpointError
        Where a tensor of these layers is missing, has another shape or dtype, or is there and
        belongs to no layer of this ratio; also as :class:`Shards`.
    """

    def __init__(self, directory: Path, config: ModelConfig, layers: Iterable[int]) -> None:
        self._shards = Shards(directory)
        self._config = config
        self._sources = {layer: self._check(config, layer) for layer in layers}
        self._kept: tuple[int, LayerWeights] | None = None

    def weights(self, layer: int) -> LayerWeights:
        """Return the tensors of a layer; the last layer is kept, so memory follows one layer.

        Raises
        ------
        CheckpointError
            Where a value is not finite, or a file changed since it was checked.
        """
        if self._kept is None or self._kept[0] != layer:
            self._kept = None  # before the next layer comes in
            self._kept = (layer, self._read(layer))
        return self._kept[1]

    def _check(self, config: ModelConfig, layer: int) -> Mapping[str, _Source]:
        where = f"checkpoint {self._shards.directory}: layer {layer}"
        found = layer_names(self._shards.names, layer)
        if found is None:
            raise CheckpointError(
                f"{where}: no tensor layers.{layer}.attn.* (official) or "
                f"layers.{layer}.self_attn.* (transformers); choose other --layers"
            )
        spelling, prefix, names = found
        sources: dict[str, _Source] = {}
        for part, shape in expected_shapes(config, layer).items():
            if 0 in shape:  # what such a layer does not have
                continue
            name = prefix + spelling.parts.get(part, part)
            if name not in names:
                raise CheckpointError(
                    f"{where} (ratio {config.ratio(layer)}): tensor {name} is missing"
                )
            sources[part] = self._check_tensor(name, shape, allowed_dtypes(part), names)
        used = {s.weight for s in sources.values()} | {s.scale for s in sources.values()}
        owned = tuple(prefix + part for part in spelling.owned)
        extra = sorted(n for n in names if n.startswith(owned) and n not in used)
        if extra:
            raise CheckpointError(
                f"{where} (ratio {config.ratio(layer)}): tensor {extra[0]} is not one that such a "
                "layer has; is this the model's config.json?"
            )
        return sources

    def _check_tensor(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...], names: frozenset[str]
    ) -> _Source:
        entry = self._shards.entry(name)
        if entry.dtype not in dtypes:
            raise CheckpointError(
                f"tensor {name}: dtype {entry.dtype}, expected {' or '.join(dtypes)}"
            )
        if entry.shape != shape:
            raise CheckpointError(
                f"tensor {name}: shape {list(entry.shape)}, expected {list(shape)}"
            )
        if entry.dtype != "F8_E4M3":
            return _Source(name, None)
        scale = scale_name(name, names)
        if scale is None:
            raise CheckpointError(f"tensor {name}: is F8_E4M3 and its block scales are missing")
        of_scale = self._shards.entry(scale)
        blocks = tuple(-(-size // BLOCK) for size in shape)
        if of_scale.dtype not in SCALE_DTYPES or of_scale.shape != blocks:
            raise CheckpointError(
                f"tensor {scale}: {of_scale.dtype} {list(of_scale.shape)}, expected "
                f"{' or '.join(SCALE_DTYPES)} {list(blocks)}: one scale for {BLOCK} x {BLOCK}"
            )
        return _Source(name, scale)

    def _read(self, layer: int) -> LayerWeights:
        shapes = expected_shapes(self._config, layer)
        parts = {part: torch.empty(shape) for part, shape in shapes.items() if 0 in shape}
        parts |= {part: self._tensor(part, s) for part, s in self._sources[layer].items()}

        def compressor(path: str) -> CompressorWeights | None:
            if f"{path}.wkv" not in parts:
                return None
            names = ("wkv", "wgate", "ape", "norm", "norm_bias")
            own = {name: f"{path}.{name}" for name in names}
            return CompressorWeights(**{n: parts[part] for n, part in own.items() if part in parts})

        return LayerWeights(
            main=compressor("main"),
            index=compressor("index"),
            index_wq_b=parts.get("index_wq_b"),
            weights_proj=parts.get("weights_proj"),
            wq_a=parts["wq_a"],
            q_norm=parts["q_norm"],
            wq_b=parts["wq_b"],
            wkv=parts["wkv"],
            kv_norm=parts["kv_norm"],
            attn_sink=parts["attn_sink"],
        )

    def _tensor(self, part: str, source: _Source) -> Tensor:
        found = self._shards.tensor(source.weight)
        if source.scale is not None:
            found = dequantised(found, self._shards.tensor(source.scale))
        finite = bool(torch.isfinite(found).all())
        if not finite:
            raise CheckpointError(f"tensor {source.weight}: holds NaN or infinity")
        last = part.rpartition(".")[2]
        return found.to(torch.float32) if "norm" in last else found


def dequantised(codes: Tensor, scales: Tensor) -> Tensor:
    """Return an FP8 matrix with its block scales multiplied in.

    Parameters
    ----------
    codes
        E4M3 ``[out, in]``.
    scales
        ``[out / 128, in / 128]``, E8M0 or fp32.

    Returns
    -------
    Tensor
        bf16 where it holds every product exactly, as it does for powers of two in its range; fp32
        otherwise.
    """
    out = torch.empty(codes.shape, dtype=torch.float32)
    columns = scales.to(torch.float32).repeat_interleave(BLOCK, dim=1)[:, : codes.shape[1]]
    for block, factor in enumerate(columns):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        out[rows] = codes[rows].to(torch.float32) * factor
    short = out.to(torch.bfloat16)
    return short if torch.equal(short.to(torch.float32), out) else out


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
    """One family of names."""

    name: str  # What to call it in messages.
    attention: str  # What stands between the layer and its tensors.
    parts: Mapping[str, str]  # Our name of a tensor to its name behind ``attention``.
    owned: tuple[str, ...]  # Prefixes behind ``attention`` under which every tensor must be known.


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
