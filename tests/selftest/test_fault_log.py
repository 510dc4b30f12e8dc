"""The twelve faults that a verifier of these kernels must tell apart, and their two controls.

Each test shows the number that tells right from wrong on its input, sees the fault caught, and sees
the sound code pass. The rest of the fault log is planted by ``needlepoint selftest``.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from needlepoint.optimized.emulation import narrow
from needlepoint.optimized.emulation.pages import allocate, write_rows
from needlepoint.optimized.emulation.select import select_topk
from needlepoint.reference.attention import sparse_attention
from needlepoint.reference.compressor import CompressorState, Taps, gather_taps, pool
from needlepoint.reference.config import MODELS
from needlepoint.reference.hadamard import hadamard
from needlepoint.reference.profile import Precision, needlepoint_profile
from needlepoint.reference.rope import apply_rope, rope_frequencies, rope_rows
from needlepoint.verify.judge.sides.attention_side import attention_errors
from needlepoint.verify.layout.pages import open_pool
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.numerics.selection import Swap, judge_picks, pick_sets
from needlepoint.verify.selftest.faults.catalogue import CATALOGUE
from needlepoint.verify.selftest.faults.picks import UNWRITTEN, capped_ties
from needlepoint.verify.selftest.faults.store import raw_codes_rounded_scale
from needlepoint.verify.selftest.input import SelftestInput, own_input
from needlepoint.verify.selftest.judge import GroundJudge

HEADS, KEYS, QUERIES, K = 64, 4096, 8, 512
"""Shape of the score input: 8 queries over 4,096 keys, 512 of them picked."""

_PROFILE = needlepoint_profile("fp8")


def caught(id: str) -> tuple[str, ...]:
    """Return the gates that a case of the catalogue sets off."""
    case = CATALOGUE[id]
    return _judge(case.setting.key_format, case.setting.ratio, case.setting.kind).find(case).gates


_KEPT: dict[tuple[str, int, str], GroundJudge] = {}
_SOURCE: list[SelftestInput] = []


def _judge(key_format: str, ratio: int, kind: str) -> GroundJudge:
    key = (key_format, ratio, kind)
    if key not in _KEPT:
        if not _SOURCE:
            _SOURCE.append(own_input(0))
        setting = next(
            case.setting
            for case in CATALOGUE.values()
            if (case.setting.key_format, case.setting.ratio, case.setting.kind) == key
        )
        _KEPT[key] = _SOURCE[0].judge(setting, 1.0, Limits.default())
        assert _KEPT[key].sound().gates == ()
    return _KEPT[key]


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return normal fp32 numbers, held in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(torch.float64)


def scores_of(q: Tensor, k: Tensor, w: Tensor, relu: bool = True) -> Tensor:
    dots = torch.einsum("shd,td->sht", q.float(), k.float())
    return torch.einsum("sht,sh->st", dots.relu() if relu else dots, w.float())


def overlap(one: Tensor, other: Tensor, k: int = K) -> float:
    a, b = (x.topk(k, dim=1).indices for x in (one, other))
    return float((a[:, :, None] == b[:, None, :]).any(2).double().mean())


@pytest.fixture(scope="module")
def queries() -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and head weights of the score input."""
    return (
        draw(QUERIES, HEADS, 128, seed=1),
        draw(KEYS, 128, seed=2),
        draw(QUERIES, HEADS, seed=3),
    )


# --- A04: a cap on equal scores ---------------------------------------------------------------


def test_a04_a_cap_on_ties_leaves_exactly_924_empty_slots() -> None:
    width, k = 8320, 2048
    scores = torch.zeros(1, width)
    scores[0, torch.randperm(width, generator=torch.Generator().manual_seed(0))[:100]] = (
        torch.arange(1.0, 101.0)
    )
    visible, bound = torch.tensor([width]), torch.zeros(1, width)
    sound = select_topk(scores, visible, k)

    def judged(picks: Tensor) -> int:
        found = judge_picks(picks, sound, scores, scores, bound, visible, k)
        assert found.count(Swap.SELECTOR) == 0
        return int(found.invalid.sum())

    assert judged(capped_ties(1024)(scores, visible, k)) == 924
    assert judged(sound) == 0
    assert set(scores[0].nonzero()[:, 0].tolist()) <= set(sound[0].tolist())
    assert "topk.invalid" in caught("ties-capped")


# --- B01: lengths of 0 and below --------------------------------------------------------------


