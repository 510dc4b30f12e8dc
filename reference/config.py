"""Model shapes: what compressor and indexer need to know of a model's configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from needlepoint.reference.formats.names import PER_TOKEN, RopeLayout

RATIOS = (0, 1, 4, 128)
"""Compression ratios: none (sliding window alone), one index key a token without a compressor,
overlapping windows of 4, windows of 128."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary frequencies of one layer type.

    Attributes
    ----------
    dim
        Rotated dims, an even number.
    theta
        Base of the geometric series of frequencies.
    factor
        YaRN: how much longer the context became; used only when ``original_length > 0``.
    original_length
        YaRN: tokens of the original context. 0 switches YaRN off.
    beta_fast, beta_slow
        YaRN: rotations over the original context above which a frequency is kept and below which
        it is divided by ``factor``.
    """

    dim: int
    theta: float
    factor: float = 1.0
    original_length: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def correction_range(self) -> tuple[int, int]:
        """Return the first pair that YaRN changes and the first that it divides fully.

        Pair ``i`` turns ``L * theta**(-2i/dim) / 2 pi`` times over the original length ``L``;
        setting that to ``beta_fast`` and ``beta_slow`` and solving for ``i`` gives both ends,
        rounded outwards (DeepSeek-V4 ``precompute_freqs_cis``).
        """

        def pair(rotations: float) -> float:
            turns = self.original_length / (rotations * 2 * math.pi)
            return self.dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = math.floor(pair(self.beta_fast)), math.ceil(pair(self.beta_slow))
        return max(low, 0), min(high, self.dim - 1)


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of one model.

    Attributes
    ----------
    name
        Preset name or path of the file it was read from.
    hidden_size
        Width of a hidden state.
    n_heads, head_dim, rope_head_dim
        Main attention: heads, dims of a head, trailing dims that RoPE rotates.
    q_lora_rank
        Width of the query latent that both query projections read.
    window_size
        Tokens of the sliding window, the query's own included.
    index_n_heads, index_head_dim, index_topk
        Indexer: heads, dims of a head, entries picked for a query.
    compress_ratios
        Ratio of each layer, 0, 1, 4 or 128. The published lists end with the MTP layers.
    rope_theta, compress_rope_theta
        RoPE base of ratio-0 layers and of all others.
    rope_factor, original_length, beta_fast, beta_slow
        YaRN, applied with ``compress_rope_theta`` only.
    norm_eps
        Epsilon inside every RMS norm.
    index_norm_eps
        Epsilon of the LayerNorm of index keys, ratio 1 alone.
    index_rope
        Dims that RoPE rotates in index keys and queries.
    """

    name: str
    hidden_size: int
    n_heads: int
    q_lora_rank: int
    index_n_heads: int
    index_topk: int
    compress_ratios: tuple[int, ...]
    head_dim: int = 512
    rope_head_dim: int = 64
    window_size: int = 128
    index_head_dim: int = 128
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_factor: float = 16.0
    original_length: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    norm_eps: float = 1e-6
    index_norm_eps: float = 1e-6
    index_rope: RopeLayout = RopeLayout.TRAILING_PAIRS

    def __post_init__(self) -> None:
        for key in (
            "hidden_size",
            "n_heads",
            "head_dim",
            "rope_head_dim",
            "q_lora_rank",
            "window_size",
            "index_n_heads",
            "index_head_dim",
            "index_topk",
            "rope_theta",
            "compress_rope_theta",
            "rope_factor",
            "beta_fast",
            "beta_slow",
            "norm_eps",
            "index_norm_eps",
        ):
            if not getattr(self, key) > 0:
                self._refuse(key, "a positive number")
        if self.original_length < 0:
            self._refuse("original_length", "0 (no YaRN) or the original context length")
        if self.rope_head_dim % 2 or self.rope_head_dim >= self.head_dim:
            self._refuse("rope_head_dim", f"an even number below head_dim {self.head_dim}")
        if self.index_head_dim != 128 or self.rope_head_dim > self.index_head_dim:
            self._refuse("index_head_dim", "128, with rope_head_dim at most that")
        wrong = [r for r in self.compress_ratios if r not in RATIOS]
        if wrong or not self.compress_ratios:
            self._refuse("compress_ratios", f"a non-empty list of {list(RATIOS)}")

    def _refuse(self, key: str, expected: str) -> None:
        raise ValueError(
            f"model {self.name!r}: {key} is {getattr(self, key)!r}, expected {expected}"
        )

    @property
    def index_weight_scale(self) -> float:
        """Constant on the head weights: ``index_head_dim**-0.5 * index_n_heads**-0.5``."""
        return float(self.index_head_dim**-0.5 * self.index_n_heads**-0.5)

    def ratio(self, layer: int) -> int:
        """Return the compression ratio of a layer; ``ValueError`` if there is no such layer."""
        if not 0 <= layer < len(self.compress_ratios):
            raise ValueError(
                f"layer {layer}: model {self.name!r} has layers 0 to "
                f"{len(self.compress_ratios) - 1}"
            )
        return self.compress_ratios[layer]

    def rope(self, compressed: bool) -> RopeConfig:
        """Return the RoPE of layers with an indexer or a compressor, or of ratio-0 layers."""
        if not compressed:
            return RopeConfig(self.rope_head_dim, self.rope_theta)
        return RopeConfig(
            self.rope_head_dim,
            self.compress_rope_theta,
            self.rope_factor,
            self.original_length,
            self.beta_fast,
            self.beta_slow,
        )


