"""Transients are counted exactly, and the unfused law is what the figures say it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from needlepoint.optimized.emulation.memory import (
    LAW_SIZES,
    TransientMeter,
    fit_law,
    measure_law,
)
from needlepoint.optimized.emulation.scoring import fused_scores, unfused_scores
from needlepoint.optimized.protocol.optional import TransientSample


def test_counts_what_is_alive_at_once() -> None:
    with TransientMeter() as meter:
        a = torch.empty(1000)
        del a
        b = torch.empty(500)
        c = b + 1
        del b, c
    assert meter.peak_bytes == 4000


def test_views_and_in_place_results_count_once() -> None:
    with TransientMeter() as meter:
        a = torch.empty(100, 10)
        a.t().mul_(2)
        a.view(-1)[5:].relu_()
    assert meter.peak_bytes == 4000


def test_what_existed_before_is_not_counted() -> None:
    out, source = torch.empty(64), torch.ones(64)
    with TransientMeter() as meter:
        torch.add(source, source, out=out)
        out.clamp_(min=0)
    assert meter.peak_bytes == 0


def test_outputs_in_lists_and_held_tensors_count() -> None:
    with TransientMeter() as meter:
        source = torch.ones(10)
        values, order = torch.sort(source)
        outside = torch.from_numpy(np.zeros(3, np.float32))
        meter.hold(outside)
        assert source.shape == values.shape == order.shape
    assert meter.peak_bytes == 40 + 40 + 80 + 12


def test_unfused_law_is_four_bytes_a_query_head_key() -> None:
    law = measure_law(unfused_scores)
    assert len(law.samples) == 4
    assert law.bytes_per_product == 4
    assert [s.bytes for s in law.samples] == [4 * s * h * t for s, h, t in LAW_SIZES]


def test_prediction_for_the_prompt_that_did_not_fit() -> None:
    law = measure_law(unfused_scores)
    assert law.predict_prompt(22_528, heads=64) == round(8.25 * 2**30) == 6144 * 64 * 5632 * 4
    assert law.predict_prompt(16_384, heads=8) == 8192 * 8 * 4096 * 4
    assert law.predict_prompt(100, heads=8) == 100 * 8 * 25 * 4


def test_fused_transients_do_not_follow_the_law() -> None:
    law = measure_law(fused_scores)
    assert [s.bytes for s in law.samples] == [4 * s * t for s, _, t in LAW_SIZES]
    off = [abs(s.bytes / law.predict(s.queries, s.heads, s.keys) - 1) for s in law.samples]
    assert max(off) > 0.4


def test_one_sample_is_no_fit() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        fit_law([TransientSample(1, 2, 3, 24)])
