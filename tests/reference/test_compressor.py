from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from needlepoint.reference.compressor import CompressorState, Taps, gather_taps, pool
from needlepoint.reference.profile import EXACT, ApePlacement, Arithmetic, Precision

WIDTH = 3
FP32_STATE = replace(EXACT, state=Precision.FP32)
WRITE = replace(FP32_STATE, ape=ApePlacement.WRITE)
READ_BF16 = replace(EXACT, state=Precision.BF16)
WRITE_BF16 = replace(WRITE, state=Precision.BF16)


def given_tokens(tokens: int, ratio: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return kv, score (fp32) and ape."""
    g = torch.Generator().manual_seed(seed)
    columns = WIDTH * (2 if ratio == 4 else 1)
    kv = torch.randn(tokens, columns, generator=g)
    return kv, torch.randn(tokens, columns, generator=g), torch.randn(ratio, columns, generator=g)


def run(
    kv: Tensor,
    score: Tensor,
    ape: Tensor,
    ratio: int,
    arithmetic: Arithmetic,
    cuts: list[int],
    state: CompressorState | None = None,
) -> Taps:
    """Feed a request cut into calls and join the taps of all windows."""
    state = state or CompressorState(ratio, kv.shape[1], arithmetic)
    taps = []
    ends = [0, *cuts, len(kv)]
    for a, b in itertools.pairwise(ends):
        taps.append(gather_taps(kv[a:b], score[a:b], ape, ratio, arithmetic, state))
        state.append(kv[a:b], score[a:b], ape)
    return Taps(torch.cat([t.kv for t in taps]), torch.cat([t.logits for t in taps]))


def by_definition(
    kv: Tensor, score: Tensor, ape: Tensor, ratio: int, entry: int, channel: int
) -> float:
    """Pool one channel of one window in plain Python, from the definition."""
    slots = []
    for position in range((entry - (ratio == 4)) * ratio, (entry + 1) * ratio):
        overlap = position < entry * ratio
        column = channel if overlap or ratio == 128 else WIDTH + channel
        if position >= 0:
            logit = score[position, column].item() + ape[position % ratio, column].item()
            slots.append((logit, kv[position, column].item()))
    top = max(logit for logit, _ in slots)
    weights = [math.exp(logit - top) for logit, _ in slots]
    return math.fsum(w * v for w, (_, v) in zip(weights, slots, strict=True)) / math.fsum(weights)


@pytest.mark.parametrize(("ratio", "tokens"), [(4, 19), (128, 260)])
def test_pooled_rows_follow_the_definition(ratio: int, tokens: int) -> None:
    kv, score, ape = given_tokens(tokens, ratio, seed=ratio)
    pooled = pool(gather_taps(kv, score, ape, ratio, EXACT))
    assert pooled.shape == (tokens // ratio, WIDTH)
    for entry in range(tokens // ratio):
        wanted = [by_definition(kv, score, ape, ratio, entry, c) for c in range(WIDTH)]
        assert pooled[entry].tolist() == pytest.approx(wanted, rel=1e-13)


@pytest.mark.parametrize("tokens", range(1, 14))
def test_a_window_of_four_counts_from_its_last_token(tokens: int) -> None:
    kv, score, ape = given_tokens(tokens, 4, seed=1)
    taps = gather_taps(kv, score, ape, 4, EXACT)
    assert taps.kv.shape == taps.logits.shape == (tokens // 4, 8, WIDTH)
    for entry in range(tokens // 4):
        masked = torch.isinf(taps.logits[entry]).all(dim=1)
        assert masked.tolist() == [entry == 0] * 4 + [False] * 4


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 255, 256, 257])
def test_a_window_of_128_has_no_overlap(tokens: int) -> None:
    kv, score, ape = given_tokens(tokens, 128, seed=1)
    taps = gather_taps(kv, score, ape, 128, EXACT)
    assert taps.kv.shape == (tokens // 128, 128, WIDTH)
    assert not torch.isinf(taps.logits).any()


@pytest.mark.parametrize("arithmetic", [FP32_STATE, WRITE, WRITE_BF16], ids=lambda a: a.state.value)
def test_every_split_of_a_short_request(arithmetic: Arithmetic) -> None:
    kv, score, ape = given_tokens(21, 4, seed=2)
    whole = run(kv, score, ape, 4, arithmetic, [])
    for cut in range(1, 21):
        split = run(kv, score, ape, 4, arithmetic, [cut])
        assert torch.equal(split.kv, whole.kv)
        assert torch.equal(split.logits, whole.logits)
    steps = run(kv, score, ape, 4, arithmetic, list(range(1, 21)))
    assert torch.equal(pool(steps), pool(whole))


@pytest.mark.parametrize("arithmetic", [FP32_STATE, WRITE], ids=["read", "write"])
def test_every_split_around_windows_of_128(arithmetic: Arithmetic) -> None:
    kv, score, ape = given_tokens(270, 128, seed=3)
    whole = pool(run(kv, score, ape, 128, arithmetic, []))
    for cut in range(1, 270):
        assert torch.equal(pool(run(kv, score, ape, 128, arithmetic, [cut])), whole)
    steps = run(kv, score, ape, 128, arithmetic, list(range(1, 270)))
    assert torch.equal(pool(steps), whole)


@settings(max_examples=60, deadline=None)
@given(
    ratio=st.sampled_from([4, 128]),
    tokens=st.integers(1, 400),
    cuts=st.sets(st.integers(1, 399), max_size=12),
    seed=st.integers(0, 3),
    threads=st.sampled_from([1, 2, 4]),
)
def test_bytes_do_not_depend_on_cuts_or_threads(
    ratio: int, tokens: int, cuts: set[int], seed: int, threads: int
) -> None:
    kv, score, ape = given_tokens(tokens, ratio, seed)
    torch.set_num_threads(1)
    whole = pool(run(kv, score, ape, ratio, FP32_STATE, []))
    torch.set_num_threads(threads)
    ends = sorted(c for c in cuts if c < tokens)
    assert torch.equal(pool(run(kv, score, ape, ratio, FP32_STATE, ends)), whole)


def test_a_state_of_bf16_rounds_what_earlier_calls_left() -> None:
    kv, score, ape = given_tokens(8, 4, seed=4)
    whole = run(kv, score, ape, 4, READ_BF16, [])
    split = run(kv, score, ape, 4, READ_BF16, [6])
    assert torch.equal(split.kv[0], whole.kv[0])
    older, newer = split.kv[1, :6], split.kv[1, 6:]
    assert torch.equal(older, whole.kv[1, :6].bfloat16().double())
    assert not torch.equal(older, whole.kv[1, :6])
    assert torch.equal(newer, whole.kv[1, 6:])
    places = ape.double()[:, WIDTH:]
    raw = (split.logits[1, 4:6] - places[:2]).abs()
    assert torch.allclose(raw, score[4:6, WIDTH:].bfloat16().double().abs(), atol=1e-15)


def test_writing_the_embedding_rounds_the_sum() -> None:
    kv, score, ape = given_tokens(4, 4, seed=5)
    sums = (score.double() + ape.double())[:, WIDTH:]
    read = gather_taps(kv, score, ape, 4, FP32_STATE).logits[0, 4:]
    write = gather_taps(kv, score, ape, 4, WRITE).logits[0, 4:]
    write_bf16 = gather_taps(kv, score, ape, 4, WRITE_BF16).logits[0, 4:]
    assert torch.equal(read, sums)
    assert torch.equal(write, sums.float().double())
    assert not torch.equal(write, read)
    assert torch.equal(write_bf16, sums.float().bfloat16().double())


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_reused_state_forgets_the_earlier_request(ratio: int, tokens: int) -> None:
    """The official buffers keep the old window when a request starts with fewer than 4 tokens."""
    state = CompressorState(ratio, WIDTH * (2 if ratio == 4 else 1), FP32_STATE)
    run(*given_tokens(300, ratio, seed=6), ratio, FP32_STATE, [], state)
    state.restart()
    kv, score, ape = given_tokens(260, ratio, seed=7)
    fresh = run(kv, score, ape, ratio, FP32_STATE, [tokens])
    reused = run(kv, score, ape, ratio, FP32_STATE, [tokens], state)
    assert torch.equal(reused.kv, fresh.kv)
    assert torch.equal(reused.logits, fresh.logits)
    assert bool((fresh.logits[0] == -math.inf).any()) == (ratio == 4)


def test_a_gap_is_an_error_not_a_mask() -> None:
    kv, score, ape = given_tokens(8, 4, seed=8)
    state = CompressorState(4, 2 * WIDTH, FP32_STATE)
    state.next_position = 4
    with pytest.raises(ValueError, match="holds position -1, expected 0"):
        gather_taps(kv[4:], score[4:], ape, 4, FP32_STATE, state)


def test_gathering_does_not_change_its_inputs() -> None:
    kv, score, ape = given_tokens(9, 4, seed=9)
    state = CompressorState(4, 2 * WIDTH, FP32_STATE)
    state.append(kv[:3], score[:3], ape)
    before = [t.clone() for t in (kv, score, ape, state.kv.rows, state.score.rows)]
    first = gather_taps(kv[3:], score[3:], ape, 4, FP32_STATE, state)
    again = gather_taps(kv[3:], score[3:], ape, 4, FP32_STATE, state)
    after = (kv, score, ape, state.kv.rows, state.score.rows)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(first.logits, again.logits)


def test_large_logits_do_not_overflow() -> None:
    logits = torch.tensor([-math.inf, 900.0, 899.0, -900.0], dtype=torch.float64).view(1, 4, 1)
    kv = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64).view(1, 4, 1)
    e = math.exp(-1)
    assert pool(Taps(kv, logits)).item() == pytest.approx((1 + 2 * e) / (1 + e), rel=1e-15)


@pytest.mark.parametrize(
    ("ratio", "kv", "score", "ape"),
    [
        (8, (4, 6), (4, 6), (8, 6)),
        (4, (0, 6), (0, 6), (4, 6)),
        (4, (4, 6), (4, 3), (4, 6)),
        (4, (4, 6), (4, 6), (128, 6)),
        (4, (4, 5), (4, 5), (4, 5)),
        (128, (4,), (4,), (128, 4)),
    ],
)
def test_wrong_shapes(
    ratio: int, kv: tuple[int, ...], score: tuple[int, ...], ape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="gather_taps"):
        gather_taps(torch.zeros(kv), torch.zeros(score), torch.zeros(ape), ratio, EXACT)
