"""What a candidate costs against the contracts: keys, overlap and score lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from needlepoint.reference.hadamard import hadamard
from needlepoint.verify.judge.contracts import ContractBlock
from needlepoint.verify.numerics.selection import selection_cost
from needlepoint.verify.numerics.spread import finite
from needlepoint.verify.schema.result import ContractCost


@dataclass
class CostTally:
    """Costs of one candidate against one contract in one layer, gathered block by block.

    Attributes
    ----------
    overlap, score_lost
        float64 ``[queries]`` of each block.
    relative
        float64 ``[entries]``, relative error of every stored key.
    """

    overlap: list[Tensor] = field(default_factory=list)
    score_lost: list[Tensor] = field(default_factory=list)
    relative: Tensor | None = None

    def add_picks(self, picks: Tensor, contract: ContractBlock, visible: Tensor, k: int) -> None:
        """Add one block of queries; a block that sees nothing overlaps in full."""
        if contract.scores.shape[1] == 0:
            self.overlap.append(torch.ones(len(picks), dtype=torch.float64))
            self.score_lost.append(torch.zeros(len(picks), dtype=torch.float64))
            return
        cost = selection_cost(picks, contract.picks, contract.scores, visible, k)
        self.overlap.append(cost.overlap)
        self.score_lost.append(cost.score_lost)

    @property
    def overlap_rows(self) -> Tensor:
        """Overlap of every query so far."""
        return torch.cat(self.overlap) if self.overlap else torch.empty(0, dtype=torch.float64)

    @property
    def lost_rows(self) -> Tensor:
        """Score lost of every query so far, in units of the row's score RMS."""
        return torch.cat(self.score_lost) if self.overlap else torch.empty(0, dtype=torch.float64)


def key_error(own: Tensor, own_rotated: bool, contract: Tensor) -> Tensor:
    """Return the relative error of every stored key against a contract's: float64 ``[entries]``.

    Parameters
    ----------
    own
        float64 ``[entries, 128]`` decoded keys of the candidate.
    own_rotated
        Whether they are Hadamard-rotated, as every contract's are. The rotation is orthonormal, so
        a candidate without one is rotated here and nothing else changes.
    contract
        float64 ``[entries, 128]`` decoded keys of the contract.
    """
    keys = own if own_rotated else hadamard(own)
    norm = torch.linalg.vector_norm(contract, dim=1).clamp(min=2.0**-126)
    error: Tensor = torch.linalg.vector_norm(keys - contract, dim=1) / norm
    return error


def contract_cost(tallies: list[CostTally]) -> ContractCost | None:
    """Return the cost over layers; None where nothing was tallied."""
    empty = torch.empty(0, dtype=torch.float64)
    rows = torch.cat([empty, *(t.relative for t in tallies if t.relative is not None)])
    overlap = torch.cat([empty, *(t.overlap_rows for t in tallies)])
    lost = torch.cat([empty, *(t.lost_rows for t in tallies)])
    if not rows.numel() and not overlap.numel():
        return None
    return ContractCost(
        rel_mean=finite(rows.mean().item()) if rows.numel() else None,
        rel_max=finite(rows.max().item()) if rows.numel() else None,
        overlap_mean=finite(overlap.mean().item()) if overlap.numel() else None,
        score_lost_max=finite(lost.max().item()) if lost.numel() else None,
    )


def cache_bytes_per_token(row_bytes: Mapping[int, float]) -> float | None:
    """Return the bytes of compressed rows per token over layers.

    Parameters
    ----------
    row_bytes
        Ratio of a layer to the bytes that one entry of its pools takes, summed over layers of
        that ratio.
    """
    return sum(size / ratio for ratio, size in row_bytes.items()) if row_bytes else None
