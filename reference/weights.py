"""The tensors of one attention layer that the compressor and indexer read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.formats.names import PER_TOKEN

_FIELD_BITS = 15  # four uniform fields of a 60-bit draw are summed to one near-normal number
_OUTLIER_GAIN = 6.0  # a few channels of real key norms are several times larger than the rest


@dataclass(frozen=True)
class CompressorWeights:
    """One compressor; ``c`` is 2 for ratio 4 (overlapping windows) and 1 for the others.

    Attributes
    ----------
    wkv, wgate
        ``[c * d, hidden]`` bf16, projections to values and to pooling scores.
    ape
        ``[ratio, c * d]`` fp32, position embedding of a token's place in its window. Columns
        ``[0, d)`` belong to the overlap half when ``c`` is 2.
    norm
        ``[d]`` fp32, weight of the RMS norm after pooling.
    norm_bias
        ``[d]`` fp32, of the LayerNorm of ratio 1; else None. There ``wkv`` is the key projection
        and ``wgate`` and ``ape`` are empty: nothing is pooled.
    """

    wkv: Tensor
    wgate: Tensor
    ape: Tensor
    norm: Tensor
    norm_bias: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are there, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices are bf16 ``[out, in]``, norms and the sink fp32.

    The main attention of a ratio-1 layer is not modelled: ``wq_b``, ``wkv``, ``kv_norm`` and
    ``attn_sink`` are empty there.

    Attributes
    ----------
    main
        Compressor of the main KV (d = head_dim); None for ratios 0 and 1.
    index
        Compressor of the index keys (d = index_head_dim); None unless ratio 4 or 1.
    index_wq_b, weights_proj
        Indexer: ``[index_n_heads * index_head_dim, q_lora_rank]`` from the latent, and
        ``[index_n_heads, hidden]``; None unless ratio 4 or 1.
    wq_a, q_norm
        ``[q_lora_rank, hidden]`` and ``[q_lora_rank]``: the query latent.
    wq_b
        ``[n_heads * head_dim, q_lora_rank]``: main queries.
    wkv, kv_norm
        ``[head_dim, hidden]`` and ``[head_dim]``: rows of the sliding window.
    attn_sink
        ``[n_heads]``: logit that takes part in the softmax and has no value.
    """

    main: CompressorWeights | None
    index: CompressorWeights | None
    index_wq_b: Tensor | None
    weights_proj: Tensor | None
    wq_a: Tensor
    q_norm: Tensor
    wq_b: Tensor
    wkv: Tensor
    kv_norm: Tensor
    attn_sink: Tensor


def check_layer_weights(weights: LayerWeights, config: ModelConfig, layer: int) -> None:
    """Check every tensor of a layer against the model's shapes.

    Raises
    ------
    ValueError
        Naming the tensor, its shape and the expected one; a part that the layer's ratio has but
        the weights lack, or the reverse, is named too.
    """
    found = _shapes(weights)
    wanted = expected_shapes(config, layer)
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise ValueError(
                f"layer {layer} of model {config.name!r} (ratio {config.ratio(layer)}): weight "
                f"{name} is {found.get(name, 'absent')}, expected {wanted.get(name, 'absent')}"
            )


def _shapes(weights: LayerWeights) -> dict[str, tuple[int, ...]]:
    tensors: dict[str, Tensor | None] = {}
    for name, value in vars(weights).items():
        if isinstance(value, CompressorWeights):
            tensors |= {f"{name}.{part}": tensor for part, tensor in value.tensors().items()}
        else:
            tensors[name] = value
    return {name: tuple(t.shape) for name, t in tensors.items() if t is not None}


