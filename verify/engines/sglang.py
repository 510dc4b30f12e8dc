"""SGLang's DeepSeek-V4 kernels as candidates: pooling, stores, query path and top-k, unmodified.

The kernels of the installed package are loaded without its serving stack
(``optimized/engines/sglang.py``) and called as its prefill calls them: one pass over all requests,
fp32 state, main rows of 584 bytes. SGLang takes index scores from DeepGEMM, a candidate of its own;
here its top-k picks from fp32 scores of its own stored keys and queries.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from needlepoint.optimized.emulation.pages import allocate, page_rows
from needlepoint.optimized.engines.sglang import find_sglang, load_sglang
from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    QUERY,
    CandidateInfo,
    CompressorInputs,
    LayerInputs,
    Observed,
    PagedRows,
    QueryRows,
    StageKey,
)
from needlepoint.reference.profile_engines import engine_profile
from needlepoint.verify.engines.plan import completed, entry_slots, switches
from needlepoint.verify.layout.stored_rows import decoded_queries, read_stored

_MAX_TOKENS = 65_535
"""A plan holds token numbers in 16 bits."""
_ROWS = 256
"""Queries that are scored together."""


@dataclass(frozen=True)
class Kernels:
    """What is called, and where it came from."""

    # Modules of the package.
    compress: Any
    norm_rope: Any
    topk: Any
    version: str  # Of the package.
    digest: str  # SHA-256 over the CUDA sources that the calls compile.
    device: str = "cuda"  # Where tensors live.


def load_kernels() -> Kernels:
    """Load the kernels of the installed package.

    Raises
    ------
    ValueError
        If there is no CUDA device or no package, or the package would take a path for another
        kind of device.
    """
    if not torch.cuda.is_available():
        raise ValueError("candidate sglang: needs a CUDA device, and torch finds none")
    root = find_sglang()
    found = load_sglang(root)
    for flag in ("_is_xpu", "_is_hip"):
        if getattr(found.compress, flag, False) or getattr(found.norm_rope, flag, False):
            raise ValueError(
                f"candidate sglang: the package takes its {flag[4:]} path on this device"
            )
    topk = importlib.import_module("sglang.kernels.ops.attention.dsv4.topk")
    return Kernels(found.compress, found.norm_rope, topk, _version("sglang"), source_digest(root))


def source_digest(root: Path) -> str:
    """Return the SHA-256 over SGLang's DeepSeek-V4 CUDA sources, in order of their names."""
    digest = sha256()
    for path in sorted((root / "kernels" / "jit" / "csrc" / "deepseek_v4").glob("*.cuh")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


class SglangCandidate:
    """``sglang:fp8`` or ``sglang:fp4``, with top-k v2 or, as ``sglang:fp8-topk-v1``, v1.

    Parameters
    ----------
    key_format
        ``"fp8"`` or ``"fp4"``.
    load
        Where kernels come from.
    topk
        Which top-k kernel picks.
    """

    def __init__(
        self, key_format: str, load: Callable[[], Kernels] = load_kernels, topk: TopK = "v2"
    ) -> None:
        self._format = key_format
        self._topk: TopK = topk
        self._kernels = load()
        self.info = CandidateInfo(
            name=f"sglang:{key_format}" + ("" if topk == "v2" else f"-topk-{topk}"),
            format=key_format,
            device=self._kernels.device,
            profile="sglang",
            variant=f"sglang {self._kernels.version}, compress v2, norm_rope_store {key_format}, "
            f"main 584, top-k {topk}",
            source_sha256=self._kernels.digest,
        )

    def stages(self, ratio: int) -> frozenset[StageKey]:
        """Return pooled and stored rows, the query path and the picks."""
        main = {(MAIN, "pooled"), (MAIN, "stored")}
        if ratio != 4:
            return frozenset(main)
        index = {(INDEX, "pooled"), (INDEX, "stored"), (INDEX, "topk")}
        return frozenset(main | index | {(QUERY, "query"), (QUERY, "weights")})

    def run(self, inputs: LayerInputs) -> Observed:
        """Run one layer, all requests in one pass.

        Raises
        ------
        ValueError
            If there are more tokens than a plan can number.
        """
        if sum(inputs.lengths) > _MAX_TOKENS:
            raise ValueError(
                f"{sum(inputs.lengths)} tokens: SGLang's plans number at most {_MAX_TOKENS} in one "
                "pass; give fewer --tokens"
            )
        dense: dict[StageKey, Tensor] = {}
        stored: dict[str, PagedRows] = {}
        for path, part in ((INDEX, inputs.index), (MAIN, inputs.main)):
            if part is not None:
                dense[path, "pooled"], stored[path] = self._store(path, part, inputs)
        path_taken = f"prefill, one pass, fp32 state; {switches('SGLANG_')}"
        if inputs.query is None:
            return Observed(dense=dense, stored=stored, path_taken=path_taken)
        query = self._query(inputs)
        picks = self._picks(inputs, stored[INDEX], query)
        path_taken += f"; top-k {self._topk} over fp32 scores of its own keys and queries"
        return Observed(dense=dense, stored=stored, query=query, topk=picks, path_taken=path_taken)

    def _store(
        self, path: str, part: CompressorInputs, inputs: LayerInputs
    ) -> tuple[Tensor, PagedRows]:
        """Pool and store one path; return the pooled rows in order, and the pages."""
        device, ratio, width = self._kernels.device, inputs.ratio, len(part.norm_weight)
        module = self._kernels.compress
        rows = torch.cat((part.kv, part.score), dim=1).to(device, torch.float32)
        ape = part.ape
        if ratio == 4:  # they keep the overlap half above the fresh half
            ape = torch.cat((ape[:, :width], ape[:, width:]))
        ape = ape.to(device, torch.float32).contiguous()
        count, lengths = len(inputs.lengths), torch.tensor(inputs.lengths)
        numbers = torch.arange(count, device=device)
        slots = count * (2 if ratio == 4 else 1)
        state = torch.zeros(slots, ratio, rows.shape[1], device=device)
        plan = module.CompressorPrefillPlan.generate_legacy(
            ratio, numbers, lengths, lengths, len(rows), rows.device
        )
        tokens, entries = completed(plan[1], inputs)
        pooled = rows.new_empty((plan[1].shape[0], width))
        module.compress_forward(
            state, rows, ape, plan, head_dim=width, compress_ratio=ratio, out=pooled
        )
        layout = f"index-{self._format}" if path == INDEX else "main-584"
        counts = [length // ratio for length in inputs.lengths]
        paged = allocate(layout, page_rows(ratio), counts, inputs.seed)
        pool = paged.pool.to(device)
        location = torch.zeros(len(rows), dtype=torch.int64)
        location[tokens] = entry_slots(paged)[entries]
        module.compress_norm_rope_store(
            pooled,
            plan,
            norm_weight=part.norm_weight.to(device, torch.float32),
            norm_eps=inputs.norm_eps,
            freq_cis=self._table(inputs),
            out_loc=location.to(device),
            kvcache=pool,
            page_size=paged.page_size,
            use_fp4=layout == "index-fp4",
        )
        paged.pool.copy_(pool)
        ordered = torch.empty(len(entries), width)
        ordered[entries] = pooled[: len(entries)].cpu()
        return ordered, paged

    def _table(self, inputs: LayerInputs) -> Tensor:
        return torch.view_as_complex(inputs.rope_table.contiguous()).to(self._kernels.device)

    def _query(self, inputs: LayerInputs) -> QueryRows:
        """Run the query path; a second call with weights of one shows the query scales."""
        given = inputs.query
        if given is None:
            raise ValueError("a layer of ratio 128 has no queries")
        device, table = self._kernels.device, self._table(inputs)
        q = given.q.to(device, torch.bfloat16).contiguous()
        w = given.weights.to(device, torch.bfloat16).contiguous()
        place = torch.cat([torch.arange(n, dtype=torch.int32) for n in inputs.lengths]).to(device)
        module = self._kernels.norm_rope
        if self._format == "fp4":
            function = module.fused_q_indexer_rope_hadamard_fp4_quant
            (codes, scales), weights = function(q, w, inputs.weight_scale, table, place)
            return QueryRows(
                "fp4",
                codes.cpu().view(torch.uint8),
                scales.cpu().unsqueeze(-1).contiguous().view(torch.uint8),
                weights.squeeze(-1).cpu(),
                scale_folded=False,
            )
        function = module.fused_q_indexer_rope_hadamard_quant
        codes, weights = function(q, w, inputs.weight_scale, table, place)
        _, scales = function(q, torch.ones_like(w), 1.0, table, place)
        return QueryRows(
            "fp8",
            codes.cpu().view(torch.uint8),
            scales.squeeze(-1).cpu(),
            weights.squeeze(-1).cpu(),
            scale_folded=True,
        )

    def _picks(self, inputs: LayerInputs, index: PagedRows, query: QueryRows) -> Tensor:
        device = self._kernels.device
        keys = read_stored(index).values.to(device, torch.float32)
        values = decoded_queries(query, engine_profile("sglang", self._format).index_query).to(
            torch.float32
        )
        weights = query.weights
        if query.scale_folded and query.scales is not None:
            weights = weights / query.scales
        picks, first, entry = [], 0, 0
        for length in inputs.lengths:
            count = length // inputs.ratio
            own = keys[entry : entry + count]
            for start in range(first, first + length, _ROWS):
                rows = slice(start, min(start + _ROWS, first + length))
                dots = torch.einsum("shd,td->sht", values[rows].to(device), own).relu_()
                scores = (dots * weights[rows].to(device).unsqueeze(-1)).sum(1)
                visible = (
                    torch.arange(rows.start - first + 1, rows.stop - first + 1) // inputs.ratio
                )
                seen, module = visible.to(torch.int32), self._kernels.topk
                picks.append(select(module, self._topk, scores, seen, inputs.topk))
            first, entry = first + length, entry + count
        return torch.cat(picks)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unpacked"


def fp8() -> SglangCandidate:
    """Return ``sglang:fp8``."""
    return SglangCandidate("fp8")


def fp4() -> SglangCandidate:
    """Return ``sglang:fp4``."""
    return SglangCandidate("fp4")


def fp8_topk_v1() -> SglangCandidate:
    """Return ``sglang:fp8-topk-v1``."""
    return SglangCandidate("fp8", topk="v1")


def fp4_topk_v1() -> SglangCandidate:
    """Return ``sglang:fp4-topk-v1``."""
    return SglangCandidate("fp4", topk="v1")


TopK = Literal["v1", "v2"]
V1_MOST: Final = 1024
"""The largest k that their v1 takes."""
_ROW = 256
"""Columns of a score row are padded to a multiple of this: the top-k reads 16 bytes at a time."""
_PAGE = page_rows(4)


def select(module: Any, kernel: TopK, scores: Tensor, visible: Tensor, k: int) -> Tensor:  # noqa: ANN401
    """Return what a kernel picks, int32 ``[rows, k]`` on the CPU.

    Parameters
    ----------
    module
        ``sglang.kernels.ops.attention.dsv4.topk``.
    kernel
        ``"v1"`` always goes through a page table and gives slots, which are turned back into
        entries; ``"v2"`` is asked for entries.
    scores
        fp32 ``[rows, entries]`` on the device of the kernels.
    visible
        int32 ``[rows]``: entries that a row sees.
    k
        Entries to pick.

    Raises
    ------
    ValueError
        If k is more than v1 takes.
    """
    if kernel == "v1" and k > V1_MOST:
        raise ValueError(f"k {k}: SGLang's top-k v1 takes at most {V1_MOST}; name top-k v2")
    device = scores.device
    width = max(_ROW, -(-scores.shape[1] // _ROW) * _ROW)
    padded = scores.new_full((len(scores), width), -torch.inf)
    padded[:, : scores.shape[1]] = scores
    lengths = visible.to(device)
    out = torch.full((len(scores), k), -1, dtype=torch.int32, device=device)
    if kernel == "v1":
        # Pages in reverse, so that a slot is not the entry itself.
        table = torch.arange(width // _PAGE, dtype=torch.int32, device=device).flip(0)
        module.topk_transform_paged(
            padded, lengths, table.expand(len(scores), -1).contiguous(), out, _PAGE
        )
        return _entries(out, table).cpu()
    plan = module.plan_topk_v2(lengths)
    if device.type == "cuda":
        torch.cuda.synchronize()  # their plan must not directly precede the kernel
    module.topk_transform_paged_v2(padded, lengths, None, out, _PAGE, plan)
    return out.cpu()


def _entries(slots: Tensor, table: Tensor) -> Tensor:
    """Return the entries that slots hold; one past all columns for a slot of no page."""
    page, row = slots // _PAGE, slots % _PAGE
    known = (page >= 0) & (page < len(table))
    place = table.argsort()[page.clamp(0, len(table) - 1)].to(torch.int32)
    found = torch.where(known, place * _PAGE + row, len(table) * _PAGE)
    return torch.where(slots == -1, -1, found).to(torch.int32)
