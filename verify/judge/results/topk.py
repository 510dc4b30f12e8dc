"""From the judgement of picks to the result's ``topk``."""

from __future__ import annotations

from needlepoint.verify.judge.layer_outcome import LayerOutcome
from needlepoint.verify.numerics.selection import Swap
from needlepoint.verify.numerics.spread import finite
from needlepoint.verify.schema.result import Swaps, TopkResult


def topk_result(outcome: LayerOutcome, k: int, contract: str) -> TopkResult | None:
    """Return the selection of a layer; None where the candidate has no picks.

    Parameters
    ----------
    outcome
        The layer.
    k
        Entries to pick.
    contract
        Contract that overlap and score lost are against.
    """
    picks = outcome.picks
    if picks is None:
        return None
    cost = outcome.costs.get(contract)
    overlap = lost = None
    if cost is not None and cost.overlap:  # nothing is tallied without the contract's scores
        overlap, lost = cost.overlap_rows, cost.lost_rows
    return TopkResult(
        k=k,
        rows=len(picks.invalid),
        discarded_mean=finite(picks.discarded.mean().item()),
        overlap_mean=None if overlap is None else finite(overlap.mean().item()),
        overlap_min=None if overlap is None else finite(overlap.min().item()),
        swaps=Swaps(
            tie=picks.count(Swap.TIE),
            explained=picks.count(Swap.EXPLAINED),
            selector=picks.count(Swap.SELECTOR),
            unknown=picks.count(Swap.UNKNOWN),
            upstream=picks.count(Swap.UPSTREAM),
        ),
        score_lost_max=None if lost is None else finite(lost.max().item()),
        invalid=int(picks.invalid.sum()),
    )
