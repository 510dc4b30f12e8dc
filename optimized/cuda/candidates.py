"""The ``cuda:`` candidates: the kernels as ``needlepoint verify`` runs them.

A candidate takes the layer's given tensors to the device and brings its pages, queries, scores and
picks back. Scores are computed from its own stored bytes, through the page table.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from needlepoint.optimized.build.compile import sources_sha256
from needlepoint.optimized.build.score_variants import accumulator, default_unit
from needlepoint.optimized.build.variants import query_name
from needlepoint.optimized.cuda.query import store_queries
from needlepoint.optimized.cuda.runtime import module, require_cuda
from needlepoint.optimized.cuda.scorer import CudaScorer
from needlepoint.optimized.cuda.scores import KeyPages, allocate_scores
from needlepoint.optimized.cuda.server import CudaServer
from needlepoint.optimized.cuda.steps import store_in_steps
from needlepoint.optimized.cuda.store import PagedPool, store
from needlepoint.optimized.cuda.topk import topk
from needlepoint.optimized.cuda.weights import StoreWeights
from needlepoint.optimized.emulation.keyside import key_and_query_stages
from needlepoint.optimized.emulation.pages import allocate, page_rows
from needlepoint.optimized.emulation.preconditions import require_preconditions
from needlepoint.optimized.emulation.specification import SPEC_VERSION
from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    CandidateInfo,
    CompressorInputs,
    LayerInputs,
    Observed,
    PagedRows,
    QueryInputs,
    QueryRows,
    StageKey,
)
from needlepoint.optimized.protocol.serving import CacheSpec, CannotServe, LayerParameters
from needlepoint.optimized.serving.cache import new_cache
from needlepoint.optimized.serving.plan import Chunks, StorePlan, plan_store

_MODULES = ("store_prefill_r4_d128", "store_prefill_r4_d512", "store_prefill_r128_d512", "query")
_SEPARATE_MODULES = ("steps", "query")


class Launches(Enum):
    """How many launches a store takes."""

    ONE = "fused"
    SEPARATE = "unfused"


@dataclass(frozen=True)
class CudaCandidate:
    """One CUDA candidate; implements :class:`~needlepoint.optimized.protocol.interface.Candidate`.

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
        stores = _MODULES if self.launches is Launches.ONE else _SEPARATE_MODULES
        unit = default_unit(self.key_format, require_cuda())
        modules = (*stores, f"scores_{unit}_{self.key_format}", "topk")
        digests = "".join(sources_sha256(name) for name in modules)
        return CandidateInfo(
            name=f"cuda:{self.launches.value}-{self.key_format}",
            format=self.key_format,
            device="cuda",
            profile="needlepoint",
            variant=f"specification {SPEC_VERSION}, {self.launches.value}, sm_{require_cuda()}",
            source_sha256=hashlib.sha256(digests.encode()).hexdigest(),
            accumulator=accumulator(unit, self.key_format),
        )

    def stages(self, ratio: int) -> frozenset[StageKey]:
        """Return what is observed: all but dense stages, and those too if launched separately."""
        return key_and_query_stages(ratio, dense=self.launches is Launches.SEPARATE)

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
        pools: dict[str, PagedPool] = {}
        taken: list[str] = []
        for path, (given, layout) in self._paths(inputs).items():
            rows, paged, pools[path], name = self._store(given, layout, inputs)
            dense |= {(path, stage): tensor.cpu() for stage, tensor in rows.items()}
            stored[path] = paged
            taken.append(name)
        if inputs.query is None:
            return Observed(dense=dense, stored=stored, path_taken="; ".join(taken))
        query = _queries(inputs.query, inputs, self.key_format)
        kind = "fp32" if inputs.query.q.dtype == torch.float32 else "bf16"
        table = page_tables(stored[INDEX]).cuda()
        keys = KeyPages(self.key_format, pools[INDEX].pages, pools[INDEX].page_size, table)
        scorer = CudaScorer(query, keys, inputs.lengths, inputs.ratio)
        taken += [_described(query_name(kind, self.key_format)), scorer.path_taken(inputs.topk)]
        return Observed(
            dense=dense,
            stored=stored,
            query=_on_cpu(query),
            scores=scorer.read,
            topk=scorer.select(inputs.topk),
            path_taken="; ".join(taken),
        )

    def serve(self, parameters: LayerParameters, spec: CacheSpec) -> CudaServer:
        """Open a server of one layer; implements ``StatefulCandidate``.

        Raises
        ------
        CannotServe
            If the stores are separate launches.
        """
        if self.launches is not Launches.ONE:
            raise CannotServe("launches one kernel a stage, for whole prompts alone")
        cache = new_cache(parameters, spec, self.key_format, "cuda")
        return CudaServer(parameters, cache, self.key_format)

    def select(self, scores: Tensor, lengths: Tensor, k: int) -> Tensor:
        """Return the picks of given scores; implements ``SelectsEntries``."""
        rows, columns = scores.shape
        values = allocate_scores(rows, columns, torch.device("cuda")).copy_(scores)
        return topk(values, lengths.to("cuda", torch.int32), k).cpu()

    def _paths(self, inputs: LayerInputs) -> dict[str, tuple[CompressorInputs, str]]:
        paths = {MAIN: (inputs.main, "main-bf16" if self.key_format == "bf16" else "main-584")}
        if inputs.index is not None:
            paths[INDEX] = (inputs.index, f"index-{self.key_format}")
        return paths

    def _store(
        self, given: CompressorInputs, layout: str, inputs: LayerInputs
    ) -> tuple[dict[str, Tensor], PagedRows, PagedPool, str]:
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
        return rows, paged, pool, taken


def plan_of(lengths: tuple[int, ...], ratio: int, paged: PagedRows) -> StorePlan:
    """Return the plan that computes whole requests in one call into given pages."""
    table = page_tables(paged)
    return plan_store(ratio, Chunks.whole(lengths), table, paged.page_size, keep_state=False)


def page_tables(paged: PagedRows) -> Tensor:
    """Return the page tables of all requests as one, int32 ``[requests, pages]``, -1 padded."""
    columns = max((len(table) for table in paged.page_table), default=0)
    out = torch.full((len(paged.page_table), max(columns, 1)), -1, dtype=torch.int32)
    for row, pages in zip(out, paged.page_table, strict=True):
        row[: len(pages)] = pages
    return out


def _queries(given: QueryInputs, inputs: LayerInputs, key_format: str) -> QueryRows:
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in inputs.lengths])
    return store_queries(
        given.q.cuda(),
        given.weights.cuda(),
        positions.cuda(),
        inputs.rope_table.cuda(),
        inputs.weight_scale,
        key_format,
    )


def _on_cpu(query: QueryRows) -> QueryRows:
    scales = None if query.scales is None else query.scales.cpu()
    return QueryRows(
        query.format, query.codes.cpu(), scales, query.weights.cpu(), query.scale_folded
    )


def _described(name: str) -> str:
    return f"{name} ({module(name, require_cuda()).path_taken})"
