"""Store and query workloads: inputs that rotate, our launches and SGLang's on the same tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from needlepoint.benchmarks.timing import Call, Side
from needlepoint.optimized.cuda.faults import new_faults
from needlepoint.optimized.cuda.query import allocate_queries, launch_query, require_query
from needlepoint.optimized.cuda.store import (
    ROWS,
    PagedPool,
    launch_store,
    new_state,
    require_store,
)
from needlepoint.optimized.cuda.weights import StoreWeights
from needlepoint.optimized.emulation.pages import LAYOUTS
from needlepoint.optimized.engines.sglang import SglangKernels
from needlepoint.optimized.serving.plan import Chunks, StorePlan, plan_store, ring_rows

L2_FACTOR = 4
MAX_SETS = 64
EPS = 1e-6


@dataclass(frozen=True)
class StoreCase:
    """One store workload.

    Attributes
    ----------
    layout
        Page layout, which fixes head_dim and row format.
    ratio
        4 or 128.
    inputs, state
        Dtypes of the projections and of the compressor state.
    requests
        Requests of the call.
    start, tokens
        Position of each request's first token, and its number of tokens.
    """

    layout: str
    ratio: int
    inputs: torch.dtype
    state: torch.dtype
    requests: int
    start: int
    tokens: int

    @property
    def head_dim(self) -> int:
        """Width of a row."""
        return ROWS[self.layout][0]

    @property
    def width(self) -> int:
        """Columns of kv and of score."""
        return self.head_dim * (2 if self.ratio == 4 else 1)

    @property
    def page_size(self) -> int:
        """Rows a page, as the engines use them: bf16 main rows are dense, C128 pages hold 2."""
        return 1 if self.layout == "main-bf16" else 256 // self.ratio

    @property
    def windows(self) -> int:
        """Entries that the call completes."""
        end = self.start + self.tokens
        return self.requests * (end // self.ratio - self.start // self.ratio)

    @property
    def floor_bytes(self) -> int:
        """Bytes that must move: inputs once, state rows read and written once, stored rows once."""
        element, kept = self.inputs.itemsize, self.state.itemsize
        row = LAYOUTS[self.layout].value_bytes + LAYOUTS[self.layout].scale_bytes
        plan = self._plan()
        tokens = 2 * self.width * element * self.requests * self.tokens
        # A window reads the overlap or the fresh columns of a token, half of its state row.
        share = 2 * self.head_dim * kept
        return int(
            tokens
            + plan.windows.from_state.sum() * share
            + plan.writes.shape[0] * 2 * self.width * kept
            + self.windows * row
        )

    def _plan(self) -> StorePlan:
        count = self.requests
        pages = -(-((self.start + self.tokens) // self.ratio) // self.page_size)
        generator = torch.Generator().manual_seed(1)
        order = torch.randperm(count * max(pages, 1), generator=generator, dtype=torch.int32)
        numbers = torch.arange(count).numpy()
        start = torch.full((count,), self.start).numpy()
        length = torch.full((count,), self.tokens).numpy()
        head = torch.full((count,), self.start % ring_rows(self.ratio)).numpy()
        chunks = Chunks(numbers, start, length, head)
        decode = self.tokens == 1
        table = order.view(count, -1)
        return plan_store(self.ratio, chunks, table, self.page_size, decode=decode)


@dataclass(frozen=True)
class StoreSet:
    """Tensors of one input set; ours and SGLang's read the same projections."""

    projections: Tensor  # [tokens, kv | score]
    state: Tensor
    pool: PagedPool
    their_state: Tensor
    their_pool: Tensor


@dataclass(frozen=True)
class StoreBench:
    """A workload with its input sets on the device."""

    case: StoreCase
    ape: Tensor
    weights: StoreWeights
    plan: StorePlan
    sets: tuple[StoreSet, ...]

    def ours(self) -> Side:
        """Return our side: one launch a call."""
        calls: list[Call] = []
        name = ""
        faults = new_faults("cuda")
        for data in self.sets:
            kv = data.projections[:, : self.case.width]
            score = data.projections[:, self.case.width :]
            arguments = (kv, score, self.weights, self.plan, data.pool, data.state)
            name = require_store(*arguments)
            calls.append(partial(launch_store, name, *arguments, faults))
        return Side(name, calls)

    def sglang(self, kernels: SglangKernels) -> Side | None:
        """Return SGLang's side, its launches in order, or None where it refuses the row."""
        case = self.case
        if case.layout == "index-bf16":
            return None
        module = kernels.compress
        plan = self._their_plan(module)
        ape = self.ape
        if case.ratio == 4:
            ape = torch.cat((ape[:, : case.head_dim], ape[:, case.head_dim :]))
        ape = ape.to(case.inputs).contiguous()
        weight = self.weights.norm_weight.to(case.inputs)
        table = torch.view_as_complex(self.weights.rope_table)
        out_loc = self._their_slots()
        calls: list[Call] = []
        for data in self.sets:
            pooled = data.projections.new_empty((plan[1].shape[0], case.head_dim))

            def call(data: StoreSet = data, pooled: Tensor = pooled) -> None:
                module.compress_forward(
                    data.their_state,
                    data.projections,
                    ape,
                    plan,
                    head_dim=case.head_dim,
                    compress_ratio=case.ratio,
                    out=pooled,
                )
                module.compress_norm_rope_store(
                    pooled,
                    plan,
                    norm_weight=weight,
                    norm_eps=EPS,
                    freq_cis=table,
                    out_loc=out_loc,
                    kvcache=data.their_pool,
                    page_size=case.page_size,
                    use_fp4=case.layout == "index-fp4",
                    bf16_store=case.layout == "main-bf16",
                )

            calls.append(call)
        return Side("sglang", calls)

    def _their_plan(self, module: Any) -> Any:  # noqa: ANN401
        case = self.case
        requests = torch.arange(case.requests, device="cuda")
        length = torch.full((case.requests,), case.start + case.tokens)
        if case.tokens == 1:
            return module.CompressorDecodePlan.generate_legacy(case.ratio, requests, length.cuda())
        extend = torch.full((case.requests,), case.tokens)
        plan = module.CompressorPrefillPlan.generate_legacy(
            case.ratio, requests, length, extend, case.requests * case.tokens, requests.device
        )
        torch.cuda.synchronize()
        return plan

    def _their_slots(self) -> Tensor:
        """Return a slot for every token: that of the entry which it completes, else 0."""
        case = self.case
        slots = torch.zeros(case.requests * case.tokens, dtype=torch.int64, device="cuda")
        entries = self.plan.slots[self.plan.slots >= 0]
        slots[torch.from_numpy(self.plan.windows.token).cuda()] = entries
        return slots


