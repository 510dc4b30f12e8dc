"""Kernel cases ``stores``: the rows of every one-launch store and query variant, byte for byte.

Inputs follow from a seed through exact arithmetic, so a recording holds only what the card wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.build.variants import (
    INDEX_ROWS,
    INPUTS,
    MODES,
    SHAPES,
    query_name,
    store_name,
)
from needlepoint.optimized.cuda.query import store_queries
from needlepoint.optimized.cuda.store import ROWS
from needlepoint.optimized.emulation.pages import planes
from needlepoint.optimized.emulation.query import store_queries as emulated_queries
from needlepoint.optimized.protocol.interface import LayerInputs, PagedRows, QueryInputs
from needlepoint.verify.inputs.draw import Draw
from needlepoint.verify.workloads.calls import Calls, Feed, Table
from needlepoint.verify.workloads.projections import emulate, make_inputs

SEED = 20
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LENGTHS = {4: (3, 21, 38), 128: (130, 259)}
_HEADS = 3


@dataclass(frozen=True)
class StoreCase:
    """One store variant and what it is run on."""

    name: str
    ratio: int
    head_dim: int
    inputs: str
    layout: str
    feed: Feed


def store_cases() -> Iterator[StoreCase]:
    """Yield every one-launch store; prefill variants also take chunks between states."""
    for mode in MODES:
        sizes = {"prefill": (17, 5, 130), "decode": (1,)}[mode]
        for ratio, head_dim in SHAPES:
            feed = Feed(mode, len(_LENGTHS[ratio]), sizes)
            for inputs in INPUTS:
                for layout, (dim, row) in ROWS.items():
                    if dim == head_dim:
                        name = store_name(mode, ratio, head_dim, inputs, row)
                        yield StoreCase(name, ratio, head_dim, inputs, layout, feed)


def store_inputs(ratio: int, head_dim: int, inputs: str) -> LayerInputs:
    """Return the layer that a golden store is run on; the same bits on every machine."""
    dtype, lengths = _DTYPES[inputs], _LENGTHS[ratio]
    base = make_inputs(ratio, head_dim, lengths, dtype, "normal", SEED)
    draw = Draw(SEED, f"gpu-golden r{ratio} d{head_dim} {inputs}")

    def normal(*shape: int) -> Tensor:
        values = draw.normal((int(np.prod(shape[:-1])), shape[-1]))
        return torch.from_numpy(values.astype(np.float32)).reshape(shape)

    width = base.main.kv.shape[1]
    spread = torch.where(normal(1, width) > 1.5, 40.0, 1.0)  # some channels are outliers
    main = replace(
        base.main,
        kv=(normal(sum(lengths), width) * spread).to(dtype),
        score=(3 * normal(sum(lengths), width)).to(dtype),
        ape=normal(ratio, width),
        norm_weight=1 + 0.25 * normal(1, head_dim)[0],
    )
    # Points of the unit circle by exact steps: no sine of any library enters.
    t = normal(max(lengths), 32)
    table = torch.stack(((1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)), dim=-1)
    return replace(base, main=main, rope_table=table.clamp(-1, 1))


def query_inputs(inputs: str) -> tuple[QueryInputs, LayerInputs]:
    """Return queries and the layer that holds their RoPE table."""
    layer = store_inputs(4, 128, inputs)
    draw = Draw(SEED, f"gpu-golden query {inputs}")
    tokens = sum(layer.lengths)
    q = draw.normal((tokens * _HEADS, 128)).astype(np.float32).reshape(tokens, _HEADS, 128)
    w = draw.normal((tokens, _HEADS)).astype(np.float32)
    queries = QueryInputs(
        torch.from_numpy(q).to(_DTYPES[inputs]), torch.from_numpy(w).to(_DTYPES[inputs])
    )
    return queries, replace(layer, weight_scale=0.0442)


def owned_rows(pool: Tensor, paged: PagedRows) -> Tensor:
    """Return the bytes of every entry, values then scales: uint8 ``[entries, bytes]``."""
    values, scales = planes(replace(paged, pool=pool))
    parts = []
    for table, count in zip(paged.page_table, paged.entries, strict=True):
        entry = np.arange(count)
        where = table.numpy()[entry // paged.page_size], entry % paged.page_size
        parts.append(np.concatenate((values[where], scales[where]), axis=1))
    return torch.from_numpy(np.concatenate(parts))


def expected_bytes() -> dict[str, Tensor]:
    """Return what the emulation says every golden tensor holds."""
    out: dict[str, Tensor] = {}
    pools: dict[tuple[int, int, str], Mapping[str, PagedRows]] = {}
    for case in store_cases():
        key = (case.ratio, case.head_dim, case.inputs)
        if key not in pools:
            pools[key] = emulate(store_inputs(*key))[1]
        expected = pools[key][case.layout]
        out[case.name] = owned_rows(expected.pool, expected)
    for inputs in INPUTS:
        queries, layer = query_inputs(inputs)
        for row in INDEX_ROWS:
            rows = emulated_queries(queries, layer, row)
            out |= _query_tensors(query_name(inputs, row), rows.codes, rows.scales, rows.weights)
    return out


def run(architecture: str) -> dict[str, Tensor]:
    """Return what this card writes for every variant."""
    out: dict[str, Tensor] = {}
    for case in store_cases():
        inputs = store_inputs(case.ratio, case.head_dim, case.inputs)
        expected = emulate(inputs)[1][case.layout]
        table = Table.of(inputs, case.layout)
        order = np.arange(len(inputs.main.kv))
        calls = Calls.plan(
            case.ratio, case.feed, order, inputs.lengths, expected, inputs.main.kv.dtype
        )
        pool = calls.run(table, expected)
        out[case.name] = owned_rows(pool.pages.cpu(), expected)
    for inputs_name in INPUTS:
        queries, layer = query_inputs(inputs_name)
        positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in layer.lengths])
        for row in INDEX_ROWS:
            rows = store_queries(
                queries.q.cuda(),
                queries.weights.cuda(),
                positions.cuda(),
                layer.rope_table.cuda(),
                layer.weight_scale,
                row,
            )
            name = query_name(inputs_name, row)
            out |= _query_tensors(name, rows.codes, rows.scales, rows.weights)
    return out


def modules(architecture: str) -> list[str]:
    """Return the kernel modules that :func:`run` runs."""
    return sorted(
        {f"store_{mode}_r{ratio}_d{d}" for mode in MODES for ratio, d in SHAPES} | {"query"}
    )


def layout_of(name: str) -> str | None:
    """Return the layout of the rows that a tensor of a recording holds, None for queries."""
    found = re.fullmatch(r"store_.*_d(\d+)_[a-z0-9]+_([a-z0-9]+)", name)
    layouts = {key: layout for layout, key in ROWS.items()}
    return None if found is None else layouts[int(found[1]), found[2]]


def _query_tensors(
    name: str, codes: Tensor, scales: Tensor | None, weights: Tensor
) -> dict[str, Tensor]:
    out = {f"{name}.codes": codes.view(torch.uint8), f"{name}.weights": weights}
    if scales is not None:
        out[f"{name}.scales"] = scales
    return out
