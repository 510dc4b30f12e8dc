"""On a card: the bytes of every kernel against the CPU emulation, whole pools compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.graphed_decode import padded_plan
from torch import Tensor

from needlepoint.benchmarks.byte_sweep import compare_inputs
from needlepoint.optimized.candidates.emulated import EmulatedCandidate, Order
from needlepoint.optimized.cuda.candidates import CudaCandidate, Launches, plan_of
from needlepoint.optimized.cuda.query import store_queries
from needlepoint.optimized.cuda.steps import store_in_steps
from needlepoint.optimized.cuda.store import PagedPool, new_state, store
from needlepoint.optimized.emulation.query import store_queries as emulated_queries
from needlepoint.optimized.emulation.specification import LOG2_E
from needlepoint.optimized.protocol.interface import LayerInputs, PagedRows, QueryInputs
from needlepoint.optimized.serving.plan import Chunks, plan_store
from needlepoint.verify.workloads.projections import (
    KINDS,
    draw,
    empty_pool,
    emulate,
    make_inputs,
    on_device,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPES = ((4, 128), (4, 512), (128, 512))
DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (1, 3, 4, 5, 260, 1023, 2)
LONG = (7, 129, 640, 1025)


def lengths_of(ratio: int) -> tuple[int, ...]:
    return LENGTHS if ratio == 4 else LONG


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ratio", "head_dim"), SHAPES)
def test_prefill(ratio: int, head_dim: int, dtype: torch.dtype, kind: str) -> None:
    inputs = make_inputs(ratio, head_dim, lengths_of(ratio), dtype, kind, seed=3)
    counts = list(compare_inputs(inputs, kind))

    assert [count.differing for count in counts] == [0] * len(counts)
    assert all(count.rows > 0 for count in counts)


def table_of(paged: PagedRows) -> Tensor:
    columns = max(len(table) for table in paged.page_table)
    out = torch.full((len(paged.page_table), max(columns, 1)), -1, dtype=torch.int32)
    for row, pages in zip(out, paged.page_table, strict=True):
        row[: len(pages)] = pages
    return out


def run_chunks(
    inputs: LayerInputs, expected: PagedRows, state_dtype: torch.dtype, sizes: list[int]
) -> Tensor:
    """Feed all requests in turns of the given chunk sizes and return the pool."""
    kv, score, weights = on_device(inputs)
    pool = empty_pool(expected)
    count = len(inputs.lengths)
    state = new_state(count, inputs.ratio, weights.head_dim, state_dtype, "cuda")
    done = np.zeros(count, np.int64)
    head = np.zeros(count, np.int64)
    first = np.cumsum(inputs.lengths) - inputs.lengths
    turn = 0
    while (done < inputs.lengths).any():
        who = np.flatnonzero(done < inputs.lengths)
        size = np.minimum(sizes[turn % len(sizes)], np.asarray(inputs.lengths)[who] - done[who])
        chunks = Chunks(who, done[who], size, head[who])
        plan = plan_store(
            inputs.ratio,
            chunks,
            table_of(expected),
            expected.page_size,
            decode=int(size.max()) == 1,
        )
        begin = first[who] + done[who]
        spans = [np.arange(at, at + n) for at, n in zip(begin, size, strict=True)]
        rows = torch.from_numpy(np.concatenate(spans)).cuda()
        store(kv[rows], score[rows], weights, plan.to("cuda"), pool, state)
        done[who] += size
        head[who] = plan.head
        turn += 1
    return pool.pages.cpu()


@pytest.mark.parametrize("sizes", [[1], [2, 7, 1, 30], [5, 3, 300, 8], [127, 129]])
@pytest.mark.parametrize("state", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ratio", "head_dim"), SHAPES)
def test_chunks_and_decode(
    ratio: int, head_dim: int, dtype: torch.dtype, state: torch.dtype, sizes: list[int]
) -> None:
    lengths = (3, 70, 257) if ratio == 4 else (130, 385)
    inputs = make_inputs(ratio, head_dim, lengths, dtype, "normal", seed=5)
    if dtype == torch.float32 and state == torch.bfloat16:
        # What a bf16 state keeps is rounded; numbers that survive rounding make the whole equal.
        inputs.main.kv.copy_(inputs.main.kv.bfloat16())
        inputs.main.score.copy_(inputs.main.score.bfloat16())
    _, pools = emulate(inputs)
    for expected in pools.values():
        assert torch.equal(run_chunks(inputs, expected, state, sizes), expected.pool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ratio", "head_dim"), SHAPES)
def test_decode_steps_of_many_requests(ratio: int, head_dim: int, dtype: torch.dtype) -> None:
    """More than a card has room for with blocks of their own that keep tokens."""
    many, most = (1100, 12) if ratio == 4 else (60, 131)
    lengths = tuple(most - i % 3 for i in range(many))
    inputs = make_inputs(ratio, head_dim, lengths, dtype, "normal", seed=8)
    for expected in emulate(inputs)[1].values():
        found = run_chunks(inputs, expected, dtype, [ratio - 2, 1, 1, 1, 1])
        assert torch.equal(found, expected.pool)


@pytest.mark.parametrize(("ratio", "head_dim"), SHAPES)
def test_bf16_state_rounds_what_it_keeps(ratio: int, head_dim: int) -> None:
    length, cut = 2 * ratio + 40, 2 * ratio - 2
    inputs = make_inputs(ratio, head_dim, (length,), torch.float32, "normal", seed=6)
    kept = make_inputs(ratio, head_dim, (length,), torch.float32, "normal", seed=6)
    for tensor in (kept.main.kv, kept.main.score):
        tensor[:cut] = tensor[:cut].bfloat16().float()
    expected = next(iter(emulate(kept)[1].values()))
    found = run_chunks(inputs, expected, torch.bfloat16, [cut, length])
    page, row = divmod(1, expected.page_size)  # entry 1 is the first that spans the cut
    width = expected.pool.shape[1] // expected.page_size
    where = (int(expected.page_table[0][page]), slice(row * width, (row + 1) * width))

    assert torch.equal(found[where], expected.pool[where])
    assert not torch.equal(found, next(iter(emulate(inputs)[1].values())).pool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ratio", "head_dim"), SHAPES)
def test_separate_steps(ratio: int, head_dim: int, dtype: torch.dtype) -> None:
    inputs = make_inputs(ratio, head_dim, lengths_of(ratio), dtype, "outliers", seed=7)
    kv, score, weights = on_device(inputs)
    dense, pools = emulate(inputs)
    for expected in pools.values():
        pool = empty_pool(expected)
        plan = plan_of(inputs.lengths, ratio, expected).to("cuda")
        stages = store_in_steps(kv, score, weights, plan, pool)
        for stage, rows in dense.items():
            assert torch.equal(stages[stage].cpu().view(torch.int32), rows.view(torch.int32)), stage
        assert torch.equal(pool.pages.cpu(), expected.pool)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("row", ["bf16", "fp8", "fp4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 8, 64])
def test_query(heads: int, dtype: torch.dtype, row: str, kind: str) -> None:
    lengths = (5, 40)
    inputs = make_inputs(4, 128, lengths, dtype, kind, seed=8)
    generator = torch.Generator().manual_seed(9)
    width = inputs.main.kv.shape[1]
    q = inputs.main.kv.repeat(1, -(-heads * 128 // width))[:, : heads * 128]
    q = q.reshape(sum(lengths), heads, 128).contiguous()
    given = QueryInputs(q, torch.randn(sum(lengths), heads, generator=generator).to(dtype))
    expected = emulated_queries(given, inputs, row)
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]).cuda()
    found = store_queries(
        q.cuda(),
        given.weights.cuda(),
        positions,
        inputs.rope_table.cuda(),
        inputs.weight_scale,
        row,
    )

    assert torch.equal(found.codes.cpu().view(torch.uint8), expected.codes.view(torch.uint8))
    assert torch.equal(found.weights.cpu(), expected.weights)
    if expected.scales is not None:
        assert found.scales is not None
        assert torch.equal(found.scales.cpu(), expected.scales)


@pytest.mark.parametrize(("ratio", "head_dim"), SHAPES)
def test_batch_order_strides_and_padding_change_nothing(ratio: int, head_dim: int) -> None:
    lengths = (300, 513)
    inputs = make_inputs(ratio, head_dim, lengths, torch.bfloat16, "normal", seed=10)
    kv, score, weights = on_device(inputs)
    expected = next(iter(emulate(inputs)[1].values()))
    table = table_of(expected)
    joined = torch.cat((kv, score), dim=1)
    width = kv.shape[1]
    for order in ((0, 1), (1, 0)):
        rows = torch.cat([joined[: lengths[0]] if r == 0 else joined[lengths[0] :] for r in order])
        zeros = np.zeros(2, np.int64)
        chunks = Chunks(np.asarray(order), zeros, np.asarray([lengths[r] for r in order]), zeros)
        plan = plan_store(ratio, chunks, table, expected.page_size, keep_state=False)
        plan = padded_plan(plan, plan.slots.shape[0] + 5, 3).to("cuda")
        pool = empty_pool(expected)
        for _ in range(2):
            store(rows[:, :width], rows[:, width:], weights, plan, pool)
        assert torch.equal(pool.pages.cpu(), expected.pool)


@pytest.mark.parametrize(("ratio", "head_dim"), SHAPES)
def test_many_requests(ratio: int, head_dim: int) -> None:
    lengths = tuple(1 + (37 * i) % (5 * ratio) for i in range(70 if ratio == 4 else 40))
    inputs = make_inputs(ratio, head_dim, lengths, torch.bfloat16, "normal", seed=17)
    counts = list(compare_inputs(inputs, "normal"))

    assert [count.differing for count in counts] == [0] * len(counts)


def test_negative_pages_are_skipped() -> None:
    inputs = make_inputs(4, 128, (600,), torch.float32, "normal", seed=11)
    kv, score, weights = on_device(inputs)
    expected = emulate(inputs)[1]["index-fp8"]
    table = table_of(expected)
    table[0, 1] = -1
    whole = Chunks.whole((600,))
    plan = plan_store(4, whole, table, expected.page_size, keep_state=False).to("cuda")
    pool = empty_pool(expected)
    store(kv, score, weights, plan, pool)
    wanted = expected.pool.clone()
    wanted[expected.page_table[0][1]] = 255

    assert torch.equal(pool.pages.cpu(), wanted)


BAD = (float("nan"), float("inf"), -float("inf"), 2.0**23, -(2.0**23))


@pytest.mark.parametrize("mode", ["prefill", "chunks", "decode"])
@pytest.mark.parametrize("state", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ratio", "head_dim"), SHAPES)
def test_inputs_outside_the_preconditions_are_reported(
    ratio: int, head_dim: int, dtype: torch.dtype, state: torch.dtype, mode: str
) -> None:
    length = 3 * ratio
    sizes = {"prefill": [length], "chunks": [ratio - 1, 2], "decode": [1]}[mode]

    def fresh() -> LayerInputs:
        return make_inputs(ratio, head_dim, (length,), dtype, "normal", seed=20)

    expected = next(iter(emulate(fresh())[1].values()))
    # Ratio 4 reads the first columns in the next window.
    entry = 2 if ratio == 4 else 1
    for number, bad in enumerate(BAD):
        for name in ("score",) if abs(bad) < 2.0**30 else ("score", "kv"):
            inputs = fresh()
            column = number * (head_dim - 1) // len(BAD)
            at = ratio + number * (ratio - 1) // len(BAD)
            getattr(inputs.main, name)[at, column] = bad
            with pytest.raises(ValueError, match=rf"^{name}: .* \(entry {entry} of its request\)"):
                run_chunks(inputs, expected, state, sizes)


@pytest.mark.parametrize("limit", [2.0**22, -(2.0**22)])
@pytest.mark.parametrize(("ratio", "head_dim"), SHAPES)
def test_the_limit_of_prescaled_scores_is_exact(ratio: int, head_dim: int, limit: float) -> None:
    inputs = make_inputs(ratio, head_dim, (2 * ratio,), torch.float32, "normal", seed=21)
    inputs.main.ape.zero_()
    expected = next(iter(emulate(inputs)[1].values()))
    beyond = np.float32(limit) / LOG2_E
    while abs(beyond * LOG2_E) < abs(limit):
        beyond = np.nextafter(beyond, np.float32(np.sign(limit) * np.inf))
    inside = np.nextafter(beyond, np.float32(0))
    while abs(inside * LOG2_E) >= abs(limit):
        inside = np.nextafter(inside, np.float32(0))
    inputs.main.score[ratio + 1, -1] = float(inside)
    run_chunks(inputs, expected, torch.float32, [2 * ratio])
    inputs.main.score[ratio + 1, -1] = float(beyond)
    with pytest.raises(ValueError, match=r"^score: "):
        run_chunks(inputs, expected, torch.float32, [2 * ratio])


@pytest.mark.parametrize("kind", ["normal", "peaked"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("ratio", "head_dim"), SHAPES)
def test_faults_of_rows_that_are_not_stored_and_of_separate_steps(
    ratio: int, head_dim: int, dtype: torch.dtype, kind: str
) -> None:
    inputs = make_inputs(ratio, head_dim, (4 * ratio,), dtype, kind, seed=22)
    kv, score, weights = on_device(inputs)
    expected = next(iter(emulate(inputs)[1].values()))
    kv[2 * ratio + 1, -1] = float("nan")
    score[3 * ratio + 1, -1] = float("inf")
    plan = plan_of(inputs.lengths, ratio, expected)
    with pytest.raises(ValueError, match=r"^score: .*\(entry 3 "):
        store(kv, score, weights, plan.to("cuda"), empty_pool(expected))
    with pytest.raises(ValueError, match=r"^score: .*\(entry 3 "):
        store_in_steps(kv, score, weights, plan.to("cuda"), empty_pool(expected))
    plan.slots[3] = -1
    with pytest.raises(ValueError, match=r"^kv: .*\(entry 2 "):
        store(kv, score, weights, plan.to("cuda"), empty_pool(expected))
    with pytest.raises(ValueError, match=r"^kv: .*\(entry 2 "):
        store_in_steps(kv, score, weights, plan.to("cuda"), empty_pool(expected))
    plan.slots[2] = -1
    store(kv, score, weights, plan.to("cuda"), empty_pool(expected))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 2.0**126])
@pytest.mark.parametrize("row", ["bf16", "fp8", "fp4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_outside_the_preconditions_are_reported(
    dtype: torch.dtype, row: str, bad: float
) -> None:
    generator = torch.Generator().manual_seed(23)
    q = torch.randn(9, 20, 128, generator=generator).to(dtype).cuda()
    w = torch.randn(9, 20, generator=generator).to(dtype).cuda()
    positions = torch.arange(9, dtype=torch.int32, device="cuda")
    table = torch.ones(9, 32, 2, device="cuda")
    store_queries(q, w, positions, table, 0.03, row)
    w[6, 19] = bad if bad != 2.0**126 else 3.0 * bad
    with pytest.raises(ValueError, match=r"^weights: token 6 "):
        store_queries(q, w, positions, table, 4.0, row)
    q[4, 17, 90:100] = bad  # finite ones overflow in a sum
    with pytest.raises(ValueError, match=r"^q: token 4 "):
        store_queries(q, w, positions, table, 0.03, row)


def test_pools_beyond_two_gib() -> None:
    inputs = make_inputs(4, 512, (256,), torch.bfloat16, "normal", seed=12)
    kv, score, weights = on_device(inputs)
    expected = emulate(inputs)[1]["main-bf16"]
    pages = 3 * 2**30 // expected.pool.shape[1]
    pool = torch.full((pages, expected.pool.shape[1]), 255, dtype=torch.uint8, device="cuda")
    table = torch.tensor([[pages - 1]], dtype=torch.int32)
    plan = plan_store(4, Chunks.whole((256,)), table, expected.page_size, keep_state=False)
    store(kv, score, weights, plan.to("cuda"), PagedPool("main-bf16", pool, expected.page_size))

    assert torch.equal(pool[-1].cpu(), expected.pool[expected.page_table[0][0]])
    assert bool((pool[:-1] == 255).all())


def layer_inputs(ratio: int) -> LayerInputs:
    main = make_inputs(ratio, 512, (130, 70), torch.bfloat16, "normal", seed=13)
    if ratio == 128:
        return main
    index = make_inputs(ratio, 128, (130, 70), torch.bfloat16, "normal", seed=14)
    q = draw("normal", (200, 8, 128), torch.Generator().manual_seed(15)).bfloat16()
    weights = draw("normal", (200, 8), torch.Generator().manual_seed(16)).bfloat16()
    return replace(main, index=index.main, query=QueryInputs(q, weights), weight_scale=0.03)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("launches", list(Launches))
@pytest.mark.parametrize("key_format", ["bf16", "fp8", "fp4"])
def test_candidates_write_what_the_emulation_writes(
    key_format: str, launches: Launches, ratio: int
) -> None:
    inputs = layer_inputs(ratio)
    candidate = CudaCandidate(key_format, launches)
    wanted = EmulatedCandidate(key_format, Order.FUSED).run(inputs)
    seen = candidate.run(inputs)

    assert {*seen.dense} | {(path, "stored") for path in seen.stored} <= candidate.stages(ratio)
    for path, paged in wanted.stored.items():
        assert torch.equal(seen.stored[path].pool, paged.pool)
    for key, rows in seen.dense.items():
        assert torch.equal(rows, wanted.dense[key])
    if wanted.query is not None:
        assert seen.query is not None
        assert torch.equal(seen.query.codes.view(torch.uint8), wanted.query.codes.view(torch.uint8))
        assert torch.equal(seen.query.weights, wanted.query.weights)
    assert candidate.info.source_sha256
