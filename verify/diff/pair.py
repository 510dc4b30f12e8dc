"""One layer of two recordings: the constants that must be equal, and what both sides were given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import (
    MAIN,
    QUERY,
    CompressorInputs,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.reference.profile import Precision
from needlepoint.verify.base.stage_tensors import returned_stages
from needlepoint.verify.base.stages import INPUT, PROJECTED
from needlepoint.verify.diff.byte_compare import equal_rows
from needlepoint.verify.numerics.compare import compare_dense
from needlepoint.verify.numerics.error_bound import ErrorBound
from needlepoint.verify.numerics.error_model import PROJECTION, U
from needlepoint.verify.numerics.row_errors import RowErrors, StageErrors
from needlepoint.verify.recording.recording import RecordingError

LATENT = 2.0**-6
"""The latent is bf16 at two points (after its projection and after its norm), each half a step of
2**-8, of independent sign over its dims: 2**-9 RMS each, taken four times."""


@dataclass(frozen=True)
class LayerPair:
    """One layer of both sides; ``own`` is what is judged.

    Attributes
    ----------
    given, meant
        What the other side was given, and what it observed.
    own_given, own
        The same of the judged side. What it was given is read anew for each use, so that no layer
        of both sides stands in memory while stages are judged.
    brought
        Stages that a dump holds, common input among them; None for a recording, which holds all.
    """

    given: LayerInputs
    meant: Observed
    own_given: Callable[[], LayerInputs]
    own: Observed
    brought: frozenset[StageKey] | None = None

    @property
    def stages(self) -> frozenset[StageKey]:
        """Stages that both sides brought, what both were given among them."""
        if self.brought is not None:
            return self.brought
        return frozenset(returned_stages(self.own_given(), self.own))


def require_same_constants(pair: LayerPair) -> None:
    """Refuse two layers that are not of one model.

    Raises
    ------
    RecordingError
        Naming every constant that differs.
    """
    one, other = pair.given, pair.own_given()
    constants: dict[str, tuple[object, object]] = {
        name: (getattr(one, name), getattr(other, name))
        for name in ("ratio", "lengths", "norm_eps", "topk", "weight_scale", "index_rope")
    }
    tensors = {"rope_table": (one.rope_table, other.rope_table)}
    for path, mine, theirs in _both(one, other):
        tensors[f"{path}.ape"] = (mine.ape, theirs.ape)
        tensors[f"{path}.norm_weight"] = (mine.norm_weight, theirs.norm_weight)
        if mine.norm_bias is not None and theirs.norm_bias is not None:
            tensors[f"{path}.norm_bias"] = (mine.norm_bias, theirs.norm_bias)
    different = [name for name, (x, y) in constants.items() if x != y]
    different += [name for name, (x, y) in tensors.items() if not torch.equal(x, y)]
    if different:
        raise RecordingError(
            f"{', '.join(different)} differ between the recordings; expected two recordings of one "
            "model, one input and one seed of weights"
        )


def _both(
    one: LayerInputs, other: LayerInputs
) -> list[tuple[str, CompressorInputs, CompressorInputs]]:
    """Return the key paths that both sides have."""
    return [(p, one.paths[p], other.paths[p]) for p in one.paths if p in other.paths]


def given_errors(pair: LayerPair) -> dict[StageKey, StageErrors]:
    """Compare input and projections bit by bit: where they differ, the fault is upstream.

    Projections of a dump come from a product of the engine's own, so they are compared within what
    an fp32 sum may lose (:func:`dumped_projection`).

    Raises
    ------
    ValueError
        If shapes or dtypes differ.
    """
    if pair.brought is not None:
        return _dumped_errors(pair, pair.brought)
    one, other = pair.given, pair.own_given()
    rows = {(MAIN, INPUT): equal_rows(other.hidden, one.hidden, "input")}
    for path, meant, own in _both(one, other):
        name = f"{path}.projected"
        row = equal_rows(own.kv, meant.kv, name)
        if meant.score.shape[1]:  # nothing is pooled at ratio 1
            score = equal_rows(own.score, meant.score, name)
            row = row.join(score, first_dim=meant.kv.shape[1])
        rows[path, PROJECTED] = row
    if one.query is not None and other.query is not None:
        row = equal_rows(other.query.q, one.query.q, "query.projected")
        heads = equal_rows(other.query.weights, one.query.weights, "query.projected")
        rows[QUERY, PROJECTED] = row.join(heads, first_dim=one.query.q[0].numel())
    return {key: StageErrors(key, row, row, "elements") for key, row in rows.items()}


def dumped_projection(own: Tensor, meant: Tensor, width: int, latent: float = 0.0) -> RowErrors:
    """Compare projections that an engine made itself with recorded ones.

    The weights are not at hand, so ``sum |x w|`` is taken as ``sqrt(n)`` times the RMS of the row's
    outputs, what products of independent sign give: radius ``8 U n RMS``. Rows that hold bf16
    numbers throughout are taken for bf16 and may be one rounding away.

    Parameters
    ----------
    own, meant
        ``[tokens, columns]``.
    width
        ``n``, products of a sum.
    latent
        What an engine that rounds the query latent elsewhere may lose besides, in units of the RMS.
    """
    value = meant.to(torch.float64)
    rms = value.square().mean(1, keepdim=True).sqrt()
    delta = ((PROJECTION.value * U * width + latent) * rms).expand_as(value)
    short = torch.equal(own.to(torch.bfloat16).to(own.dtype), own)
    return compare_dense(own, ErrorBound(value, delta), Precision.BF16 if short else Precision.FP32)


def _dumped_errors(pair: LayerPair, brought: frozenset[StageKey]) -> dict[StageKey, StageErrors]:
    one, other = pair.given, pair.own_given()
    rows: dict[StageKey, RowErrors] = {}
    if (MAIN, INPUT) in brought:
        rows[MAIN, INPUT] = equal_rows(other.hidden, one.hidden, "input")
    width = one.hidden.shape[1]
    for path, meant, own in _both(one, other):
        if (path, PROJECTED) in brought:
            row = dumped_projection(own.kv, meant.kv, width)
            if meant.score.shape[1]:
                score = dumped_projection(own.score, meant.score, width)
                row = row.join(score, first_dim=meant.kv.shape[1])
            rows[path, PROJECTED] = row
    if one.query is not None and other.query is not None and (QUERY, PROJECTED) in brought:
        q = dumped_projection(other.query.q.flatten(1), one.query.q.flatten(1), width, LATENT)
        weights = dumped_projection(other.query.weights, one.query.weights, width)
        rows[QUERY, PROJECTED] = q.join(weights, first_dim=one.query.q[0].numel())
    return {key: StageErrors(key, row, row) for key, row in rows.items()}
