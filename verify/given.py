"""What both sides are given for one layer: the reference's projections and the constants."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from needlepoint.optimized.interface import CompressorInputs, LayerInputs, QueryInputs
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import Precision
from needlepoint.reference.rope import rope_table
from needlepoint.reference.stages import KeyProjections, Projected, QueryProjections
from needlepoint.reference.weights import CompressorWeights, LayerWeights
from needlepoint.verify.inputs import Inputs


def project_requests(inputs: Inputs, layer: int, reference: ReferenceLayer) -> list[Projected]:
    """Return the projections of every request of a layer."""
    parts = inputs.hidden(layer).split(list(inputs.requests))
    return [reference.project_inputs(part) for part in parts]


def given_inputs(
    inputs: Inputs, layer: int, reference: ReferenceLayer, projected: list[Projected]
) -> LayerInputs:
    """Return the given tensors of one layer, fp32, concatenated over requests.

    Parameters
    ----------
    inputs
        The run's input.
    layer
        Layer with ratio 4 or 128.
    reference
        Reference of the layer, whose projections were rounded to fp32.
    projected
        :func:`project_requests` of it.

    Raises
    ------
    ValueError
        If the layer has no compressor.
    """
    config, weights = inputs.config, inputs.weights(layer)
    if weights.main is None:
        raise ValueError(f"layer {layer} has ratio 0: there is no compressor to judge")
    table = rope_table(reference.frequencies, max(inputs.requests), Precision.FP32)
    index = query = None
    if weights.index is not None:
        index = _compressor(weights.index, projected, "index")
        query = QueryInputs(
            q=_joined(projected, "query", "q"), weights=_joined(projected, "query", "weights")
        )
    return LayerInputs(
        layer=layer,
        ratio=reference.ratio,
        lengths=inputs.requests,
        index=index,
        main=_compressor(weights.main, projected, "main"),
        query=query,
        rope_table=table.to(torch.float32),
        norm_eps=config.norm_eps,
        topk=config.index_topk,
        weight_scale=config.index_weight_scale,
        hidden=inputs.hidden(layer),
        layer_weights=_parameters(weights),
        seed=inputs.seed,
    )


def projected_rows(projected: Projected, rows: slice) -> Projected:
    """Return the projections of some tokens of a request."""
    return Projected(
        first_position=projected.first_position + rows.start,
        index=_key_rows(projected.index, rows),
        main=_key_rows(projected.main, rows),
        query=None
        if projected.query is None
        else QueryProjections(projected.query.q[rows], projected.query.weights[rows]),
        latent=projected.latent[rows],
        window=projected.window[rows],
    )


def fingerprint(inputs: LayerInputs) -> dict[str, int]:
    """Return a checksum of every given tensor, to show that a candidate changed none of them."""
    return {name: _checksum(tensor) for name, tensor in _tensors(inputs)}


def changed_tensors(before: Mapping[str, int], inputs: LayerInputs) -> list[str]:
    """Return the names of given tensors whose bytes are no longer those of ``before``."""
    after = fingerprint(inputs)
    return [name for name, value in before.items() if after[name] != value]


def _tensors(inputs: LayerInputs) -> Iterator[tuple[str, Tensor]]:
    for name, part in (("index", inputs.index), ("main", inputs.main), ("query", inputs.query)):
        if part is not None:
            yield from ((f"{name}.{key}", tensor) for key, tensor in part.__dict__.items())
    yield "rope_table", inputs.rope_table
    yield "hidden", inputs.hidden


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data)


def _key_rows(given: KeyProjections | None, rows: slice) -> KeyProjections | None:
    return None if given is None else KeyProjections(given.kv[rows], given.score[rows])


def _compressor(
    weights: CompressorWeights, projected: list[Projected], path: str
) -> CompressorInputs:
    return CompressorInputs(
        kv=_joined(projected, path, "kv"),
        score=_joined(projected, path, "score"),
        ape=weights.ape.to(torch.float32),
        norm_weight=weights.norm.to(torch.float32),
    )


def _joined(projected: list[Projected], path: str, name: str) -> Tensor:
    return torch.cat([getattr(getattr(part, path), name).to(torch.float32) for part in projected])


def _parameters(weights: LayerWeights) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in weights.__dict__.items():
        if isinstance(value, CompressorWeights):
            found |= {f"{name}.{key}": tensor for key, tensor in value.__dict__.items()}
        elif value is not None:
            found[name] = value
    return found