def test_b01_rows_of_no_length_pick_nothing() -> None:
    lengths = torch.tensor([-4, -3, -2, -1, 0, 1])
    scores = torch.full((6, 131072), torch.nan)
    visible = lengths.clamp(min=0)
    sound = select_topk(scores, visible, 8)
    unsigned = (lengths % 2**32).clamp(max=scores.shape[1])
    wrong = select_topk(scores.nan_to_num(), unsigned, 8)

    assert torch.equal(sound[:5], torch.full((5, 8), -1, dtype=torch.int32))
    assert sound[5].tolist() == [0] + [-1] * 7
    assert pick_sets(sound, visible, 8, 1).invalid.tolist() == [0] * 6
    assert (pick_sets(wrong, visible, 8, 1).invalid >= 8).tolist() == [True] * 4 + [False] * 2
    assert "topk.invalid" in caught("length-read-as-unsigned")


# --- C03, C08: -1 in the picks of attention ---------------------------------------------------


def test_c03_a_skipped_pick_leaks_nothing() -> None:
    q, window, rows, sink = draw(4, 2, 64), draw(4, 64, seed=4), draw(64, 64, seed=5), draw(2)
    rows[0] = torch.nan
    few = torch.arange(1, 13, dtype=torch.int32).expand(4, 12)
    many = torch.cat((few, torch.full((4, 20), -1, dtype=torch.int32)), dim=1)
    expected = sparse_attention(q, window, rows, few, sink, window_size=4)
    found = sparse_attention(q, window, rows, many, sink, window_size=4)
    # The faulty kernel gathers row 0 for -1 and gives it the weight 0.
    leaked = expected + 0.0 * rows[0]

    sound = attention_errors(found, expected)
    assert torch.isfinite(found).all()
    assert float(sound.relative(1e-30).max()) < 1e-12
    assert not torch.isfinite(attention_errors(leaked, expected).error_norm).any()
    assert "topk.invalid" in caught("minus-one-read-as-zero")


def test_c08_a_first_block_of_skipped_picks_is_no_nan() -> None:
    q, window, rows, sink = draw(4, 2, 64), draw(4, 64, seed=4), draw(64, 64, seed=5), draw(2)
    ids = torch.arange(48, dtype=torch.int32).expand(4, 48)
    first = torch.cat((torch.full((4, 16), -1, dtype=torch.int32), ids), dim=1)
    nobody = torch.full((4, 16), -1, dtype=torch.int32)

    def online(logits: Tensor) -> Tensor:
        """Rescale by the old maximum minus the new one, both -inf in a block of none."""
        old = torch.full((4,), -torch.inf, dtype=torch.float64)
        new = torch.maximum(old, logits.amax(1))
        return (old - new).exp()

    found = sparse_attention(q, window, rows, first, sink, window_size=4)
    expected = sparse_attention(q, window, rows, ids, sink, window_size=4)
    assert float(attention_errors(found, expected).relative(1e-30).max()) < 1e-12
    assert torch.isfinite(sparse_attention(q, window, rows, nobody, sink, window_size=4)).all()
    assert torch.isnan(online(torch.full((4, 16), -torch.inf, dtype=torch.float64))).all()


# --- D01: interleaved for planar --------------------------------------------------------------


def test_d01_an_interleaved_page_reads_one_row_right_and_64_finite_scales() -> None:
    keys = draw(64, 128, seed=6) * 2.0 ** -(torch.arange(64) % 7)[:, None]
    rows = narrow.store_fp8(np.ascontiguousarray(keys.numpy().astype(np.float32).T))
    paged = allocate("index-fp8", 64, [64], seed=0)
    write_rows(paged, 0, 0, rows)
    page = int(paged.page_table[0][0])
    raw = paged.pool[page]
    # A reader that takes each row's scale from behind its values: 132 bytes a row.
    wrong = raw[: 64 * 132].view(64, 132)
    scales = wrong[:, 128:].contiguous().view(torch.float32)[:, 0]
    right = (wrong[:, :128].numpy() == rows.values).all(1)

    assert right.sum() == 1
    assert right[0]
    assert np.array_equal(
        open_pool(paged.pool, "index-fp8", 64).raw_rows([page], 64)[:, :128], rows.values
    )
    # No check for NaN or infinity is enough.
    assert torch.isfinite(scales).sum() >= 60
    assert "index.stored" in caught("page-interleaved")


# --- E01: page number times stride beyond 32 bits ---------------------------------------------


def test_e01_pages_on_both_sides_of_two_gib() -> None:
    stride, last = 1077120, 1994
    pool_ = torch.empty((last + 1) * stride, dtype=torch.uint8).view(last + 1, stride)
    rows = narrow.store_fp8(np.random.default_rng(0).normal(size=(128, 128)).astype(np.float32))
    for page, part in ((1993, slice(0, 64)), (1994, slice(64, 128))):
        pool_[page, : 64 * 128] = torch.from_numpy(rows.values[part].reshape(-1).copy())
        pool_[page, 64 * 128 : 64 * 132] = torch.from_numpy(rows.scales[part].reshape(-1).copy())

    def offset32(page: int) -> int:
        return (page * stride + 2**31) % 2**32 - 2**31

    read = open_pool(pool_, "index-fp8", 64, page_stride=stride).read([1993, 1994], 128)
    assert np.array_equal(read.codes, rows.values)
    assert np.abs(read.values[64:]).sum() > 0
    assert offset32(1993) == 1993 * stride
    assert offset32(1994) < 0
    assert "index.stored" in caught("page-number-wraps")
    assert "index.stored" in caught("page-of-zeros")


