"""The score bound holds in every order of fp32 sums and for every admissible flip of a code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from needlepoint.reference.formats import (
    BF16,
    FP4_OFFICIAL,
    FP4_SGLANG,
    FP8_NO_FLOOR,
    FP8_PLAIN,
    FP8_POW2,
    FP32,
    MAIN_FP8,
    Encoded,
    Format,
    decode,
    encode,
)
from needlepoint.reference.profile import OFFICIAL, Accumulator, needlepoint_profile
from needlepoint.verify.numerics.bounds import ScoreBound, stored_error_bound
from needlepoint.verify.numerics.compare_codes import compare_encoded
from needlepoint.verify.numerics.error_bound import ErrorBound, exact

FP32_CHAIN = needlepoint_profile("fp8")
KEY_FORMATS = (BF16, FP8_PLAIN, FP8_POW2, FP8_NO_FLOOR, FP4_OFFICIAL, FP4_SGLANG)
names = pytest.mark.parametrize


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def true_scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    dots = torch.einsum("shd,td->sht", query.double(), keys.double()).relu()
    return (dots * weights.double().unsqueeze(-1)).sum(1)


# --- accumulation ---------------------------------------------------------------------------------


def dot_in_sequence(q: Tensor, k: Tensor) -> Tensor:
    total = torch.zeros(len(q), len(k))
    for d in range(q.shape[1]):
        total = total + q[:, d : d + 1] * k[:, d]
    return total


def dot_tree(q: Tensor, k: Tensor) -> Tensor:
    products = q[:, None] * k
    while products.shape[-1] > 1:
        products = products[..., ::2] + products[..., 1::2]
    return products[..., 0]


def dot_by_sixteen(q: Tensor, k: Tensor) -> Tensor:
    total = torch.zeros(len(q), len(k))
    for d in range(0, q.shape[1], 16):
        total = total + q[:, d : d + 16] @ k[:, d : d + 16].T
    return total


def dot_blas(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.T


DOTS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    dot_in_sequence,
    dot_tree,
    dot_by_sixteen,
    dot_blas,
)


def fp32_scores(
    query: Tensor, weights: Tensor, keys: Tensor, dot: Callable[[Tensor, Tensor], Tensor]
) -> list[Tensor]:
    heads = range(query.shape[1])
    terms = torch.stack([dot(query[:, h], keys).relu() * weights[:, h : h + 1] for h in heads])
    forwards, backwards = torch.zeros_like(terms[0]), torch.zeros_like(terms[0])
    for h in heads:
        forwards = forwards + terms[h]
        backwards = backwards + terms[-1 - h]
    halves = terms
    while len(halves) > 1:
        halves = halves[::2] + halves[1::2]
    return [forwards, backwards, halves[0], terms.sum(0)]


KINDS = ("gaussian", "positive", "constant", "anisotropic", "outliers", "negative weights", "small")


def draw(kind: str, heads: int, fmt: Format, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return stored queries and keys (fp32 values of the format) and weights."""
    g = generator(seed)
    q, k = torch.randn(12, heads, 128, generator=g), torch.randn(24, 128, generator=g)
    w = 0.01 * torch.randn(12, heads, generator=g)
    if kind == "positive":
        q, k, w = q.abs(), k.abs(), w.abs()
    elif kind == "constant":
        q, k, w = torch.full_like(q, 1.01), torch.full_like(k, 1.02), torch.full_like(w, 0.0110485)
    elif kind == "anisotropic":
        q, k = q + 20, k + 20
    elif kind == "outliers":
        q[..., ::31] *= 1e3
        k[..., ::31] *= 1e3
    elif kind == "negative weights":
        w = -w.abs()
    elif kind == "small":
        q, k = 1e-3 * q, 1e-3 * k
    return decode(encode(q, fmt), fmt).float(), w, decode(encode(k, fmt), fmt).float()


