"""The pooled radius holds for every order of fp32 evaluation, and not for a wrong computation.

The oracle is written here, in plain fp32: three ways to form the exponent, two exponentials of
different accuracy, and seven orders of summation, online softmax included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from needlepoint.reference.compressor import Taps
from needlepoint.verify.numerics.error_bound import ErrorBound
from needlepoint.verify.numerics.error_bound_pooled import pooled, slot_ape

LOG2E = torch.tensor(math.log2(math.e), dtype=torch.float32)
WIDTH = 16


def exp2_polynomial(t: Tensor) -> Tensor:
    """Degree-5 base-2 exponential, relative error about 2e-7, as a kernel would write it."""
    t = t.clamp(min=-126.0)
    whole = torch.round(t)
    f = t - whole
    p = torch.full_like(f, 1.3398874e-3)
    for coefficient in (9.618437e-3, 5.5503324e-2, 2.4022648e-1, 6.9314718e-1, 1.0):
        p = p * f + coefficient
    return torch.ldexp(p, whole.to(torch.int32))


def exp2_coarse(t: Tensor) -> Tensor:
    """Return 2**t, always 2 ulp high: the worst that a fast unit may do."""
    return torch.exp2(t) * (1 + 2.0**-22)


Exponent = tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]

EXPONENTS: dict[str, Exponent] = {
    "prescaled": (lambda score, ape: score * LOG2E + ape * LOG2E, exp2_polynomial),
    "coarse": (lambda score, ape: score * LOG2E + ape * LOG2E, exp2_coarse),
    "scaled-sum": (lambda score, ape: (score + ape) * LOG2E, torch.exp2),
    "natural": (lambda score, ape: score + ape, torch.exp),
}


def in_sequence(e: Tensor, kv: Tensor) -> Tensor:
    total, norm = torch.zeros_like(kv[:, 0]), torch.zeros_like(kv[:, 0])
    for slot in range(kv.shape[1]):
        total = total + e[:, slot] * kv[:, slot]
        norm = norm + e[:, slot]
    return total / norm


def backwards(e: Tensor, kv: Tensor) -> Tensor:
    return in_sequence(e.flip(1), kv.flip(1))


def tree(e: Tensor, kv: Tensor) -> Tensor:
    total, norm = e * kv, e
    while total.shape[1] > 1:
        total, norm = total[:, ::2] + total[:, 1::2], norm[:, ::2] + norm[:, 1::2]
    return (total / norm)[:, 0]


def groups_of_eight(e: Tensor, kv: Tensor) -> Tensor:
    grouped = (len(kv), -1, 8, kv.shape[2])
    total, norm = (e * kv).reshape(grouped), e.reshape(grouped)
    total, norm = total.cumsum(2)[:, :, -1], norm.cumsum(2)[:, :, -1]
    while total.shape[1] > 1:
        total, norm = total[:, ::2] + total[:, 1::2], norm[:, ::2] + norm[:, 1::2]
    return (total / norm)[:, 0]


def normalised_first(e: Tensor, kv: Tensor) -> Tensor:
    return ((e / e.sum(1, keepdim=True)) * kv).sum(1)


def reciprocal(e: Tensor, kv: Tensor) -> Tensor:
    return (e * kv).sum(1) * (1 / e.sum(1))


ORDERS = (in_sequence, backwards, tree, groups_of_eight, normalised_first, reciprocal)


def online(z: Tensor, exp: Callable[[Tensor], Tensor], kv: Tensor) -> Tensor:
    """Online softmax over the slots in time order, rescaling at every new maximum."""
    peak = torch.full_like(z[:, 0], -3.0e38)
    norm, total = torch.zeros_like(peak), torch.zeros_like(peak)
    for slot in range(z.shape[1]):
        higher = torch.maximum(peak, z[:, slot])
        keep, new = exp(peak - higher), exp(z[:, slot] - higher)
        new = torch.where(torch.isinf(z[:, slot]), 0.0, new)
        total = total * keep + kv[:, slot] * new
        norm = norm * keep + new
        peak = higher
    return total / norm


def evaluations(kv: Tensor, score: Tensor, ape: Tensor, masked: Tensor) -> Iterator[Tensor]:
    for form, exp in EXPONENTS.values():
        z = form(score, ape).masked_fill(masked, -math.inf)
        e = exp(z - z.amax(1, keepdim=True)).masked_fill(masked, 0.0)
        yield from (order(e, kv) for order in ORDERS)
        yield online(z, exp, kv)


Case = tuple[Tensor, Tensor, Tensor]


def draw(kind: str, rows: int, slots: int, seed: int) -> Case:
    """Taps of one kind: kv, score, ape in fp32."""
    g = torch.Generator().manual_seed(seed)
    shape = (rows, slots, WIDTH)
    kv = torch.randn(shape, generator=g)
    score = 2 * torch.randn(shape, generator=g)
    ape = 0.5 * torch.randn(slots, WIDTH, generator=g)
    jitter = torch.rand(shape, generator=g)
    if kind == "offset":
        score = score + 300
    elif kind == "cancelled-ape":
        ape, score = ape - 100, score + 100
    elif kind == "constant-kv":
        kv = 1 + torch.rand(rows, 1, WIDTH, generator=g).expand(shape)
    elif kind == "lost-addends":  # every later term is below half an ulp of the first
        kv, ape = kv.abs(), torch.zeros_like(ape)
        score = 0.3 * jitter - 16.7
        score[:, 0] = 0
    elif kind == "rising":  # every slot is a new maximum of the online softmax
        score = torch.arange(slots)[None, :, None] / slots + 1e-3 * jitter
    elif kind == "anisotropic":
        kv = kv + 30
    elif kind == "peaked":
        score = 10 * score
    elif kind == "outliers":
        kv = kv * torch.where(torch.arange(WIDTH) % 7 == 0, 1e3, 1.0)
    elif kind == "beyond-2^16":
        score = 3e4 * score
    elif kind == "plateau":
        kv, score, ape = torch.round(4 * kv), torch.ones_like(score), torch.zeros_like(ape)
    elif kind == "small":
        kv = 1e-3 * kv
    elif kind == "subnormal":
        kv = 1e-39 * kv
    elif kind == "zeros":
        kv = torch.zeros_like(kv)
    return kv, score, ape


KINDS = (
    "gaussian",
    "offset",
    "cancelled-ape",
    "constant-kv",
    "lost-addends",
    "rising",
    "anisotropic",
    "peaked",
    "outliers",
    "beyond-2^16",
    "plateau",
    "small",
    "subnormal",
    "zeros",
)


def enclose(case: Case, masked: Tensor | None = None) -> ErrorBound:
    kv, score, ape = (x.to(torch.float64) for x in case)
    logits = score + ape
    if masked is not None:
        logits = logits.masked_fill(masked, -math.inf)
    return pooled(Taps(kv, logits), case[2])


def worst(found: Tensor, error_bound: ErrorBound) -> float:
    return float(((found.to(torch.float64) - error_bound.value).abs() / error_bound.delta).max())


@pytest.mark.parametrize("slots", [8, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_no_order_of_fp32_evaluation_leaves_the_radius(kind: str, slots: int) -> None:
    case = draw(kind, 512 // slots + 24, slots, seed=11)
    masked = torch.zeros(case[0].shape, dtype=torch.bool)
    masked[0, : slots // 2] = slots == 8
    case = (case[0].masked_fill(masked, 0.0), *case[1:])

    error_bound = enclose(case, masked)

    for found in evaluations(*case, masked):
        assert bool(torch.isfinite(found).all())
        assert worst(found, error_bound) <= 1


@given(
    kind=st.sampled_from(KINDS),
    slots=st.sampled_from([8, 128]),
    rows=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25, deadline=None)
def test_soundness_over_seeds(kind: str, slots: int, rows: int, seed: int) -> None:
    case = draw(kind, rows, slots, seed)
    error_bound = enclose(case)
    masked = torch.zeros(case[0].shape, dtype=torch.bool)

    assert max(worst(found, error_bound) for found in evaluations(*case, masked)) <= 1


@pytest.mark.parametrize("slots", [8, 128])
def test_the_radius_is_within_a_hundred_times_of_what_is_observed(slots: int) -> None:
    case = draw("gaussian", 200, slots, seed=5)
    masked = torch.zeros(case[0].shape, dtype=torch.bool)

    error_bound = enclose(case)

    assert max(worst(found, error_bound) for found in evaluations(*case, masked)) >= 0.01


def _fault(name: str, kv: Tensor, score: Tensor, ape: Tensor) -> Tensor:
    z = score + ape
    if name == "ape missing":
        z = score
    elif name == "ape shifted":
        z = score + ape.roll(1, 0)
    elif name == "slot dropped":
        z = z.clone()
        z[:, 1] = -math.inf
    elif name == "softmax over channels":
        return (torch.softmax(z, 2) * kv).sum(1)
    elif name == "bf16 logits":
        z = z.bfloat16().float()
    elif name == "bf16 values":
        kv = kv.bfloat16().float()
    elif name == "neighbouring window":
        kv, z = kv.roll(1, 0), z.roll(1, 0)
    result = (torch.softmax(z, 1) * kv).sum(1)
    if name == "gain 0.4 %":
        return result * 1.004
    if name == "bf16 truncation":
        return (result.view(torch.int32) & ~0xFFFF).view(torch.float32)
    if name == "exponential off by 1e-3":
        e = torch.exp(z - z.amax(1, keepdim=True))
        e = e * (1 + 1e-3 * torch.sin(100 * z))
        return (e * kv).sum(1) / e.sum(1)
    return result


FAULTS = (
    "ape missing",
    "ape shifted",
    "slot dropped",
    "softmax over channels",
    "bf16 logits",
    "bf16 values",
    "neighbouring window",
    "gain 0.4 %",
    "bf16 truncation",
    "exponential off by 1e-3",
)


@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("slots", [8, 128])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_the_radius_in_every_row(fault: str, slots: int, scale: float) -> None:
    kv, score, ape = draw("gaussian", 40, slots, seed=3)
    case = (kv * scale, score, ape)
    sound, wrong = _fault("none", *case), _fault(fault, *case)
    assert not torch.equal(sound, wrong)

    error_bound = enclose(case)
    error = (wrong.to(torch.float64) - error_bound.value).abs() / error_bound.delta

    assert worst(sound, error_bound) <= 1
    assert bool((error.amax(1) > 5).all())


def test_rows_do_not_depend_on_the_rows_around_them() -> None:
    kv, score, ape = draw("gaussian", 700, 128, seed=2)
    whole = enclose((kv, score, ape))

    part = enclose((kv[650:], score[650:], ape))

    assert torch.equal(whole.delta[650:], part.delta)
    assert torch.equal(whole.value[650:], part.value)


def test_logits_without_resolution_stay_in_the_hull_of_their_values() -> None:
    kv, score, ape = draw("gaussian", 8, 8, seed=1)

    error_bound = enclose((kv, 1e9 * score, ape))

    hull = (kv.to(torch.float64) - error_bound.value.unsqueeze(1)).abs().amax(1)
    assert bool((error_bound.delta <= 1.1 * hull + 1e-4).all())


def test_no_windows_give_no_rows() -> None:
    empty = torch.zeros(0, 8, WIDTH, dtype=torch.float64)

    assert pooled(Taps(empty, empty), torch.zeros(8, WIDTH)).value.shape == (0, WIDTH)


def test_slot_ape_puts_the_overlap_columns_first() -> None:
    ape = torch.arange(4.0 * 6).reshape(4, 6)

    assert torch.equal(slot_ape(ape, 4)[:4], ape[:, :3].to(torch.float64))
    assert torch.equal(slot_ape(ape, 4)[4:], ape[:, 3:].to(torch.float64))
    assert torch.equal(slot_ape(ape, 128), ape.to(torch.float64))


@pytest.mark.parametrize("shape", [(8, WIDTH - 1), (7, WIDTH)])
def test_a_position_embedding_of_another_shape_is_refused(shape: tuple[int, int]) -> None:
    kv, score, _ = draw("gaussian", 3, 8, seed=0)

    with pytest.raises(ValueError, match=r"position embedding \(\d, \d+\); expected \[rows"):
        pooled(Taps(kv.to(torch.float64), score.to(torch.float64)), torch.zeros(shape))
