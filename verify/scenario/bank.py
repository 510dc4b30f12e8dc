"""The tokens of scenarios: texts with their projections, and the layers that read them.

A token is (text, position). Every layer has its projections of every text, made by the reference
from drawn hidden states; shapes are small, ratios and row widths are the model's. One text more
than scenarios may name is what rejected drafts and padding say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    CompressorInputs,
    LayerInputs,
    QueryInputs,
)
from needlepoint.optimized.protocol.serving import CompressorParameters, LayerParameters, TokenRows
from needlepoint.optimized.serving.cache import first_needed
from needlepoint.reference.config import MODELS, ModelConfig
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.reference.weights import random_layer_weights
from needlepoint.verify.inputs.checks import tensor_digest
from needlepoint.verify.inputs.layer_inputs import given_layer
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.inputs.synthetic import synthetic_hidden
from needlepoint.verify.scenario.actions import Ints
from needlepoint.verify.scenario.events import MAX_TOKENS, TEXTS

RATIOS = (4, 128)
"""Ratio of the first and of the second layer."""
_LINES = TEXTS + 1

CONFIG: ModelConfig = replace(
    MODELS["mini"],
    name="scenario",
    hidden_size=64,
    q_lora_rank=64,
    n_heads=1,
    index_n_heads=2,
    index_topk=8,
    compress_ratios=RATIOS,
)
"""Eight picks, so that a few dozen entries are a selection."""


@dataclass(frozen=True)
class Bank:
    """All tokens of one layer."""

    inputs: LayerInputs  # Every text as a whole request, as candidates are given them.
    sha256: str  # Of the hidden states.

    @property
    def ratio(self) -> int:
        """Tokens an entry."""
        return self.inputs.ratio

    @property
    def paths(self) -> tuple[str, ...]:
        """The key paths of the layer."""
        return (MAIN,) if self.inputs.index is None else (INDEX, MAIN)

    def compressor(self, path: str) -> CompressorInputs:
        """Return the given tensors of a path, all texts."""
        index = self.inputs.index
        return index if path == INDEX and index is not None else self.inputs.main

    def parameters(self) -> LayerParameters:
        """Return what a server is told of the layer."""
        own = self.inputs
        found = {
            path: CompressorParameters(self.compressor(path).ape, self.compressor(path).norm_weight)
            for path in self.paths
        }
        return LayerParameters(
            layer=own.layer,
            ratio=own.ratio,
            index=found.get(INDEX),
            main=found[MAIN],
            rope_table=own.rope_table,
            norm_eps=own.norm_eps,
            topk=own.topk,
            weight_scale=own.weight_scale,
        )

    def rows(self, texts: Ints, first: int) -> Tensor:
        """Return the rows of consecutive positions from ``first`` on, each of its own text."""
        return torch.from_numpy(texts * MAX_TOKENS + np.arange(first, first + len(texts)))

    def tokens(self, path: str, rows: Tensor) -> TokenRows:
        """Return the projections of rows for one compressor."""
        given = self.compressor(path)
        return TokenRows(given.kv[rows], given.score[rows])

    def query(self, rows: Tensor) -> QueryInputs | None:
        """Return the query projections of rows; None for ratio 128."""
        given = self.inputs.query
        return None if given is None else QueryInputs(given.q[rows], given.weights[rows])

    def tail(self, texts: Ints) -> Mapping[str, TokenRows]:
        """Return by path the last tokens of a prefix that an open window can still need."""
        first = first_needed(len(texts), self.ratio)
        rows = self.rows(texts[first:], first)
        return {path: self.tokens(path, rows) for path in self.paths}

    def alone(self, texts: Ints) -> LayerInputs:
        """Return these tokens as the only request of a layer."""
        rows = self.rows(texts, 0)
        own = self.inputs

        def given(path: str) -> CompressorInputs:
            tokens = self.tokens(path, rows)
            return replace(self.compressor(path), kv=tokens.kv, score=tokens.score)

        return replace(
            own,
            lengths=(len(texts),),
            index=given(INDEX) if INDEX in self.paths else None,
            main=given(MAIN),
            query=self.query(rows),
            hidden=own.hidden[rows],
        )


@lru_cache(maxsize=4)
def bank(ratio: int, seed: int) -> Bank:
    """Return the tokens of a layer; the same for every scenario of one seed."""
    lengths = (MAX_TOKENS,) * _LINES
    hidden = synthetic_hidden("gaussian", lengths, CONFIG.hidden_size, seed)
    layer = RATIOS.index(ratio)
    weights = random_layer_weights(CONFIG, layer, seed)
    inputs = Inputs(
        name="scenario",
        sha256=tensor_digest([hidden]),
        config=CONFIG,
        requests=lengths,
        layers=(layer,),
        seed=seed,
        states={layer: hidden},
        weights_of=lambda _: weights,
    )
    reference = ReferenceLayer(CONFIG, layer, weights, BF16_CONTRACT)
    return Bank(given_layer(inputs, layer, reference).inputs, inputs.sha256)


@lru_cache(maxsize=8)
def reference_layer(ratio: int, seed: int) -> ReferenceLayer:
    """Return the reference of a bank's layer, with its weights, under the bf16 contract."""
    layer = RATIOS.index(ratio)
    return ReferenceLayer(CONFIG, layer, random_layer_weights(CONFIG, layer, seed), BF16_CONTRACT)
