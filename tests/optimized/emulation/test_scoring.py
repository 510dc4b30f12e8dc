"""Scores from stored bytes: value, mask, and a reader that returns what the picks rest on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.candidates.emulated import EmulatedCandidate, Order
from needlepoint.optimized.emulation import scoring
from needlepoint.optimized.emulation.readback import read_index_keys, read_queries
from needlepoint.optimized.emulation.scoring import FusedScorer, Scorer, UnfusedScorer
from needlepoint.optimized.emulation.select import select_topk
from needlepoint.optimized.protocol.interface import LayerInputs, Observed

Make = Callable[..., LayerInputs]
LENGTHS = (530, 7, 3, 64)
KINDS = [("bf16", Order.FUSED), ("fp8", Order.FUSED), ("fp4", Order.FUSED), ("bf16", Order.UNFUSED)]


def observe(make: Make, key_format: str, order: Order) -> tuple[LayerInputs, Observed]:
    inputs = make(4, LENGTHS, heads=3)
    return inputs, EmulatedCandidate(key_format, order).run(inputs)


def scorer_of(observed: Observed, order: Order) -> Scorer:
    kind = FusedScorer if order is Order.FUSED else UnfusedScorer
    assert observed.query is not None
    return kind(observed.query, observed.stored["index"], LENGTHS, 4)


def in_float64(observed: Observed, request: int) -> tuple[Tensor, Tensor]:
    """Return unmasked scores in float64 and the sum of absolute terms."""
    assert observed.query is not None
    start = sum(LENGTHS[:request])
    rows = slice(start, start + LENGTHS[request])
    keys = read_index_keys(observed.stored["index"], request)
    q, w = read_queries(observed.query, rows).double(), observed.query.weights[rows].double()
    dot = torch.einsum("shd,td->sht", q, keys.values.double())
    size = torch.einsum("shd,td->sht", q.abs(), keys.values.double().abs())
    scale = 1.0 if keys.scale is None else keys.scale.double()
    score = torch.einsum("sh,sht->st", w, dot.relu()) * scale
    return score, torch.einsum("sh,sht->st", w.abs(), size) * scale


@pytest.mark.parametrize(("key_format", "order"), KINDS)
def test_scores_are_fp32_of_the_stored_rows(
    make_inputs: Make, key_format: str, order: Order
) -> None:
    _, observed = observe(make_inputs, key_format, order)
    assert observed.scores is not None
    for request, length in enumerate(LENGTHS):
        got = observed.scores(request, 0, length)
        assert got.dtype == torch.float32
        assert got.shape == (length, length // 4)
        visible = torch.arange(1, length + 1)[:, None] // 4
        shown = torch.arange(length // 4) < visible
        assert torch.equal(got.isinf(), ~shown)
        assert bool((got[~shown] == -torch.inf).all())
        expected, size = in_float64(observed, request)
        error = (got.double() - expected).abs()[shown]
        assert bool((error <= 2.0**-21 * size[shown]).all())


@pytest.mark.parametrize(("key_format", "order"), KINDS)
def test_any_slice_of_the_reader_has_the_same_bits(
    make_inputs: Make, key_format: str, order: Order
) -> None:
    _, observed = observe(make_inputs, key_format, order)
    assert observed.scores is not None
    whole = observed.scores(0, 0, 530)
    for start, stop in ((0, 1), (255, 258), (256, 512), (300, 530), (529, 530), (4, 4)):
        part = observed.scores(0, start, stop)
        assert torch.equal(part, whole[start:stop])


@pytest.mark.parametrize(("key_format", "order"), KINDS)
def test_the_picks_are_those_of_the_read_scores(
    make_inputs: Make, key_format: str, order: Order
) -> None:
    inputs, observed = observe(make_inputs, key_format, order)
    assert observed.scores is not None
    assert observed.topk is not None
    start = 0
    for request, length in enumerate(LENGTHS):
        scores = observed.scores(request, 0, length)
        visible = torch.arange(1, length + 1) // 4
        expected = select_topk(scores, visible, inputs.topk)
        assert torch.equal(observed.topk[start : start + length], expected)
        start += length


@pytest.mark.parametrize("order", Order)
def test_bits_do_not_depend_on_the_number_of_threads(make_inputs: Make, order: Order) -> None:
    _, observed = observe(make_inputs, "bf16", order)
    scorer = scorer_of(observed, order)
    threads = torch.get_num_threads()
    try:
        scores = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            scores.append(scorer.read(0, 0, 530))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(scores[0], scores[1])
    assert torch.equal(scores[0], scores[2])


def test_the_unfused_peak_holds_the_per_head_tensor_and_the_fused_does_not(
    make_inputs: Make,
) -> None:
    inputs = make_inputs(4, (1024,), heads=16)
    peaks = {o: EmulatedCandidate("bf16", o).run(inputs).peak_transient_bytes for o in Order}
    keys, queries = 4 * 128 * 256, 4 * 128 * 16
    block = scoring.FUSED_ROWS
    # keys, queries, one head's products and the sum; or the packed selection keys
    assert peaks[Order.FUSED] >= keys + block * (queries + 2 * 4 * 256)
    assert peaks[Order.FUSED] < 4 * block * 16 * 256
    chunk = scoring.UNFUSED_BYTES // (4 * 16 * 256)
    assert peaks[Order.UNFUSED] >= keys + chunk * queries + scoring.UNFUSED_BYTES


def test_unfused_chunks_fit_the_run_time_budget(
    make_inputs: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "UNFUSED_BYTES", 4 * 3 * 132 * 10)
    _, observed = observe(make_inputs, "bf16", Order.UNFUSED)
    scorer = scorer_of(observed, Order.UNFUSED)
    assert scorer.block_rows(0) == 10
    assert scorer.seen(0, 10) == 132
    assert observed.scores is not None
    expected, size = in_float64(observed, 0)
    got = observed.scores(0, 0, 530).double()
    shown = ~got.isinf()
    assert bool(((got - expected).abs()[shown] <= 2.0**-21 * size[shown]).all())


@pytest.mark.parametrize(
    ("request_id", "start", "stop"), [(4, 0, 1), (-1, 0, 1), (1, 0, 8), (1, 3, 2)]
)
def test_rows_that_do_not_exist(make_inputs: Make, request_id: int, start: int, stop: int) -> None:
    _, observed = observe(make_inputs, "bf16", Order.FUSED)
    assert observed.scores is not None
    with pytest.raises(ValueError, match=f"request {request_id}, rows {start} .. {stop}"):
        observed.scores(request_id, start, stop)
