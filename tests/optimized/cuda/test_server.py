"""The server of the CUDA candidates: its queue on the CPU, its kernels and graphs on a card."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.graphed_decode import GraphedDecode, require_decode
from torch import Tensor

from needlepoint.optimized.candidates.emulated import EmulatedCandidate, Order
from needlepoint.optimized.cuda import server as stateful_cuda
from needlepoint.optimized.cuda.candidates import CudaCandidate, Launches
from needlepoint.optimized.cuda.server import CudaServer
from needlepoint.optimized.cuda.store import PagedPool, new_state, store
from needlepoint.optimized.cuda.weights import StoreWeights
from needlepoint.optimized.emulation.narrow import store_fp8, store_main_fp8
from needlepoint.optimized.emulation.pooling import pool as pool_slots
from needlepoint.optimized.emulation.query import store_queries_at
from needlepoint.optimized.emulation.rows import hadamard, norm, rope
from needlepoint.optimized.protocol.interface import QueryInputs, QueryRows
from needlepoint.optimized.protocol.serving import CacheSpec, CannotServe, LayerParameters
from needlepoint.optimized.serving.cache import new_cache
from needlepoint.optimized.serving.plan import (
    Chunks,
    StorePlan,
    plan_store,
    ring_rows,
    window_slots,
)
from needlepoint.verify.scenario.events import Scenario
from needlepoint.verify.scenario.random import random_scenario
from needlepoint.verify.scenario.rules import check
from needlepoint.verify.scenario.trial import try_candidate
from needlepoint.verify.selftest.faults.scenario import FAULTS
from needlepoint.verify.workloads.projections import make_inputs

SHAPES = ((4, 128), (4, 512), (128, 512))
on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def stored_by_plan(
    kv: Tensor,
    score: Tensor,
    weights: StoreWeights,
    plan: StorePlan,
    pool: PagedPool,
    state: Tensor,
) -> None:
    """Do what a launch does, from the tensors of the plan alone, in plain loops."""
    ratio, slots, ring = plan.ratio, window_slots(plan.ratio), ring_rows(plan.ratio)
    both = torch.stack((kv, score), dim=1)
    flat = state.view(-1, *state.shape[2:])
    for chunk, segment in enumerate(plan.segments.tolist()):
        before, count, token, entry, behind, base, place, _ = segment
        for step in range(count):
            slot = int(plan.slots[chunk if plan.decode else before + step])
            last, kept = token + step * ratio, max(behind - step * ratio, 0)
            oldest = (entry + step + 1) * ratio - slots
            window = torch.zeros(slots, 2, kv.shape[1])
            for i in range(max(0, -oldest), slots):
                at = base + (place + step * ratio + i) % ring
                window[i] = flat[at] if i < kept else both[last - (slots - 1 - i)]
            masked = np.arange(slots)[:, None, None] < -oldest
            row = finished(window, masked, weights, (entry + step) * ratio)
            if slot >= 0:
                write_row(pool, slot, row)
    for token, row in plan.writes.tolist():
        flat[row] = both[token].to(flat)


def finished(
    window: Tensor, masked: np.ndarray, weights: StoreWeights, position: int
) -> np.ndarray:
    halves = 2 if weights.ratio == 4 else 1
    values = window.numpy()
    ape = weights.ape.numpy()
    if halves == 2:
        width = values.shape[2] // 2
        values = np.concatenate((values[:4, :, :width], values[4:, :, width:]))
        ape = np.concatenate((ape[:, :width], ape[:, width:]))
    pooled = pool_slots(values[:, :1], values[:, 1:], ape[:, None], masked)
    table = weights.rope_table.numpy()[position]
    eps = np.float32(weights.norm_eps)
    row = norm(np.ascontiguousarray(pooled.T), weights.norm_weight.numpy(), eps)
    row = rope(row, table[:, :1], table[:, 1:])
    return hadamard(row) if weights.head_dim == 128 else row


def write_row(pool: PagedPool, slot: int, row: np.ndarray) -> None:
    stored = store_fp8(row) if row.shape[0] == 128 else store_main_fp8(row)
    page, place = divmod(slot, pool.page_size)
    width = stored.values.shape[1]
    pages = pool.pages.numpy()
    pages[page, place * width : (place + 1) * width] = stored.values[0]
    start = pool.page_size * width + place * stored.scales.shape[1]
    pages[page, start : start + stored.scales.shape[1]] = stored.scales[0]


def emulated_queries(
    q: Tensor, weights: Tensor, positions: Tensor, table: Tensor, scale: float, row: str
) -> QueryRows:
    given = QueryInputs(q, weights)
    return store_queries_at(given, positions.numpy().astype(np.int64), table, scale, row)


class OnCpu(EmulatedCandidate):
    """The server of a CUDA candidate, with its launches done on the CPU."""

    def serve(self, parameters: LayerParameters, spec: CacheSpec) -> CudaServer:  # type: ignore[override]
        return CudaServer(parameters, new_cache(parameters, spec, "fp8"), "fp8")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> OnCpu:
    monkeypatch.setattr(stateful_cuda, "store", stored_by_plan)
    monkeypatch.setattr(stateful_cuda, "store_queries", emulated_queries)
    return OnCpu("fp8", Order.FUSED)


def history(index: int) -> Scenario:
    """Return a history."""
    return random_scenario(3, index)


def test_the_queue_holds_what_histories_need(on_cpu: OnCpu) -> None:
    compared = 0
    for index in range(8):
        scenario = history(index)
        trial = try_candidate(scenario, check(scenario), on_cpu)
        assert trial.failures == []
        compared += sum(trial.compared.values())

    assert compared > 0


def test_a_queue_that_keeps_drafts_is_caught(
    on_cpu: OnCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = CudaServer._store

    def keeping(self: CudaServer, feeds: list[stateful_cuda.Feed], *, keep: bool) -> None:
        sound(self, feeds, keep=True)

    monkeypatch.setattr(CudaServer, "_store", keeping)
    (fault,) = [fault for fault in FAULTS if fault.id == "drafts-kept"]
    scenario = fault.scenario

    assert try_candidate(scenario, check(scenario), on_cpu).failures


def test_separate_launches_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("needlepoint.optimized.cuda.candidates.require_cuda", lambda: "90a")
    candidate = CudaCandidate("bf16", Launches.SEPARATE)
    with pytest.raises(CannotServe, match="one kernel a stage"):
        candidate.serve(None, CacheSpec(1, 1, 1, 1, "fp32"))  # type: ignore[arg-type]


def decode_plan(requests: list[int], start: list[int], head: list[int], ratio: int) -> StorePlan:
    chunks = Chunks(*(np.array(x) for x in (requests, start, [1] * len(requests), head)))
    table = torch.arange(16 * 8, dtype=torch.int32).view(16, 8)
    return plan_store(ratio, chunks, table, 4, decode=True)


def test_graphs_take_decode_plans_of_their_width() -> None:
    plan = decode_plan([0, 1, 2], [3, 4, 5], [3, 4, 5], 4)
    require_decode(plan, 3)
    with pytest.raises(ValueError, match="3 requests, expected at most the 2"):
        require_decode(plan, 2)
    with pytest.raises(ValueError, match="decode plans alone"):
        require_decode(replace(plan, decode=False), 3)


# --- on a card ------------------------------------------------------------------------------


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("key_format", ["bf16", "fp8", "fp4"])
def test_histories_on_a_card(key_format: str) -> None:
    candidate = CudaCandidate(key_format, Launches.ONE)
    for index in range(24):
        scenario = random_scenario(0, index)
        assert try_candidate(scenario, check(scenario), candidate).failures == []


def fed(
    ratio: int, head_dim: int, pages: int, streams: int = 1
) -> tuple[Tensor, Tensor, StoreWeights, list[PagedPool], list[Tensor]]:
    """Return 16 requests of two windows and more on a card, and as many empty pools and states."""
    tokens = 2 * ratio + 4
    inputs = make_inputs(ratio, head_dim, (tokens,) * 16, torch.float32, "normal", seed=21)
    given = inputs.main
    weights = StoreWeights.prepare(
        ratio,
        given.ape.cuda(),
        given.norm_weight.cuda(),
        inputs.rope_table.cuda(),
        inputs.norm_eps,
    )
    layout, row = ("index-fp8", 132) if head_dim == 128 else ("main-bf16", 1024)
    made = [
        PagedPool(layout, torch.full((pages, 4 * row), 255, dtype=torch.uint8, device="cuda"), 4)
        for _ in range(streams)
    ]
    states = [new_state(16, ratio, head_dim, torch.float32, "cuda") for _ in range(streams)]
    kv, score = (x.view(16, tokens, -1).cuda() for x in (given.kv, given.score))
    return kv, score, weights, made, states


def turns(ratio: int) -> list[tuple[list[int], list[int]]]:
    """Return calls of 8, 3, 3 in another order, 8 and 1 requests at mixed lengths."""
    lengths = [(7 * i + 3) % (2 * ratio + 3) for i in range(16)]
    found = []
    for who in (range(8), [9, 2, 14], [14, 9, 2], range(8, 16), [5]):
        requests = list(who)
        found.append((requests, [lengths[r] for r in requests]))
        for request in requests:
            lengths[request] += 1
    return found


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize(("ratio", "head_dim"), SHAPES)
def test_a_graph_replays_other_batches_as_eager_does(ratio: int, head_dim: int) -> None:
    kv, score, weights, pools, states = fed(ratio, head_dim, 128, streams=2)
    warm = [(7 * i + 3) % (2 * ratio + 3) for i in range(16)]
    table = torch.arange(128, dtype=torch.int32).view(16, 8)
    heads = np.zeros(16, np.int64)
    who = [r for r in range(16) if warm[r]]
    chunks = Chunks(
        np.array(who), np.zeros(len(who), np.int64), np.array([warm[r] for r in who]), heads[who]
    )
    plan = plan_store(ratio, chunks, table, 4)
    rows, marks = (torch.cat([x[r, : warm[r]] for r in who]) for x in (kv, score))
    for pool, state in zip(pools, states, strict=True):
        store(rows, marks, weights, plan.to("cuda"), pool, state)
    heads[who] = plan.head
    graph = GraphedDecode(
        weights, pools[1], states[1], decode_plan([0], [3], [3], ratio), 8, torch.float32
    )
    for requests, starts in turns(ratio):
        chunks = Chunks(
            np.array(requests), np.array(starts), np.ones(len(requests), np.int64), heads[requests]
        )
        plan = plan_store(ratio, chunks, table, 4, decode=True)
        rows, marks = (
            torch.stack([x[r, at] for r, at in zip(requests, starts, strict=True)])
            for x in (kv, score)
        )
        store(rows, marks, weights, plan.to("cuda"), pools[0], states[0])
        graph.replay(plan, rows, marks)
        heads[requests] = plan.head
        assert torch.equal(pools[0].pages, pools[1].pages)
        assert torch.equal(states[0].view(torch.int32), states[1].view(torch.int32))
    assert graph.faults.tolist() == [2**31 - 1] * 2


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize(("ratio", "head_dim"), SHAPES)
def test_two_graphs_on_two_streams_do_not_meet(ratio: int, head_dim: int) -> None:
    """Two servers decode other requests at once; each ends as if it were alone."""
    kv, score, weights, pools, states = fed(ratio, head_dim, 128, streams=4)
    table = torch.arange(128, dtype=torch.int32).view(16, 8)
    graphs = [
        GraphedDecode(weights, pools[i], states[i], decode_plan([0], [3], [3], ratio), 8, kv.dtype)
        for i in (0, 1)
    ]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]
    heads = [np.zeros(16, np.int64) for _ in range(2)]
    torch.cuda.synchronize()
    for position in range(2 * ratio + 2):
        for side in (0, 1):
            requests = np.arange(8) + 8 * side
            chunks = Chunks(
                requests,
                np.full(8, position),
                np.ones(8, np.int64),
                heads[side][requests],
            )
            plan = plan_store(ratio, chunks, table, 4, decode=True)
            rows, marks = (x[8 * side : 8 * side + 8, position].contiguous() for x in (kv, score))
            torch.cuda.synchronize()
            with torch.cuda.stream(streams[side]):
                graphs[side].replay(plan, rows, marks)
            store(rows, marks, weights, plan.to("cuda"), pools[2 + side], states[2 + side])
            heads[side][requests] = plan.head
    torch.cuda.synchronize()
    for side in (0, 1):
        assert torch.equal(pools[side].pages, pools[2 + side].pages)
        assert torch.equal(states[side].view(torch.int32), states[2 + side].view(torch.int32))
