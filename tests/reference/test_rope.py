from __future__ import annotations

import hashlib
import math

import pytest
import torch

from needlepoint.reference.config import MODELS
from needlepoint.reference.formats.names import RopeLayout
from needlepoint.reference.profile import Precision
from needlepoint.reference.rope import (
    apply_rope,
    from_pairs,
    in_pairs,
    invert_rope,
    rope_frequencies,
    rope_rows,
    rope_table,
)

FLASH = MODELS["v4-flash"]
GOLDEN = "1f132e9c03f43671d62cb9f1a6ce7cd2941717a7be0676b93aa5a049ca0991b8"


def test_golden_frequencies() -> None:
    f = rope_frequencies(FLASH, compressed=True)
    assert hashlib.sha256(f.numpy().tobytes()).hexdigest() == GOLDEN
    spots = {
        0: 0x3F800000,
        1: 0x3F300A3A,
        15: 0x3B6E4237,
        16: 0x3B147AE1,
        20: 0x399BB3AF,
        24: 0x37A3D70C,
        25: 0x36B443D0,
        31: 0x35187C4D,
    }
    assert {i: int(f.view(torch.int32)[i]) for i in spots} == spots


def test_presets_of_v4_share_the_table() -> None:
    golden = rope_frequencies(FLASH, compressed=True)
    for name in ("mini", "v4-pro"):
        assert torch.equal(rope_frequencies(MODELS[name], compressed=True), golden)


def test_plain_frequencies() -> None:
    f = rope_frequencies(FLASH, compressed=False)
    assert f.dtype == torch.float32
    assert f.tolist() == pytest.approx([10000.0 ** (-i / 32) for i in range(32)], rel=1e-6)


def test_angle_is_the_fp32_product() -> None:
    f = rope_frequencies(FLASH, compressed=True)
    position = 999_983
    rows = rope_rows(f, torch.tensor([position]), Precision.FLOAT64)[0]
    angle = torch.tensor(float(position)) * f  # fp32
    assert rows[:, 0].tolist() == pytest.approx([math.cos(a) for a in angle.tolist()], abs=1e-15)
    assert rows[:, 1].tolist() == pytest.approx([math.sin(a) for a in angle.tolist()], abs=1e-15)
    exact = (position * f.double()).cos()  # another way to form the angle is another embedding
    assert (exact - rows[:, 0]).abs().max().item() > 1e-3


def test_table_precision() -> None:
    f = rope_frequencies(FLASH, compressed=True)
    exact = rope_table(f, 300, Precision.FLOAT64)
    rounded = rope_table(f, 300, Precision.FP32)
    assert rounded.dtype == torch.float64
    assert torch.equal(rounded, exact.float().double())
    assert not torch.equal(rounded, exact)
    assert torch.equal(rounded, rope_rows(f, torch.arange(300), Precision.FP32))


def test_rotates_adjacent_pairs_of_the_last_dims() -> None:
    f = rope_frequencies(FLASH, compressed=True)
    rows = rope_table(f, 8, Precision.FLOAT64)[7]
    x = torch.randn(512, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = apply_rope(x, rows)
    assert torch.equal(y[:448], x[:448])
    for pair in range(32):
        a, b = x[448 + 2 * pair].item(), x[449 + 2 * pair].item()
        angle = (torch.tensor(7.0) * f[pair]).item()
        cos, sin = math.cos(angle), math.sin(angle)
        assert y[448 + 2 * pair].item() == pytest.approx(a * cos - b * sin, abs=1e-14)
        assert y[449 + 2 * pair].item() == pytest.approx(a * sin + b * cos, abs=1e-14)


def test_scores_depend_on_distance_alone() -> None:
    f = rope_frequencies(FLASH, compressed=True)
    table = rope_table(f, 200, Precision.FLOAT64)
    g = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 128, generator=g, dtype=torch.float64)
    near = apply_rope(q, table[150]) @ apply_rope(k, table[86])
    far = apply_rope(q, table[64]) @ apply_rope(k, table[0])
    other = apply_rope(q, table[65]) @ apply_rope(k, table[0])
    torch.testing.assert_close(near, far, rtol=0, atol=1e-4)  # the angle itself is fp32
    assert abs(float(other - far)) > 1e-2


def test_inverse() -> None:
    rows = rope_table(rope_frequencies(FLASH, compressed=True), 100, Precision.FLOAT64)
    x = torch.randn(100, 3, 128, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    y = invert_rope(apply_rope(x, rows.unsqueeze(1)), rows.unsqueeze(1))
    torch.testing.assert_close(y, x)
    torch.testing.assert_close(invert_rope(x, rows.unsqueeze(1))[0], x[0])


def test_no_rows() -> None:
    f = rope_frequencies(FLASH, compressed=True)
    rows = rope_rows(f, torch.arange(0), Precision.FP32)
    assert apply_rope(torch.zeros(0, 128, dtype=torch.float64), rows).shape == (0, 128)


@pytest.mark.parametrize("position", [-1, 1 << 24])
def test_positions_out_of_range(position: int) -> None:
    f = rope_frequencies(FLASH, compressed=True)
    with pytest.raises(ValueError, match=str(position)):
        rope_rows(f, torch.tensor([0, position]), Precision.FP32)


def test_wrong_dtypes() -> None:
    f = rope_frequencies(FLASH, compressed=True)
    with pytest.raises(ValueError, match="frequencies"):
        rope_rows(f.double(), torch.tensor([0]), Precision.FP32)
    rows = rope_table(f, 1, Precision.FP32)
    with pytest.raises(ValueError, match="apply_rope"):
        apply_rope(torch.zeros(1, 128), rows)
    with pytest.raises(ValueError, match="at least 64 dims"):
        apply_rope(torch.zeros(1, 32).double(), rows)


@pytest.mark.parametrize("layout", RopeLayout)
def test_layouts_rotate_their_own_pairs(layout: RopeLayout) -> None:
    g = torch.Generator().manual_seed(4)
    x = torch.randn(5, 128, generator=g, dtype=torch.float64)
    rows = rope_rows(rope_frequencies(FLASH, compressed=True), torch.arange(5), Precision.FP32)
    pairs = {
        RopeLayout.TRAILING_PAIRS: [(64 + 2 * i, 65 + 2 * i) for i in range(32)],
        RopeLayout.LEADING_PAIRS: [(2 * i, 2 * i + 1) for i in range(32)],
        RopeLayout.LEADING_HALVES: [(i, 32 + i) for i in range(32)],
    }[layout]
    meant = x.clone()
    for pair, (one, other) in enumerate(pairs):
        cos, sin = rows[:, pair].unbind(1)
        meant[:, one] = x[:, one] * cos - x[:, other] * sin
        meant[:, other] = x[:, one] * sin + x[:, other] * cos

    found = apply_rope(x, rows, layout)

    assert torch.equal(found, meant)
    assert torch.equal(from_pairs(in_pairs(x, layout, 32), layout, 32), x)