def rotating_sets(size: int) -> int:
    """Return how many input sets of ``size`` bytes rotate over four times the L2; at least 3."""
    l2 = torch.cuda.get_device_properties("cuda").L2_cache_size
    return max(3, -(-L2_FACTOR * l2 // size))


def make_store(case: StoreCase) -> StoreBench:
    """Return a workload with as many input sets as rotate over four times the L2."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    ape = 0.5 * normal(case.ratio, case.width)
    angle = normal(case.start + case.tokens, 32)
    weights = StoreWeights.prepare(
        case.ratio,
        ape,
        1 + 0.1 * normal(case.head_dim),
        torch.stack((angle.cos(), angle.sin()), dim=-1),
        EPS,
    )
    plan = case._plan()
    layout = LAYOUTS[case.layout]
    pages = max(plan.pages, 1)
    ring = ring_rows(case.ratio)
    count = min(MAX_SETS, rotating_sets(case.floor_bytes))
    sets = []
    for _ in range(count):
        tokens = case.requests * case.tokens
        state = new_state(case.requests, case.ratio, case.head_dim, case.state, "cuda")
        state.copy_(normal(case.requests, ring, 2, case.width))
        their = normal(case.requests * (2 if case.ratio == 4 else 1), case.ratio, 2 * case.width)
        pool = torch.full(
            (pages, layout.page_bytes(case.page_size)), 255, dtype=torch.uint8, device="cuda"
        )
        sets.append(
            StoreSet(
                normal(tokens, 2 * case.width).to(case.inputs),
                state,
                PagedPool(case.layout, pool, case.page_size),
                their.to(case.state),
                torch.full_like(pool, 255),
            )
        )
    return StoreBench(case, ape, weights, plan.to("cuda"), tuple(sets))


@dataclass(frozen=True)
class QueryBench:
    """Query path of ``tokens`` by ``heads`` rows."""

    tokens: int
    heads: int
    row: str
    sets: tuple[tuple[Tensor, Tensor], ...]
    positions: Tensor
    rope_table: Tensor

    @property
    def floor_bytes(self) -> int:
        """Bytes read and written once: bf16 rows, codes, scales, weights."""
        codes = {"bf16": 256, "fp8": 132, "fp4": 68}[self.row]
        return self.tokens * self.heads * (256 + 2 + codes + 4)

    def ours(self) -> Side:
        """Return our side."""
        calls: list[Call] = []
        name = ""
        faults = new_faults("cuda")
        for q, w in self.sets:
            name = require_query(q, w, self.positions, self.rope_table, self.row)
            out = allocate_queries(self.tokens, self.heads, self.row, q.device)
            arguments = (q, w, self.positions, self.rope_table, 0.01, out, faults)
            calls.append(partial(launch_query, name, *arguments))
        return Side(name, calls)

    def sglang(self, kernels: SglangKernels) -> Side | None:
        """Return SGLang's side, or None for bf16, which it does not have."""
        if self.row == "bf16":
            return None
        module = kernels.norm_rope
        name = {"fp8": "quant", "fp4": "fp4_quant"}[self.row]
        function = getattr(module, f"fused_q_indexer_rope_hadamard_{name}")
        table = torch.view_as_complex(self.rope_table)
        return Side(
            "sglang",
            [partial(function, q, w, 0.01, table, self.positions) for q, w in self.sets],
        )


def make_query(tokens: int, heads: int, row: str) -> QueryBench:
    """Return a query workload of bf16 inputs."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    count = min(MAX_SETS, rotating_sets(tokens * heads * 256))
    angle = torch.randn(tokens, 32, generator=generator, device="cuda")

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(torch.bfloat16)

    return QueryBench(
        tokens,
        heads,
        row,
        tuple((normal(tokens, heads, 128), normal(tokens, heads)) for _ in range(count)),
        torch.arange(tokens, dtype=torch.int32, device="cuda"),
        torch.stack((angle.cos(), angle.sin()), dim=-1),
    )
