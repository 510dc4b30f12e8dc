"""What the self-test runs on: its own small input, or the rows of a recording."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from needlepoint.optimized.protocol.interface import CompressorInputs, LayerInputs
from needlepoint.reference.config import MODELS
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.reference.weights import LayerWeights, random_layer_weights
from needlepoint.verify.inputs.checks import tensor_digest
from needlepoint.verify.inputs.layer_inputs import given_layer
from needlepoint.verify.inputs.load import MINI, Inputs
from needlepoint.verify.inputs.synthetic import synthetic_hidden, synthetic_weights
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.selftest.faults.fault import OWN, Setting
from needlepoint.verify.selftest.faults.ground import make_ground
from needlepoint.verify.selftest.judge import GroundJudge

SMALL_ROWS = 1e-3
"""Scale of stored rows at which absolute tolerances stop seeing anything."""
SCALES = (1.0, SMALL_ROWS)

TOKENS = 1200
"""Tokens of a recording that are used where the user names no number."""

_LENGTHS = (268, 132, 39)
"""Two pages of 64 entries and a part of one; a window of 128 twice, once and never."""
_OF_KIND = {"ties": (604, 132, 39), "small": (*_LENGTHS, 8, 8, 8, 8, 8)}
"""Tokens for the period of ``ties`` to come round, requests for every step of ``small``."""


@dataclass(frozen=True)
class SelftestInput:
    """Hidden states, model and layers of a self-test."""

    inputs: Inputs  # Rows that cases of kind ``own`` run on.
    # Whether they are the user's: then some faults may need more rows than there are.
    recorded: bool

    def layer(self, ratio: int) -> int | None:
        """Return the first layer of a ratio that has a complete window, or None."""
        for layer in self.inputs.layers:
            if self.inputs.config.ratio(layer) == ratio <= max(self.inputs.requests):
                return layer
        return None

    def entries(self, setting: Setting) -> int:
        """Return the entries of the longest request that a setting runs on."""
        return max(self.of_kind(setting.kind).requests) // setting.ratio

    def given(self, setting: Setting, scale: float) -> LayerInputs:
        """Return what candidates are given for a setting, stored rows at a scale.

        Raises
        ------
        ValueError
            If no layer of the ratio has a complete window.
        """
        layer = self.layer(setting.ratio)
        if layer is None:
            raise ValueError(f"input {self.inputs.name}: no layer of ratio {setting.ratio}")
        inputs = self.of_kind(setting.kind)
        reference = ReferenceLayer(
            inputs.config, layer, inputs.weights(layer), BF16_CONTRACT, compute=torch.float32
        )
        given = given_layer(inputs, layer, reference).inputs
        index = None if given.index is None else _scaled(given.index, scale)
        return replace(given, index=index, main=_scaled(given.main, scale))

    def judge(self, setting: Setting, scale: float, limits: Limits) -> GroundJudge:
        """Return the judge of what is planted on a setting at a scale."""
        return GroundJudge(make_ground(self.given(setting, scale), setting.key_format), limits)

    def of_kind(self, kind: str) -> Inputs:
        """Return the inputs that cases of a kind run on."""
        if kind == OWN:
            return self.inputs
        own = self.inputs.requests
        lengths = own if self.recorded else _OF_KIND.get(kind, own)
        return _drawn(self.inputs, kind, lengths)


def own_input(seed: int) -> SelftestInput:
    """Return the self-test's own input: a model of small shapes and 439 Gaussian tokens."""
    config = replace(
        MODELS[MINI], hidden_size=64, q_lora_rank=32, n_heads=1, index_n_heads=3, index_topk=8
    )
    empty = Inputs("own", "0" * 64, config, _LENGTHS, (0, 1), seed, {}, lambda layer: _none())
    return SelftestInput(_drawn(empty, "gaussian", _LENGTHS), recorded=False)


def recorded_input(inputs: Inputs) -> SelftestInput:
    """Return the rows of a recording, or of a synthetic input, as those of the self-test."""
    return SelftestInput(inputs, recorded=True)


def _none() -> LayerWeights:
    raise ValueError("this input has no weights yet")


def _scaled(part: CompressorInputs, scale: float) -> CompressorInputs:
    """Return a compressor whose norm weights, and so its stored rows, are at a scale."""
    return replace(part, norm_weight=part.norm_weight * scale)


def _drawn(like: Inputs, kind: str, lengths: Iterable[int]) -> Inputs:
    """Return synthetic states of a kind for the model and layers of another input."""
    requests = tuple(lengths)
    hidden = synthetic_hidden(kind, requests, like.config.hidden_size, like.seed)

    def weights(layer: int) -> LayerWeights:
        return synthetic_weights(
            kind, random_layer_weights(like.config, layer, like.seed), like.seed
        )

    return replace(
        like,
        sha256=tensor_digest([hidden]),
        requests=requests,
        states=dict.fromkeys(like.layers, hidden),
        weights_of=weights,
    )
