"""Rows of one key path with some stages done by the candidate and the others by the reference.

A stage of the candidate is the reference's replay of it plus a *residual*: what the candidate found
minus the replay from its own last stage. A mixture adds the residuals of its own stages to replays
of whatever enters them. With all of them it is the candidate, with none the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import StageKey
from needlepoint.verify.base.stages import POOLED, STORED
from needlepoint.verify.judge.sides.key_side import KeyReference, reference_rows
from needlepoint.verify.layout.stored_rows import StoredRows, replayable
from needlepoint.verify.numerics.error_bound import exact, key_chain, precision_of, rounding


class KeyMixture:
    """Mixtures of candidate and reference on one key path.

    Parameters
    ----------
    reference
        The profile's reference of the path.
    dense
        Observed stages before the store, by name.
    stored
        Observed rows, or None.
    """

    def __init__(
        self, reference: KeyReference, dense: Mapping[str, Tensor], stored: StoredRows | None
    ) -> None:
        self._reference = reference
        self._order = list(reference.chain.stages)
        self._residual: dict[str, Tensor] = {}
        entering = reference.stages[POOLED].value
        for stage in self._order:
            meant = self._rounded(stage, entering)
            found = meant
            if stage in dense:
                found = replayable(dense[stage])
                self._residual[stage] = found - meant
            entering = self._next(stage, found)
        if stored is not None:
            self._residual[STORED] = replayable(stored.values) - self._store(entering)
        # One mixture differs from the next in one stage: what is asked for again is kept.
        self._kept: dict[frozenset[str], Tensor] = {}

    @property
    def stages(self) -> tuple[StageKey, ...]:
        """Stages that can be swapped, in order."""
        return tuple((self._reference.path, stage) for stage in self._residual)

    def rows(self, own: frozenset[StageKey]) -> Tensor:
        """Return the decoded rows, float64 ``[entries, d]``.

        Parameters
        ----------
        own
            Stages that are the candidate's; those of other paths are ignored.
        """
        mine = frozenset(s for s in self._residual if (self._reference.path, s) in own)
        if mine not in self._kept:
            self._kept[mine] = self._rows(mine)
        return self._kept[mine]

    def _rows(self, own: frozenset[str]) -> Tensor:
        entering = self._reference.stages[POOLED].value
        for stage in self._order:
            found = self._rounded(stage, entering)
            if stage in own:
                found = found + self._residual[stage]
            entering = self._next(stage, found)
        rows = self._store(entering)
        return rows + self._residual[STORED] if STORED in own else rows

    def _rounded(self, stage: str, value: Tensor) -> Tensor:
        point = precision_of(stage, self._reference.chain.arithmetic)
        return rounding(exact(value), point).value

    def _next(self, stage: str, found: Tensor) -> Tensor:
        """Return what the stage behind ``stage`` computes; what the store receives at the end."""
        if stage == self._order[-1]:
            return found
        following = self._order[self._order.index(stage) + 1]
        return key_chain(stage, exact(found), self._reference.chain)[following].value

    def _store(self, entering: Tensor) -> Tensor:
        stages = {**self._reference.stages, self._order[-1]: exact(entering)}
        return reference_rows(replace(self._reference, stages=stages))


def same_rows(one: Tensor, other: Tensor) -> bool:
    """Return whether two mixtures hold the same rows."""
    return one is other or torch.equal(one, other)
