"""Which tensors a recording must have, with which dtype and shape.

The rules of a layer follow from the stages that the manifest declares, the request lengths and the
ratio; the widths of rows are those of the given tensors, and everything observed must agree with
them. Writer and reader apply the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from needlepoint.optimized.protocol.interface import INDEX, MAIN, QUERY, StageKey
from needlepoint.reference.formats.names import PER_TOKEN
from needlepoint.verify.base.stages import (
    ATTENTION,
    INPUT,
    PROJECTED,
    QUERIES,
    SCORES,
    STORED,
    TOPK,
    WEIGHTS,
)
from needlepoint.verify.recording.manifest import LayerRecord, RecordingError, TensorRecord

SHARED_INPUT = "input"
"""Hidden states that are the input of every layer."""

_FLOATS = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class TensorRule:
    """What a tensor must be. A dim of None is free; ``free_rank`` allows more dims after these."""

    dtypes: tuple[str, ...]
    shape: tuple[int | None, ...]
    free_rank: bool = False

    def check(self, name: str, tensor: TensorRecord) -> None:
        """Raise :class:`RecordingError` where a tensor breaks the rule."""
        if tensor.dtype not in self.dtypes:
            raise RecordingError(
                f"tensor {name}: dtype {tensor.dtype}, expected {' or '.join(self.dtypes)}"
            )
        head = tensor.shape[: len(self.shape)] if self.free_rank else tensor.shape
        if len(head) != len(self.shape) or any(
            want not in (None, have) for want, have in zip(self.shape, head, strict=True)
        ):
            dims = ["any" if want is None else str(want) for want in self.shape]
            raise RecordingError(
                f"tensor {name}: shape {list(tensor.shape)}, expected "
                f"[{', '.join(dims)}{', ...' if self.free_rank else ''}]"
            )


def layer_prefix(layer: int) -> str:
    """Return how the names of one layer's tensors begin."""
    return f"layer{layer}."


def input_name(layer: int, names: Mapping[str, object]) -> str:
    """Return the name of the hidden states of a layer: its own, or those shared by all.

    Raises
    ------
    RecordingError
        Where the recording has neither.
    """
    own = f"{layer_prefix(layer)}{INPUT}"
    for name in (own, SHARED_INPUT):
        if name in names:
            return name
    raise RecordingError(f"layer {layer}: neither tensor {own} nor tensor {SHARED_INPUT} is there")


def input_rule(lengths: Sequence[int]) -> TensorRule:
    """Return the rule of hidden states."""
    return TensorRule(("BF16",), (sum(lengths), None))


def check_layer(
    record: LayerRecord, lengths: Sequence[int], tensors: Mapping[str, TensorRecord]
) -> None:
    """Check one layer's tensors against what its declared stages need.

    Parameters
    ----------
    record
        The layer as the manifest declares it.
    lengths
        Tokens of each request.
    tensors
        Every tensor of the recording, or of this layer, by name; other layers are ignored.

    Raises
    ------
    RecordingError
        Where a declared stage has no tensor, a tensor belongs to no declared stage, a dtype or
        shape is wrong, or stages, layouts and the query record contradict each other.
    """
    _check_declarations(record, lengths)
    prefix = layer_prefix(record.layer)
    rules = {prefix + name: rule for name, rule in _layer_rules(record, lengths, tensors).items()}
    parameters = f"{prefix}given.parameters."
    for name, rule in rules.items():
        if name not in tensors:
            raise RecordingError(
                f"layer {record.layer}: tensor {name} is missing; the manifest declares its stage"
            )
        rule.check(name, tensors[name])
    for name in tensors:
        known = name in rules or name.startswith(parameters) or name == f"{prefix}{INPUT}"
        if name.startswith(prefix) and not known:
            raise RecordingError(
                f"layer {record.layer}: tensor {name} belongs to no stage that the manifest "
                "declares; declare the stage or remove the tensor"
            )


def recorded_paths(ratio: int) -> tuple[str, ...]:
    """Return the key paths of a layer."""
    return {PER_TOKEN: (INDEX,), 4: (INDEX, MAIN)}.get(ratio, (MAIN,))