@names("fmt", [BF16, FP8_POW2, FP4_OFFICIAL], ids=lambda f: f.name)
@names("heads", [8, 64])
@names("kind", KINDS)
def test_no_order_of_fp32_sums_leaves_the_bound(kind: str, heads: int, fmt: Format) -> None:
    query, weights, keys = draw(kind, heads, fmt, seed=1)

    bound = ScoreBound.of_keys(exact(keys), FP32_CHAIN).of_queries(exact(query), exact(weights))

    reference = true_scores(query, weights, keys)
    for dot in DOTS:
        for found in fp32_scores(query, weights, keys, dot):
            assert bool(((found.double() - reference).abs() <= bound).all())


@names("heads", [8, 64])
def test_the_bound_is_within_a_hundred_times_of_what_is_observed(heads: int) -> None:
    query, weights, keys = draw("gaussian", heads, BF16, seed=1)
    bound = ScoreBound.of_keys(exact(keys)).of_queries(exact(query), exact(weights))
    reference = true_scores(query, weights, keys)

    worst = max(
        float(((found.double() - reference).abs() / bound).max())
        for dot in DOTS
        for found in fp32_scores(query, weights, keys, dot)
    )

    assert worst >= 0.01


@names("scale", [1.0, 1e-3])
@names(
    "fault",
    ["gain 0.4 %", "no relu", "head dropped", "head weight missing", "bf16 sum", "keys swapped"],
)
def test_a_wrong_score_leaves_the_bound_for_every_query(fault: str, scale: float) -> None:
    query, weights, keys = draw("gaussian", 64, BF16, seed=2)
    query = query * scale
    dots = torch.einsum("shd,td->sht", query, keys)
    right = (dots.relu() * weights.unsqueeze(-1)).sum(1)
    wrong = {
        "gain 0.4 %": right * 1.004,
        "no relu": (dots * weights.unsqueeze(-1)).sum(1),
        "head dropped": (dots.relu() * weights.unsqueeze(-1))[:, 1:].sum(1),
        "head weight missing": dots.relu().sum(1) * weights.mean(),
        "bf16 sum": right.bfloat16().float(),
        "keys swapped": right[:, [1, 0, *range(2, 24)]],
    }[fault]

    bound = ScoreBound.of_keys(exact(keys), FP32_CHAIN).of_queries(exact(query), exact(weights))
    error = (wrong.double() - true_scores(query, weights, keys)).abs() / bound

    assert bool(((right.double() - true_scores(query, weights, keys)).abs() <= bound).all())
    assert bool((error.amax(1) > 5).all())


def test_the_fp8_accumulator_of_hopper_gets_its_own_constant() -> None:
    query, weights, keys = draw("gaussian", 64, FP8_POW2, seed=3)
    # Products cut to 14 bits below the largest of the dot, as an aligned adder does.
    products = query.double().unsqueeze(2) * keys.double()
    unit = torch.exp2(products.abs().amax(-1, keepdim=True).log2().ceil() - 14)
    dots = (torch.trunc(products / unit) * unit).sum(-1)
    found = (dots.relu() * weights.double().unsqueeze(-1)).sum(1)
    error = (found - true_scores(query, weights, keys)).abs()

    narrow, wide = (
        ScoreBound.of_keys(exact(keys), replace(FP32_CHAIN, accumulator=unit)).of_queries(
            exact(query), exact(weights)
        )
        for unit in (Accumulator.FP32, Accumulator.SM90_FP8)
    )

    assert not bool((error <= narrow).all())
    assert bool((error <= wide).all())


