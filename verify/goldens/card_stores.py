"""Bytes that a card wrote, kept small: a machine without one holds the emulation to them.

Inputs follow from a seed through exact arithmetic, so the file holds only what the card wrote: the
rows of every store variant and of every query variant. ``python -m
needlepoint.verify.goldens.card_stores --out FILE`` records them on a card.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from needlepoint.optimized.build.compile import sources_sha256
from needlepoint.optimized.build.variants import (
    INDEX_ROWS,
    INPUTS,
    MODES,
    SHAPES,
    query_name,
    store_name,
)
from needlepoint.optimized.cuda.query import store_queries
from needlepoint.optimized.cuda.runtime import require_cuda
from needlepoint.optimized.cuda.store import ROWS
from needlepoint.optimized.emulation.pages import planes
from needlepoint.optimized.emulation.query import store_queries as emulated_queries
from needlepoint.optimized.emulation.specification import SPEC_VERSION
from needlepoint.optimized.protocol.interface import LayerInputs, PagedRows, QueryInputs
from needlepoint.verify.base.atomic import write_files
from needlepoint.verify.inputs.draw import Draw
from needlepoint.verify.schema.environment import driver_version
from needlepoint.verify.workloads.calls import Calls, Feed, Table
from needlepoint.verify.workloads.projections import emulate, make_inputs

SEED = 20
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LENGTHS = {4: (3, 21, 38), 128: (130, 259)}
_HEADS = 3


@dataclass(frozen=True)
class StoreGolden:
    """One store variant and what it is run on."""

    name: str
    ratio: int
    head_dim: int
    inputs: str
    layout: str
    feed: Feed


def store_goldens() -> Iterator[StoreGolden]:
    """Yield every one-launch store; prefill variants also take chunks between states."""
    for mode in MODES:
        sizes = {"prefill": (17, 5, 130), "decode": (1,)}[mode]
        for ratio, head_dim in SHAPES:
            feed = Feed(mode, len(_LENGTHS[ratio]), sizes)
            for inputs in INPUTS:
                for layout, (dim, row) in ROWS.items():
                    if dim == head_dim:
                        name = store_name(mode, ratio, head_dim, inputs, row)
                        yield StoreGolden(name, ratio, head_dim, inputs, layout, feed)


def golden_inputs(ratio: int, head_dim: int, inputs: str) -> LayerInputs:
    """Return the layer that a golden store is run on; the same bits on every machine."""
    dtype, lengths = _DTYPES[inputs], _LENGTHS[ratio]
    base = make_inputs(ratio, head_dim, lengths, dtype, "normal", SEED)
    draw = Draw(SEED, f"gpu-golden r{ratio} d{head_dim} {inputs}")

    def normal(*shape: int) -> Tensor:
        values = draw.normal((int(np.prod(shape[:-1])), shape[-1]))
        return torch.from_numpy(values.astype(np.float32)).reshape(shape)

    width = base.main.kv.shape[1]
    spread = torch.where(normal(1, width) > 1.5, 40.0, 1.0)  # some channels are outliers
    given = replace(
        base.main,
        kv=(normal(sum(lengths), width) * spread).to(dtype),
        score=(3 * normal(sum(lengths), width)).to(dtype),
        ape=normal(ratio, width),
        norm_weight=1 + 0.25 * normal(1, head_dim)[0],
    )
    # Points of the unit circle by exact steps: no sine of any library enters.
    t = normal(max(lengths), 32)
    table = torch.stack(((1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)), dim=-1)
    return replace(base, main=given, rope_table=table.clamp(-1, 1))


def golden_query(inputs: str) -> tuple[QueryInputs, LayerInputs]:
    """Return queries and the layer that holds their RoPE table."""
    layer = golden_inputs(4, 128, inputs)
    draw = Draw(SEED, f"gpu-golden query {inputs}")
    tokens = sum(layer.lengths)
    q = draw.normal((tokens * _HEADS, 128)).astype(np.float32).reshape(tokens, _HEADS, 128)
    w = draw.normal((tokens, _HEADS)).astype(np.float32)
    given = QueryInputs(
        torch.from_numpy(q).to(_DTYPES[inputs]), torch.from_numpy(w).to(_DTYPES[inputs])
    )
    return given, replace(layer, weight_scale=0.0442)


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
    for golden in store_goldens():
        key = (golden.ratio, golden.head_dim, golden.inputs)
        if key not in pools:
            pools[key] = emulate(golden_inputs(*key))[1]
        expected = pools[key][golden.layout]
        out[golden.name] = owned_rows(expected.pool, expected)
    for inputs in INPUTS:
        given, layer = golden_query(inputs)
        for row in INDEX_ROWS:
            rows = emulated_queries(given, layer, row)
            out |= _query_tensors(query_name(inputs, row), rows.codes, rows.scales, rows.weights)
    return out


def record() -> tuple[dict[str, Tensor], dict[str, str]]:
    """Run every variant on this card and return its bytes and their provenance."""
    architecture = require_cuda()
    out: dict[str, Tensor] = {}
    for golden in store_goldens():
        inputs = golden_inputs(golden.ratio, golden.head_dim, golden.inputs)
        expected = emulate(inputs)[1][golden.layout]
        table = Table.of(inputs, golden.layout)
        order = np.arange(len(inputs.main.kv))
        calls = Calls.plan(
            golden.ratio, golden.feed, order, inputs.lengths, expected, inputs.main.kv.dtype
        )
        pool = calls.run(table, expected)
        out[golden.name] = owned_rows(pool.pages.cpu(), expected)
    for inputs_name in INPUTS:
        given, layer = golden_query(inputs_name)
        positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in layer.lengths])
        for row in INDEX_ROWS:
            rows = store_queries(
                given.q.cuda(),
                given.weights.cuda(),
                positions.cuda(),
                layer.rope_table.cuda(),
                layer.weight_scale,
                row,
            )
            name = query_name(inputs_name, row)
            out |= _query_tensors(name, rows.codes, rows.scales, rows.weights)
    modules = {f"store_{m}_r{r}_d{d}" for m in MODES for r, d in SHAPES} | {"query"}
    facts = {
        "card": torch.cuda.get_device_name(),
        "architecture": f"sm_{architecture}",
        "driver": driver_version(),
        "torch": torch.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "specification": str(SPEC_VERSION),
        "seed": str(SEED),
        "sources_sha256": json.dumps({name: sources_sha256(name) for name in sorted(modules)}),
    }
    return {name: tensor.cpu().contiguous() for name, tensor in out.items()}, facts


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a golden file and its provenance."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}


def _query_tensors(
    name: str, codes: Tensor, scales: Tensor | None, weights: Tensor
) -> dict[str, Tensor]:
    out = {f"{name}.codes": codes.view(torch.uint8), f"{name}.weights": weights}
    if scales is not None:
        out[f"{name}.scales"] = scales
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Record; return 2 without a usable card."""
    parser = argparse.ArgumentParser(prog="gpu-goldens", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    options = parser.parse_args(arguments)
    try:
        tensors, facts = record()
        write_files({options.out: save(tensors, facts)}, force=True)
    except ValueError as error:
        sys.stderr.write(f"gpu-goldens: {error}\n")
        return 2
    sys.stdout.write(f"{options.out}: {len(tensors)} tensors, {facts}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
