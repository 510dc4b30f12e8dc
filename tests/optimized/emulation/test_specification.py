"""The emulation against a scalar reading of docs/specification.md.

The scalar model follows the page one number at a time: fused multiply-adds over exact rationals,
loops instead of arrays. ``test_mutants`` changes one thing at a time on the same data.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from needlepoint.optimized.emulation import pooling, rows, specification
from needlepoint.optimized.protocol.interface import LayerInputs

F32 = npt.NDArray[np.float32]
f32 = np.float32
TOKENS, ENTRIES = (49,), range(12)
PAGE = Path(__file__).parents[3] / "docs" / "specification.md"
MAGIC, LOG2_E = f32(12582912.0), f32(1.44269504088896340736)
POLYNOMIAL = [f32(float.fromhex(h)) for h in ("0x1.5bda54p-10", "0x1.3ce8acp-7")] + [
    f32(float.fromhex(h)) for h in ("0x1.c6b6d8p-5", "0x1.ebf9c2p-3", "0x1.62e42ap-1")
]


def fused(a: np.floating, b: np.floating, c: np.floating) -> np.float32:
    """One rounding of a * b + c; numbers here stay in fp32's normal range."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if exact == 0:
        return f32(float(a) * float(b) + float(c))
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    exponent -= abs(exact) < Fraction(2) ** exponent
    quantum = Fraction(2) ** (exponent - 23)
    return f32(float(round(exact / quantum) * quantum))


def tree(x: list[np.float32]) -> np.float32:
    stride = 1
    while stride < len(x):
        for i in range(0, len(x), 2 * stride):
            x[i] = x[i] + x[i + stride]
        stride *= 2
    return x[0]


def weight(z: np.float32, m: np.float32) -> np.float32:
    t = max(z - m, f32(-126))
    r = t + MAGIC
    f = t - (r - MAGIC)
    p = fused(f, POLYNOMIAL[0], POLYNOMIAL[1])
    for c in (*POLYNOMIAL[2:], f32(1)):
        p = fused(f, p, c)
    bits = int(p.view(np.uint32)) + (int(r.view(np.uint32)) << 23)
    return np.uint32(bits % 2**32).view(f32)


def pooled_channel(kv: F32, score: F32, ape: F32) -> np.float32:
    """One channel; the slots in time order, masked ones left out."""
    z = [fused(s, LOG2_E, a * LOG2_E) for s, a in zip(score, ape, strict=True)]
    m = max(z)
    sums, values = [], []
    for start in range(0, len(z), 8):
        s = v = f32(0)
        for j in range(start, min(start + 8, len(z))):
            e = weight(z[j], m)
            s, v = s + e, fused(e, kv[j], v)
        sums.append(s)
        values.append(v)
    return tree(values) / tree(sums)


def pooled_row(given: F32, score: F32, ape: F32, entry: int, ratio: int, d: int) -> F32:
    out = np.empty(d, f32)
    for i in range(d):
        slots = [(ratio * entry + j, j, i + (d if ratio == 4 else 0)) for j in range(ratio)]
        if ratio == 4 and entry:
            slots = [(4 * entry - 4 + j, j, i) for j in range(4)] + slots
        kv, sc, po = (
            np.array([source[at[k], at[2]] for at in slots], f32)
            for source, k in ((given, 0), (score, 0), (ape, 1))
        )
        out[i] = pooled_channel(kv, sc, po)
    return out


def normed_row(x: F32, w: F32, eps: np.float32) -> F32:
    halves = [fused(x[i + 1], x[i + 1], x[i] * x[i]) for i in range(0, x.size, 2)]
    a = fused(tree(halves), f32(1 / x.size), eps)
    r = f32(1) / np.sqrt(a)
    return np.array([(v * r) * g for v, g in zip(x, w, strict=True)], f32)


def roped_row(x: F32, table: F32) -> F32:
    out = x.copy()
    for i in range(32):
        at = x.size - 64 + 2 * i
        (x0, x1), (c, s) = x[at : at + 2], table[i]
        out[at] = fused(-x1, s, x0 * c)
        out[at + 1] = fused(x1, c, x0 * s)
    return out


def rotated_row(x: F32) -> F32:
    a = list(x)
    for h in (1, 2, 4, 8, 16, 32, 64):
        for i in range(128):
            if not i & h:
                a[i], a[i + h] = a[i] + a[i + h], a[i] - a[i + h]
    scale = np.uint32(0x3DB504F3).view(f32)
    return np.array([v * scale for v in a], f32)


Stages = dict[str, npt.NDArray[np.generic]]
Emulate = Callable[[LayerInputs, str, range], Stages]


