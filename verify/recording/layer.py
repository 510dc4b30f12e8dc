"""One layer as named tensors, both ways.

Every name contains the stage it belongs to: ``layer2.index.pooled``, ``layer2.index.stored.pages``,
``layer2.query.query.codes``. What is given to both sides stands under ``projected`` and ``given``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from pydantic import ValidationError
from torch import Tensor

from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    CompressorInputs,
    LayerInputs,
    Observed,
    PagedRows,
    QueryInputs,
    QueryRows,
    ScoreReader,
    no_compressor,
)
from needlepoint.reference.formats.names import PER_TOKEN
from needlepoint.verify.base.stage_tensors import output_tensors, returned_stages
from needlepoint.verify.base.stages import (
    ATTENTION,
    SCORES,
    STORED,
    TOPK,
    is_key_side,
)
from needlepoint.verify.recording.file import TensorSource, tensor_source
from needlepoint.verify.recording.manifest import (
    LayerRecord,
    PoolRecord,
    QueryRecord,
    RecordingError,
    first_fault,
)
from needlepoint.verify.recording.rules import recorded_paths

_SCORE_BLOCK_BYTES = 64 << 20


def layer_record(inputs: LayerInputs, observed: Observed) -> LayerRecord:
    """Return the manifest entry of a layer.

    Raises
    ------
    RecordingError
        Where a scalar or a stage is not one that a recording can hold.
    """
    query = observed.query
    try:
        layouts = {
            path: PoolRecord.model_validate(
                {"layout": rows.layout, "page_size": rows.page_size, "entries": rows.entries}
            )
            for path, rows in observed.stored.items()
        }
        return LayerRecord.model_validate(
            {
                "layer": inputs.layer,
                "ratio": inputs.ratio,
                "stages": returned_stages(inputs, observed),
                "layouts": layouts,
                "query": None
                if query is None
                else QueryRecord.model_validate(
                    {"format": query.format, "scale_folded": query.scale_folded}
                ),
                "norm_eps": inputs.norm_eps,
                "topk": inputs.topk,
                "weight_scale": inputs.weight_scale,
                "seed": inputs.seed,
                "peak_transient_bytes": observed.peak_transient_bytes,
                "path_taken": observed.path_taken,
                "index_rope": inputs.index_rope,
            }
        )
    except ValidationError as error:
        raise RecordingError(f"layer {inputs.layer}: {first_fault(error)}") from error


def layer_sources(inputs: LayerInputs, observed: Observed) -> dict[str, TensorSource]:
    """Return every tensor of a layer by name, hidden states apart."""
    tensors: dict[str, Tensor] = {"given.rope_table": inputs.rope_table}
    for path, given in inputs.paths.items():
        tensors[f"{path}.projected.kv"] = given.kv
        tensors[f"{path}.projected.score"] = given.score
        tensors[f"{path}.given.ape"] = given.ape
        tensors[f"{path}.given.norm_weight"] = given.norm_weight
        if given.norm_bias is not None:
            tensors[f"{path}.given.norm_bias"] = given.norm_bias
    if inputs.query is not None:
        tensors["query.projected.q"] = inputs.query.q
        tensors["query.projected.weights"] = inputs.query.weights
    for name, parameter in inputs.layer_weights.items():
        tensors[f"given.parameters.{name}"] = parameter
    tensors |= output_tensors(observed)
    prefix = f"layer{inputs.layer}."
    sources = {prefix + name: tensor_source(tensor) for name, tensor in tensors.items()}
    if observed.scores is not None:
        for request, length in enumerate(inputs.lengths):
            sources[f"{prefix}index.scores.{request}"] = _score_source(
                observed.scores, request, length, length // inputs.ratio
            )
    return sources


def layer_inputs(
    record: LayerRecord,
    lengths: tuple[int, ...],
    tensor: Callable[[str], Tensor],
    names: Iterable[str],
    hidden: Tensor,
) -> LayerInputs:
    """Return the given side of a recorded layer; ``tensor`` reads one tensor by its full name."""
    prefix = f"layer{record.layer}."
    parameters = f"{prefix}given.parameters."

    def compressor(path: str) -> CompressorInputs:
        return CompressorInputs(
            kv=tensor(f"{prefix}{path}.projected.kv"),
            score=tensor(f"{prefix}{path}.projected.score"),
            ape=tensor(f"{prefix}{path}.given.ape"),
            norm_weight=tensor(f"{prefix}{path}.given.norm_weight"),
            norm_bias=tensor(f"{prefix}{path}.given.norm_bias")
            if record.ratio == PER_TOKEN
            else None,
        )

    paths, query = recorded_paths(record.ratio), None
    if INDEX in paths:
        query = QueryInputs(
            q=tensor(f"{prefix}query.projected.q"),
            weights=tensor(f"{prefix}query.projected.weights"),
        )
    return LayerInputs(
        layer=record.layer,
        ratio=record.ratio,
        lengths=lengths,
        index=compressor(INDEX) if INDEX in paths else None,
        main=compressor(MAIN) if MAIN in paths else no_compressor(sum(lengths)),
        query=query,
        rope_table=tensor(f"{prefix}given.rope_table"),
        norm_eps=record.norm_eps,
        topk=record.topk,
        weight_scale=record.weight_scale,
        hidden=hidden,
        layer_weights={
            name.removeprefix(parameters): tensor(name)
            for name in names
            if name.startswith(parameters)
        },
        seed=record.seed,
        index_rope=record.index_rope,
    )


def layer_observed(
    record: LayerRecord,
    lengths: tuple[int, ...],
    tensor: Callable[[str], Tensor],
    names: Iterable[str],
    scores: ScoreReader,
) -> Observed:
    """Return the observed side of a recorded layer."""
    prefix, declared, known = f"layer{record.layer}.", set(record.stages), set(names)
    dense = {
        key: tensor(f"{prefix}{'.'.join(key)}")
        for key in record.stages
        if is_key_side(key) and key[1] != STORED
    }
    stored: dict[str, PagedRows] = {
        path: PagedRows(
            layout=pool.layout,
            pool=tensor(f"{prefix}{path}.stored.pages"),
            page_size=pool.page_size,
            page_table=tuple(
                tensor(f"{prefix}{path}.stored.page_table.{request}")
                for request in range(len(lengths))
            ),
            entries=pool.entries,
        )
        for path, pool in record.layouts.items()
    }
    query = None
    if record.query is not None:
        scales = f"{prefix}query.query.scales"
        query = QueryRows(
            format=record.query.format,
            codes=tensor(f"{prefix}query.query.codes"),
            scales=tensor(scales) if scales in known else None,
            weights=tensor(f"{prefix}query.weights"),
            scale_folded=record.query.scale_folded,
        )
    return Observed(
        dense=dense,
        stored=stored,
        query=query,
        scores=scores if (INDEX, SCORES) in declared else None,
        topk=tensor(f"{prefix}index.topk") if (INDEX, TOPK) in declared else None,
        attention=tensor(f"{prefix}main.attention") if (MAIN, ATTENTION) in declared else None,
        peak_transient_bytes=record.peak_transient_bytes,
        path_taken=record.path_taken,
    )


def _score_source(scores: ScoreReader, request: int, length: int, entries: int) -> TensorSource:
    step = max(1, _SCORE_BLOCK_BYTES // (4 * max(entries, 1)))

    def blocks() -> Iterable[Tensor]:
        for start in range(0, length, step):
            stop = min(start + step, length)
            block = scores(request, start, stop)
            if tuple(block.shape) != (stop - start, entries):
                raise RecordingError(
                    f"index.scores of request {request}, queries {start} to {stop}: shape "
                    f"{list(block.shape)}, expected [{stop - start}, {entries}]"
                )
            yield block

    # The dtype must be known before the first block is written.
    dtype = scores(request, 0, 1).dtype if length else torch.float32
    return TensorSource(dtype, (length, entries), blocks)
