"""LayerNorm in fp32 stays in its radius in several orders, is sharp there, and faults leave it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from needlepoint.reference.norm import layer_norm
from needlepoint.verify.numerics.error_bound import ErrorBound, exact, layer_normed

EPS = 1e-6
ROWS = 64


def draw(kind: str, seed: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 128, generator=g)
    if kind == "offset":
        return x + 30
    if kind == "outlier":
        x[:, 7] *= 40
    if kind == "small":
        return x * 2.0**-20
    if kind == "constant":
        return torch.full_like(x, 3.1)
    return x


def parameters() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    return 1 + 0.2 * torch.randn(128, generator=g), 0.2 * torch.randn(128, generator=g)


def worst(found: Tensor, error_bound: ErrorBound) -> float:
    error = (found.to(torch.float64) - error_bound.value).abs()
    return float(torch.where(error == 0, 0.0, error / error_bound.delta).max())


def in_sequence(x: Tensor) -> Tensor:
    total = torch.zeros(len(x))
    for column in x.unbind(1):
        total = total + column
    return total.unsqueeze(1)


def in_warps(x: Tensor) -> Tensor:
    lanes = x.view(len(x), 32, 4)
    parts = ((lanes[..., 0] + lanes[..., 1]) + lanes[..., 2]) + lanes[..., 3]
    while parts.shape[1] > 1:
        half = parts.shape[1] // 2
        parts = parts[:, :half] + parts[:, half:]
    return parts


SUMS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.sum(1, keepdim=True),
    in_warps,
    lambda x: in_warps(x.flip(1)),
]


def by_hand(x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    weight, bias = parameters()
    centred = x - total(x) / 128
    return centred * torch.rsqrt(total(centred.square()) / 128 + EPS) * weight + bias


@pytest.mark.parametrize("kind", ["gaussian", "offset", "outlier", "small", "constant"])
def test_no_evaluation_leaves_the_radius(kind: str) -> None:
    x, (weight, bias) = draw(kind), parameters()
    error_bound = layer_normed(exact(x), weight, bias, EPS)

    assert torch.equal(error_bound.value, layer_norm(x.double(), weight, bias, EPS))
    library = torch.nn.functional.layer_norm(x, (128,), weight, bias, EPS)
    for found in (library, *(by_hand(x, total) for total in SUMS)):
        assert worst(found, error_bound) <= 1


def test_the_radius_is_sharp() -> None:
    x, (weight, bias) = draw("gaussian"), parameters()
    error_bound = layer_normed(exact(x), weight, bias, EPS)

    seen = max(worst(by_hand(x, total), error_bound) for total in (*SUMS, in_sequence))
    assert 0.01 < seen <= 1


def test_it_carries_the_radius_of_its_input() -> None:
    x, (weight, bias) = draw("gaussian").double(), parameters()
    g = torch.Generator().manual_seed(3)
    delta = 1e-3 * torch.rand(x.shape, generator=g, dtype=torch.float64)
    error_bound = layer_normed(ErrorBound(x, delta), weight, bias, EPS)

    for push in (delta, -delta, delta * x.sign(), -delta * x.sign()):
        assert worst(layer_norm(x + push, weight, bias, EPS), error_bound) <= 1


@pytest.mark.parametrize(
    "fault", ["no bias", "no weight", "mean kept", "eps", "bias scaled", "n-1"]
)
def test_a_wrong_norm_leaves_the_radius(fault: str) -> None:
    x, (weight, bias) = draw("gaussian") * 0.01 + 0.01, parameters()
    error_bound = layer_normed(exact(x), weight, bias, EPS)
    mean, variance = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
    inverse = (variance + EPS).rsqrt()
    wrong = {
        "no bias": (x - mean) * inverse * weight,
        "no weight": (x - mean) * inverse + bias,
        "mean kept": x * (x.square().mean(1, keepdim=True) + EPS).rsqrt() * weight + bias,
        "eps": (x - mean) * (variance + 1e-5).rsqrt() * weight + bias,
        "bias scaled": ((x - mean) * inverse + bias) * weight,
        "n-1": (x - mean) * (x.var(1, keepdim=True) + EPS).rsqrt() * weight + bias,
    }[fault]

    error = (wrong.double() - error_bound.value).abs() / error_bound.delta

    assert bool((error.amax(1) > 20).all())
