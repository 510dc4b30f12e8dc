"""The reference of one layer under one profile, shared by every candidate that declares it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import INDEX, MAIN, LayerInputs
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import Arithmetic
from needlepoint.verify.base.rows import Rows
from needlepoint.verify.base.stage_blocks import Block
from needlepoint.verify.judge.results.stages import zero_errors
from needlepoint.verify.judge.sides.attention_side import (
    AttentionInputs,
    AttentionReads,
    attend,
    attention_errors,
)
from needlepoint.verify.judge.sides.key_side import KeyReference, key_reference, reference_rows
from needlepoint.verify.judge.sides.outputs import key_paths
from needlepoint.verify.judge.sides.query_reference import (
    QueryReference,
    ReferenceBlock,
    RotatedQueries,
)
from needlepoint.verify.numerics.row_errors import RowErrors

_BEFORE_STORE = (
    "key_input",
    "pool_weights",
    "pool_terms",
    "pooled",
    "normed",
    "roped",
    "rotated",
    "rope_table",
    "hadamard",
    "ape",
    "state",
)
"""Rounding points that the key chain before the store depends on."""

_NOTHING = torch.empty(0, 0, dtype=torch.float64)


@dataclass(frozen=True)
class ProfileBlock:
    """The reference of one block of queries under one profile.

    Attributes
    ----------
    query
        Queries, scores and picks; None for ratio 128.
    attention
        What attention reads besides rows and picks.
    expected
        float64 ``[queries, heads, 512]``, attention over the reference's own rows and picks.

    Both are empty where the layer has no main path.
    """

    query: ReferenceBlock | None
    attention: AttentionInputs
    expected: Tensor


class ProfileSide:
    """One profile in one layer.

    Parameters
    ----------
    given
        The layer's given tensors.
    reference
        The layer under the profile, for attention.
    keys
        Reference of each key path.
    rotated
        Rotated queries, shared by profiles; None for ratio 128.
    reads
        What attention reads besides rows and picks, shared by profiles.
    """

    def __init__(
        self,
        given: LayerInputs,
        reference: ReferenceLayer,
        keys: Mapping[str, KeyReference],
        rotated: RotatedQueries | None,
        reads: AttentionReads,
    ) -> None:
        self.arithmetic = reference.arithmetic
        self.keys = keys
        self.query: QueryReference | None = None
        if rotated is not None:
            self.query = QueryReference(given, self.arithmetic, keys[INDEX], rotated)
        self._reads = reads
        self._reference = reference
        self._main_rows = reference_rows(keys[MAIN]) if MAIN in keys else _NOTHING
        self._entries = Rows(given.lengths, given.ratio)

    def prepare(self, block: Block) -> ProfileBlock:
        """Run the reference over one block of queries."""
        query = None if self.query is None else self.query.block(block)
        if MAIN not in self.keys:
            return ProfileBlock(query, AttentionInputs(_NOTHING, _NOTHING), _NOTHING)
        attention = self._reads.of(self._reference, block)
        rows = self._main_rows[self._entries.span(block.request)]
        picks = None if query is None else query.picks
        expected = attend(self._reference, attention, rows, picks, block)
        return ProfileBlock(query, attention, expected)

    def changed_rows(self, rows: Tensor) -> Tensor:
        """Return which main rows of a candidate are not the reference's own, bool ``[entries]``."""
        return (rows != self._main_rows).any(1)

    def attention_errors(
        self,
        prepared: ProfileBlock,
        rows: Tensor,
        changed: Tensor,
        picks: Tensor | None,
        block: Block,
    ) -> RowErrors:
        """Return the errors of attention over a candidate's rows and picks.

        Parameters
        ----------
        prepared
            :meth:`prepare` of the block.
        rows
            float64 ``[entries, 512]``, main rows of all requests.
        changed
            :meth:`changed_rows` of them.
        picks
            int ``[queries, k]``; None for every visible entry (ratio 128).
        block
            The queries.
        """
        span = self._entries.span(block.request)
        if not _moved(prepared.query, changed[span], picks, block):
            # Same rows, same picks: the same output, and nothing to compute.
            return zero_errors(block.stop - block.start)
        found = attend(self._reference, prepared.attention, rows[span], picks, block)
        return attention_errors(found, prepared.expected)


def _moved(
    reference: ReferenceBlock | None, changed: Tensor, picks: Tensor | None, block: Block
) -> bool:
    """Return whether a query of the block reads a changed row or picks other entries."""
    if reference is None or picks is None:
        return bool(changed[: block.columns].any())
    if picks.shape != reference.picks.shape:
        return True
    own, meant = picks.sort(1).values, reference.picks.sort(1).values
    return not torch.equal(own, meant) or bool(
        changed[torch.unique(meant[meant >= 0]).long()].any()
    )


class KeyReferences:
    """Key references of one layer; profiles that differ behind the store alone share a chain."""

    def __init__(self, inputs: LayerInputs) -> None:
        self._inputs = inputs
        self._kept: dict[tuple[object, ...], KeyReference] = {}

    def of(self, arithmetic: Arithmetic) -> dict[str, KeyReference]:
        """Return the reference of each key path under a profile."""
        return {path: self.path(path, arithmetic) for path in key_paths(self._inputs)}

    def path(self, path: str, arithmetic: Arithmetic) -> KeyReference:
        """Return the reference of one key path under a profile."""
        key = (path, *(getattr(arithmetic, name) for name in _BEFORE_STORE))
        if key not in self._kept:
            self._kept[key] = key_reference(path, self._inputs, arithmetic)
        shared = self._kept[key]
        return replace(shared, chain=replace(shared.chain, arithmetic=arithmetic))
