"""The tensors of a layer by name, and what the registry says of their dtypes and shapes.

A live candidate's outputs and a recording on disk are held to the same entries: only where names,
dtypes and shapes come from differs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import LayerInputs, Observed
from needlepoint.optimized.protocol.stages import (
    INDEX,
    MAIN,
    QUERY,
    StageKey,
    StageTensor,
    stage_named,
)
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
    declared_stages,
    stage_order,
)

DTYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}
"""Dtypes that a stage can hold, as safetensors names them."""

_LONGEST_LAYOUT = 40

QUERY_FORMATS = ("bf16", "fp8", "fp4", "float64")
"""Formats of stored queries; ``float64`` is that of the reference."""

ROPE_TABLE = StageTensor("given.rope_table", ("F32",), ("longest", "any", "two"))
_GIVEN = (
    StageTensor("given.norm_weight", ("F32",), ("width",)),
    StageTensor("given.ape", ("F32",), ("ratio", "gates")),
)
_NORM_BIAS = StageTensor("given.norm_bias", ("F32",), ("width",))

Rules = dict[str, tuple[StageTensor, Mapping[str, int]]]
"""Name without the layer's prefix to what the tensor must be, and the size of every dim."""


def given_rules(lengths: Sequence[int], ratio: int, widths: Mapping[str, int], heads: int) -> Rules:
    """Return the rules of what both sides are given, hidden states apart.

    Parameters
    ----------
    lengths
        Tokens of each request.
    ratio
        Compression ratio of the layer.
    widths
        Elements of a row, by key path.
    heads
        Of the indexer; 0 without one.
    """
    rules: Rules = {ROPE_TABLE.part: (ROPE_TABLE, {"longest": max(lengths), "two": 2})}
    for path, width in widths.items():
        dims = _dims(lengths, ratio, width, heads)
        extra = (_NORM_BIAS,) if ratio == PER_TOKEN else ()
        rules |= {f"{path}.{tensor.part}": (tensor, dims) for tensor in (*_GIVEN, *extra)}
        rules |= stage_rules((path, PROJECTED), lengths, ratio, dims)
    if INDEX in widths:
        dims = _dims(lengths, ratio, widths[INDEX], heads)
        rules |= stage_rules((QUERY, PROJECTED), lengths, ratio, dims)
    return rules


def output_rules(
    stages: Collection[StageKey],
    lengths: Sequence[int],
    ratio: int,
    widths: Mapping[str, int],
    heads: int,
    query_format: str,
) -> Rules:
    """Return the rules of the tensors of observed stages.

    Parameters
    ----------
    stages
        What was observed; common input among them is left out.
    lengths, ratio, widths, heads
        As :func:`given_rules`.
    query_format
        Format of stored queries.
    """
    rules: Rules = {}
    for path, stage in stages:
        if stage not in (INPUT, PROJECTED):
            dims = _dims(lengths, ratio, widths[INDEX if path == QUERY else path], heads)
            rules |= stage_rules((path, stage), lengths, ratio, dims, query_format)
    return rules