def model(inputs: LayerInputs, path: str, entries: range) -> Stages:
    given = inputs.index if path == "index" else inputs.main
    assert given is not None
    d = given.norm_weight.numel()
    kv, score, ape = (t.float().numpy() for t in (given.kv, given.score, given.ape))
    out: dict[str, list[F32]] = {"pooled": [], "normed": [], "roped": [], "rotated": []}
    for entry in entries:
        pooled = pooled_row(kv, score, ape, entry, inputs.ratio, d)
        normed = normed_row(pooled, given.norm_weight.numpy(), f32(inputs.norm_eps))
        roped = roped_row(normed, inputs.rope_table[entry * inputs.ratio].numpy())
        rotated = rotated_row(roped) if path == "index" else roped
        for rows_of, row in zip(out.values(), (pooled, normed, roped, rotated), strict=True):
            rows_of.append(row)
    if path == "main":
        del out["rotated"]
    return {name: np.stack(rows_of) for name, rows_of in out.items()}


def assert_model(emulate: Emulate, inputs: LayerInputs, path: str, entries: range) -> None:
    got = emulate(inputs, path, entries)
    for stage, expected in model(inputs, path, entries).items():
        bits = got[stage].view(np.uint32) != expected.view(np.uint32)
        assert not bits.any(), f"{path} {stage}: {bits.sum()} differ, first {np.argwhere(bits)[0]}"


def test_the_page_and_the_module_hold_the_same_constants() -> None:
    table = re.findall(r"^\| (.+?) \| (\S+) \| `0x([0-9A-F]{8})` \|$", PAGE.read_text(), re.M)
    bits = {name.split(" = ")[0].removeprefix("fl(").removesuffix(")"): b for name, _, b in table}
    assert {k: int(v, 16) for k, v in bits.items()} == specification.CONSTANT_BITS
    for _, decimal, b in table:
        assert f32(float(decimal)).view(np.uint32) == int(b, 16)


def test_the_constants_are_what_their_names_say() -> None:
    assert specification.LOG2_E == f32(np.log2(np.e))
    assert specification.HADAMARD_SCALE == f32(128**-0.5)
    assert specification.AMAX_FLOOR == f32(1e-4)
    assert specification.INVERSE_448 == f32(1 / 448)
    assert specification.INVERSE_6 == f32(1 / 6)
    assert specification.AMAX_FLOOR_FP4 == f32(6 * 2.0**-126)
    assert f"version {specification.SPEC_VERSION}" in PAGE.read_text().splitlines()[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_rows_equal_the_scalar_model(
    make_inputs: Callable[..., LayerInputs], emulate: Emulate, dtype: torch.dtype
) -> None:
    assert_model(emulate, make_inputs(4, TOKENS, dtype), "index", ENTRIES)


def test_main_rows_equal_the_scalar_model(
    make_inputs: Callable[..., LayerInputs], emulate: Emulate
) -> None:
    assert_model(emulate, make_inputs(4, (8,), seed=5), "main", range(0, 2))


def test_ratio_128_pooling_equals_the_scalar_model() -> None:
    rng = np.random.default_rng(8)
    kv, score, ape = (rng.standard_normal((128, 6)).astype(f32) * s for s in (1, 4, 0.5))
    got = pooling.pool(kv, score, pooling.scaled_ape(ape))
    expected = [pooled_channel(kv[:, i], score[:, i], ape[:, i]) for i in range(6)]
    assert np.array_equal(got, np.array(expected, f32))


def test_masked_slots_count_as_absent() -> None:
    rng = np.random.default_rng(1)
    kv, score, ape = (rng.standard_normal((8, 64)).astype(f32) for _ in range(3))
    kv[4:, 0] = -0.0  # the sum starts at +0, so this channel pools to +0
    masked = np.zeros((8, 1), np.bool_)
    masked[:4] = True
    kv[:4], score[:4] = np.nan, np.inf  # what a masked slot holds must not matter
    got = pooling.pool(kv, score, pooling.scaled_ape(ape), masked)
    expected = [pooled_channel(kv[4:, i], score[4:, i], ape[4:, i]) for i in range(64)]
    assert np.array_equal(got.view(np.uint32), np.array(expected, f32).view(np.uint32))
    assert not np.signbit(got[0])


@pytest.mark.parametrize("d", [128, 512])
def test_the_squares_of_the_norm_are_fused(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(2).standard_normal((d, 40)).astype(f32)
    weight_of = np.linspace(0.5, 2, d, dtype=f32)
    clean = rows.norm(x, weight_of, f32(1e-6))
    expected = np.stack([normed_row(x[:, i], weight_of, f32(1e-6)) for i in range(40)], axis=1)
    assert np.array_equal(clean, expected)

    def unfused(a: F32, b: F32, c: F32) -> F32:
        return np.add(np.multiply(a, b, dtype=f32), c, dtype=f32)

    monkeypatch.setattr(rows, "fma", unfused)
    assert not np.array_equal(clean, rows.norm(x, weight_of, f32(1e-6)))


def test_the_digest_covers_every_byte() -> None:
    names = ("specification.py", "exact32.py")
    digest = specification.source_digest(names)
    assert re.fullmatch("[0-9a-f]{64}", digest)
    assert digest != specification.source_digest(names[::-1])


def test_eps_joins_the_mean(make_inputs: Callable[..., LayerInputs], emulate: Emulate) -> None:
    inputs = replace(make_inputs(4, (5,)), norm_eps=0.25)
    assert_model(emulate, inputs, "index", range(0, 1))
