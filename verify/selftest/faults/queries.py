"""Faults of stored queries and head weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.emulation.compressor import widen
from needlepoint.optimized.emulation.exact32 import F32
from needlepoint.optimized.emulation.query import STORES, store_queries
from needlepoint.optimized.emulation.rows import hadamard, rope
from needlepoint.optimized.protocol.interface import Observed, QueryRows
from needlepoint.verify.selftest.faults.fault import Case, Plant, Setting, fault
from needlepoint.verify.selftest.faults.ground import (
    Ground,
    query_of,
    rescored,
)
from needlepoint.verify.selftest.faults.rows import half_split

_QUERY, _WEIGHTS, _SCORES = "query.query", "query.weights", "index.scores"
_BF16 = Setting("bf16")


def queried(change: Callable[[Ground, QueryRows], QueryRows]) -> Plant:
    """Store other queries or weights; scores and picks follow from them."""

    def plant(ground: Ground) -> Observed:
        query = change(ground, query_of(ground))
        return rescored(ground, replace(ground.observed, query=query))

    return plant


def _again(ground: Ground, rotate: Callable[[F32, F32, F32], F32], late: int) -> QueryRows:
    """Store the given queries with another rotation, scales and weights as they follow."""
    given, query = ground.given, ground.given.query
    if query is None:
        raise ValueError(f"layer {given.layer} of ratio {given.ratio} has no query")
    tokens, heads, _ = query.q.shape
    positions = np.concatenate([np.arange(n) for n in given.lengths]) + late
    table = widen(given.rope_table)[positions % len(given.rope_table)]
    x = np.ascontiguousarray(np.moveaxis(widen(query.q), -1, 0))
    cos, sin = (np.ascontiguousarray(table[..., i].T)[..., None] for i in (0, 1))
    rows = STORES["fp8"](rotate(x, cos, sin).reshape(128, -1))
    scale = torch.from_numpy(rows.scales.view("<f4").reshape(tokens, heads).astype(np.float32))
    weights = query.weights.to(torch.float32) * given.weight_scale
    codes = torch.from_numpy(rows.values).reshape(tokens, heads, 128)
    return QueryRows("fp8", codes, scale, weights * scale, True)


def _rotated(rotate: Callable[[F32, F32, F32], F32], late: int = 0) -> Plant:
    return queried(lambda ground, query: _again(ground, rotate, late))


def _flipped(ground: Ground, query: QueryRows) -> QueryRows:
    codes = query.codes.clone()
    codes[ground.token_row(ground.given.lengths[ground.longest] // 2), 1, 64] ^= 0x80
    return replace(query, codes=codes)


def _swapped(ground: Ground, query: QueryRows) -> QueryRows:
    at = ground.token_row(ground.given.lengths[ground.longest] // 2)
    order = torch.arange(len(query.codes))
    order[at], order[at + 1] = at + 1, at
    scales = None if query.scales is None else query.scales[order]
    return replace(query, codes=query.codes[order], scales=scales)


def _stale(ground: Ground, query: QueryRows) -> QueryRows:
    """Keep in the last row the query of the token before."""
    codes = query.codes.clone()
    codes[-1] = codes[-2]
    return replace(query, codes=codes)


def _weighted(change: Callable[[Tensor, Tensor], Tensor]) -> Plant:
    def apply(ground: Ground, query: QueryRows) -> QueryRows:
        scales = query.scales if query.scales is not None else torch.ones_like(query.weights)
        return replace(query, weights=change(query.weights, scales))

    return queried(apply)


def _no_constant(ground: Ground, query: QueryRows) -> QueryRows:
    if ground.given.query is None:
        return query
    return store_queries(ground.given.query, replace(ground.given, weight_scale=1.0), "fp8")


FAULTS: tuple[Case, ...] = (
    fault("hadamard-missing-on-queries", "G", "queries not rotated by Hadamard",
          _rotated(rope), _QUERY,
          log="G03 G04"),
    fault("query-half-split", "F", "queries alone rotated over pairs (i, i + 32)",
          _rotated(lambda x, cos, sin: hadamard(half_split(x, cos, sin))),
          _QUERY, log="F02 F01"),
    fault("query-one-position-late", "F", "queries at the position behind their own",
          _rotated(lambda x, cos, sin: hadamard(rope(x, cos, sin)), late=1),
          _QUERY, log="J09"),
    fault("query-not-roped", "F", "queries without RoPE",
          _rotated(lambda x, cos, sin: hadamard(x)), _QUERY),
    fault("query-code-of-the-wrong-sign", "G", "one code of one query negated", queried(_flipped),
          _QUERY),
    fault("query-rows-swapped", "L", "two neighbouring queries exchanged", queried(_swapped),
          _QUERY, log="L05"),
    fault("query-stale", "M", "the last query is that of the token before", queried(_stale), _QUERY,
          log="M04"),
    fault("query-scale-folded-twice", "G", "weights hold the query scale twice",
          _weighted(lambda w, s: w * s), _WEIGHTS),
    fault("query-scale-not-folded", "G", "weights lack the query scale",
          _weighted(lambda w, s: w / s), _WEIGHTS),
    fault("weight-constant-missing", "G", "head weights without their constant",
          queried(_no_constant), _WEIGHTS),
    fault("weights-absolute", "G", "head weights without their sign",
          _weighted(lambda w, s: w.abs()), _WEIGHTS),
    fault("weights-of-the-next-head", "G", "head weights moved by one head",
          _weighted(lambda w, s: w.roll(1, 1)), _WEIGHTS),
    fault("weights-in-bf16", "G", "head weights rounded to bf16",
          _weighted(lambda w, s: w.to(torch.bfloat16).to(torch.float32)), _WEIGHTS, log="G07"),
    fault("weights-gain-0.4%", "G", "head weights 0.4 % too large",
          _weighted(lambda w, s: w * 1.004), _WEIGHTS, clear="topk", on=_BF16),
)  # fmt: skip
