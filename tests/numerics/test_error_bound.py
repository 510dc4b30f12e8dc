"""Each stage's radius holds in fp32 under several orders, is sharp, and is left by faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from needlepoint.reference.profile import BF16_CONTRACT, Precision, needlepoint_profile
from needlepoint.verify.numerics.error_bound import (
    ErrorBound,
    exact,
    normed,
    query_rotated,
    roped,
    rotated,
    rounding,
    weights,
)
from needlepoint.verify.numerics.error_model import PROJECTION, U

EPS = 1e-6
HADAMARD_FP32 = torch.tensor(0.08838834764831845, dtype=torch.float32)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def worst(found: Tensor, error_bound: ErrorBound) -> float:
    error = (found.to(torch.float64) - error_bound.value).abs()
    return float(torch.where(error == 0, 0.0, error / error_bound.delta).max())


KINDS = ("gaussian", "constant", "outliers", "anisotropic", "small", "tiny", "zeros", "powers")


def draw(kind: str, rows: int, size: int, seed: int) -> Tensor:
    g = generator(seed)
    x = torch.randn(rows, size, generator=g)
    shifts = torch.randint(-20, 20, (rows, size), generator=g)
    return {
        "gaussian": x,
        "constant": torch.full_like(x, 1 + 2.0**-18),
        "outliers": x * torch.where(torch.arange(size) % 37 == 0, 1e3, 1.0),
        "anisotropic": x + 20,
        "small": 1e-3 * x,
        "tiny": 1e-20 * x,
        "zeros": torch.zeros_like(x),
        "powers": torch.sign(x) * torch.ldexp(torch.ones_like(x), shifts),
    }[kind]


# --- norm -----------------------------------------------------------------------------------------


def tree_sum(x: Tensor) -> Tensor:
    while x.shape[-1] > 1:
        x = x[..., ::2] + x[..., 1::2]
    return x


def lane_sum(x: Tensor) -> Tensor:
    """32 lanes that sum with a stride, then a butterfly over the lanes."""
    lanes = x.reshape(len(x), -1, 32)
    total = lanes[..., 0, :]
    for step in range(1, lanes.shape[-2]):
        total = total + lanes[..., step, :]
    return tree_sum(total)


def torch_sum(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


SUMS: tuple[Callable[[Tensor], Tensor], ...] = (tree_sum, lane_sum, torch_sum)


def norm_fp32(x: Tensor, weight: Tensor, total: Callable[[Tensor], Tensor]) -> list[Tensor]:
    mean = total(x * x) / x.shape[-1] + torch.tensor(EPS, dtype=torch.float32)
    root = torch.sqrt(mean)
    return [
        x * (1 / root) * weight,
        x / root * weight,
        x * (weight * torch.rsqrt(mean)),
        x * (torch.rsqrt(mean) * (1 + 2.0**-22)) * weight,
    ]


@pytest.mark.parametrize("size", [128, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_no_evaluation_of_the_norm_leaves_the_radius(kind: str, size: int) -> None:
    x = draw(kind, 64, size, seed=1)
    weight = 1 + 0.1 * torch.randn(size, generator=generator(2))

    error_bound = normed(exact(x), weight, EPS)

    for total in SUMS:
        assert max(worst(found, error_bound) for found in norm_fp32(x, weight, total)) <= 1


@pytest.mark.parametrize("size", [128, 512])
def test_the_norm_carries_the_radius_of_its_input(size: int) -> None:
    x = draw("gaussian", 32, size, seed=3).to(torch.float64)
    weight = 1 + 0.1 * torch.randn(size, generator=generator(2))
    delta = 1e-3 * torch.rand(x.shape, generator=generator(4), dtype=torch.float64)
    error_bound = normed(ErrorBound(x, delta), weight, EPS)

    for push in (delta, -delta, delta * torch.sign(x), -delta * torch.sign(x)):
        moved = normed(exact(x + push), weight, EPS).value
        assert worst(moved, error_bound) <= 1
        assert worst(x + push, ErrorBound(x, delta)) <= 1 + 1e-9


def test_an_input_radius_beyond_the_row_itself_stays_sound() -> None:
    x = draw("small", 16, 128, seed=5).to(torch.float64)
    delta = torch.full_like(x, 5e-3)
    error_bound = normed(ErrorBound(x, delta), torch.ones(128), EPS)

    for push in (-x, delta, -delta):
        reachable = x + push.clamp(-5e-3, 5e-3)
        assert worst(normed(exact(reachable), torch.ones(128), EPS).value, error_bound) <= 1


@pytest.mark.parametrize("fault", ["eps", "no weight", "sum over half", "gain 0.4 %", "max norm"])
def test_a_wrong_norm_leaves_the_radius(fault: str) -> None:
    x = draw("small", 32, 128, seed=6)
    weight = 1 + 0.1 * torch.randn(128, generator=generator(2))
    sound = norm_fp32(x, weight, torch_sum)[0]
    half = x[:, :64].square().mean(-1, keepdim=True) + EPS
    wrong = {
        "eps": x * weight / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt(),
        "no weight": sound / weight,
        "sum over half": x * weight / half.sqrt(),
        "gain 0.4 %": sound * 1.004,
        "max norm": x * weight / x.abs().amax(-1, keepdim=True),
    }[fault]

    error_bound = normed(exact(x), weight, EPS)
    error = (wrong.to(torch.float64) - error_bound.value).abs() / error_bound.delta

    assert worst(sound, error_bound) <= 1
    assert bool((error.amax(1) > 20).all())


def test_norm_without_eps_is_refused() -> None:
    with pytest.raises(ValueError, match=r"eps 0\.0, expected a positive number"):
        normed(exact(torch.ones(1, 128)), torch.ones(128), 0.0)


# --- RoPE -----------------------------------------------------------------------------------------


def angles(rows: int, seed: int) -> Tensor:
    """Cosine and sine of random angles, fp32-valued float64 [rows, 32, 2]."""
    angle = 100 * torch.rand(rows, 32, generator=generator(seed), dtype=torch.float64)
    return torch.stack((angle.cos(), angle.sin()), -1).to(torch.float32).to(torch.float64)


def rope_fp32(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.to(torch.float32).unbind(-1)
    a, b = x[..., -64:].reshape(*x.shape[:-1], 32, 2).unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return torch.cat((x[..., :-64], turned), -1)


@pytest.mark.parametrize("size", [128, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_rope_stays_in_its_radius_and_leaves_the_other_dims_alone(kind: str, size: int) -> None:
    x, table = draw(kind, 64, size, seed=7), angles(64, seed=8)

    error_bound = roped(exact(x), table)

    assert worst(rope_fp32(x, table), error_bound) <= 1
    assert torch.equal(error_bound.value[:, :-64], x[:, :-64].to(torch.float64))
    assert not bool(error_bound.delta[:, :-64].any())


def test_rope_carries_the_radius_of_its_input() -> None:
    x, table = draw("gaussian", 64, 128, seed=7).to(torch.float64), angles(64, seed=8)
    delta = 1e-3 * torch.rand(x.shape, generator=generator(9), dtype=torch.float64)
    error_bound = roped(ErrorBound(x, delta), table)

    for seed in range(8):
        signs = torch.sign(torch.randn(x.shape, generator=generator(seed), dtype=torch.float64))
        assert worst(roped(exact(x + signs * delta), table).value, error_bound) <= 1 + 1e-9


@pytest.mark.parametrize("fault", ["position", "half-split", "first dims", "conjugate"])
def test_a_wrong_rotation_leaves_the_radius(fault: str) -> None:
    x, table = draw("gaussian", 64, 128, seed=7), angles(64, seed=8)
    split = torch.cat((torch.arange(64, 128, 2), torch.arange(65, 128, 2))) - 64
    halves = torch.cat((x[:, :64], x[:, 64:][:, split]), 1)
    turned = rope_fp32(halves, table)
    wrong = {
        "position": rope_fp32(x, table.roll(1, 0)),
        "half-split": torch.cat((x[:, :64], turned[:, 64:][:, split.argsort()]), 1),
        "first dims": rope_fp32(x.roll(64, 1), table).roll(-64, 1),
        "conjugate": rope_fp32(x, table * torch.tensor([1.0, -1.0])),
    }[fault]

    error_bound = roped(exact(x), table)
    error = (wrong.to(torch.float64) - error_bound.value).abs()
    ratio = torch.where(error == 0, 0.0, error / error_bound.delta)

    assert bool((ratio.amax(1) > 1000).all())


def test_a_candidate_with_its_own_table_gets_its_error_added() -> None:
    x, table = draw("gaussian", 64, 128, seed=7), angles(64, seed=8)
    off = table + 1e-4

    assert worst(rope_fp32(x, off), roped(exact(x), table)) > 1
    assert worst(rope_fp32(x, off), roped(exact(x), table, table_error=1e-4)) <= 1


# --- Hadamard -------------------------------------------------------------------------------------


def butterfly(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    for stride in strides:
        pairs = x.reshape(*x.shape[:-1], -1, 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), -2).flatten(-3)
    return x


def sylvester() -> Tensor:
    return butterfly(torch.eye(128), (1, 2, 4, 8, 16, 32, 64))


def hadamard_fp32(x: Tensor) -> list[Tensor]:
    ascending = (1, 2, 4, 8, 16, 32, 64)
    return [
        butterfly(x, ascending) * HADAMARD_FP32,
        butterfly(x, ascending[::-1]) * HADAMARD_FP32,
        butterfly(x * HADAMARD_FP32, ascending),
        x @ (sylvester() * HADAMARD_FP32),
        butterfly(x, ascending) * (HADAMARD_FP32 * (1 + 2.0**-22)),
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_no_evaluation_of_the_hadamard_leaves_the_radius(kind: str) -> None:
    x = draw(kind, 64, 128, seed=10)

    error_bound = rotated(exact(x))

    assert max(worst(found, error_bound) for found in hadamard_fp32(x)) <= 1


def test_the_hadamard_carries_the_sum_of_the_radii() -> None:
    x = draw("gaussian", 32, 128, seed=10).to(torch.float64)
    delta = 1e-3 * torch.rand(x.shape, generator=generator(9), dtype=torch.float64)
    error_bound = rotated(ErrorBound(x, delta))
    column = sylvester().to(torch.float64)[5]

    pushed = rotated(exact(x + column * delta))

    assert worst(pushed.value, error_bound) <= 1
    # Pushed along one column, that output moves by all of the sum: the radius is attained.
    assert bool(
        ((pushed.value - error_bound.value)[:, 5].abs() > 0.9 * error_bound.delta[:, 5]).all()
    )


@pytest.mark.parametrize("fault", ["missing", "unscaled", "one stage short", "bf16 inside"])
def test_a_wrong_rotation_of_the_key_leaves_the_radius(fault: str) -> None:
    x = draw("gaussian", 64, 128, seed=10)
    wrong = {
        "missing": x,
        "unscaled": butterfly(x, (1, 2, 4, 8, 16, 32, 64)),
        "one stage short": butterfly(x, (1, 2, 4, 8, 16, 32)) * HADAMARD_FP32,
        "bf16 inside": butterfly(x.bfloat16().float(), (1, 2, 4, 8, 16, 32, 64)) * HADAMARD_FP32,
    }[fault]

    error_bound = rotated(exact(x))
    error = (wrong.to(torch.float64) - error_bound.value).abs() / error_bound.delta

    assert bool((error.amax(1) > 20).all())


@pytest.mark.parametrize(
    ("error_bound", "found"),
    [
        (
            normed(exact(draw("gaussian", 200, 512, 1)), torch.ones(512), EPS),
            norm_fp32(draw("gaussian", 200, 512, 1), torch.ones(512), lane_sum)[3],
        ),
        (
            roped(exact(draw("gaussian", 200, 128, 1)), angles(200, 2)),
            rope_fp32(draw("gaussian", 200, 128, 1), angles(200, 2)),
        ),
        (
            rotated(exact(draw("gaussian", 200, 128, 1))),
            hadamard_fp32(draw("gaussian", 200, 128, 1))[1],
        ),
        (weights(draw("gaussian", 200, 64, 1), 0.011), draw("gaussian", 200, 64, 1) * 0.011),
    ],
    ids=["normed", "roped", "rotated", "weights"],
)
def test_a_radius_is_within_a_hundred_times_of_what_is_observed(
    error_bound: ErrorBound, found: Tensor
) -> None:
    assert 0.01 <= worst(found, error_bound) <= 1


# --- rounding, weights, projections ---------------------------------------------------------------


@given(seed=st.integers(0, 2**31), log_radius=st.integers(-30, -1), scale=st.integers(-100, 100))
@settings(max_examples=60, deadline=None)
def test_rounding_reaches_exactly_what_bf16_makes_of_the_interval(
    seed: int, log_radius: int, scale: int
) -> None:
    value = torch.randn(200, generator=generator(seed), dtype=torch.float64) * 2.0**scale
    delta = value.abs() * 2.0**log_radius
    error_bound = rounding(ErrorBound(value, delta), Precision.BF16)
    inside = value + delta * torch.linspace(-1, 1, 33, dtype=torch.float64).unsqueeze(1)

    # Numbers that fp32 holds are rounded once by torch's own conversion: those are the oracle.
    held = inside.to(torch.float32)
    reachable = (held.to(torch.float64) - value).abs() <= delta
    found = held.bfloat16().to(torch.float64)

    reach = (found - error_bound.value).abs()
    assert bool((reach <= error_bound.delta)[reachable].all())
    highest = torch.where(reachable, found, -math.inf).amax(0)
    lowest = torch.where(reachable, found, math.inf).amin(0)
    assert bool((error_bound.delta[highest > lowest] > 0).all())
    # No more is open than the two numbers around the interval and one step.
    assert bool((error_bound.delta <= 2 * delta + 2.0**-7 * value.abs()).all())


def test_an_unambiguous_value_leaves_nothing_open() -> None:
    error_bound = ErrorBound(
        torch.tensor([1.0, 1.0 + 2.0**-8], dtype=torch.float64),
        torch.tensor([1e-4, 1e-4], dtype=torch.float64),
    )

    after = rounding(error_bound, Precision.BF16)

    assert after.value.tolist() == [1.0, 1.0]
    assert after.delta.tolist() == [0.0, 2.0**-7]


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FLOAT64])
def test_unrounded_points_change_nothing(precision: Precision) -> None:
    error_bound = rotated(exact(draw("gaussian", 2, 128, 0)))

    assert rounding(error_bound, precision) is error_bound


def test_weights_allow_two_constants_and_an_unfolded_scale() -> None:
    w = draw("gaussian", 100, 64, seed=1)
    scale = 128**-0.5 * 64**-0.5
    step = torch.rand(100, 64, generator=generator(2)) + 1e-3
    once, twice = w * scale, w * 128**-0.5 * 64**-0.5
    unfolded = (w * scale * step).to(torch.float64) / step

    error_bound = weights(w, scale)

    assert max(worst(found, error_bound) for found in (once, twice, unfolded)) <= 1
    assert worst(once * 1.004, error_bound) > 1000
    assert worst(once.bfloat16(), error_bound) > 1000


@pytest.mark.parametrize("inner", [64, 1024])
def test_projections_in_any_order_stay_inside_and_bf16_ones_do_not(inner: int) -> None:
    x = draw("gaussian", 32, inner, seed=1).bfloat16().float()
    w = draw("gaussian", 48, inner, seed=2).bfloat16().float()
    in_turn = torch.zeros(32, 48)
    for i in range(inner):
        in_turn = in_turn + x[:, i : i + 1] * w[:, i]

    # The radius that limits.md states for `PROJECTION`.
    magnitude = x.double().abs() @ w.double().abs().T
    growth = PROJECTION.value * U * inner**0.5
    error_bound = ErrorBound(x.double() @ w.double().T, growth * magnitude)

    assert worst(x @ w.T, error_bound) <= 1
    assert worst(in_turn, error_bound) <= 1
    assert worst((x @ w.T).bfloat16(), error_bound) > 1
    assert worst(x @ w.T * 1.004, error_bound) > 1


# --- query ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("contract", ["needlepoint", "bf16", "no hadamard"])
def test_query_path_in_fp32_stays_in_the_radius(contract: str) -> None:
    profile = needlepoint_profile("fp8")
    arithmetic = {
        "needlepoint": profile,
        "bf16": BF16_CONTRACT,
        "no hadamard": replace(profile, hadamard=False),
    }[contract]
    x = torch.randn(20, 4, 128, generator=generator(1)).bfloat16().float()
    table = angles(20, seed=2).unsqueeze(1)

    error_bound = query_rotated(exact(x), table, arithmetic)

    found = rope_fp32(x, table)
    if contract == "bf16":
        found = found.bfloat16().float()
    if contract != "no hadamard":
        found = hadamard_fp32(found)[0]
    if contract == "bf16":
        found = found.bfloat16().float()
    assert worst(found, error_bound) <= 1
    assert worst(found * 1.004, error_bound) > 5 if contract != "bf16" else True


def test_value_and_radius_must_have_one_shape() -> None:
    with pytest.raises(ValueError, match=r"value \(2,\) with radius \(3,\)"):
        ErrorBound(torch.zeros(2), torch.zeros(3))


def test_rows_and_dims_cut_value_and_radius_alike() -> None:
    error_bound = ErrorBound(torch.arange(12.0).reshape(3, 4), torch.ones(3, 4) * math.pi)

    assert error_bound.rows(slice(1, 3)).value.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert error_bound.dims(slice(3, None)).value.tolist() == [[3], [7], [11]]
    assert error_bound.dims(slice(3, None)).delta.shape == (3, 1)
