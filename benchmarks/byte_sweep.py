"""Millions of rows of the CUDA stores against the compiled emulation.

A table of projections is drawn once for a kind and an input dtype; each round takes its tokens in
another random order, so that every window of eight or 128 tokens is a new one, while card and
emulation read the same table without sending it again. A round feeds the tokens as whole prompts,
as unaligned chunks with a state between them, or token by token, and compares the whole pool, which
starts as 0xFF.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.build.toolchain import BuildError
from needlepoint.optimized.cuda.candidates import plan_of
from needlepoint.optimized.cuda.runtime import require_cuda
from needlepoint.optimized.cuda.store import ROWS, store
from needlepoint.optimized.cuda.weights import StoreWeights
from needlepoint.optimized.emulation.compiled import Parameters, compute_rows, encode_rows
from needlepoint.optimized.emulation.narrow import StoredRows
from needlepoint.optimized.emulation.pages import allocate, page_rows, write_rows
from needlepoint.optimized.emulation.specification import LOG2_E
from needlepoint.optimized.protocol.interface import LayerInputs, PagedRows
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.verify.inputs.layer_inputs import given_layer
from needlepoint.verify.inputs.load import load_inputs
from needlepoint.verify.inputs.synthetic import VARIED
from needlepoint.verify.workloads.calls import Calls, Feed, Table, window_tokens
from needlepoint.verify.workloads.projections import (
    EPS,
    KINDS,
    draw,
    empty_pool,
    emulate,
    on_device,
)

SOURCES = ("mini", *(f"synthetic:{kind}" for kind in VARIED))
SHAPES = ((4, 128), (4, 512), (128, 512))
"""Supported (ratio, head_dim)."""
TABLE_TOKENS = 32768
ROUND_TOKENS = 131072


@dataclass(frozen=True)
class ByteCount:
    """Outcome of one comparison."""

    layout: str
    inputs: str
    """Dtype of the projections."""
    kind: str
    tokens: int
    rows: int
    """Rows stored."""
    differing: int
    """Rows with a differing byte, or every row if a byte outside them differs."""
    compared: int
    """Bytes compared, the untouched ones included."""


def feeds(ratio: int) -> tuple[Feed, ...]:
    """Return the feeds of consecutive rounds: most are whole prompts, which are the cheapest."""
    whole = Feed("prefill", 3, (0,))
    chunks = Feed("chunks", 41, (129, 3, 1023, 510, 7, 333))
    decode = Feed("decode", 2048 if ratio == 4 else 512, (1,))
    return (whole, chunks, whole, decode, whole, whole, chunks, whole)


def draw_table(ratio: int, dim: int, kind: str, dtype: torch.dtype, seed: int) -> Table:
    """Draw on the card, where it is fast, and copy to the host."""
    device = torch.Generator(device="cuda").manual_seed(seed)
    width = dim * (2 if ratio == 4 else 1)

    def projections() -> Tensor:
        return draw(kind, (TABLE_TOKENS, width), device).to(dtype)

    kv, score = projections(), projections()
    host = torch.Generator().manual_seed(seed)
    ape = torch.randn(ratio, width, generator=host)
    norm = 1 + 0.3 * torch.randn(dim, generator=host)
    angle = 3 * torch.randn(ROUND_TOKENS, 32, generator=host)
    rope = torch.stack((angle.cos(), angle.sin()), dim=-1)
    weights = StoreWeights.prepare(ratio, ape.cuda(), norm.cuda(), rope.cuda(), EPS)
    parameters = Parameters(ratio, ape * float(LOG2_E), norm, rope, EPS)
    return Table(ratio, kind, kv.cpu(), score.cpu(), parameters, kv, score, weights)


def compare_round(table: Table, feed: Feed, seed: int) -> Iterator[ByteCount]:
    """Feed the tokens of one round to the card and compare every row format."""
    generator = np.random.default_rng(seed)
    order = generator.integers(0, len(table.kv), ROUND_TOKENS)
    cuts = np.linspace(0, ROUND_TOKENS, feed.requests + 1).astype(np.int64)
    lengths = tuple(int(n) for n in np.diff(cuts))
    tokens, entries = window_tokens(table.ratio, lengths)
    rows = compute_rows(
        table.kv, table.score, np.where(tokens < 0, -1, order[tokens]), entries, table.parameters
    )
    # A state keeps what it is given; bf16 inputs fit either dtype, in turn for every feed.
    narrow = table.kv.dtype == torch.bfloat16 and seed // len(feeds(table.ratio)) % 2 == 1
    calls: Calls | None = None
    for layout in table.layouts:
        counts = [n // table.ratio for n in lengths]
        expected = allocate(layout, page_rows(table.ratio), counts, seed)
        write_all(expected, encode_rows(layout, rows))
        if calls is None:
            state = torch.bfloat16 if narrow else torch.float32
            calls = Calls.plan(table.ratio, feed, order, lengths, expected, state)
        pool = calls.run(table, expected)
        wanted = expected.pool.cuda()
        differing = 0
        if not torch.equal(pool.pages, wanted):
            differing = differing_rows(pool.pages.cpu(), expected)
        yield ByteCount(
            layout=layout,
            inputs="fp32" if table.kv.dtype == torch.float32 else "bf16",
            kind=f"{table.kind}, {feed.name}",
            tokens=ROUND_TOKENS,
            rows=len(rows),
            differing=differing,
            compared=expected.pool.numel(),
        )


def write_all(paged: PagedRows, stored: StoredRows) -> None:
    """Write the rows of all requests, in order."""
    first = 0
    for request, count in enumerate(paged.entries):
        part = slice(first, first + count)
        write_rows(paged, request, 0, StoredRows(stored.values[part], stored.scales[part]))
        first += count


def compare_inputs(inputs: LayerInputs, kind: str) -> Iterator[ByteCount]:
    """Run the main compressor of a layer on both sides, whatever its width, from the beginning."""
    kv, score, weights = on_device(inputs)
    _, pools = emulate(inputs)
    for layout, expected in pools.items():
        pool = empty_pool(expected)
        plan = plan_of(inputs.lengths, inputs.ratio, expected).to("cuda")
        store(kv, score, weights, plan, pool)
        rows = sum(expected.entries)
        yield ByteCount(
            layout,
            "fp32" if kv.dtype == torch.float32 else "bf16",
            kind,
            sum(inputs.lengths),
            rows,
            differing_rows(pool.pages.cpu(), expected),
            expected.pool.numel(),
        )


def differing_rows(actual: Tensor, expected: PagedRows) -> int:
    """Return the number of rows with a differing byte; all of them if another byte differs."""
    wrong = actual != expected.pool
    if not wrong.any():
        return 0
    head_dim = ROWS[expected.layout][0]
    size = expected.page_size
    values = {"index-fp8": 128, "index-bf16": 256, "index-fp4": 64, "main-584": 576}
    value = values.get(expected.layout, 2 * head_dim)
    scale = {"index-fp8": 4, "index-fp4": 4, "main-584": 8}.get(expected.layout, 0)
    split, end = size * value, size * (value + scale)
    by_row = wrong[:, :split].view(-1, size, value).any(-1)
    if scale:
        by_row |= wrong[:, split:end].view(-1, size, scale).any(-1)
    owned = torch.zeros_like(by_row)
    for table, count in zip(expected.page_table, expected.entries, strict=True):
        entry = torch.arange(count)
        owned[table[entry // size].long(), entry % size] = True
    if (by_row & ~owned).any() or wrong[:, end:].any():
        return sum(expected.entries)
    return int(by_row.sum())


def projected(source: str, tokens: int | None = None) -> Iterator[LayerInputs]:
    """Yield every compressor of an input's layers as the main one of a layer, fp32 then bf16."""
    inputs = load_inputs(source, tokens=tokens)
    for layer in inputs.layers:
        reference = ReferenceLayer(inputs.config, layer, inputs.weights(layer), BF16_CONTRACT)
        projections = given_layer(inputs, layer, reference).inputs
        for part in (projections.index, projections.main):
            if part is None:
                continue
            wide = replace(projections, index=None, query=None, main=part)
            yield wide
            narrow = replace(part, kv=part.kv.bfloat16(), score=part.score.bfloat16())
            yield replace(wide, main=narrow)


