"""The query workloads of the bench: inputs that rotate, ours and SGLang's on the same tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from needlepoint.benchmarks.cases import L2_FACTOR, MAX_SETS
from needlepoint.benchmarks.timing import Call, Side
from needlepoint.optimized.cuda.faults import new_faults
from needlepoint.optimized.cuda.query import allocate_queries, launch_query, require_query
from needlepoint.optimized.engines.sglang import SglangKernels


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
    l2 = torch.cuda.get_device_properties("cuda").L2_cache_size
    count = min(MAX_SETS, max(3, -(-L2_FACTOR * l2 // (tokens * heads * 256))))
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
