"""On a card: store calls so long that blocks stay and take several windows, and their faults."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.graphed_decode import padded_plan

from needlepoint.benchmarks.byte_sweep import (
    compare_round,
    draw_table,
    feeds,
    write_all,
)
from needlepoint.optimized.cuda.candidates import plan_of
from needlepoint.optimized.cuda.store import store
from needlepoint.optimized.emulation.compiled import compute_rows, encode_rows
from needlepoint.optimized.emulation.pages import allocate, page_rows
from needlepoint.optimized.protocol.interface import LayerInputs, PagedRows
from needlepoint.optimized.serving.plan import StorePlan
from needlepoint.verify.workloads.calls import parameters_of, window_tokens
from needlepoint.verify.workloads.projections import (
    empty_pool,
    make_inputs,
    on_device,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPES = ((4, 128), (4, 512), (128, 512))
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("turn", [0, 1, 3])
@pytest.mark.parametrize("kind", ["normal", "outliers"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ratio", "head_dim"), SHAPES)
def test_long_calls(ratio: int, head_dim: int, dtype: torch.dtype, kind: str, turn: int) -> None:
    """Enough windows that blocks stay and take several, and ones that begin in a state."""
    table = draw_table(ratio, head_dim, kind, dtype, seed=30)
    counts = list(compare_round(table, feeds(ratio)[turn], seed=31 + turn))

    assert [count.differing for count in counts] == [0] * len(counts)


LONG_CALL = (3, 40003, 1, 128, 6, 20000, 4)


def long_call(dtype: torch.dtype, head_dim: int) -> tuple[LayerInputs, PagedRows, StorePlan]:
    inputs = make_inputs(4, head_dim, LONG_CALL, dtype, "normal", seed=32)
    layout = "index-fp8" if head_dim == 128 else "main-584"
    paged = allocate(layout, page_rows(4), [n // 4 for n in LONG_CALL], 33)
    plan = plan_of(LONG_CALL, 4, paged)
    return inputs, paged, padded_plan(plan, plan.slots.shape[0] + 9000, 5)


@pytest.mark.parametrize("head_dim", [128, 512])
def test_long_calls_of_requests_of_any_length_padding_and_alignment(head_dim: int) -> None:
    inputs, paged, plan = long_call(torch.bfloat16, head_dim)
    kv, score, weights = on_device(inputs)
    tokens, entries = window_tokens(4, LONG_CALL)
    given = parameters_of(inputs)
    write_all(
        paged,
        encode_rows(
            paged.layout,
            compute_rows(inputs.main.kv, inputs.main.score, tokens, entries, given),
        ),
    )
    width = kv.shape[1]
    for offset in (0, 4):  # 8 bytes off a multiple of 16: the copy engine cannot take them
        wide = torch.zeros(len(kv), 2 * width + 16, dtype=kv.dtype, device="cuda")
        own, other = wide[:, offset : offset + width], wide[:, width + 8 : 2 * width + 8]
        own.copy_(kv)
        other.copy_(score)
        pool = empty_pool(paged)
        store(own, other, weights, plan.to("cuda"), pool)
        assert torch.equal(pool.pages.cpu(), paged.pool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_windows_than_a_block_lists_at_once(dtype: torch.dtype) -> None:
    """At ratio 128 a block lists 32 windows; 1,300 are more than one list on every card."""
    lengths = (70 * 128 + 5, 1230 * 128)
    inputs = make_inputs(128, 512, lengths, dtype, "normal", seed=34)
    paged = allocate("main-584", page_rows(128), [n // 128 for n in lengths], 35)
    plan = plan_of(lengths, 128, paged)
    kv, score, weights = on_device(inputs)
    tokens, entries = window_tokens(128, lengths)
    rows = compute_rows(inputs.main.kv, inputs.main.score, tokens, entries, parameters_of(inputs))
    write_all(paged, encode_rows(paged.layout, rows))
    pool = empty_pool(paged)

    store(kv, score, weights, plan.to("cuda"), pool)
    assert torch.equal(pool.pages.cpu(), paged.pool)


@pytest.mark.parametrize("token", [3, 9, 20001, 40001, 40010, 41000])
@pytest.mark.parametrize("name", ["kv", "score"])
@pytest.mark.parametrize("head_dim", [128, 512])
def test_faults_of_long_calls(head_dim: int, name: str, token: int) -> None:
    inputs, paged, plan = long_call(torch.bfloat16, head_dim)
    getattr(inputs.main, name)[token, -1] = float("-inf")
    kv, score, weights = on_device(inputs)
    place = int(np.flatnonzero(plan.windows.token >= token)[0])
    where = f"row {int(plan.windows.token[place])} .*entry {int(plan.windows.entry[place])} "
    with pytest.raises(ValueError, match=rf"^{name}: the window that ends at {where}"):
        store(kv, score, weights, plan.to("cuda"), empty_pool(paged))