def sweep_inputs() -> Iterator[ByteCount]:
    """Yield byte comparisons over every input of :data:`SOURCES`, both input dtypes."""
    for source in SOURCES:
        for inputs in projected(source):
            torch.cuda.empty_cache()
            yield from compare_inputs(inputs, source)


def sweep(
    rows: int,
    seconds: float,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
) -> Iterator[ByteCount]:
    """Yield comparisons until every row format has ``rows`` of them, or time is up.

    Time is shared out: if it is short, every kind of data, dtype and shape gets fewer rounds, at
    least one. A row of ratio 128 is made of 128 tokens: there are a thirty-second as many.
    """
    begin = time.monotonic()
    tables = list(product(shapes, dtypes, KINDS))
    for number, ((ratio, dim), dtype, kind) in enumerate(tables):
        stop = begin + seconds * (number + 1) / len(tables)
        windows = ROUND_TOKENS // ratio
        rounds = -(-(rows * 4 // ratio) // (windows * len(dtypes) * len(KINDS)))
        table = draw_table(ratio, dim, kind, dtype, seed=number)
        own = feeds(ratio)
        for turn in range(rounds):
            if turn and time.monotonic() > stop:
                break
            yield from compare_round(table, own[(turn + number) % len(own)], 997 * number + turn)


def comparisons(rows: int, seconds: float) -> Iterator[ByteCount]:
    """Yield the comparisons of every input, then those of a sweep."""
    yield from sweep_inputs()
    yield from sweep(rows, seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line a comparison; return 1 if a byte differs, 2 if nothing could be compared."""
    parser = argparse.ArgumentParser(prog="byte-sweep", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows compared, each format")
    parser.add_argument("--seconds", type=float, default=60, help="limit of the comparison")
    options = parser.parse_args(arguments)
    differing = 0
    try:
        require_cuda()
        for item in comparisons(options.rows, options.seconds):
            differing += item.differing
            print(f"{item.layout}, {item.inputs} in, {item.kind}: {item.differing} of {item.rows}")
    except (ValueError, BuildError) as error:
        sys.stderr.write(f"byte-sweep: {error}\n")
        return 2
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
