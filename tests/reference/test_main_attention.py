"""Main queries and window rows, which are no stages, against their definition.

The whole layer is held to the plain model in ``test_model``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.main_attention import MainAttention
from needlepoint.reference.profile import BF16_CONTRACT, EXACT, Precision
from needlepoint.reference.rope import rope_frequencies
from needlepoint.reference.rounding import round_to
from needlepoint.reference.weights import random_layer_weights

Hidden = Callable[[int, int], Tensor]
EPS = 1e-6


def rms(x: Tensor, weight: Tensor | float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def turn(x: Tensor, position: int, frequencies: Tensor) -> Tensor:
    angles = (torch.tensor(float(position)) * frequencies).double()
    pairs = torch.view_as_complex(x[..., -64:].reshape(*x.shape[:-1], 32, 2).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones(32).double(), angles))
    return torch.cat((x[..., :-64], turned.flatten(-2)), dim=-1)


def test_main_queries_are_normed_and_roped_with_a_rounding_after_each(
    small_model: ModelConfig, hidden_states: Hidden
) -> None:
    weights = random_layer_weights(small_model, 0, 1)
    layer = ReferenceLayer(small_model, 0, weights, BF16_CONTRACT)
    attention: MainAttention = layer.attention
    projected = layer.project_inputs(hidden_states(40, 21))
    found = attention.queries(projected.latent, layer.rope(0, 40), 0)
    q = (projected.latent @ weights.wq_b.double().t()).float().double().view(40, 2, 128)
    normed = round_to(rms(q, 1.0), Precision.BF16)
    f = rope_frequencies(small_model, compressed=True)
    roped = round_to(torch.stack([turn(r, p, f) for p, r in enumerate(normed)]), Precision.BF16)
    same = (found == roped).double().mean().item()
    assert same > 0.999  # the table is fp32 there and float64 here
    assert torch.equal(found, round_to(found, Precision.BF16))
    once = round_to(torch.stack([turn(r, p, f) for p, r in enumerate(rms(q, 1.0))]), Precision.BF16)
    assert (found == once).double().mean().item() < 0.9


def test_window_rows_are_made_like_main_rows(
    small_model: ModelConfig, hidden_states: Hidden
) -> None:
    weights = random_layer_weights(small_model, 0, 1)
    layer = ReferenceLayer(small_model, 0, weights, EXACT)
    projected = layer.project_inputs(hidden_states(20, 22))
    rows = layer.attention.window(projected, layer.rope(0, 20), layer.new_request().window)
    f = rope_frequencies(small_model, compressed=True)
    normed = rms(projected.window, weights.kv_norm.double())
    wanted = torch.stack([turn(r, p, f) for p, r in enumerate(normed)])
    torch.testing.assert_close(rows, wanted, rtol=1e-12, atol=1e-12)
