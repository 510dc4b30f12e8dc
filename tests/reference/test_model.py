"""The staged reference against the plain model, in exact arithmetic: every stage, any calls."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from needlepoint.reference.config import MODELS, ModelConfig
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.model import layer_stages, rope_frequencies
from needlepoint.reference.profile import EXACT
from needlepoint.reference.rope import rope_frequencies as staged_frequencies
from needlepoint.reference.weights import LayerWeights, random_layer_weights

Stages = dict[tuple[str, str], Tensor]

SCORES, PICKS = ("index", "scores"), ("index", "topk")

# Both sides compute in float64 and sum in orders of their own. A sum of n terms in any order is off
# by at most n 2**-53 of its terms' sizes: 2**-43 for the up to 1024 terms here. The longest way to
# a stage has four such sums (latent, query, dot, attention), and none cancels more than about one
# half of its terms' sizes, so that 2**-40 is kept with room. The narrowest rounding that a profile
# can add, to fp32, moves a row by about 2**-25 of it.
TOLERANCE = 2.0**-40


def staged(
    model: ModelConfig, number: int, weights: LayerWeights, hidden: Tensor, cuts: list[int]
) -> Stages:
    """Feed a request in calls and join their stages; scores are padded to the last width."""
    layer = ReferenceLayer(model, number, weights, EXACT)
    state = layer.new_request()
    calls = [
        layer.forward(hidden[a:b], state, keep_scores=True).tensors()
        for a, b in itertools.pairwise([0, *cuts, len(hidden)])
    ]
    entries = len(hidden) // max(model.ratio(number), 1)
    for call in calls:
        if SCORES in call:
            missing = entries - call[SCORES].shape[1]
            call[SCORES] = torch.nn.functional.pad(call[SCORES], (0, missing), value=-torch.inf)
    return {key: torch.cat([call[key] for call in calls]) for key in calls[0]}


def check(model: ModelConfig, number: int, tokens: int, cuts: list[int], seed: int = 1) -> Stages:
    """Compare every stage, row by row; return those of the plain model."""
    weights = random_layer_weights(model, number, seed)
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, model.hidden_size, generator=generator).bfloat16()
    plain = layer_stages(model, number, weights, hidden)
    found = staged(model, number, weights, hidden, cuts)
    assert found.keys() == plain.keys()
    for key, expected in plain.items():
        assert (found[key].shape, found[key].dtype) == (expected.shape, expected.dtype), key
        if key == PICKS:
            assert torch.equal(found[key], expected)
            continue
        masked = torch.isinf(expected)
        assert torch.equal(torch.isinf(found[key]), masked), key
        wanted, error = (x.masked_fill(masked, 0) for x in (expected, found[key] - expected))
        assert bool((error.norm(dim=-1) <= TOLERANCE * wanted.norm(dim=-1)).all()), key
    return plain


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 7, 8, 9, 23, 24, 61, 130])
def test_ratio_4_at_every_kind_of_length(small_model: ModelConfig, tokens: int) -> None:
    """The window holds 8 tokens and 5 entries are picked, so rows discard from token 23 on."""
    stages = check(small_model, 0, tokens, [])
    assert len(stages) == 17
    assert bool((stages[PICKS] >= 0).any()) == (tokens >= 4)


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 255, 256, 270])
def test_ratio_128_at_every_kind_of_length(small_model: ModelConfig, tokens: int) -> None:
    assert len(check(small_model, 1, tokens, [])) == 6


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 30])
def test_ratio_0_at_every_kind_of_length(small_model: ModelConfig, tokens: int) -> None:
    assert list(check(small_model, 2, tokens, [])) == [("main", "attention")]


@pytest.mark.parametrize(
    ("number", "tokens", "cuts"),
    [
        (0, 41, list(range(1, 41))),
        (0, 41, [2, 3, 9, 30]),
        (0, 61, [4, 8, 59]),
        (1, 131, list(range(1, 131))),
        (1, 270, [127, 129, 255]),
        (2, 30, list(range(1, 30))),
        (2, 30, [8, 9]),
    ],
)
def test_calls_of_any_size(
    small_model: ModelConfig, number: int, tokens: int, cuts: list[int]
) -> None:
    check(small_model, number, tokens, cuts, seed=2)


@pytest.mark.parametrize(("number", "cuts"), [(0, [333]), (1, [200, 201])])
def test_the_mini_model(number: int, cuts: list[int]) -> None:
    """Widths of a real model where kernels care: head_dim 512, 128 picks of 150 entries."""
    check(MODELS["mini"], number, 600, cuts, seed=3)


@pytest.mark.parametrize("name", ["v4-flash", "v4-pro", "mini"])
@pytest.mark.parametrize("compressed", [False, True])
def test_frequencies_are_the_same_numbers(name: str, compressed: bool) -> None:
    found = rope_frequencies(MODELS[name], compressed=compressed)
    assert torch.equal(found, staged_frequencies(MODELS[name], compressed=compressed))


def test_other_layers_and_weights_are_refused(small_model: ModelConfig) -> None:
    hidden = torch.zeros(4, small_model.hidden_size)
    with pytest.raises(ValueError, match="expected those of ratio 4"):
        layer_stages(small_model, 0, random_layer_weights(small_model, 1, 1), hidden)
    model = MODELS["mini-v3.2"]
    with pytest.raises(ValueError, match="layer 1 has ratio 1, expected 0, 4 or 128"):
        layer_stages(model, 1, random_layer_weights(model, 1, 1), hidden)
