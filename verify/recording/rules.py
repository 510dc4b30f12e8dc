"""Which tensors a recording must have, with which dtype and shape.

The rules of a layer follow from the stages that the manifest declares, the request lengths and the
ratio; the widths of rows are those of the given tensors, and everything observed must agree with
them. Writer and reader apply the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from needlepoint.optimized.protocol.interface import INDEX, MAIN, QUERY
from needlepoint.optimized.protocol.stages import StageTensor, stage_named
from needlepoint.reference.formats.names import PER_TOKEN
from needlepoint.verify.base.stage_tensors import Rules, given_rules, output_rules
from needlepoint.verify.base.stages import INPUT, QUERIES, STORED, WEIGHTS
from needlepoint.verify.recording.manifest import LayerRecord, RecordingError, TensorRecord

SHARED_INPUT = "input"
"""Hidden states that are the input of every layer."""


def check_tensor(
    name: str, tensor: TensorRecord, rule: StageTensor, dims: Mapping[str, int]
) -> None:
    """Raise :class:`RecordingError` where a tensor breaks its rule."""
    fault = rule.fault(tensor.dtype, tensor.shape, dims)
    if fault is not None:
        raise RecordingError(f"tensor {name}: {fault}")


def check_input(name: str, tensor: TensorRecord, lengths: Sequence[int]) -> None:
    """Raise :class:`RecordingError` unless a tensor can be hidden states of these requests."""
    (rule,) = stage_named(INPUT).tensors_of(MAIN)
    check_tensor(name, tensor, rule, {"tokens": sum(lengths)})


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
    for name, (rule, dims) in rules.items():
        if name not in tensors:
            raise RecordingError(
                f"layer {record.layer}: tensor {name} is missing; the manifest declares its stage"
            )
        check_tensor(name, tensors[name], rule, dims)
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
) -> Rules:
    """Return the rule of every tensor by its name without the layer's prefix."""
    prefix, heads = layer_prefix(record.layer), 0
    widths = {
        path: _dim(tensors, f"{prefix}{path}.given.norm_weight", axis=0, rank=1)
        for path in recorded_paths(record.ratio)
    }
    if INDEX in widths:
        heads = _dim(tensors, f"{prefix}query.projected.q", axis=1, rank=3)
    coded = "" if record.query is None else record.query.format
    return given_rules(lengths, record.ratio, widths, heads) | output_rules(
        record.stages, lengths, record.ratio, widths, heads, coded
    )


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