_FLASH_RATIOS = (0, 0, *(4, 128) * 20, 4, 0)  # 43 layers and one MTP layer
_PRO_RATIOS = (128, 128, *(4, 128) * 29, 4, 0)  # 61 layers and one MTP layer
# 78 layers; three of four reuse the picks of an earlier layer and have no indexer of their own.
_GLM_RATIOS = tuple(PER_TOKEN if n < 3 or n % 4 == 2 else 0 for n in range(78))

MODELS: dict[str, ModelConfig] = {
    m.name: m
    for m in (
        ModelConfig(
            name="mini",
            hidden_size=384,
            n_heads=4,
            q_lora_rank=128,
            index_n_heads=8,
            index_topk=128,
            compress_ratios=(4, 128),
        ),
        ModelConfig(
            name="v4-flash",
            hidden_size=4096,
            n_heads=64,
            q_lora_rank=1024,
            index_n_heads=64,
            index_topk=512,
            compress_ratios=_FLASH_RATIOS,
        ),
        ModelConfig(
            name="v4-pro",
            hidden_size=7168,
            n_heads=128,
            q_lora_rank=1536,
            index_n_heads=64,
            index_topk=1024,
            compress_ratios=_PRO_RATIOS,
        ),
        ModelConfig(
            name="v3.2",
            hidden_size=7168,
            n_heads=128,
            q_lora_rank=1536,
            index_n_heads=64,
            index_topk=2048,
            compress_ratios=(PER_TOKEN,) * 62,  # 61 layers and one MTP layer
            compress_rope_theta=10000.0,
            rope_factor=40.0,
            original_length=4096,
            index_rope=RopeLayout.LEADING_HALVES,
        ),
        ModelConfig(
            name="glm-5.2",
            hidden_size=6144,
            n_heads=64,
            q_lora_rank=2048,
            index_n_heads=32,
            index_topk=2048,
            compress_ratios=_GLM_RATIOS,
            compress_rope_theta=8e6,
            original_length=0,
            norm_eps=1e-5,
            index_rope=RopeLayout.LEADING_PAIRS,
        ),
        ModelConfig(
            name="mini-v3.2",
            hidden_size=384,
            n_heads=4,
            q_lora_rank=128,
            index_n_heads=8,
            index_topk=128,
            compress_ratios=(PER_TOKEN,) * 2,
            compress_rope_theta=10000.0,
            rope_factor=40.0,
            original_length=4096,
            index_rope=RopeLayout.LEADING_HALVES,
        ),
    )
}
"""Presets. ``mini`` has the shapes of ``v4-flash`` where kernels care and is small elsewhere;
``mini-v3.2`` is the same to ``v3.2``."""
