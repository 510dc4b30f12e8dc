"""Key side of one layer: pooled to stored, the candidate's rows against the profile's reference.

Each stage is compared twice. *Accumulated*: the reference runs from the given projections. *Local*:
it replays this one stage from the last stage before it that the candidate observed, so that a fault
is charged to the stage where it was born.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import INDEX, CompressorInputs, LayerInputs
from needlepoint.optimized.protocol.stages import dense_stages
from needlepoint.reference.compressor import CompressorState, compressor_inputs, gather_taps
from needlepoint.reference.formats.names import PER_TOKEN, RopeLayout
from needlepoint.reference.profile import Arithmetic, Precision
from needlepoint.reference.rope import table_as
from needlepoint.verify.base.stages import POOLED, STORED
from needlepoint.verify.layout.stored_rows import StoredRows, replayable
from needlepoint.verify.numerics.bounds import stored_error_bound
from needlepoint.verify.numerics.compare import compare_dense
from needlepoint.verify.numerics.compare_codes import compare_encoded
from needlepoint.verify.numerics.error_bound import (
    ErrorBound,
    KeyPath,
    exact,
    key_chain,
    precision_of,
    rounding,
)
from needlepoint.verify.numerics.error_bound_pooled import pooled, slot_ape
from needlepoint.verify.numerics.error_model import LEAN, U
from needlepoint.verify.numerics.row_errors import RowErrors, StageErrors, row_blocks
from needlepoint.verify.numerics.tally import Tally, content_of

_BLOCK_TOKENS = 1024
"""Tokens whose windows are gathered at once; a multiple of every ratio."""

NOPE = slice(0, 448)
ROPE = slice(448, 512)


@dataclass(frozen=True)
class KeyReference:
    """The profile's reference of one path: every stage before the store, from the projections.

    Attributes
    ----------
    path
        ``index`` or ``main``.
    chain
        Weights, table and profile behind ``pooled``.
    stages
        Stage to error bound before that stage's rounding point. ``pooled`` is not among them where
        nothing is pooled (ratio 1).
    """

    path: str
    chain: KeyPath
    stages: Mapping[str, ErrorBound]

    @property
    def last(self) -> str:
        """Name of the last stage before the store."""
        return self.chain.stages[-1]

    def rows(self, rows: slice) -> KeyReference:
        """Return the reference of some entries."""
        chain = replace(self.chain, table=self.chain.table[rows])
        return replace(self, chain=chain, stages={k: e.rows(rows) for k, e in self.stages.items()})

    @property
    def to_store(self) -> ErrorBound:
        """What the store receives."""
        return self.entering_store(self.stages)

    def entering_store(self, stages: Mapping[str, ErrorBound]) -> ErrorBound:
        """Return what the store receives at the end of a chain."""
        return rounding(stages[self.last], precision_of(self.last, self.chain.arithmetic))


def key_reference(path: str, inputs: LayerInputs, arithmetic: Arithmetic) -> KeyReference:
    """Run the profile's reference of one path over every request.

    Parameters
    ----------
    path
        ``index`` or ``main``.
    inputs
        The given tensors of the layer.
    arithmetic
        Profile.

    Raises
    ------
    ValueError
        If the layer has no such path.
    """
    given = inputs.index if path == INDEX else inputs.main
    if given is None:
        raise ValueError(f"layer {inputs.layer} of ratio {inputs.ratio} has no {path} path")
    chain = KeyPath(
        norm_weight=given.norm_weight,
        eps=inputs.norm_eps,
        table=given_table(window_table(inputs), arithmetic),
        arithmetic=arithmetic,
        rotate=path == INDEX and arithmetic.hadamard,
        norm_bias=given.norm_bias,
        layout=inputs.index_rope if path == INDEX else RopeLayout.TRAILING_PAIRS,
        name=path,
    )
    if inputs.ratio > PER_TOKEN:
        row = _pooled_rows(given, inputs, arithmetic)
        return KeyReference(path, chain, key_chain(POOLED, row, chain))
    read, _ = compressor_inputs(given.kv, given.score, arithmetic)
    stages = key_chain(POOLED, exact(read), chain)
    return KeyReference(path, chain, {k: row for k, row in stages.items() if k != POOLED})


def window_table(inputs: LayerInputs) -> Tensor:
    """Return cos and sin at the first token of every window: float64 ``[entries, 32, 2]``."""
    counts = [length // inputs.ratio for length in inputs.lengths]
    rows = torch.cat([torch.arange(count) * inputs.ratio for count in counts])
    return inputs.rope_table.to(torch.float64)[rows]


def given_table(table: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Return the given cos and sin, float64, as a profile reads them."""
    bf16 = arithmetic.rope_table is Precision.BF16
    return table_as(table, Precision.BF16) if bf16 else table


