"""One layer of two recordings: the constants that must be equal, and what both sides were given."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from needlepoint.optimized.interface import INDEX, MAIN, QUERY, LayerInputs, Observed, StageKey
from needlepoint.verify.byte_compare import equal_rows
from needlepoint.verify.key_side import StageErrors
from needlepoint.verify.recordings import RecordingError
from needlepoint.verify.recordings_layer import layer_record
from needlepoint.verify.stages import INPUT, PROJECTED


@dataclass(frozen=True)
class LayerPair:
    """One layer of both recordings; ``own`` is what is judged."""

    given: LayerInputs
    meant: Observed
    own_given: LayerInputs
    own: Observed

    @property
    def stages(self) -> frozenset[StageKey]:
        """Stages that both sides brought, what both were given among them."""
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

    Raises
    ------
    ValueError
        If shapes or dtypes differ.
    """
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
