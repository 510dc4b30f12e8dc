"""The three contracts of one layer, fed block by block beside the candidates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import CONTRACTS, Arithmetic, Precision, contract_of
from needlepoint.reference.request import KeyState
from needlepoint.reference.stages import Projected
from needlepoint.reference.weights import LayerWeights


@dataclass(frozen=True)
class ContractBlock:
    """What one contract computed for one block of queries.

    Attributes
    ----------
    scores
        ``[queries, entries so far]``, -inf where invisible.
    picks
        int32 ``[queries, k]``.
    """

    scores: Tensor
    picks: Tensor


class Contracts:
    """The reference under every contract; one request after another, block by block.

    Parameters
    ----------
    config, layer, weights
        The model's layer.
    names
        Contracts to run.
    budget_bytes
        Bound on the transient tensors of each.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: LayerWeights,
        names: tuple[str, ...],
        budget_bytes: int,
    ) -> None:
        self._layers = {
            name: ReferenceLayer(
                config,
                layer,
                weights,
                contract_of(name, config.ratio(layer)),
                compute=compute_type(CONTRACTS[name]),
                budget_bytes=budget_bytes,
            )
            for name in names
        }
        self._states: dict[str, KeyState | None] = {}
        self._keys: dict[str, list[Tensor]] = {name: [] for name in names}

    def start_request(self) -> None:
        """Begin the next request."""
        self._states = {name: layer.new_request().index for name, layer in self._layers.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """Contracts that run."""
        return tuple(self._layers)

    def feed(self, name: str, hidden: Tensor, projected: Projected) -> ContractBlock | None:
        """Advance one contract by one block of tokens; contracts may be fed side by side.

        Only what selects is computed: a contract prices scores and picks.

        Parameters
        ----------
        name
            Contract.
        hidden
            ``[tokens, hidden_size]`` of the block.
        projected
            Its projections, rounded to fp32; the exact contract makes its own.
        """
        layer, state = self._layers[name], self._states[name]
        start = projected.first_position
        if layer.arithmetic.projected is not Precision.FP32:
            projected = layer.project_inputs(hidden, start)
        rope = layer.rope(start, len(hidden))
        stages = layer.select(projected, rope, state, keep_scores=True)
        if stages.index is not None:
            self._keys[name].append(stages.index.stored.values)
        if stages.scores is None or stages.topk is None:
            return None
        return ContractBlock(stages.scores, stages.topk)

    def keys(self) -> Mapping[str, Tensor]:
        """Return the decoded index keys of everything fed so far: float64 ``[entries, 128]``."""
        return {name: torch.cat(parts) for name, parts in self._keys.items() if parts}


def compute_type(contract: Arithmetic) -> torch.dtype:
    """Return the type in which a contract's scores are evaluated."""
    return torch.float64 if contract.dot is Precision.FLOAT64 else torch.float32
