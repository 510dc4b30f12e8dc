"""Random projections of a compressor, and what the emulation stores of them in every layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from needlepoint.optimized.cuda.store import PagedPool
from needlepoint.optimized.cuda.weights import StoreWeights
from needlepoint.optimized.emulation.keyside import KeySide
from needlepoint.optimized.emulation.narrow import store_bf16, store_main_fp8
from needlepoint.optimized.emulation.pages import allocate, page_rows, write_rows
from needlepoint.optimized.emulation.query import STORES
from needlepoint.optimized.protocol.interface import CompressorInputs, LayerInputs, PagedRows

EPS = 1e-6
KINDS = ("normal", "peaked", "tied", "tiny", "huge", "outliers", "integers", "sparse")
"""Kinds of random projections: the softmax spread, equal scores, both ends of the range, outlier
channels, exactly summable numbers, and rows that are zero."""


def draw(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return projections of a kind, fp32 on the generator's device.

    Raises
    ------
    ValueError
        For an unknown kind.
    """
    x = torch.randn(shape, generator=generator, device=generator.device)
    if kind == "normal":
        return x
    if kind == "peaked":
        return 20 * x
    if kind == "tied":
        return x.sign()
    if kind == "tiny":
        return x * 2.0**-20
    if kind == "huge":
        return x * 2.0**14
    if kind == "outliers":
        return torch.where(_uniform(shape, generator) < 0.01, 300 * x, x)
    if kind == "integers":
        return (4 * x).round()
    if kind == "sparse":
        return torch.where(_uniform((shape[0], 1), generator) < 0.5, 0 * x, x)
    raise ValueError(f"kind {kind!r}: expected one of {list(KINDS)}")


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device)


def make_inputs(
    ratio: int, head_dim: int, lengths: tuple[int, ...], dtype: torch.dtype, kind: str, seed: int
) -> LayerInputs:
    """Return the inputs of a layer that has this one compressor, as its main one."""
    generator = torch.Generator().manual_seed(seed)
    width = head_dim * (2 if ratio == 4 else 1)
    tokens = sum(lengths)
    angle = 3 * torch.randn(max(lengths), 32, generator=generator)
    compressor = CompressorInputs(
        kv=draw(kind, (tokens, width), generator).to(dtype),
        score=draw(kind, (tokens, width), generator).to(dtype),
        ape=torch.randn(ratio, width, generator=generator),
        norm_weight=1 + 0.3 * torch.randn(head_dim, generator=generator),
    )
    return LayerInputs(
        layer=0,
        ratio=ratio,
        lengths=lengths,
        index=None,
        main=compressor,
        query=None,
        rope_table=torch.stack((angle.cos(), angle.sin()), dim=-1),
        norm_eps=EPS,
        topk=1,
        weight_scale=1.0,
        hidden=torch.empty(tokens, 0),
        seed=seed,
    )


def emulate(inputs: LayerInputs) -> tuple[Mapping[str, Tensor], dict[str, PagedRows]]:
    """Return the stages and the pools of every layout that the emulation writes."""
    compressor = inputs.main
    rotated = compressor.norm_weight.shape[0] == 128
    formats = {f"index-{name}": function for name, function in STORES.items()}
    if not rotated:
        formats = {"main-bf16": store_bf16, "main-584": store_main_fp8}
    first, *others = formats
    side = KeySide(compressor, inputs, first, formats[first], rotated=rotated)
    side.run_fused()
    pools = {first: side.paged}
    last = side.dense["rotated" if rotated else "roped"].numpy()
    for layout in others:
        entries = side.paged.entries
        pools[layout] = allocate(layout, page_rows(inputs.ratio), entries, inputs.seed)
        for block in side.blocks:
            rows = formats[layout](last[block.rows].T.copy())
            write_rows(pools[layout], block.request, block.first, rows)
    return side.dense, pools


def on_device(inputs: LayerInputs, *, device: str = "cuda") -> tuple[Tensor, Tensor, StoreWeights]:
    """Return kv, score and parameters on the device."""
    compressor = inputs.main
    weights = StoreWeights.prepare(
        inputs.ratio,
        compressor.ape.to(device),
        compressor.norm_weight.to(device),
        inputs.rope_table.to(device),
        inputs.norm_eps,
    )
    return compressor.kv.to(device), compressor.score.to(device), weights


def empty_pool(expected: PagedRows) -> PagedPool:
    """Return an unwritten pool on the device, of the size of an emulated one."""
    pages = torch.full_like(expected.pool, 255).cuda()
    return PagedPool(expected.layout, pages, expected.page_size)
