"""Index heads spread over ranks: every rank scores its own heads, an all-reduce sums the scores.

This is how tensor-parallel engines run an indexer. The sum over heads is then taken in another
order than on one rank, and the judge holds it to the same bound: ``emulated`` stands for the kernel
of each rank, ``torch.distributed`` adds the partial scores in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from needlepoint.optimized.candidates.emulated import EmulatedCandidate, Order
from needlepoint.optimized.emulation.select import select_topk
from needlepoint.optimized.protocol.interface import (
    CandidateInfo,
    LayerInputs,
    Observed,
    QueryInputs,
    QueryRows,
    StageKey,
)


@dataclass(frozen=True)
class ParallelHeads:
    """The fused emulation with its index heads spread over the ranks of torchrun.

    Attributes
    ----------
    key_format
        ``"bf16"``, ``"fp8"`` or ``"fp4"``.
    """

    key_format: str

    @property
    def info(self) -> CandidateInfo:
        """Identity: that of the emulation, under a name of its own."""
        own = self._kernel.info
        return replace(own, name=f"heads:fused-{self.key_format}", variant=f"{own.variant}, heads")

    def stages(self, ratio: int) -> frozenset[StageKey]:
        """Return the stages of the emulation."""
        return self._kernel.stages(ratio)

    def run(self, inputs: LayerInputs) -> Observed:
        """Run this rank's heads, gather queries and sum scores.

        Raises
        ------
        ValueError
            If the process group is missing, or the heads do not divide by the ranks.
        """
        if inputs.query is None:
            return self._kernel.run(inputs)
        rank, world = _group()
        heads = inputs.query.q.shape[1]
        if heads % world:
            raise ValueError(f"{heads} index heads over {world} ranks; expected a multiple")
        own = slice(rank * heads // world, (rank + 1) * heads // world)
        part = QueryInputs(
            inputs.query.q[:, own].contiguous(), inputs.query.weights[:, own].contiguous()
        )
        found = self._kernel.run(replace(inputs, query=part))
        if found.query is None or found.scores is None:
            raise ValueError("the kernel of this rank returned no scores")
        summed = [
            _summed(found.scores(request, 0, length))
            for request, length in enumerate(inputs.lengths)
        ]
        picks = [_picks(scores, inputs.topk) for scores in summed]
        return replace(
            found,
            query=_gathered(found.query, world),
            scores=lambda request, start, stop: summed[request][start:stop],
            topk=torch.cat(picks),
            path_taken=f"{found.path_taken}; {world} ranks of {heads // world} heads, all-reduce",
        )

    def select(self, scores: Tensor, lengths: Tensor, k: int) -> Tensor:
        """Select as the emulation does: from summed scores, on every rank."""
        return self._kernel.select(scores, lengths, k)

    @property
    def spreads_layers(self) -> bool:
        """Every rank takes part in every layer."""
        return True

    @property
    def _kernel(self) -> EmulatedCandidate:
        return EmulatedCandidate(self.key_format, Order.FUSED)


def _group() -> tuple[int, int]:
    """Return rank and number of ranks; join the group on first use."""
    if not dist.is_torchelastic_launched():
        raise ValueError("index heads are spread over ranks: start the run with torchrun")
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def _summed(partial: Tensor) -> Tensor:
    """Return the sum over ranks; masked entries stay -inf."""
    total = partial.clone()
    dist.all_reduce(total)
    return total


def _picks(scores: Tensor, k: int) -> Tensor:
    visible = (scores > -torch.inf).sum(1)
    return select_topk(scores, visible, k)


def _gathered(query: QueryRows, world: int) -> QueryRows:
    """Return the stored queries of all heads."""
    return replace(
        query,
        codes=_joined(query.codes, world),
        scales=None if query.scales is None else _joined(query.scales, world),
        weights=_joined(query.weights, world),
    )


def _joined(part: Tensor, world: int) -> Tensor:
    raw = part.contiguous()
    parts = [torch.empty_like(raw) for _ in range(world)]
    dist.all_gather(parts, raw)
    return torch.cat(parts, dim=1)