# --- F01: half-split for pairs ----------------------------------------------------------------


def half_split(x: Tensor, rows: Tensor) -> Tensor:
    cos, sin = rows[..., 0], rows[..., 1]
    a, b = x[..., -64:-32], x[..., -32:]
    return torch.cat((x[..., :-64], a * cos - b * sin, b * cos + a * sin), dim=-1)


def test_f01_the_wrong_rotation_grows_with_distance(
    queries: tuple[Tensor, Tensor, Tensor],
) -> None:
    q, k, w = queries
    frequencies = rope_frequencies(MODELS["mini"], compressed=False)

    def error(distance: int) -> tuple[float, float]:
        at = rope_rows(frequencies, torch.tensor([16383, 16383 - distance]), Precision.FLOAT64)
        right, wrong = (
            scores_of(rotate(q, at[0]), rotate(k, at[1]), w) for rotate in (apply_rope, half_split)
        )
        return float((right - wrong).square().mean().sqrt() / right.square().mean().sqrt()), (
            overlap(right, wrong)
        )

    errors = {distance: error(distance)[0] for distance in (0, 1, 64, 16383)}
    assert errors[0] < 1e-5
    assert 0.1 < errors[1] < 0.4
    assert errors[1] < errors[64] < errors[16383] * 1.5
    assert errors[64] > 0.4
    assert error(0)[1] > 0.999
    assert error(16383)[1] < 0.6
    assert caught("rope-half-split")[0] == "index.roped"
    assert caught("query-half-split")[0] == "query.query"


# --- G01, G03: ReLU and Hadamard --------------------------------------------------------------


def test_g01_scores_without_relu_pick_a_third_otherwise(
    queries: tuple[Tensor, Tensor, Tensor],
) -> None:
    q, k, w = queries
    right, wrong = scores_of(q, k, w.abs()), scores_of(q, k, w.abs(), relu=False)

    assert 0.55 < overlap(right, wrong) < 0.8
    assert overlap(right, scores_of(q, k, w.abs())) == 1.0
    # Of products that are never negative, ReLU takes nothing.
    with_it, without = (scores_of(q.abs(), k.abs(), w.abs(), relu) for relu in (True, False))
    assert overlap(with_it, without) == 1.0
    assert "index.scores" in caught("relu-missing")
    assert caught("picks-of-every-head") == ("protocol",)


def test_g03_one_side_rotated_is_chance_and_both_is_nothing(
    queries: tuple[Tensor, Tensor, Tensor],
) -> None:
    q, k, w = queries
    right = scores_of(q, k, w)

    assert overlap(right, scores_of(hadamard(q), hadamard(k), w)) > 0.995
    assert overlap(right, scores_of(hadamard(q), k, w)) == pytest.approx(K / KEYS, abs=0.06)
    assert caught("hadamard-missing-on-keys")[0] == "index.rotated"
    assert caught("hadamard-missing-on-queries")[0] == "query.query"


# --- H01: codes under one scale, another stored -----------------------------------------------


def test_h01_codes_and_scale_must_be_of_one_scale() -> None:
    x = np.random.default_rng(0).normal(size=(128, 1)).astype(np.float32)
    x *= np.float32(1.1 * 448 / np.abs(x).max())  # the raw scale lies just above a power of two

    def error(rows: narrow.StoredRows) -> float:
        codes = torch.from_numpy(rows.values).view(torch.float8_e4m3fn).to(torch.float32)
        scale = torch.from_numpy(rows.scales.view("<f4").astype(np.float32))
        back = (codes * scale).T.numpy()
        return float(np.linalg.norm(back - x) / np.linalg.norm(x))

    scale = np.exp2(np.ceil(np.log2(np.abs(x).max(axis=0) / 448))).astype(np.float32)
    sound = narrow.StoredRows(
        np.ascontiguousarray(narrow.to_e4m3((x / scale).astype(np.float32)).T),
        scale.view(np.uint8).reshape(-1, 4),
    )
    assert error(sound) < 0.035
    assert error(raw_codes_rounded_scale(x)) > 4 * error(sound)
    assert caught("scale-rounded-codes-not")[0] == "index.stored"


# --- I01, K01: the state between calls --------------------------------------------------------

Split = tuple[int, ...]


