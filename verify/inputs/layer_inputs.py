"""What both sides are given for one layer: the reference's projections and the constants."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import (
    CompressorInputs,
    LayerInputs,
    QueryInputs,
    no_compressor,
)
from needlepoint.reference.formats.names import PER_TOKEN
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import Precision
from needlepoint.reference.rope import rope_table
from needlepoint.reference.stages import KeyProjections, Projected, QueryProjections
from needlepoint.reference.weights import CompressorWeights, LayerWeights
from needlepoint.verify.base.placement import CPU, on, placed
from needlepoint.verify.inputs.load import Inputs

_BLOCK_TOKENS = 1024
"""Tokens projected at once; a multiple of the projections' row block."""


@dataclass(frozen=True)
class GivenLayer:
    """The given tensors of one layer, and what the reference needs of it besides."""

    inputs: LayerInputs  # What candidates are given: projections rounded to fp32, and constants.
    latent: Tensor  # ``[tokens, q_lora_rank]`` query latent, for attention.
    window: Tensor  # ``[tokens, head_dim]`` window projections, for attention.

    def projected(self, request: int, start: int, stop: int) -> Projected:
        """Return the projections of tokens ``start .. stop - 1`` of a request, float64."""
        rows = self._rows(request, start, stop)
        query = self.inputs.query
        return Projected(
            first_position=start,
            index=_key_rows(self.inputs.index, rows),
            main=_key_rows(self.inputs.main, rows),
            query=None
            if query is None
            else QueryProjections(_wide(query.q[rows]), _wide(query.weights[rows])),
            latent=_wide(self.latent[rows]),
            window=_wide(self.window[rows]),
        )

    def latent_rows(self, request: int, start: int, stop: int) -> Tensor:
        """Return the query latent of tokens ``start .. stop - 1`` of a request, float64."""
        return _wide(self.latent[self._rows(request, start, stop)])

    def window_rows(self, request: int, start: int, stop: int) -> Tensor:
        """Return the window projections of the same tokens, float64."""
        return _wide(self.window[self._rows(request, start, stop)])

    def request(self, request: int) -> GivenLayer:
        """Return one request by itself: views of the same tensors."""
        length, given = self.inputs.lengths[request], self.inputs
        rows = self._rows(request, 0, length)

        def path(part: CompressorInputs) -> CompressorInputs:
            return replace(part, kv=part.kv[rows], score=part.score[rows])

        query = None
        if given.query is not None:
            query = QueryInputs(given.query.q[rows], given.query.weights[rows])
        inputs = replace(
            given,
            lengths=(length,),
            index=None if given.index is None else path(given.index),
            main=path(given.main),
            query=query,
            rope_table=given.rope_table[:length],
            hidden=given.hidden[rows],
        )
        return GivenLayer(inputs, self.latent[rows], self.window[rows])

    def _rows(self, request: int, start: int, stop: int) -> slice:
        offset = sum(self.inputs.lengths[:request])
        return slice(offset + start, offset + stop)


def given_layer(inputs: Inputs, layer: int, reference: ReferenceLayer) -> GivenLayer:
    """Project one layer's hidden states and return what both sides are given.

    Parameters
    ----------
    inputs
        The run's input.
    layer
        Layer with an indexer or a compressor.
    reference
        Reference of the layer, whose projections are rounded to fp32; they are made where its
        weights lie, and returned on the CPU.

    Raises
    ------
    ValueError
        If the layer has neither.
    """
    config, weights = inputs.config, placed(reference.weights, CPU)
    if weights.main is None and weights.index is None:
        raise ValueError(f"layer {layer} has ratio 0: there is no compressor to judge")
    rows = _projected_rows(inputs, layer, reference)
    table = rope_table(placed(reference.frequencies, CPU), max(inputs.requests), Precision.FP32)
    query = None
    if "query.q" in rows:
        query = QueryInputs(q=rows["query.q"], weights=rows["query.weights"])
    given = LayerInputs(
        layer=layer,
        ratio=reference.ratio,
        lengths=inputs.requests,
        index=None if weights.index is None else _compressor(weights.index, rows, "index"),
        main=no_compressor(inputs.tokens)
        if weights.main is None
        else _compressor(weights.main, rows, "main"),
        query=query,
        rope_table=table.to(torch.float32),
        norm_eps=config.index_norm_eps if reference.ratio == PER_TOKEN else config.norm_eps,
        topk=config.index_topk,
        weight_scale=config.index_weight_scale,
        hidden=inputs.hidden(layer),
        layer_weights=_parameters(weights),
        seed=inputs.seed,
        index_rope=config.index_rope,
    )
    return GivenLayer(given, rows["latent"], rows["window"])


