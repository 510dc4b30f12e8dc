"""The recording and every synthetic kind, projected by the reference, through the CUDA stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from needlepoint.benchmarks.stored_bytes import ByteCount, compare_inputs
from needlepoint.optimized.protocol.interface import LayerInputs
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.verify.inputs.layer_inputs import given_layer
from needlepoint.verify.inputs.load import load_inputs
from needlepoint.verify.inputs.synthetic import VARIED

SOURCES = ("mini", *(f"synthetic:{kind}" for kind in VARIED))


def projected(source: str, tokens: int | None = None) -> Iterator[LayerInputs]:
    """Yield every compressor of an input's layers as the main one of a layer, fp32 then bf16."""
    inputs = load_inputs(source, tokens=tokens)
    for layer in inputs.layers:
        reference = ReferenceLayer(inputs.config, layer, inputs.weights(layer), BF16_CONTRACT)
        given = given_layer(inputs, layer, reference).inputs
        for part in (given.index, given.main):
            if part is None:
                continue
            wide = replace(given, index=None, query=None, main=part)
            yield wide
            narrow = replace(part, kv=part.kv.bfloat16(), score=part.score.bfloat16())
            yield replace(wide, main=narrow)


def sweep_inputs() -> Iterator[ByteCount]:
    """Yield byte comparisons over every input of :data:`SOURCES`, both input dtypes."""
    for source in SOURCES:
        for inputs in projected(source):
            torch.cuda.empty_cache()
            yield from compare_inputs(inputs, source)