def _layer_rules(
    record: LayerRecord, lengths: Sequence[int], tensors: Mapping[str, TensorRecord]
) -> dict[str, TensorRule]:
    """Return the rule of every tensor by its name without the layer's prefix."""
    prefix, tokens = layer_prefix(record.layer), sum(lengths)
    paths = recorded_paths(record.ratio)
    widths = {
        path: _dim(tensors, f"{prefix}{path}.given.norm_weight", axis=0, rank=1) for path in paths
    }
    rules = {"given.rope_table": TensorRule(("F32",), (max(lengths), None, 2))}
    for path, width in widths.items():
        columns = width * (2 if record.ratio == 4 else 1)  # overlapping windows need both halves
        pooled = 0 if record.ratio == PER_TOKEN else columns
        rules[f"{path}.given.norm_weight"] = TensorRule(("F32",), (width,))
        if record.ratio == PER_TOKEN:
            rules[f"{path}.given.norm_bias"] = TensorRule(("F32",), (width,))
        rules[f"{path}.given.ape"] = TensorRule(("F32",), (record.ratio, pooled))
        rules[f"{path}.projected.kv"] = TensorRule(_FLOATS, (tokens, columns))
        rules[f"{path}.projected.score"] = TensorRule(_FLOATS, (tokens, pooled))
    heads = 0
    if INDEX in paths:
        heads = _dim(tensors, f"{prefix}query.projected.q", axis=1, rank=3)
        rules["query.projected.q"] = TensorRule(_FLOATS, (tokens, heads, widths[INDEX]))
        rules["query.projected.weights"] = TensorRule(_FLOATS, (tokens, heads))
    for path, stage in record.stages:
        if (path, stage) == (QUERY, QUERIES):
            rules |= _query_rules(record, tokens, heads, widths[INDEX])
        elif (path, stage) == (QUERY, WEIGHTS):
            rules["query.weights"] = TensorRule(_FLOATS, (tokens, heads))
        elif stage not in (INPUT, PROJECTED):
            rules |= _stage_rules(record, (path, stage), lengths, widths[path])
    return rules


def _stage_rules(
    record: LayerRecord, key: StageKey, lengths: Sequence[int], width: int
) -> dict[str, TensorRule]:
    stage, name = key[1], ".".join(key)
    requests = range(len(lengths))
    if stage == STORED:
        tables = {
            f"{name}.page_table.{request}": TensorRule(("I32",), (None,)) for request in requests
        }
        return {f"{name}.pages": TensorRule(("U8",), (None, None)), **tables}
    if stage == SCORES:
        return {
            f"{name}.{request}": TensorRule(
                _FLOATS, (lengths[request], lengths[request] // record.ratio)
            )
            for request in requests
        }
    if stage == TOPK:
        return {name: TensorRule(("I32",), (sum(lengths), None))}
    if stage == ATTENTION:
        return {name: TensorRule(_FLOATS, (sum(lengths),), free_rank=True)}
    rows = sum(length // record.ratio for length in lengths)
    return {name: TensorRule(_FLOATS, (rows, width))}


def _query_rules(record: LayerRecord, tokens: int, heads: int, width: int) -> dict[str, TensorRule]:
    coded = record.query.format if record.query is not None else "bf16"
    codes, scales = "query.query.codes", "query.query.scales"
    if coded == "fp8":
        return {
            codes: TensorRule(("U8",), (tokens, heads, width)),
            scales: TensorRule(("F32",), (tokens, heads)),
        }
    if coded == "fp4":
        return {
            codes: TensorRule(("U8",), (tokens, heads, width // 2)),
            scales: TensorRule(("U8",), (tokens, heads, width // 32)),
        }
    return {
        codes: TensorRule(("F64",) if coded == "float64" else ("BF16",), (tokens, heads, width))
    }


def _check_declarations(record: LayerRecord, lengths: Sequence[int]) -> None:
    stages = set(record.stages)
    where = f"layer {record.layer}"
    for path in (INDEX, MAIN):
        if ((path, STORED) in stages) != (path in record.layouts):
            raise RecordingError(
                f"{where}: stage {path}.stored and its layout must be declared together"
            )
    together = {(QUERY, QUERIES) in stages, (QUERY, WEIGHTS) in stages, record.query is not None}
    if len(together) > 1:
        raise RecordingError(
            f"{where}: stages query.query and query.weights and the query record must be declared "
            "together"
        )
    expected = tuple(length // record.ratio for length in lengths)
    for path, pool in record.layouts.items():
        if pool.entries != expected:
            raise RecordingError(
                f"{where}: {path}.stored has entries {list(pool.entries)}, expected "
                f"{list(expected)} (request lengths // {record.ratio})"
            )


def _dim(tensors: Mapping[str, TensorRecord], name: str, *, axis: int, rank: int) -> int:
    if name not in tensors:
        raise RecordingError(f"tensor {name} is missing; every recorded layer needs it")
    shape = tensors[name].shape
    if len(shape) != rank:
        raise RecordingError(f"tensor {name}: shape {list(shape)}, expected {rank} dims")
    return shape[axis]
