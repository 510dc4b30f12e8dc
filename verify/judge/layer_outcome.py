"""What the judgement of one layer leaves of one candidate: rows, swaps and costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from needlepoint.optimized.protocol.interface import StageKey
from needlepoint.verify.judge.cost import CostTally
from needlepoint.verify.numerics.row_errors import RowErrors, StageErrors
from needlepoint.verify.numerics.selection import PickErrors
from needlepoint.verify.schema.swap import SwapResult


@dataclass(frozen=True)
class LayerOutcome:
    """What one layer says of one candidate.

    Attributes
    ----------
    layer, ratio
        Layer and its compression ratio.
    errors
        Row errors of each compared stage.
    picks
        Swaps against the profile's reference; None where there are no picks.
    costs
        Cost against each contract, by name.
    attention
        Relative errors of the attention output; None where nothing was attended.
    entry_bytes
        Bytes that one entry of the layer takes over its pools.
    peak_transient_bytes, path_taken
        As the candidate reported.
    swap
        Shares of the stages in the end of the layer; None where nothing was swapped.
    """

    layer: int
    ratio: int
    errors: Mapping[StageKey, StageErrors]
    picks: PickErrors | None
    costs: Mapping[str, CostTally]
    attention: RowErrors | None
    entry_bytes: float
    peak_transient_bytes: int
    path_taken: str
    swap: SwapResult | None = None