def fingerprint(inputs: LayerInputs) -> dict[str, int]:
    """Return a checksum of every given tensor, to show that a candidate changed none of them."""
    return {name: _checksum(tensor) for name, tensor in given_tensors(inputs)}


def changed_tensors(before: Mapping[str, int], inputs: LayerInputs) -> list[str]:
    """Return the names of given tensors whose bytes are no longer those of ``before``."""
    after = fingerprint(inputs)
    return [name for name, value in before.items() if after.get(name) != value]


def given_tensors(inputs: LayerInputs) -> Iterator[tuple[str, Tensor]]:
    """Yield every given tensor by name."""
    for name, part in (("index", inputs.index), ("main", inputs.main), ("query", inputs.query)):
        if part is not None:
            yield from ((f"{name}.{key}", tensor) for key, tensor in part.tensors().items())
    yield "rope_table", inputs.rope_table
    yield "hidden", inputs.hidden
    yield from inputs.layer_weights.items()


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data)


def _projected_rows(inputs: Inputs, layer: int, reference: ReferenceLayer) -> dict[str, Tensor]:
    """Return every projection as fp32 ``[tokens, ..]``, made in blocks of tokens."""
    rows: dict[str, Tensor] = {}
    offset = 0
    for part in torch.split(inputs.hidden(layer), list(inputs.requests)):
        for start in range(0, len(part), _BLOCK_TOKENS):
            tokens = part[start : start + _BLOCK_TOKENS].to(reference.frequencies.device)
            with on(tokens.device.type):
                found = reference.project_inputs(tokens, start)
            for name, block in _named(found):
                if name not in rows:
                    rows[name] = torch.empty(inputs.tokens, *block.shape[1:])
                rows[name][offset + start : offset + start + len(block)] = block
        offset += len(part)
    return rows


def _named(projected: Projected) -> Iterator[tuple[str, Tensor]]:
    for path, part in (("index", projected.index), ("main", projected.main)):
        if part is not None:
            yield f"{path}.kv", part.kv
            yield f"{path}.score", part.score
    if projected.query is not None:
        yield "query.q", projected.query.q
        yield "query.weights", projected.query.weights
    yield "latent", projected.latent
    yield "window", projected.window


def _key_rows(given: CompressorInputs | None, rows: slice) -> KeyProjections | None:
    return (
        None if given is None else KeyProjections(_wide(given.kv[rows]), _wide(given.score[rows]))
    )


def _wide(rows: Tensor) -> Tensor:
    return rows.to(torch.float64)


def _compressor(
    weights: CompressorWeights, rows: Mapping[str, Tensor], path: str
) -> CompressorInputs:
    return CompressorInputs(
        kv=rows[f"{path}.kv"],
        score=rows[f"{path}.score"],
        ape=weights.ape.to(torch.float32),
        norm_weight=weights.norm.to(torch.float32),
        norm_bias=None if weights.norm_bias is None else weights.norm_bias.to(torch.float32),
    )


def _parameters(weights: LayerWeights) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in weights.__dict__.items():
        if isinstance(value, CompressorWeights):
            found |= {f"{name}.{key}": tensor for key, tensor in value.tensors().items()}
        elif value is not None:
            found[name] = value
    return found
