"""What the judgement of one layer leaves of one candidate: stage errors, swaps and costs.

The record between a candidate's outputs and the result: outputs, stage errors, layer outcome,
result. A live run, a recording and a dump all come through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from needlepoint.optimized.protocol.interface import LayerInputs, Observed, StageKey
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
    entry_bytes
        Bytes that one entry of the layer takes over its pools.
    peak_transient_bytes, path_taken
        As the candidate reported.
    errors
        Row errors of each compared stage.
    picks
        Swaps against the profile's reference; None where there are no picks.
    costs
        Cost against each contract, by name.
    attention
        Relative errors of the attention output; None where nothing was attended.
    swap
        Shares of the stages in the end of the layer; None where nothing was swapped.
    """

    layer: int
    ratio: int
    entry_bytes: float
    peak_transient_bytes: int
    path_taken: str
    errors: Mapping[StageKey, StageErrors]
    picks: PickErrors | None
    costs: Mapping[str, CostTally] = field(default_factory=dict)
    attention: RowErrors | None = None
    swap: SwapResult | None = None

    @classmethod
    def of(
        cls,
        inputs: LayerInputs,
        outputs: Observed,
        errors: Mapping[StageKey, StageErrors],
        picks: PickErrors | None,
    ) -> LayerOutcome:
        """Return the outcome of a layer whose stages were judged; costs are added to it."""
        return cls(
            layer=inputs.layer,
            ratio=inputs.ratio,
            entry_bytes=sum(p.pool.shape[1] / p.page_size for p in outputs.stored.values()),
            peak_transient_bytes=outputs.peak_transient_bytes,
            path_taken=outputs.path_taken,
            errors=errors,
            picks=picks,
        )

    def without_rows(self) -> LayerOutcome:
        """Return what is summed up over layers; row errors have gone to the result by then."""
        return replace(self, errors={}, picks=None, attention=None, swap=None)
