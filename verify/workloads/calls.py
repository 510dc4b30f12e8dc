"""Tokens fed to the CUDA stores call by call: whole prompts, chunks with a state, decode steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from needlepoint.optimized.cuda.faults import new_faults, require_no_store_faults
from needlepoint.optimized.cuda.store import ROWS, PagedPool, new_state, store
from needlepoint.optimized.cuda.weights import StoreWeights
from needlepoint.optimized.emulation.compiled import Parameters
from needlepoint.optimized.emulation.specification import LOG2_E
from needlepoint.optimized.protocol.interface import LayerInputs, PagedRows
from needlepoint.optimized.serving.plan import Chunks, StorePlan, plan_store, window_slots
from needlepoint.verify.workloads.projections import empty_pool, on_device

I64 = npt.NDArray[np.int64]


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


def parameters_of(inputs: LayerInputs) -> Parameters:
    """Return what the compiled emulation needs of the main compressor of a layer."""
    part = inputs.main
    ape = part.ape * float(LOG2_E)
    return Parameters(inputs.ratio, ape, part.norm_weight, inputs.rope_table, inputs.norm_eps)


@dataclass(frozen=True)
class Table:
    """Projections and parameters of one kind, on both sides."""

    ratio: int
    kind: str
    kv: Tensor
    score: Tensor
    parameters: Parameters
    device_kv: Tensor
    device_score: Tensor
    weights: StoreWeights

    @classmethod
    def of(cls, inputs: LayerInputs, kind: str) -> Table:
        """Return the main compressor of a layer, whatever its width, as a table."""
        kv, score, weights = on_device(inputs)
        part = inputs.main
        return cls(
            inputs.ratio, kind, part.kv, part.score, parameters_of(inputs), kv, score, weights
        )

    @property
    def layouts(self) -> tuple[str, ...]:
        """Page layouts of these rows."""
        dim = self.parameters.norm_weight.shape[0]
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
        dim = table.parameters.norm_weight.shape[0]
        pool = empty_pool(expected)
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