def test_a_chain_that_rounds_to_bf16_stays_in_its_own_bound() -> None:
    query, weights, keys = draw("gaussian", 64, FP4_OFFICIAL, seed=3)

    def chain(dots: Tensor) -> Tensor:
        terms = dots.to(torch.bfloat16).relu() * weights.bfloat16().unsqueeze(-1)
        return terms.float().sum(1).bfloat16().double()

    reference = chain(torch.einsum("shd,td->sht", query.double(), keys.double()))
    dots = torch.stack([dot_in_sequence(query[:, h], keys) for h in range(64)], 1)
    # Every dot off by as much as the accumulator may lose: flips at all three points.
    error = (chain(dots * (1 + 2.0**-9)) - reference).abs()

    narrow, wide = (
        ScoreBound.of_keys(exact(keys), arithmetic).of_queries(exact(query), exact(weights))
        for arithmetic in (FP32_CHAIN, OFFICIAL)
    )

    assert bool(((chain(dots) - reference).abs() <= wide).all())
    assert bool((error <= wide).all())
    assert not bool((error <= narrow).all())


def test_a_reference_in_fp32_pays_a_second_time() -> None:
    query, weights, keys = draw("gaussian", 8, BF16, seed=3)

    once, twice = (
        ScoreBound.of_keys(exact(keys), FP32_CHAIN, compute=compute).of_queries(
            exact(query), exact(weights)
        )
        for compute in (torch.float64, torch.float32)
    )

    assert torch.allclose(twice, 2 * once)


# --- code steps -----------------------------------------------------------------------------------


def enclosed(rows: int, fmt: Format, seed: int, relative: float) -> ErrorBound:
    width = 448 if fmt is MAIN_FP8 else 128
    x = torch.randn(rows, width, generator=generator(seed), dtype=torch.float64)
    x[0] = 0
    x[1] = 1e-5 * x[1]
    # A block whose amax stands on the boundary of two powers of two, and values on midpoints.
    x[2, 0], x[2, 1:] = 448.0 if fmt.element == "e4m3" else 6.0, x[2, 1:].clamp(-1, 1)
    x[3] = torch.round(4 * x[3]) / 4 + 1.0 / 16
    return ErrorBound(x, relative * x.abs() + 1e-12)


def admissible_rows(row: ErrorBound, fmt: Format, seed: int) -> list[Encoded]:
    """Encode what admissible candidates may hold: random points and corners of the interval."""
    signs = torch.sign(torch.randn(row.value.shape, generator=generator(seed)))
    inward = torch.rand(row.value.shape, generator=generator(seed + 1), dtype=torch.float64)
    pushes = [row.delta, -row.delta, signs * row.delta, signs * inward * row.delta]
    return [encode(row.value + push, fmt) for push in pushes]


@names("fmt", [*KEY_FORMATS, MAIN_FP8], ids=lambda f: f.name)
@given(seed=st.integers(0, 2**31), radius=st.sampled_from([2.0**-20, 2.0**-12, 2.0**-7]))
@settings(max_examples=15, deadline=None)
def test_every_admissible_row_decodes_within_the_reach(
    fmt: Format, seed: int, radius: float
) -> None:
    row = enclosed(12, fmt, seed, radius)

    reach = stored_error_bound(row, fmt)

    for stored in admissible_rows(row, fmt, seed):
        assert not bool(compare_encoded(stored, row, fmt).failed(1.0).any())
        assert bool(((decode(stored, fmt) - reach.value).abs() <= reach.delta * (1 + 1e-12)).all())


@names("fmt", [BF16, FP8_POW2, FP4_OFFICIAL, MAIN_FP8], ids=lambda f: f.name)
def test_a_value_known_exactly_leaves_no_code_open(fmt: Format) -> None:
    row = enclosed(12, fmt, 0, 0.0)

    reach = stored_error_bound(exact(row.value), fmt)

    assert not bool(reach.delta.any())
    assert torch.equal(reach.value, decode(encode(row.value, fmt), fmt))


@names("fmt", [FP8_PLAIN, FP8_POW2, FP4_OFFICIAL], ids=lambda f: f.name)
def test_few_codes_are_open_at_the_radius_of_a_key(fmt: Format) -> None:
    x = torch.randn(200, 128, generator=generator(4), dtype=torch.float64)

    reach = stored_error_bound(ErrorBound(x, 1e-6 * x.abs()), fmt)

    step = 2.0**-3 if fmt.element == "e4m3" else 1.0
    opened = reach.delta > 0.2 * step * x.abs().clamp(max=1e-3)
    assert 0 < float(opened.double().mean()) < 2e-3 or fmt.element == "e2m1"
    assert float(opened.double().mean()) < 2e-3