def entries(tokens: Tensor, score: Tensor, ape: Tensor, split: Split, *, overlap: bool) -> Tensor:
    """Return pooled rows of a prompt in pieces; ``overlap`` off loses each piece's past window."""
    state, rows, start = CompressorState(4, 64, _PROFILE), [], 0
    for size in split:
        piece = slice(start, start + size)
        taps = gather_taps(tokens[piece], score[piece], ape, 4, _PROFILE, state)
        state.append(tokens[piece], score[piece], ape)
        if not overlap and len(taps.kv):
            logits = taps.logits.clone()
            logits[0, :4] = -torch.inf
            taps = Taps(taps.kv, logits)
        rows.append(pool(taps) if len(taps.kv) else taps.kv[:, 0])
        start += size
    return torch.cat(rows)


SPLITS: tuple[Split, ...] = ((5, 16), (3, 18), (2, 2, 9, 8), (1,) * 21)


@pytest.fixture(scope="module")
def prompt() -> tuple[Tensor, Tensor, Tensor]:
    """Return 21 tokens: values, scores of +-3, position embedding."""
    return draw(21, 64), 3 * draw(21, 64, seed=1).sign(), draw(4, 64, seed=2).float()


@pytest.mark.parametrize("split", SPLITS)
def test_i01_every_split_gives_the_same_rows(
    split: Split, prompt: tuple[Tensor, Tensor, Tensor]
) -> None:
    whole = entries(*prompt, (21,), overlap=True)

    assert torch.equal(entries(*prompt, split, overlap=True), whole)


def test_i01_a_lost_overlap_spares_entry_0_alone(prompt: tuple[Tensor, Tensor, Tensor]) -> None:
    whole = entries(*prompt, (21,), overlap=True)
    decoded = entries(*prompt, (1,) * 21, overlap=False)
    error = (decoded - whole).norm(dim=1) / whole.norm(dim=1)

    assert float(error[0]) == 0.0
    assert all(0.3 < e < 3.0 for e in error[1:].tolist())
    assert caught("overlap-missing")[0] == "index.pooled"
    # A split at a window's edge before the first full window hides it.
    assert torch.equal(entries(*prompt, (4, 17), overlap=False)[:1], whole[:1])


@pytest.mark.parametrize("length", [64, 65, 127, 128, 129, 255, 256])
def test_k01_a_hit_needs_the_ring_of_its_own_request(length: int) -> None:
    values, score, ape = draw(300, 64), draw(300, 64, seed=1), draw(4, 64, seed=2).float()
    cold = entries(values, score, ape, (300,), overlap=True)

    def resumed(ring: Tensor) -> Tensor:
        """Resume behind a prefix with the ring that these values left."""
        state = CompressorState(4, 64, _PROFILE)
        state.append(ring[:length], score[:length], ape)
        rest = slice(length, None)
        return pool(gather_taps(values[rest], score[rest], ape, 4, _PROFILE, state))

    right, wrong = resumed(values), resumed(draw(300, 64, seed=9))
    assert torch.equal(right, cold[length // 4 :])
    assert not torch.equal(wrong[0], right[0])
    assert torch.equal(wrong[2:], right[2:])
    assert caught("ring-of-another-request")[0] == "index.pooled"


# --- L01: one offset where two are needed -----------------------------------------------------


def test_l01_every_pick_lies_in_its_own_request() -> None:
    prefixes, new = (0, 70, 129), (5, 1, 17)
    k = 8
    invalid = {"sound": 0, "one offset": 0}
    first = 0
    for prefix, count in zip(prefixes, new, strict=True):
        visible = (torch.arange(prefix, prefix + count) + 1) // 4
        width = int(visible.max())
        scores = draw(count, max(width, 1), seed=prefix).float()
        picks = select_topk(scores, visible, k)
        moved = torch.where(picks >= 0, picks + first, -1)
        for name, found in (("sound", picks), ("one offset", moved)):
            invalid[name] += int(pick_sets(found, visible, k, max(width, 1)).invalid.sum())
        first += width
    assert invalid["sound"] == 0
    assert invalid["one offset"] > 0
    assert "topk.invalid" in caught("picks-of-the-batch")
    assert caught("keys-of-another-request")[0] == "index.scores"


# --- Controls ---------------------------------------------------------------------------------


def test_g06_a_positive_constant_fails_the_scores_and_no_pick() -> None:
    gates = caught("wrong-positive-constant")

    assert "index.scores" in gates
    assert not any(gate.startswith("topk") for gate in gates)


@pytest.mark.parametrize("id", ["everything-otherwise", "scale-by-a-reciprocal"])
def test_h08_two_sound_ways_of_one_format_are_not_told_apart(id: str) -> None:
    assert caught(id) == ()


def test_an_index_that_nobody_wrote_is_never_a_pick() -> None:
    picks = torch.tensor([[0, UNWRITTEN]], dtype=torch.int32)

    assert int(pick_sets(picks, torch.tensor([4]), 2, 4).invalid) == 1
