"""Millions of rows of the CUDA stores against the compiled emulation.

A table of projections is drawn once for a kind and an input dtype; each round takes its tokens in
another random order, so that every window of eight or 128 tokens is a new one, while card and
emulation read the same table without sending it again. A round feeds the tokens as whole prompts,
as unaligned chunks with a state between them, or token by token, and compares the whole pool, which
starts as 0xFF.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from needlepoint.benchmarks.stored_bytes import (
    EPS,
    KINDS,
    ByteCount,
    differing_rows,
    draw,
    on_device,
)
from needlepoint.optimized.cuda.faults import new_faults, require_no_store_faults
from needlepoint.optimized.cuda.store import ROWS, PagedPool, new_state, store
from needlepoint.optimized.cuda.weights import StoreWeights
from needlepoint.optimized.emulation.compiled import Parameters, compute_rows, encode_rows
from needlepoint.optimized.emulation.narrow import StoredRows
from needlepoint.optimized.emulation.pages import allocate, page_rows, write_rows
from needlepoint.optimized.emulation.specification import LOG2_E
from needlepoint.optimized.protocol.interface import LayerInputs, PagedRows
from needlepoint.optimized.serving.plan import Chunks, StorePlan, plan_store, window_slots

I64 = npt.NDArray[np.int64]
SHAPES = ((4, 128), (4, 512), (128, 512))
"""Supported (ratio, head_dim)."""
TABLE_TOKENS = 32768
ROUND_TOKENS = 131072


@dataclass(frozen=True)
class Feed:
    """How the tokens of a round arrive.

    Attributes
    ----------
    name
        ``"prefill"``, ``"chunks"`` or ``"decode"``.
    requests
        Requests of equal length that share the tokens of the round, almost evenly.
    sizes
        Tokens a call, taken in turn; 0 for the whole request.
    """

    name: str
    requests: int
    sizes: tuple[int, ...]


def feeds(ratio: int) -> tuple[Feed, ...]:
    """Return the feeds of consecutive rounds: most are whole prompts, which are the cheapest."""
    whole = Feed("prefill", 3, (0,))
    chunks = Feed("chunks", 41, (129, 3, 1023, 510, 7, 333))
    decode = Feed("decode", 2048 if ratio == 4 else 512, (1,))
    return (whole, chunks, whole, decode, whole, whole, chunks, whole)


def window_tokens(ratio: int, lengths: tuple[int, ...]) -> tuple[I64, I64]:
    """Return the token of each slot of each window, negative where masked, and each entry's number.

    Parameters
    ----------
    ratio
        4 or 128.
    lengths
        Tokens of each request; their rows follow one another.

    Returns
    -------
    tuple
        int64 ``[windows, slots]`` and int64 ``[windows]``, windows of all requests in order.
    """
    slots = window_slots(ratio)
    first = np.cumsum(lengths) - lengths
    tokens, entries = [], []
    for start, length in zip(first, lengths, strict=True):
        entry = np.arange(length // ratio, dtype=np.int64)
        position = (entry[:, None] + 1) * ratio - slots + np.arange(slots)
        tokens.append(np.where(position < 0, -1, start + position))
        entries.append(entry)
    return np.concatenate(tokens), np.concatenate(entries)


@dataclass(frozen=True)
class Table:
    """Projections and parameters of one kind, on both sides."""

    ratio: int
    kind: str
    kv: Tensor
    score: Tensor
    given: Parameters
    device_kv: Tensor
    device_score: Tensor
    weights: StoreWeights

    @classmethod
    def draw(cls, ratio: int, dim: int, kind: str, dtype: torch.dtype, seed: int) -> Table:
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
        given = Parameters(ratio, ape * float(LOG2_E), norm, rope, EPS)
        return cls(ratio, kind, kv.cpu(), score.cpu(), given, kv, score, weights)

    @classmethod
    def of(cls, inputs: LayerInputs, kind: str) -> Table:
        """Return the main compressor of a layer, whatever its width, as a table."""
        kv, score, weights = on_device(inputs)
        part = inputs.main
        ape = part.ape * float(LOG2_E)
        given = Parameters(inputs.ratio, ape, part.norm_weight, inputs.rope_table, inputs.norm_eps)
        return cls(inputs.ratio, kind, part.kv, part.score, given, kv, score, weights)

    @property
    def layouts(self) -> tuple[str, ...]:
        """Page layouts of these rows."""
        dim = self.given.norm_weight.shape[0]
        return tuple(layout for layout, (head_dim, _) in ROWS.items() if head_dim == dim)


@dataclass(frozen=True)
class Calls:
    """The launches of a round: plans on the device, and the rows of the table that each takes."""

    plans: tuple[StorePlan, ...]
    rows: tuple[Tensor, ...]
    requests: int
    state: torch.dtype | None

    @classmethod
    def plan(
        cls,
        ratio: int,
        feed: Feed,
        order: I64,
        lengths: tuple[int, ...],
        pages: PagedRows,
        state: torch.dtype,
    ) -> Calls:
        """Plan every call of a feed.

        Parameters
        ----------
        ratio, feed, lengths
            What arrives.
        order
            int64 ``[tokens]``: row of the table that each token takes.
        pages
            Page size and page tables; those of every layout are the same.
        state
            Dtype of the state, if the feed needs one.
        """
        table = page_table(pages)
        length = np.asarray(lengths)
        first = np.cumsum(length) - length
        done, head = np.zeros_like(length), np.zeros_like(length)
        whole = feed.sizes == (0,)
        plans: list[StorePlan] = []
        rows: list[Tensor] = []
        while (done < length).any():
            who = np.flatnonzero(done < length)
            left = length[who] - done[who]
            size = left if whole else np.minimum(feed.sizes[len(plans) % len(feed.sizes)], left)
            plan = plan_store(
                ratio,
                Chunks(who, done[who], size, head[who]),
                table,
                pages.page_size,
                keep_state=not whole,
                decode=int(size.max()) == 1,
            )
            start = np.repeat(first[who] + done[who] - (np.cumsum(size) - size), size)
            rows.append(torch.from_numpy(order[start + np.arange(len(start))]).cuda())
            plans.append(plan.to("cuda"))
            done[who] += size
            head[who] = plan.head
        return cls(tuple(plans), tuple(rows), len(lengths), None if whole else state)

    def run(self, table: Table, expected: PagedRows) -> PagedPool:
        """Store all tokens on the card, call by call, into a pool of 0xFF."""
        dim = table.given.norm_weight.shape[0]
        pages = torch.full(expected.pool.shape, 255, dtype=torch.uint8, device="cuda")
        pool = PagedPool(expected.layout, pages, expected.page_size)
        state = None
        if self.state is not None:
            state = new_state(self.requests, table.ratio, dim, self.state, "cuda")
        faults = new_faults("cuda")
        for plan, rows in zip(self.plans, self.rows, strict=True):
            kv, score = table.device_kv[rows], table.device_score[rows]
            store(kv, score, table.weights, plan, pool, state, faults=faults)
        require_no_store_faults(faults, self.plans[0])
        return pool


def page_table(pages: PagedRows) -> Tensor:
    """Return the page tables of all requests as one, int32 ``[requests, pages]``."""
    columns = max(len(own) for own in pages.page_table)
    table = torch.full((len(pages.page_table), columns), -1, dtype=torch.int32)
    for row, own in zip(table, pages.page_table, strict=True):
        row[: len(own)] = own
    return table


def compare_round(table: Table, feed: Feed, seed: int) -> Iterator[ByteCount]:
    """Feed the tokens of one round to the card and compare every row format."""
    generator = np.random.default_rng(seed)
    order = generator.integers(0, len(table.kv), ROUND_TOKENS)
    cuts = np.linspace(0, ROUND_TOKENS, feed.requests + 1).astype(np.int64)
    lengths = tuple(int(n) for n in np.diff(cuts))
    tokens, entries = window_tokens(table.ratio, lengths)
    rows = compute_rows(
        table.kv, table.score, np.where(tokens < 0, -1, order[tokens]), entries, table.given
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
        table = Table.draw(ratio, dim, kind, dtype, seed=number)
        own = feeds(ratio)
        for turn in range(rounds):
            if turn and time.monotonic() > stop:
                break
            yield from compare_round(table, own[(turn + number) % len(own)], 997 * number + turn)