def test_unrounded_keys_keep_their_radius() -> None:
    row = enclosed(4, FP32, 0, 1e-6)

    assert stored_error_bound(row, FP32) is row


# --- both together --------------------------------------------------------------------------------


@names("fmt", KEY_FORMATS, ids=lambda f: f.name)
@given(seed=st.integers(0, 2**31), heads=st.sampled_from([1, 8]))
@settings(max_examples=8, deadline=None)
def test_scores_of_admissible_keys_queries_and_weights_stay_in_the_accumulated_bound(
    fmt: Format, seed: int, heads: int
) -> None:
    keys = enclosed(16, fmt, seed, 2.0**-12)
    flat = enclosed(6 * heads, fmt, seed + 7, 2.0**-12)
    query = ErrorBound(flat.value.reshape(6, heads, -1), flat.delta.reshape(6, heads, -1))
    w = torch.randn(6, heads, generator=generator(seed), dtype=torch.float64)
    weights = ErrorBound(w, 1e-4 * w.abs())
    stored_query, stored_keys = stored_error_bound(query, fmt), stored_error_bound(keys, fmt)
    reference = true_scores(stored_query.value, w, stored_keys.value)

    bound = ScoreBound.of_keys(stored_keys, FP32_CHAIN).of_queries(stored_query, weights)

    for k, q in zip(
        admissible_rows(keys, fmt, seed), admissible_rows(query, fmt, seed), strict=True
    ):
        for push in (1e-4, -1e-4):
            found = true_scores(decode(q, fmt), w * (1 + push), decode(k, fmt))
            assert bool(((found - reference).abs() <= bound).all())


@names("fmt", [FP8_POW2, FP4_OFFICIAL], ids=lambda f: f.name)
def test_a_flipped_code_is_covered_where_it_is_ambiguous_and_nowhere_else(fmt: Format) -> None:
    x = torch.randn(20, 128, generator=generator(6), dtype=torch.float64).clamp(-2, 2)
    dim, code = 17, 3
    x[:, dim + 1] = 2.0
    x[:, 0] = 0.45 * fmt.max_value  # the scale of the block that holds `dim` is 1/2
    lower, upper = (
        decode(Encoded(torch.full((1, 128), c, dtype=torch.uint8), encode(x[:1], fmt).scales), fmt)
        for c in (code, code + 1)
    )
    # One value of each row stands just below the midpoint above its code, inside the radius.
    x[:, dim] = (lower[0, dim] + upper[0, dim]) / 2 * (1 - 1e-6)
    row = ErrorBound(x, 1e-5 * x.abs())
    stored = encode(x, fmt)
    flipped = stored.codes.clone()
    flipped[:, dim] += 1
    elsewhere = stored.codes.clone()
    elsewhere[:, dim + 1] ^= 8 if fmt.element == "e2m1" else 0x80
    assert stored.codes[:, dim].tolist() == [code] * 20
    query = torch.randn(5, 8, 128, generator=generator(7), dtype=torch.float64)
    weights = torch.rand(5, 8, generator=generator(8), dtype=torch.float64) + 0.5
    keys = stored_error_bound(row, fmt)
    bound = ScoreBound.of_keys(keys, FP32_CHAIN).of_queries(exact(query), exact(weights))
    reference = true_scores(query, weights, keys.value)

    def error(codes: Tensor) -> Tensor:
        found = true_scores(query, weights, decode(Encoded(codes, stored.scales), fmt))
        return (found - reference).abs()

    assert bool((error(flipped) <= bound).all())
    assert bool((error(flipped).amax(0) > 0).all())
    covered = error(elsewhere) <= bound
    assert float(covered.double().mean()) < 0.5
