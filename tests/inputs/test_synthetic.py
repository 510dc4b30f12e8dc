from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from needlepoint.reference.compressor import gather_taps, pool, rms_norm
from needlepoint.reference.config import MODELS
from needlepoint.reference.formats import (
    FP4_OFFICIAL,
    FP8_PLAIN,
    MAIN_FP8,
    MAIN_FP8_SCALE_FLOOR,
    Format,
    block_scales,
    decode,
    encode,
)
from needlepoint.reference.indexer import head_weights, index_scores, rotate_index, rotate_query
from needlepoint.reference.linear import project
from needlepoint.reference.profile import Precision, needlepoint_profile
from needlepoint.reference.rope import apply_rope, rope_frequencies, rope_rows
from needlepoint.reference.topk import visible_entries
from needlepoint.reference.weights import LayerWeights, random_layer_weights
from needlepoint.verify.base.rows import Rows
from needlepoint.verify.inputs.draw import Draw
from needlepoint.verify.inputs.synthetic import (
    DEFAULT_LENGTHS,
    KINDS,
    TIE_PERIOD,
    VARIED,
    declares_constant,
    synthetic_hidden,
    synthetic_weights,
)

MINI = MODELS["mini"]
RATIO4, RATIO128 = 0, 1
PROFILE = needlepoint_profile("fp8")


@cache
def hidden_of(kind: str) -> Tensor:
    """Return the first request of the default input."""
    return synthetic_hidden(kind, DEFAULT_LENGTHS, MINI.hidden_size, 0)[: DEFAULT_LENGTHS[0]]


@cache
def weights_of(kind: str, layer: int) -> LayerWeights:
    return synthetic_weights(kind, random_layer_weights(MINI, layer, 0), 0)


@cache
def row_stages(kind: str, layer: int, path: str) -> dict[str, Tensor]:
    weights, ratio = weights_of(kind, layer), MINI.ratio(layer)
    compressor = weights.index if path == "index" else weights.main
    assert compressor is not None
    kv = project(hidden_of(kind), compressor.wkv, Precision.FP32)
    score = project(hidden_of(kind), compressor.wgate, Precision.FP32)
    pooled = pool(gather_taps(kv, score, compressor.ape, ratio, PROFILE)).float().double()
    normed = rms_norm(pooled, compressor.norm, MINI.norm_eps).float().double()
    positions = torch.arange(len(normed)) * ratio
    table = rope_rows(rope_frequencies(MINI, True), positions, Precision.FP32)
    roped = apply_rope(normed, table).float().double()
    return {"kv": kv, "pooled": pooled, "normed": normed, "roped": roped}


def group_amax(rows: Tensor, block: int) -> Tensor:
    return rows.reshape(len(rows), -1, block).abs().amax(-1).flatten()


@cache
def scores_of(kind: str) -> Tensor:
    weights = weights_of(kind, RATIO4)
    assert weights.index_wq_b is not None
    assert weights.weights_proj is not None
    latent = project(hidden_of(kind), weights.wq_a, Precision.FP32)
    latent = rms_norm(latent, weights.q_norm, MINI.norm_eps).float().double()
    q = project(latent, weights.index_wq_b, Precision.FP32).reshape(len(latent), -1, 128)
    positions = torch.arange(len(q))
    table = rope_rows(rope_frequencies(MINI, True), positions, Precision.FP32)
    w = project(hidden_of(kind), weights.weights_proj, Precision.FP32)
    keys = rotate_index(row_stages(kind, RATIO4, "index")["roped"], PROFILE)
    return index_scores(
        stored(rotate_query(q, table, PROFILE), FP8_PLAIN),
        head_weights(w, MINI.index_weight_scale, PROFILE),
        stored(keys, FP8_PLAIN),
        visible_entries(positions, 4),
        PROFILE,
    )


