"""S9: index scores from stored bytes, fused (no per-head tensor) and unfused, and the picks.

Scores are judged by a bound, but the picks are justified by the scores that a reader returns later.
Rows are therefore always computed in the same blocks, so that both see the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.optimized.emulation.memory import TransientMeter
from needlepoint.optimized.emulation.parallel import over_blocks
from needlepoint.optimized.emulation.readback import DecodedKeys, read_index_keys, read_queries
from needlepoint.optimized.emulation.select import select_topk
from needlepoint.optimized.protocol.interface import PagedRows, QueryRows

FUSED_ROWS = 256  # queries of one block
UNFUSED_BYTES = 8 * 2**20  # per-head scores of one run-time chunk


def fused_scores(queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
    """Write sum over heads of w * relu(q.k) without a per-head tensor: one head at a time.

    Parameters
    ----------
    queries, weights, keys
        float32 ``[S, H, 128]``, ``[S, H]``, ``[T, 128]``.
    out
        float32 ``[S, T]``, overwritten.
    """
    out.zero_()
    dot = torch.empty_like(out)
    for head in range(queries.shape[1]):
        torch.mm(queries[:, head], keys.T, out=dot)
        out.add_(dot.clamp_(min=0).mul_(weights[:, head, None]))


def unfused_scores(queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
    """Write what :func:`fused_scores` writes, through the per-head fp32 tensor ``[S, H, T]``."""
    count, heads, width = queries.shape
    per_head = torch.mm(queries.reshape(count * heads, width), keys.T)
    per_head = per_head.relu_().view(count, heads, -1)
    torch.bmm(weights[:, None], per_head, out=out[:, None])


@dataclass(frozen=True)
class Scorer(ABC):
    """Scores and picks of all requests of one layer.

    Attributes
    ----------
    query
        Stored queries and weights, ``[tokens, ..]``.
    keys
        Pages of the index keys.
    lengths
        Tokens of each request.
    ratio
        Tokens an entry.
    """

    query: QueryRows
    keys: PagedRows
    lengths: tuple[int, ...]
    ratio: int

    @abstractmethod
    def block_rows(self, request: int) -> int:
        """Return how many queries of a request are scored together."""

    @abstractmethod
    def score(self, queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
        """Write unmasked scores, before the key scale."""

    def seen(self, request: int, stop: int) -> int:
        """Return how many keys a block that ends before query ``stop`` computes with."""
        return min(stop // self.ratio, self.keys.entries[request])

    def read(self, request: int, start: int, stop: int) -> Tensor:
        """Return scores float32 ``[stop - start, entries]`` of one request, masked with -inf.

        Raises
        ------
        ValueError
            If the request or the rows do not exist.
        """
        if not 0 <= request < len(self.lengths) or not 0 <= start <= stop <= self.lengths[request]:
            raise ValueError(
                f"scores of request {request}, rows {start} .. {stop}: expected one of "
                f"{len(self.lengths)} requests and rows within its length"
            )
        keys = read_index_keys(self.keys, request)
        step = self.block_rows(request)
        firsts = range(start - start % step, stop, step)
        blocks = over_blocks(lambda first: self._block(request, first, keys)[0], firsts)
        out = torch.full((stop - start, self.keys.entries[request]), -torch.inf)
        for first, block in zip(firsts, blocks, strict=True):
            low, high = max(start, first), min(stop, first + block.shape[0])
            out[low - start : high - start, : block.shape[1]] = block[low - first : high - first]
        return out

    def select(self, k: int) -> Tensor:
        """Return the picks int32 ``[tokens, k]``."""
        picks = [torch.empty(0, k, dtype=torch.int32)]
        for request, length in enumerate(self.lengths):
            keys = read_index_keys(self.keys, request)

            def work(first: int, request: int = request, keys: DecodedKeys = keys) -> Tensor:
                return select_topk(*self._block(request, first, keys), k)

            picks += over_blocks(work, range(0, length, self.block_rows(request)))
        return torch.cat(picks)

    def peak_transient_bytes(self, k: int) -> int:
        """Measure what scoring and selection hold for the block with the most scores.

        Blocks are independent and of one shape of computation, so this block is the peak, whatever
        the number of blocks; decoded keys and queries count.
        """
        request = max(range(len(self.lengths)), key=lambda r: self.lengths[r])
        length, step = self.lengths[request], self.block_rows(request)
        last = (length - 1) // step * step
        first = max(
            (last, max(0, last - step)),
            key=lambda f: (min(f + step, length) - f) * self.seen(request, min(f + step, length)),
        )
        with TransientMeter() as meter:
            keys = read_index_keys(self.keys, request)
            meter.hold(keys.values)
            block, visible = self._block(request, first, keys, meter)
            select_topk(block, visible, k)
        return meter.peak_bytes

    def _block(
        self, request: int, first: int, keys: DecodedKeys, meter: TransientMeter | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return masked scores ``[n, seen]`` and the visible entries ``[n]`` of one block."""
        stop = min(first + self.block_rows(request), self.lengths[request])
        offset = sum(self.lengths[:request])
        rows = slice(offset + first, offset + stop)
        queries = read_queries(self.query, rows)
        if meter is not None:
            meter.hold(queries)
        seen = self.seen(request, stop)
        out = torch.empty(stop - first, seen)
        self.score(queries, self.query.weights[rows], keys.values[:seen], out)
        if keys.scale is not None:
            out.mul_(keys.scale[:seen])
        visible = torch.arange(first + 1, stop + 1) // self.ratio
        out.masked_fill_(torch.arange(seen) >= visible[:, None], -torch.inf)
        return out, visible


class FusedScorer(Scorer):
    """Scores block by block of queries, head by head."""

    def block_rows(self, request: int) -> int:
        """Return the fixed block."""
        return FUSED_ROWS

    def score(self, queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
        """Write :func:`fused_scores`."""
        fused_scores(queries, weights, keys, out)


class UnfusedScorer(Scorer):
    """Scores through the per-head tensor over all keys of the request."""

    def block_rows(self, request: int) -> int:
        """Return as many queries as keep the per-head tensor within :data:`UNFUSED_BYTES`."""
        heads = self.query.weights.shape[1]
        return max(1, UNFUSED_BYTES // (4 * heads * max(1, self.keys.entries[request])))

    def seen(self, request: int, stop: int) -> int:
        """Return all keys: causality is applied afterwards, by the mask."""
        return self.keys.entries[request]

    def score(self, queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
        """Write :func:`unfused_scores`."""
        unfused_scores(queries, weights, keys, out)
