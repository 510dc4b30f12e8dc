"""The ``cuda:`` candidates: the kernels as ``needlepoint verify`` runs them.

A candidate takes the layer's given tensors to the device and brings its pages and queries back.
Scores and picks are not its own, so it does not declare them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from needlepoint.optimized.build import sources_sha256
from needlepoint.optimized.cuda_plan import Chunks, StorePlan, plan_store
from needlepoint.optimized.cuda_query import store_queries
from needlepoint.optimized.cuda_runtime import module, require_cuda
from needlepoint.optimized.cuda_steps import store_in_steps
from needlepoint.optimized.cuda_store import PagedPool, StoreWeights, store
from needlepoint.optimized.cuda_variants import query_name
from needlepoint.optimized.interface import (
    INDEX,
    MAIN,
    QUERY,
    CandidateInfo,
    CompressorInputs,
    LayerInputs,
    Observed,
    PagedRows,
    QueryInputs,
    QueryRows,
    StageKey,
)
from needlepoint.optimized.pages import allocate, page_rows
from needlepoint.optimized.preconditions import require_preconditions
from needlepoint.optimized.specification import SPEC_VERSION

_MODULES = ("store_prefill_r4_d128", "store_prefill_r4_d512", "store_prefill_r128_d512", "query")
_SEPARATE_MODULES = ("steps", "query")


class Launches(Enum):
    """How many launches a store takes."""

    ONE = "fused"
    SEPARATE = "unfused"


@dataclass(frozen=True)
class CudaCandidate:
    """One CUDA candidate; implements :class:`~needlepoint.optimized.interface.Candidate`.

    Attributes
    ----------
    key_format
        ``"bf16"``, ``"fp8"`` or ``"fp4"``; main rows are bf16 beside bf16 keys, else 584 bytes.
    launches
        One launch a store, or one a stage. The stored bytes are the same.

    Raises
    ------
    ValueError
        On construction, if this machine has no supported CUDA device.
    """

    key_format: str
    launches: Launches

    def __post_init__(self) -> None:
        require_cuda()

    @property
    def info(self) -> CandidateInfo:
        """Identity; the digest covers the CUDA sources of every kernel that it runs."""
        modules = _MODULES if self.launches is Launches.ONE else _SEPARATE_MODULES
        digests = "".join(sources_sha256(name) for name in modules)
        return CandidateInfo(
            name=f"cuda:{self.launches.value}-{self.key_format}",
            format=self.key_format,
            device="cuda",
            profile="needlepoint",
            variant=f"specification {SPEC_VERSION}, {self.launches.value}, sm_{require_cuda()}",
            source_sha256=hashlib.sha256(digests.encode()).hexdigest(),
        )

    def stages(self, ratio: int) -> frozenset[StageKey]:
        """Return what is observed: pages and queries; every dense stage if launched separately."""
        if ratio not in (4, 128):
            return frozenset()
        dense = () if self.launches is Launches.ONE else ("pooled", "normed", "roped")
        out = {(MAIN, stage) for stage in (*dense, "stored")}
        if ratio == 4:
            rotated = ("rotated",) if dense else ()
            out |= {(INDEX, stage) for stage in (*dense, *rotated, "stored")}
            out |= {(QUERY, "query"), (QUERY, "weights")}
        return frozenset(out)

    def run(self, inputs: LayerInputs) -> Observed:
        """Compute one layer on the current CUDA device.

        Raises
        ------
        ValueError
            If a tensor has a wrong shape or dtype or a precondition of the specification does not
            hold, naming the tensor and the token.
        """
        require_preconditions(inputs)
        dense: dict[StageKey, Tensor] = {}
        stored: dict[str, PagedRows] = {}
        taken: list[str] = []
        for path, (given, layout) in self._paths(inputs).items():
            rows, paged, name = self._store(given, layout, inputs)
            dense |= {(path, stage): tensor.cpu() for stage, tensor in rows.items()}
            stored[path] = paged
            taken.append(name)
        query = None
        if inputs.query is not None:
            query = _queries(inputs.query, inputs, self.key_format)
            kind = "fp32" if inputs.query.q.dtype == torch.float32 else "bf16"
            taken.append(_described(query_name(kind, self.key_format)))
        torch.cuda.synchronize()
        return Observed(dense=dense, stored=stored, query=query, path_taken="; ".join(taken))

    def _paths(self, inputs: LayerInputs) -> dict[str, tuple[CompressorInputs, str]]:
        paths = {MAIN: (inputs.main, "main-bf16" if self.key_format == "bf16" else "main-584")}
        if inputs.index is not None:
            paths[INDEX] = (inputs.index, f"index-{self.key_format}")
        return paths

    def _store(
        self, given: CompressorInputs, layout: str, inputs: LayerInputs
    ) -> tuple[dict[str, Tensor], PagedRows, str]:
        entries = [length // inputs.ratio for length in inputs.lengths]
        paged = allocate(layout, page_rows(inputs.ratio), entries, inputs.seed)
        plan = plan_of(inputs.lengths, inputs.ratio, paged).to("cuda")
        weights = StoreWeights.prepare(
            inputs.ratio,
            given.ape.cuda(),
            given.norm_weight.cuda(),
            inputs.rope_table.cuda(),
            inputs.norm_eps,
        )
        pool = PagedPool(layout, paged.pool.cuda(), paged.page_size)
        kv, score = given.kv.cuda(), given.score.cuda()
        rows: dict[str, Tensor] = {}
        if self.launches is Launches.ONE:
            taken = _described(store(kv, score, weights, plan, pool))
        else:
            rows = dict(store_in_steps(kv, score, weights, plan, pool))
            taken = f"separate steps of {layout}"
        paged.pool.copy_(pool.pages)
        return rows, paged, taken


def plan_of(lengths: tuple[int, ...], ratio: int, paged: PagedRows) -> StorePlan:
    """Return the plan that computes whole requests in one call into given pages."""
    columns = max((len(table) for table in paged.page_table), default=0)
    table = torch.full((len(lengths), max(columns, 1)), -1, dtype=torch.int32)
    for row, pages in zip(table, paged.page_table, strict=True):
        row[: len(pages)] = pages
    return plan_store(ratio, Chunks.whole(lengths), table, paged.page_size, keep_state=False)


def _queries(given: QueryInputs, inputs: LayerInputs, key_format: str) -> QueryRows:
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in inputs.lengths])
    out = store_queries(
        given.q.cuda(),
        given.weights.cuda(),
        positions.cuda(),
        inputs.rope_table.cuda(),
        inputs.weight_scale,
        key_format,
    )
    scales = None if out.scales is None else out.scales.cpu()
    return QueryRows(out.format, out.codes.cpu(), scales, out.weights.cpu(), out.scale_folded)


def _described(name: str) -> str:
    return f"{name} ({module(name, require_cuda()).path_taken})"