def stored(rows: Tensor, fmt: Format) -> Tensor:
    return decode(encode(rows, fmt), fmt)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_finite_bf16_and_repeatable(kind: str) -> None:
    lengths = (130, 5)
    hidden = synthetic_hidden(kind, lengths, 96, 7)

    assert hidden.shape == (135, 96)
    assert hidden.dtype is torch.bfloat16
    assert bool(torch.isfinite(hidden).all())
    assert torch.equal(hidden, synthetic_hidden(kind, lengths, 96, 7))
    assert not torch.equal(hidden, synthetic_hidden(kind, lengths, 96, 8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", [RATIO4, RATIO128])
def test_weights_keep_shape_and_are_repeatable(kind: str, layer: int) -> None:
    plain, changed = random_layer_weights(MINI, layer, 3), weights_of(kind, layer)

    for name, before in vars(plain).items():
        after = getattr(changed, name)
        if isinstance(before, Tensor):
            assert (after.shape, after.dtype) == (before.shape, before.dtype)
            assert bool(torch.isfinite(after).all())
        elif before is None:
            assert after is None
        else:
            again = getattr(synthetic_weights(kind, random_layer_weights(MINI, layer, 0), 0), name)
            for part, tensor in after.tensors().items():
                assert tensor.shape == getattr(before, part).shape
                assert tensor.dtype == getattr(before, part).dtype
                assert torch.equal(tensor, getattr(again, part))


def test_gaussian_is_centred_with_unit_deviation() -> None:
    hidden = hidden_of("gaussian").double()

    # 787,584 draws: the mean is within 5 / sqrt(n) of 0, the mean square within 5 * sqrt(2 / n).
    assert abs(float(hidden.mean())) < 5 / hidden.numel() ** 0.5
    assert abs(float(hidden.square().mean()) - 1) < 5 * (2 / hidden.numel()) ** 0.5
    assert 4 < float(hidden.abs().max()) < 4.9


def test_outlier_channels_reach_the_normed_rows() -> None:
    channels = hidden_of("outlier").double().square().mean(0).sqrt()
    assert int((channels > 11 * channels.median()).sum()) == 4
    assert float(channels.max()) < 42 * float(channels.median())

    for layer, path in ((RATIO4, "index"), (RATIO4, "main"), (RATIO128, "main")):
        dims = row_stages("outlier", layer, path)["normed"].square().mean(0).sqrt()
        assert int((dims > 10 * dims.median()).sum()) >= 3


def test_anisotropic_keys_are_alike() -> None:
    def mean_cosine(kind: str) -> float:
        rows = row_stages(kind, RATIO4, "index")["pooled"]
        unit = rows / rows.norm(dim=1, keepdim=True)
        return float((unit @ unit.T).mean())

    assert mean_cosine("anisotropic") > 0.7
    assert mean_cosine("gaussian") < 0.1


@pytest.mark.parametrize(
    ("layer", "path", "block"),
    [(RATIO4, "index", 32), (RATIO4, "main", 64), (RATIO128, "main", 64)],
)
def test_small_groups_lie_on_every_side_of_the_floors(layer: int, path: str, block: int) -> None:
    rows = row_stages("small", layer, path)["roped"]
    if path == "index":
        rows = rotate_index(rows, PROFILE)
    amax = group_amax(rows[:, : 448 if path == "main" else 128], block)

    assert int((amax == 0).sum()) >= 7
    assert int(((amax > 0) & (amax < 1e-4)).sum()) >= 7
    assert int(((amax >= 1e-4) & (amax < 3.7e-4)).sum()) >= 1
    assert int(((amax >= 3.7e-4) & (amax < 0.0273)).sum()) >= 7
    assert int((amax >= 0.0273).sum()) >= 7


def test_small_parts_the_floor_rules_of_main_rows() -> None:
    nope = row_stages("small", RATIO128, "main")["roped"][:, :448]
    amax_floor, scale_floor = block_scales(nope, MAIN_FP8), block_scales(nope, MAIN_FP8_SCALE_FLOOR)

    differing = (amax_floor != scale_floor).sum()
    assert 0 < int(differing) < amax_floor.numel()


def test_ties_are_exact_and_split_the_selection_border() -> None:
    keys = rotate_index(row_stages("ties", RATIO4, "index")["roped"], PROFILE)
    period = TIE_PERIOD // 4
    # The first window has no predecessor, so the copies start one window later.
    assert torch.equal(keys[1:period], keys[period + 1 : 2 * period])

    scores, k = scores_of("ties"), MINI.index_topk
    full = scores[-256:, :].sort(dim=1, descending=True).values
    finite = full[:, k] > -torch.inf
    assert bool(finite.all())
    assert float((full[:, k - 1] == full[:, k]).double().mean()) > 0.5
    plain = scores_of("gaussian")[-256:, :].sort(dim=1, descending=True).values
    assert float((plain[:, k - 1] == plain[:, k]).double().mean()) < 0.05


def test_ties_hold_plateaus_of_zero_scores() -> None:
    scores = scores_of("ties")
    seen = scores > -torch.inf

    assert 0.2 < float((scores[seen] == 0).double().mean()) < 0.8
    # In some rows the plateau is as high as the border: more than k scores are not below it.
    high = (scores >= 0).sum(1) > MINI.index_topk
    assert int((high & ((scores == 0).sum(1) > 1) & ((scores > 0).sum(1) < MINI.index_topk)).sum())


def test_pow2_rows_are_signed_powers_of_two_at_the_steps_of_the_scale() -> None:
    for layer in (RATIO4, RATIO128):
        stages = row_stages("pow2", layer, "main")
        # The first row of each block of 128 mixes two sign patterns under ratio 4.
        whole = stages["pooled"].abs().amin(1) == stages["pooled"].abs().amax(1)
        assert float(whole.double().mean()) > 0.9
        mantissa = torch.frexp(stages["pooled"][whole]).mantissa.abs()
        assert bool((mantissa == 0.5).all())
        normed = torch.frexp(stages["normed"][whole][:, :448]).mantissa.abs()
        assert set(normed.flatten().tolist()) == {0.5, 0.75, 0.875}  # 2^k, 6 * 2^k, 448 * 2^k

        amax = group_amax(stages["normed"][whole][:, :448], 64)
        at_step = torch.frexp(amax / 448).mantissa == 0.5
        assert int(at_step.sum()) > 0
        assert int((~at_step).sum()) > 0
        scales = block_scales(stages["normed"][whole][:, :448], MAIN_FP8).flatten()
        # amax = 448 * 2^k takes exactly 2^k: an approximate logarithm would take the next power.
        exponents = torch.log2(amax[at_step] / 448).round().long() + 127
        assert torch.equal(scales[at_step].long(), exponents)


@pytest.mark.parametrize("layer", [RATIO4, RATIO128])
def test_integer_projections_are_exact_in_any_order(layer: int) -> None:
    weights, hidden = weights_of("integer", layer), hidden_of("integer")[:64].double()
    assert weights.main is not None

    for matrix in (weights.main.wkv, weights.main.wgate, weights.weights_proj):
        if matrix is None:
            continue
        exact = hidden @ matrix.double().T
        terms = hidden[:, None, :].float() * matrix[None, :32].float()
        for order in (torch.arange(terms.shape[-1]), torch.arange(terms.shape[-1]).flip(0)):
            total = torch.zeros(terms.shape[:2])
            for term in order:
                total += terms[..., term]
            assert torch.equal(total.double(), exact[:, :32])
        assert float(matrix.double().abs().max()) > 0


def test_integer_rows_are_not_trivial() -> None:
    assert set(hidden_of("integer").flatten().tolist()) == set(range(-8, 9))
    pooled = row_stages("integer", RATIO4, "index")["pooled"]
    assert float(pooled.std()) > 0.1


def test_bits_hold_every_kind_of_finite_pattern_and_stay_finite() -> None:
    hidden = hidden_of("bits")
    bits = hidden.view(torch.int16).int() & 0xFFFF
    exponent, mantissa = bits >> 7 & 0xFF, bits & 0x7F

    assert set(mantissa.flatten().tolist()) == set(range(128))
    assert int(((exponent == 0) & (mantissa > 0)).sum()) > 100  # subnormal
    assert int((bits == 0).sum()) > 100
    assert int((bits == 0x8000).sum()) > 100
    assert int(exponent.max()) == 139
    assert int((exponent.amax(1) == 0).sum()) > 100  # rows without a normal number
    for layer, path in ((RATIO4, "index"), (RATIO4, "main"), (RATIO128, "main")):
        stages = row_stages("bits", layer, path)
        assert all(bool(torch.isfinite(rows).all()) for rows in stages.values())
    rotated = rotate_index(row_stages("bits", RATIO4, "index")["roped"], PROFILE)
    assert bool(torch.isfinite(stored(rotated, FP4_OFFICIAL)).all())


def test_a_constant_leaves_every_pick_to_the_tie_rule() -> None:
    assert [kind for kind in KINDS if declares_constant(kind)] == ["ties", "pow2", "constant"]
    assert not declares_constant("no kind")
    assert set(VARIED) == set(KINDS) - {"constant"}
    assert bool((hidden_of("constant") == hidden_of("constant")[0]).all())
    scores = scores_of("constant")
    # The first window has none before it; behind it all scores of a query are equal.
    for query in (11, 500, 2050):
        row = scores[query, 1 : (query + 1) // 4]
        assert float(row.max()) - float(row.min()) <= 1e-12 * float(row.abs().max())
    assert bool(scores[2050, 1:512].any())


def test_kinds_by_name() -> None:
    assert list(KINDS) == [
        "gaussian", "outlier", "anisotropic", "small", "ties", "pow2", "integer", "bits",
        "constant",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="synthetic kind 'uniform': expected one of gaussian, "):
        synthetic_hidden("uniform", (4,), 8, 0)


@given(st.lists(st.integers(1, 1500), min_size=1, max_size=3), st.sampled_from(sorted(KINDS)))
@settings(max_examples=25, deadline=None)
def test_any_lengths_give_as_many_rows(lengths: list[int], kind: str) -> None:
    assert len(synthetic_hidden(kind, lengths, 4, 0)) == sum(lengths)


def test_ties_repeat_within_each_request_and_across() -> None:
    lengths = (TIE_PERIOD + 5, 9)
    hidden = synthetic_hidden("ties", lengths, 8, 0)
    rows = Rows(lengths)

    assert torch.equal(hidden[TIE_PERIOD : TIE_PERIOD + 5], hidden[:5])
    assert torch.equal(hidden[rows.span(1)], hidden[:9])


DIGESTS = {
    "gaussian": "6ab452d593352cb7",
    "outlier": "7d9fadad7c7cc837",
    "anisotropic": "cca23568c7021151",
    "small": "466c084e64ae18a4",
    "ties": "1032cd7921be6bab",
    "pow2": "009c4d2e350ce6c5",
    "integer": "8b7446cede798b96",
    "bits": "73b8951b78eddebf",
    "constant": "08bf8a8ad82443c3",
}


@pytest.mark.parametrize(("kind", "digest"), DIGESTS.items())
def test_the_bytes_of_a_kind_are_pinned(kind: str, digest: str) -> None:
    # Runs on other machines and with other libraries must see the same input.
    hidden = synthetic_hidden(kind, (130, 5), 96, 7)

    assert hashlib.sha256(hidden.view(torch.uint8).numpy().tobytes()).hexdigest()[:16] == digest


def test_draws_are_pinned_and_depend_on_seed_and_purpose() -> None:
    assert Draw(1, "pinned").integers(0, 999, (6,)).tolist() == [42, 480, 774, 535, 168, 166]
    assert Draw(1, "pinned").channels(10, 10).tolist() == [0, 5, 4, 8, 1, 3, 6, 7, 2, 9]
    assert not np.array_equal(Draw(1, "a").words(4), Draw(1, "b").words(4))
    assert not np.array_equal(Draw(1, "a").words(4), Draw(2, "a").words(4))