def compare_key_stages(
    reference: KeyReference,
    dense: Mapping[str, Tensor],
    stored: StoredRows | None,
) -> list[StageErrors]:
    """Compare every observed stage of a path.

    Parameters
    ----------
    reference
        :func:`key_reference` of the candidate's profile.
    dense
        Observed stages before the store by name, ``[entries, d]``.
    stored
        Observed rows as read from the pages, or None.

    Returns
    -------
    list
        One element for each observed stage, in order; none where there are no entries.
    """
    first = next(iter(reference.stages.values())).value
    parts = [
        _compare_entries(
            reference.rows(rows),
            {stage: row[rows] for stage, row in dense.items()},
            None if stored is None else stored.rows(rows),
        )
        for rows in row_blocks(*first.shape)
    ]
    return [_joined(part) for part in zip(*parts, strict=True)]


def _joined(parts: Sequence[StageErrors]) -> StageErrors:
    return replace(
        parts[0],
        local=RowErrors.concatenate([part.local for part in parts]),
        accumulated=RowErrors.concatenate([part.accumulated for part in parts]),
    )


def _compare_entries(
    reference: KeyReference, dense: Mapping[str, Tensor], stored: StoredRows | None
) -> list[StageErrors]:
    """Compare some entries; every number of an entry depends on that entry alone."""
    found: list[StageErrors] = []
    stages = reference.stages
    content = content_of(next(iter(stages.values())).value)
    steps = 0
    for stage in dense_stages(reference.path):
        steps += stage in stages
        if stage in dense:
            point = precision_of(stage, reference.chain.arithmetic)
            local = compare_dense(dense[stage], stages[stage], point)
            accumulated = compare_dense(dense[stage], reference.stages[stage], point)
            local.tally[:, Tally.CONTENT] = content
            lean = LEAN.value * U * steps
            found.append(StageErrors((reference.path, stage), local, accumulated, lean=lean))
            steps = 0
            # From here on the local reference starts at what the candidate itself observed.
            stages = key_chain(stage, exact(replayable(dense[stage])), reference.chain)
    if stored is not None:
        local = _compare_stored(stored, reference.entering_store(stages), reference)
        accumulated = _compare_stored(stored, reference.to_store, reference)
        local.tally[:, Tally.CONTENT] = content
        lean = LEAN.value * U * (steps + 1)
        found.append(StageErrors((reference.path, STORED), local, accumulated, lean=lean))
    return found


def reference_rows(reference: KeyReference) -> Tensor:
    """Return the rows that the profile's reference stores, decoded: float64 ``[entries, d]``."""
    row, arithmetic = reference.to_store, reference.chain.arithmetic
    if reference.path == INDEX:
        return stored_error_bound(row, arithmetic.index_key).value
    nope = stored_error_bound(row.dims(NOPE), arithmetic.main_nope).value
    rope = rounding(row.dims(ROPE), arithmetic.main_rope).value
    return torch.cat((nope, rope), dim=-1)


def _compare_stored(stored: StoredRows, row: ErrorBound, reference: KeyReference) -> RowErrors:
    arithmetic = reference.chain.arithmetic
    if reference.path == INDEX:
        stored.require(arithmetic.index_key)
        return compare_encoded(stored.encoded, row, arithmetic.index_key)
    stored.require(arithmetic.main_nope)
    if stored.rope is None:
        return compare_encoded(stored.encoded, row, arithmetic.main_nope)
    nope = compare_encoded(stored.encoded, row.dims(NOPE), arithmetic.main_nope)
    rope = compare_dense(stored.rope, row.dims(ROPE), Precision.BF16)
    return nope.join(rope, first_dim=NOPE.stop)


def _pooled_rows(
    given: CompressorInputs, inputs: LayerInputs, arithmetic: Arithmetic
) -> ErrorBound:
    by_slot = slot_ape(given.ape, inputs.ratio)
    parts: list[ErrorBound] = []
    first = 0
    for length in inputs.lengths:
        state = CompressorState(inputs.ratio, given.kv.shape[1], arithmetic)
        for start in range(first, first + length, _BLOCK_TOKENS):
            block = slice(start, min(start + _BLOCK_TOKENS, first + length))
            kv, score = compressor_inputs(given.kv[block], given.score[block], arithmetic)
            taps = gather_taps(kv, score, given.ape, inputs.ratio, arithmetic, state)
            state.append(kv, score, given.ape)
            parts.append(pooled(taps, by_slot, arithmetic))
        first += length
    return ErrorBound(
        torch.cat([part.value for part in parts]), torch.cat([part.delta for part in parts])
    )