def expected_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a layer; names of a compressor's begin with its path."""
    ratio, hidden, latent = config.ratio(layer), config.hidden_size, config.q_lora_rank
    heads, head_dim = (0, 0) if ratio == PER_TOKEN else (config.n_heads, config.head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "wq_a": (latent, hidden),
        "q_norm": (latent,),
        "wq_b": (heads * head_dim, latent),
        "wkv": (head_dim, hidden),
        "kv_norm": (head_dim,),
        "attn_sink": (heads,),
    }
    paths = {"main": config.head_dim} if ratio > PER_TOKEN else {}
    if ratio in (PER_TOKEN, 4):
        paths["index"] = config.index_head_dim
        shapes["index_wq_b"] = (config.index_n_heads * config.index_head_dim, latent)
        shapes["weights_proj"] = (config.index_n_heads, hidden)
    for path, width in paths.items():
        columns = width * (2 if ratio == 4 else 1)
        pooled = 0 if ratio == PER_TOKEN else columns
        shapes[f"{path}.wkv"], shapes[f"{path}.wgate"] = (columns, hidden), (pooled, hidden)
        shapes[f"{path}.ape"] = (ratio, pooled)
        shapes[f"{path}.norm"] = (width,)
        if ratio == PER_TOKEN:
            shapes[f"{path}.norm_bias"] = (width,)
    return shapes


def random_layer_weights(config: ModelConfig, layer: int, seed: int) -> LayerWeights:
    """Return random weights with the scales of a trained layer, the same bits on every machine.

    Projections keep the size of their input; pooling scores spread enough that windows prefer some
    tokens; norm weights scatter around 1 with a few outlier channels. Draws are integers, because
    ``torch.randn`` depends on the vector instructions of the machine.

    Parameters
    ----------
    config
        Model shapes.
    layer
        Layer, which fixes the ratio.
    seed
        Different seeds and different layers give independent weights.
    """
    ratio = config.ratio(layer)
    generator = torch.Generator().manual_seed((seed * 1_000_003 + layer) % (1 << 63))
    hidden, latent = config.hidden_size, config.q_lora_rank

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        deviation = gain / math.sqrt(columns)
        return (_normal((rows, columns), generator) * deviation).to(torch.bfloat16)

    def norm(width: int) -> Tensor:
        weight = 1.0 + 0.2 * _normal((width,), generator)
        weight[:: max(width // 4, 1)] *= _OUTLIER_GAIN
        return weight.to(torch.bfloat16).to(torch.float32)

    def compressor(width: int) -> CompressorWeights:
        columns = width * (2 if ratio == 4 else 1)
        pooled = 0 if ratio == PER_TOKEN else columns
        return CompressorWeights(
            wkv=matrix(columns, hidden),
            wgate=matrix(pooled, hidden, gain=2.0),
            ape=_normal((ratio, pooled), generator) * 0.5,
            norm=norm(width),
            norm_bias=_normal((width,), generator) * 0.2 if ratio == PER_TOKEN else None,
        )

    indexed = ratio in (PER_TOKEN, 4)
    heads, head_dim = (0, 0) if ratio == PER_TOKEN else (config.n_heads, config.head_dim)
    return LayerWeights(
        main=compressor(config.head_dim) if ratio > PER_TOKEN else None,
        index=compressor(config.index_head_dim) if indexed else None,
        index_wq_b=matrix(config.index_n_heads * config.index_head_dim, latent)
        if indexed
        else None,
        weights_proj=matrix(config.index_n_heads, hidden) if indexed else None,
        wq_a=matrix(latent, hidden),
        q_norm=norm(latent),
        wq_b=matrix(heads * head_dim, latent),
        wkv=matrix(head_dim, hidden),
        kv_norm=norm(head_dim),
        attn_sink=_normal((heads,), generator),
    )


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return fp32 numbers of mean 0 and variance 1, each a scaled sum of four uniform integers."""
    out = torch.empty(shape, dtype=torch.float32)
    if not out.numel():
        return out
    rows = out.view(shape[0], -1)
    step = max(1, (1 << 20) // rows.shape[1])
    levels = 1 << _FIELD_BITS
    mean, deviation = 2.0 * (levels - 1), ((levels**2 - 1) / 3) ** 0.5
    for start in range(0, shape[0], step):
        block = rows[start : start + step]
        draw = torch.empty(block.shape, dtype=torch.int64)
        draw.random_(0, 1 << (4 * _FIELD_BITS), generator=generator)
        total = torch.zeros_like(draw)
        for field in range(4):
            total += (draw >> (_FIELD_BITS * field)) & (levels - 1)
        block.copy_((total.to(torch.float64) - mean) / deviation)
    return out
