"""What a candidate is given and what it hands back.

A candidate is one implementation of (part of) the compressor and indexer: an emulation, a CUDA
kernel, an engine. It receives the *given* tensors of one layer and returns what it observed at each
stage it declares. Everything is concatenated over requests in order: token-side tensors have
``sum(lengths)`` rows, key-side tensors ``sum(length // ratio)`` rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from needlepoint.optimized.protocol.stages import INDEX as INDEX
from needlepoint.optimized.protocol.stages import MAIN as MAIN
from needlepoint.optimized.protocol.stages import QUERY as QUERY
from needlepoint.optimized.protocol.stages import StageKey as StageKey
from needlepoint.reference.formats.names import RopeLayout


@dataclass(frozen=True)
class CompressorInputs:
    """Given tensors of one compressor (index keys: d = 128, main KV: d = 512).

    ``c`` is 2 for ratio 4 (overlapping windows) and 1 for ratio 128. With ratio 1 nothing is
    pooled: ``kv`` is the key projection, ``score`` and ``ape`` have no columns, and the norm is a
    LayerNorm.
    """

    kv: Tensor  # [tokens, c * d] fp32 or bf16, projection wkv
    score: Tensor  # [tokens, c * d] same dtype, projection wgate, position embedding not added
    ape: Tensor  # [ratio, c * d] fp32; columns [0, d) belong to the overlap half when c == 2
    norm_weight: Tensor  # [d] fp32
    norm_bias: Tensor | None = None  # [d] fp32, ratio 1 alone

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are there, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


def no_compressor(tokens: int) -> CompressorInputs:
    """Return the given tensors of a path that a layer does not have: nothing of each."""
    nothing = torch.empty(tokens, 0)
    return CompressorInputs(nothing, nothing, torch.empty(0, 0), torch.empty(0))


@dataclass(frozen=True)
class QueryInputs:
    """Given tensors of the indexer's query path."""

    q: Tensor  # [tokens, heads, 128] fp32 or bf16, before RoPE
    weights: Tensor  # [tokens, heads] same dtype, weights_proj(x), constant not applied

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return dict(vars(self))


@dataclass(frozen=True)
class LayerInputs:
    """Everything one layer of a candidate may read; never to be modified."""

    layer: int
    ratio: int  # 1, 4 or 128
    lengths: tuple[int, ...]  # tokens of each request
    index: CompressorInputs | None  # None for ratio 128
    main: CompressorInputs  # no columns at ratio 1, which has no main path
    query: QueryInputs | None  # None for ratio 128
    rope_table: (
        Tensor  # [max(lengths), rope_head_dim / 2, 2] fp32, cos and sin of position 0, 1, ..
    )
    norm_eps: float
    topk: int  # index_topk
    weight_scale: float  # index_head_dim**-0.5 * index_n_heads**-0.5
    hidden: Tensor  # [tokens, hidden_size] bf16, for candidates that start before `projected`
    layer_weights: Mapping[str, Tensor] = field(default_factory=dict)
    seed: int = 0  # page permutation
    index_rope: RopeLayout = RopeLayout.TRAILING_PAIRS  # dims of index keys and queries

    @property
    def paths(self) -> dict[str, CompressorInputs]:
        """Given tensors of the key paths that the layer has."""
        parts = {INDEX: self.index, MAIN: self.main}
        return {name: part for name, part in parts.items() if part and part.norm_weight.numel()}


@dataclass(frozen=True)
class PagedRows:
    """Stored rows as raw bytes: a pool of pages and one page table per request.

    Entry ``e`` of request ``r`` lives in page ``page_table[r][e // page_size]`` at slot
    ``e % page_size``; what a page looks like is said by ``layout``.
    """

    layout: str  # "index-fp8", "index-bf16", "index-fp4", "main-584", "main-bf16"
    pool: Tensor  # uint8 [pages, page_bytes]
    page_size: int  # rows a page
    page_table: tuple[Tensor, ...]  # per request int32 [ceil(entries / page_size)]
    entries: tuple[int, ...]  # per request


@dataclass(frozen=True)
class QueryRows:
    """Stored queries in the candidate's own format, and weights as the score kernel reads them."""

    format: str  # "bf16", "fp8" or "fp4"
    codes: (
        Tensor  # bf16: bfloat16 [tokens, heads, 128]; fp8: uint8 same; fp4: uint8 [.., 64] packed
    )
    scales: Tensor | None  # fp8: fp32 [tokens, heads]; fp4: uint8 UE8M0 [tokens, heads, 4]
    weights: Tensor  # [tokens, heads] fp32
    scale_folded: bool  # fp8: `weights` already holds the query scale


ScoreReader = Callable[[int, int, int], Tensor]
"""``reader(request, start, stop)`` -> fp32 [stop - start, entries of the request], masked -inf."""


@dataclass(frozen=True)
class Observed:
    """What a candidate computed for one layer. Absent stages are simply not declared.

    Tensors lie in CPU memory, also those of a candidate that ran on a card.
    """

    dense: Mapping[StageKey, Tensor] = field(default_factory=dict)  # pooled, normed, roped, rotated
    stored: Mapping[str, PagedRows] = field(default_factory=dict)  # by path: index, main
    query: QueryRows | None = None
    scores: ScoreReader | None = None
    topk: Tensor | None = None  # int32 [tokens, k], request-relative entries, -1 padded
    attention: Tensor | None = None  # only when the candidate brings its own
    peak_transient_bytes: int = 0
    path_taken: str = ""


@dataclass(frozen=True)
class CandidateInfo:
    """Identity of a candidate, as it stands in results."""

    name: str  # "emulated:fused-fp8"
    format: str  # "bf16", "fp8", "fp4"
    device: str  # "cpu", "cuda"
    profile: str  # "needlepoint", "sglang", ...
    variant: str  # kernel variant
    source_sha256: str  # of the sources that define the arithmetic
    accumulator: str = "fp32"  # what its score kernel sums in; "sm90-fp8": FP8 wgmma of Hopper


class Candidate(Protocol):
    """One implementation under judgement."""

    @property
    def info(self) -> CandidateInfo:
        """Identity and profile."""
        ...

    def stages(self, ratio: int) -> frozenset[StageKey]:
        """Return the (path, stage) pairs that :meth:`run` will return for a layer of this ratio."""
        ...

    def run(self, inputs: LayerInputs) -> Observed:
        """Compute one layer. Inputs must not be modified."""
        ...
