"""Scores and picks of a layer from what the CUDA kernels have stored, requests as they stand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.optimized.build.score_variants import (
    default_unit,
    described_unit,
    held_heads,
)
from needlepoint.optimized.cuda.runtime import require_cuda
from needlepoint.optimized.cuda.score_plan import ScorePlan, plan_scores
from needlepoint.optimized.cuda.scores import KeyPages, scores
from needlepoint.optimized.cuda.topk import query_slice, score_topk, topk_kind
from needlepoint.optimized.protocol.interface import QueryRows


@dataclass(frozen=True)
class CudaScorer:
    """Scores and picks of all requests of one layer.

    Attributes
    ----------
    query
        Stored queries and weights on the device, ``[tokens, ..]``.
    keys
        Index keys on the device.
    seq_lens
        Tokens of each request; its query rows are all of them.
    ratio
        Tokens an entry.
    """

    query: QueryRows
    keys: KeyPages
    seq_lens: tuple[int, ...]
    ratio: int

    def read(self, request: int, start: int, stop: int) -> Tensor:
        """Return scores fp32 ``[stop - start, entries]`` of one request on the CPU, masked -inf.

        Raises
        ------
        ValueError
            If the request or the rows do not exist.
        """
        if (
            not 0 <= request < len(self.seq_lens)
            or not 0 <= start <= stop <= self.seq_lens[request]
        ):
            raise ValueError(
                f"scores of request {request}, rows {start} .. {stop}: expected one of "
                f"{len(self.seq_lens)} requests and rows within its length"
            )
        counts = [0] * len(self.seq_lens)
        counts[request] = stop - start
        offset = sum(self.seq_lens[:request])
        entries = self.seq_lens[request] // self.ratio
        out = scores(
            query_slice(self.query, slice(offset + start, offset + stop)),
            self._context_lens(start, stop),
            self.keys,
            self._plan(counts),
            entries,
        )
        return out.cpu()

    def select(self, k: int) -> Tensor:
        """Return the picks int32 ``[tokens, k]`` on the CPU."""
        context_lens = [self._context_lens(0, length) for length in self.seq_lens]
        plan = self._plan(list(self.seq_lens))
        columns = max((length // self.ratio for length in self.seq_lens), default=0)
        seen = torch.cat([torch.empty(0, dtype=torch.int32), *context_lens])
        return score_topk(self.query, seen, self.keys, plan, columns, k).cpu()

    def path_taken(self, k: int) -> str:
        """Name the kernels and the unit that they multiply with."""
        row, architecture = self.keys.row, require_cuda()
        columns = max(self.seq_lens, default=0) // self.ratio
        kind = topk_kind(sum(self.seq_lens), columns, k)
        unit = default_unit(row, architecture)
        heads = held_heads(self.query.weights.shape[1])
        described = described_unit(unit, row, architecture)
        return f"scores_{unit}_{row}_h{heads} ({described}); topk_{kind}"

    def _plan(self, counts: list[int]) -> ScorePlan:
        weights = self.query.weights
        unit = default_unit(self.keys.row, require_cuda())
        return plan_scores(counts, weights.shape[1], unit).to(weights.device)

    def _context_lens(self, start: int, stop: int) -> Tensor:
        return torch.arange(start + 1, stop + 1, dtype=torch.int32) // self.ratio
