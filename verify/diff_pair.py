"""One layer of two recordings: the constants that must be equal, and what both sides were given."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.optimized.interface import INDEX, MAIN, QUERY, LayerInputs, Observed, StageKey
from needlepoint.reference.profile import Precision
from needlepoint.verify.byte_compare import equal_rows
from needlepoint.verify.compare import compare_dense
from needlepoint.verify.enclosure import Enclosure
from needlepoint.verify.error_model import PROJECTION, U
from needlepoint.verify.key_side import StageErrors
from needlepoint.verify.recordings import RecordingError
from needlepoint.verify.recordings_layer import layer_record
from needlepoint.verify.row_errors import RowErrors
from needlepoint.verify.stages import INPUT, PROJECTED

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
        The same of the judged side.
    brought
        Stages that a dump holds, common input among them; None for a recording, which holds all.
    """

    given: LayerInputs
    meant: Observed
    own_given: LayerInputs
    own: Observed
    brought: frozenset[StageKey] | None = None

    @property
    def stages(self) -> frozenset[StageKey]:
        """Stages that both sides brought, what both were given among them."""
        if self.brought is not None:
            return self.brought
        return frozenset(layer_record(self.own_given, self.own).stages)


def require_same_constants(pair: LayerPair) -> None:
    """Refuse two layers that are not of one model.

    Raises
    ------
    RecordingError
        Naming every constant that differs.
    """
    one, other = pair.given, pair.own_given
    constants: dict[str, tuple[object, object]] = {
        name: (getattr(one, name), getattr(other, name))
        for name in ("ratio", "lengths", "norm_eps", "topk", "weight_scale")
    }
    tensors = {"rope_table": (one.rope_table, other.rope_table)}
    for path, mine, theirs in ((INDEX, one.index, other.index), (MAIN, one.main, other.main)):
        if mine is not None and theirs is not None:
            tensors[f"{path}.ape"] = (mine.ape, theirs.ape)
            tensors[f"{path}.norm_weight"] = (mine.norm_weight, theirs.norm_weight)
    different = [name for name, (x, y) in constants.items() if x != y]
    different += [name for name, (x, y) in tensors.items() if not torch.equal(x, y)]
    if different:
        raise RecordingError(
            f"layer {one.layer}: {', '.join(different)} differ between the recordings; expected "
            "two recordings of one model and one input"
        )


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
    one, other = pair.given, pair.own_given
    rows = {(MAIN, INPUT): equal_rows(other.hidden, one.hidden, "input")}
    for path, meant, own in ((INDEX, one.index, other.index), (MAIN, one.main, other.main)):
        if meant is not None and own is not None:
            rows[path, PROJECTED] = equal_rows(
                torch.cat((own.kv, own.score), dim=1),
                torch.cat((meant.kv, meant.score), dim=1),
                f"{path}.projected",
            )
    if one.query is not None and other.query is not None:
        meant_q = torch.cat((one.query.q.flatten(1), one.query.weights), dim=1)
        own_q = torch.cat((other.query.q.flatten(1), other.query.weights), dim=1)
        rows[QUERY, PROJECTED] = equal_rows(own_q, meant_q, "query.projected")
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
    return compare_dense(own, Enclosure(value, delta), Precision.BF16 if short else Precision.FP32)


def _dumped_errors(pair: LayerPair, brought: frozenset[StageKey]) -> dict[StageKey, StageErrors]:
    one, other = pair.given, pair.own_given
    rows: dict[StageKey, RowErrors] = {}
    if (MAIN, INPUT) in brought:
        rows[MAIN, INPUT] = equal_rows(other.hidden, one.hidden, "input")
    width = one.hidden.shape[1]
    for path, meant, own in ((INDEX, one.index, other.index), (MAIN, one.main, other.main)):
        if meant is not None and own is not None and (path, PROJECTED) in brought:
            kv = dumped_projection(own.kv, meant.kv, width)
            score = dumped_projection(own.score, meant.score, width)
            rows[path, PROJECTED] = kv.join(score, first_dim=meant.kv.shape[1])
    if one.query is not None and other.query is not None and (QUERY, PROJECTED) in brought:
        q = dumped_projection(other.query.q.flatten(1), one.query.q.flatten(1), width, LATENT)
        weights = dumped_projection(other.query.weights, one.query.weights, width)
        rows[QUERY, PROJECTED] = q.join(weights, first_dim=one.query.q[0].numel())
    return {key: StageErrors(key, row, row) for key, row in rows.items()}
