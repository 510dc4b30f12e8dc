"""Inputs of one layer, small enough to run in milliseconds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from needlepoint.optimized.emulation import narrow
from needlepoint.optimized.emulation.compressor import Compressor, EntryBlock
from needlepoint.optimized.protocol.interface import CompressorInputs, LayerInputs, QueryInputs

Stages = dict[str, npt.NDArray[np.generic]]
InputsFactory = Callable[..., LayerInputs]


@pytest.fixture
def make_inputs() -> InputsFactory:
    """Return ``make(ratio, lengths, dtype=torch.float32, heads=2, seed=0)``."""
    return build_inputs


def build_inputs(
    ratio: int,
    lengths: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    heads: int = 2,
    seed: int = 0,
) -> LayerInputs:
    generator = torch.Generator().manual_seed(seed)
    tokens, c = sum(lengths), 2 if ratio == 4 else 1

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def compressor(d: int) -> CompressorInputs:
        return CompressorInputs(
            kv=(normal(tokens, c * d) * 2.0 ** normal(1, c * d)).to(dtype),
            score=(2 * normal(tokens, c * d)).to(dtype),
            ape=normal(ratio, c * d) / 2,
            norm_weight=1 + normal(d) / 8,
        )

    angle = torch.rand(max(lengths), 32, generator=generator) * 6.28
    sparse = ratio == 4
    return LayerInputs(
        layer=0,
        ratio=ratio,
        lengths=lengths,
        index=compressor(128) if sparse else None,
        main=compressor(512),
        query=QueryInputs(normal(tokens, heads, 128).to(dtype), normal(tokens, heads).to(dtype))
        if sparse
        else None,
        rope_table=torch.stack((angle.cos(), angle.sin()), dim=-1),
        norm_eps=1e-6,
        topk=4,
        weight_scale=(128 * max(heads, 1)) ** -0.5,
        hidden=torch.zeros(tokens, 8, dtype=torch.bfloat16),
        seed=seed,
    )


@pytest.fixture
def emulate() -> Callable[[LayerInputs, str, range], Stages]:
    """Return ``emulate(inputs, path, entries)``."""
    return emulate_stages


def emulate_stages(inputs: LayerInputs, path: str, entries: range) -> Stages:
    """Return every stage of consecutive entries of request 0, stored bytes included."""
    given = inputs.index if path == "index" else inputs.main
    assert given is not None
    side = Compressor(given, inputs)
    block = EntryBlock(0, entries.start, len(entries), entries.start, 0)
    pooled = side.pool(block)
    normed = side.norm(pooled)
    stages: Stages = {"pooled": pooled, "normed": normed, "roped": side.rope(normed, block)}
    last = stages["roped"]
    if path == "index":
        stages["rotated"] = last = side.rotate(side.rope(normed, block))
        stages["fp8"] = narrow.store_fp8(np.ascontiguousarray(last.T)).values
        stages["fp8 scale"] = narrow.store_fp8(np.ascontiguousarray(last.T)).scales
        stages["fp4"] = narrow.store_fp4(np.ascontiguousarray(last.T)).values
    else:
        stages["584"] = narrow.store_main_fp8(np.ascontiguousarray(last.T)).values
    return stages