def stage_rules(
    key: StageKey,
    lengths: Sequence[int],
    ratio: int,
    dims: Mapping[str, int],
    query_format: str = "",
) -> Rules:
    """Return the rules of one stage's tensors."""
    rules: Rules = {}
    for tensor in stage_named(key[1]).tensors_of(key[0]):
        if tensor.formats and query_format not in tensor.formats:
            continue
        name = ".".join(part for part in (*key, tensor.part) if part)
        if "{request}" not in name:
            rules[name] = (tensor, dims)
            continue
        for request, length in enumerate(lengths):
            own = {**dims, "length": length, "windows": length // ratio}
            rules[name.replace("{request}", str(request))] = (tensor, own)
    return rules


def returned_stages(inputs: LayerInputs, outputs: Observed) -> tuple[StageKey, ...]:
    """Return the common input and every stage that was observed, in order.

    Raises
    ------
    ValueError
        For a path or stage that does not exist.
    """
    found: list[StageKey] = [(MAIN, INPUT), *((path, PROJECTED) for path in inputs.paths)]
    found += [(QUERY, PROJECTED)] if inputs.query is not None else []
    found += [*outputs.dense, *((path, STORED) for path in outputs.stored)]
    found += [(QUERY, QUERIES), (QUERY, WEIGHTS)] if outputs.query is not None else []
    found += [(INDEX, SCORES)] if outputs.scores is not None else []
    found += [(INDEX, TOPK)] if outputs.topk is not None else []
    found += [(MAIN, ATTENTION)] if outputs.attention is not None else []
    return tuple(sorted(found, key=stage_order))


def output_tensors(outputs: Observed) -> dict[str, Tensor]:
    """Return every observed tensor by name, except scores, which are read in blocks."""
    tensors = {f"{path}.{stage}": rows for (path, stage), rows in outputs.dense.items()}
    for path, paged in outputs.stored.items():
        tensors[f"{path}.stored.pages"] = paged.pool
        for request, table in enumerate(paged.page_table):
            tensors[f"{path}.stored.page_table.{request}"] = table
    if outputs.query is not None:
        tensors["query.query.codes"] = outputs.query.codes
        tensors["query.weights"] = outputs.query.weights
        if outputs.query.scales is not None:
            tensors["query.query.scales"] = outputs.query.scales
    if outputs.topk is not None:
        tensors["index.topk"] = outputs.topk
    if outputs.attention is not None:
        tensors["main.attention"] = outputs.attention
    return tensors


def check_outputs(inputs: LayerInputs, outputs: Observed) -> tuple[StageKey, ...]:
    """Hold what a live candidate returned to the registry.

    Returns
    -------
    tuple
        :func:`returned_stages`.

    Raises
    ------
    ValueError
        Naming a stage that the layer does not have, a tensor of another shape or dtype than its
        stage has, or one that is missing.
    """
    where = f"layer {inputs.layer}"
    _check_fields(where, outputs)
    stages = returned_stages(inputs, outputs)
    known = declared_stages(inputs.ratio)
    for key in stages:
        if key not in known:
            raise ValueError(
                f"{where}: a layer of ratio {inputs.ratio} has no stage {'.'.join(key)}"
            )
    for path, stage in outputs.dense:
        if not stage_named(stage).dense:
            raise ValueError(
                f"{where}: stage {path}.{stage} stands in dense; expected it in its own field of "
                "Observed"
            )
    expected = tuple(length // inputs.ratio for length in inputs.lengths)
    for path, paged in outputs.stored.items():
        if paged.entries != expected:
            raise ValueError(
                f"{where}: {path}.stored has entries {list(paged.entries)}, expected "
                f"{list(expected)} (request lengths // {inputs.ratio})"
            )
    widths = {path: given.norm_weight.numel() for path, given in inputs.paths.items()}
    rules = output_rules(
        stages,
        inputs.lengths,
        inputs.ratio,
        widths,
        0 if inputs.query is None else inputs.query.q.shape[1],
        "" if outputs.query is None else outputs.query.format,
    )
    tensors = output_tensors(outputs)
    for name, found in _facts(tensors, outputs, inputs):
        if name not in rules:
            raise ValueError(
                f"tensor layer{inputs.layer}.{name} belongs to no stage that was returned; "
                "remove it"
            )
        rule, dims = rules.pop(name)
        fault = rule.fault(*found, dims)
        if fault is not None:
            raise ValueError(f"tensor layer{inputs.layer}.{name}: {fault}")
    for name in rules:
        raise ValueError(f"tensor layer{inputs.layer}.{name} is missing; its stage was returned")
    return stages


def _facts(
    tensors: Mapping[str, Tensor], outputs: Observed, inputs: LayerInputs
) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """Yield name, dtype and shape of every tensor; of scores, the dtype of the first row."""
    for name, tensor in tensors.items():
        yield name, (_dtype(tensor, name, inputs.layer), tuple(tensor.shape))
    if outputs.scores is not None:
        for request, length in enumerate(inputs.lengths):
            name, shape = f"index.scores.{request}", (length, length // inputs.ratio)
            row = outputs.scores(request, 0, 1)
            yield name, (_dtype(row, name, inputs.layer), shape)


def _dtype(tensor: Tensor, name: str, layer: int) -> str:
    if tensor.dtype not in DTYPE_NAMES:
        raise ValueError(
            f"tensor layer{layer}.{name}: dtype {tensor.dtype}, expected one of "
            f"{', '.join(DTYPE_NAMES.values())}"
        )
    return DTYPE_NAMES[tensor.dtype]


def _check_fields(where: str, outputs: Observed) -> None:
    """Refuse what stands beside the tensors and is not what its annotation says."""
    for name in ("dense", "stored"):
        if not isinstance(getattr(outputs, name), Mapping):
            raise ValueError(
                f"{where}: {name} is {_shown(getattr(outputs, name))}, expected a dict"
            )
    for key in outputs.dense:
        if not isinstance(key, tuple) or [type(part) for part in key] != [str, str]:
            raise ValueError(f"{where}: dense has the key {_shown(key)}, expected (path, stage)")
    for path, paged in outputs.stored.items():
        for name, kind, found in (
            ("layout", str, paged.layout),
            ("page_size", int, paged.page_size),
            ("page_table", tuple, paged.page_table),
            ("entries", tuple, paged.entries),
        ):
            if type(found) is not kind:
                raise ValueError(
                    f"{where}: {path}.stored has {name} {_shown(found)}, expected {kind.__name__}"
                )
        if not 1 <= paged.page_size < 1 << 32:
            raise ValueError(
                f"{where}: {path}.stored has page_size {paged.page_size}, expected at least 1"
            )
        if len(paged.layout) > _LONGEST_LAYOUT:
            raise ValueError(f"{where}: {path}.stored has layout {_shown(paged.layout)}, no layout")
        if any(type(count) is not int for count in paged.entries):
            raise ValueError(
                f"{where}: {path}.stored has entries {_shown(paged.entries)}, expected whole "
                "numbers"
            )
    if outputs.query is not None and outputs.query.format not in QUERY_FORMATS:
        raise ValueError(
            f"{where}: query format {_shown(outputs.query.format)}, expected one of "
            f"{', '.join(QUERY_FORMATS)}"
        )
    if outputs.query is not None and type(outputs.query.scale_folded) is not bool:
        raise ValueError(
            f"{where}: scale_folded is {_shown(outputs.query.scale_folded)}, expected True or False"
        )
    peak = outputs.peak_transient_bytes
    if type(peak) is not int or not 0 <= peak < 1 << 48:
        raise ValueError(
            f"{where}: peak_transient_bytes is {_shown(peak)}, expected a whole number of bytes"
        )
    if type(outputs.path_taken) is not str:
        raise ValueError(f"{where}: path_taken is {_shown(outputs.path_taken)}, expected a text")


def _shown(value: object) -> str:
    """Return a foreign value for a message: its type, and a text or number cut short."""
    if isinstance(value, str | int | float | tuple | list):
        return f"{value!r:.80}"
    return f"of type {type(value).__name__}"


def _dims(lengths: Sequence[int], ratio: int, width: int, heads: int) -> dict[str, int]:
    columns = width * (2 if ratio == 4 else 1)  # overlapping windows need both halves
    return {
        "tokens": sum(lengths),
        "entries": sum(length // ratio for length in lengths),
        "width": width,
        "columns": columns,
        "gates": 0 if ratio == PER_TOKEN else columns,
        "ratio": ratio,
        "heads": heads,
        "half": width // 2,
        "blocks": width // 32,
    }
