"""DeepGEMM's FP8 index scores as a candidate, ragged and paged, unmodified.

The keys and queries that it scores are made by the emulation of the specification, with queries
rounded to bf16 first as engines hand them over, so its profile is that of SGLang.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from needlepoint.optimized.candidates.emulated import EmulatedCandidate, Order
from needlepoint.optimized.protocol.interface import (
    INDEX,
    CandidateInfo,
    LayerInputs,
    Observed,
    PagedRows,
    QueryRows,
    StageKey,
)
from needlepoint.verify.engines.plan import switches
from needlepoint.verify.layout.stored_rows import read_stored

_PAGE = 64
_BLOCK = 2048
"""Queries of one ragged call."""
_BATCH = 64
"""Queries of one paged call: each stands for a request that decodes one token."""


@dataclass(frozen=True)
class DeepGemm:
    """The package, its version, and a digest of what it compiles."""

    module: Any
    version: str
    digest: str
    device: str = "cuda"


def load_deepgemm() -> DeepGemm:
    """Load the installed package.

    Raises
    ------
    ValueError
        If there is no CUDA device, no package, or one without these kernels.
    """
    if not torch.cuda.is_available():
        raise ValueError("candidate deepgemm: needs a CUDA device, and torch finds none")
    if importlib.util.find_spec("deep_gemm") is None:
        raise ValueError(
            "candidate deepgemm: deep_gemm is not installed; `pip install --no-deps "
            "sgl_deep_gemm==0.1.5` loads beside torch 2.11"
        )
    try:
        module = importlib.import_module("deep_gemm")
    except (ImportError, OSError) as error:
        raise ValueError(
            f"candidate deepgemm: the package does not load beside torch {torch.__version__}: "
            f"{error}"
        ) from error
    for name in ("fp8_mqa_logits", "fp8_paged_mqa_logits", "get_paged_mqa_logits_metadata"):
        if not hasattr(module, name):
            raise ValueError(f"candidate deepgemm: this version has no {name}; install 0.1.5")
    root = Path(str(module.__file__)).parent / "include"
    digest = sha256()
    for path in sorted(root.rglob("*mqa_logits*.cuh")):
        digest.update(path.name.encode() + path.read_bytes())
    return DeepGemm(module, version("sgl_deep_gemm"), digest.hexdigest())


class DeepGemmCandidate:
    """``deepgemm:fp8`` (ragged prefill) or ``deepgemm:fp8-paged`` (one query a request).

    Parameters
    ----------
    paged
        Which kernel.
    load
        Where it comes from.
    """

    def __init__(self, *, paged: bool, load: Callable[[], DeepGemm] = load_deepgemm) -> None:
        self._kernel = load()
        self._paged = paged
        self._rows = EmulatedCandidate("fp8", Order.FUSED)
        name = "fp8_paged_mqa_logits" if paged else "fp8_mqa_logits"
        self.info = CandidateInfo(
            name="deepgemm:fp8-paged" if paged else "deepgemm:fp8",
            format="fp8",
            device=self._kernel.device,
            profile="sglang",
            variant=f"sgl_deep_gemm {self._kernel.version}, {name}",
            source_sha256=self._kernel.digest,
        )

    def stages(self, ratio: int) -> frozenset[StageKey]:
        """Return the rows that are scored, and the scores."""
        own = self._rows.stages(ratio)
        return own - {(INDEX, "topk")}

    def run(self, inputs: LayerInputs) -> Observed:
        """Make keys and queries, then score them block by block on demand."""
        query = inputs.query
        if query is None:
            return self._rows.run(inputs)
        short = replace(
            query, q=_bf16(query.q), weights=_bf16(query.weights)
        )  # engines hand both over in bf16
        made = self._rows.run(replace(inputs, query=short))
        if made.query is None:
            raise ValueError("the emulation returned no queries")
        scorer = _Scorer(self._kernel, inputs, made.query, made.stored[INDEX])
        read = scorer.paged if self._paged else scorer.ragged
        return replace(
            made,
            scores=read,
            topk=None,
            peak_transient_bytes=0,
            path_taken=f"{self.info.variant}; {switches('DG_', 'SGLANG_')}",
        )


class _Scorer:
    """Keys on the device; scores are read in the blocks that the judge asks for."""

    def __init__(
        self, kernel: DeepGemm, inputs: LayerInputs, query: QueryRows, index: PagedRows
    ) -> None:
        self._kernel = kernel
        self._inputs = inputs
        self._query = query
        self._index = index
        self._pool = index.pool.to(kernel.device)

    def ragged(self, request: int, start: int, stop: int) -> Tensor:
        """Score queries against contiguous keys of their request."""
        device, ratio = self._kernel.device, self._inputs.ratio
        one = replace(
            self._index,
            page_table=(self._index.page_table[request],),
            entries=(self._index.entries[request],),
        )
        count = one.entries[0]
        if count == 0:
            return torch.empty(stop - start, 0)
        stored = read_stored(one).encoded
        codes = stored.codes.view(torch.float8_e4m3fn).to(device)
        if stored.scales is None:
            raise ValueError("FP8 keys have scales")
        scales = stored.scales.flatten().to(device)
        parts = []
        for first in range(start, stop, _BLOCK):
            last = min(first + _BLOCK, stop)
            q, weights = self._queries(request, first, last)
            visible = (torch.arange(first, last) + 1) // ratio
            begin = torch.zeros_like(visible, dtype=torch.int32).to(device)
            found = self._kernel.module.fp8_mqa_logits(
                q, (codes, scales), weights, begin, visible.to(device, torch.int32)
            )
            parts.append(_masked(found.cpu()[:, :count], visible))
        return torch.cat(parts)

    def paged(self, request: int, start: int, stop: int) -> Tensor:
        """Score each query as a request that decodes one token, through the page table."""
        device, ratio = self._kernel.device, self._inputs.ratio
        count = self._index.entries[request]
        if count == 0:
            return torch.empty(stop - start, 0)
        module = self._kernel.module
        view = self._pool.view(len(self._pool), _PAGE, 1, 132)
        table = self._index.page_table[request].to(device, torch.int32)
        parts = []
        for first in range(start, stop, _BATCH):
            last = min(first + _BATCH, stop)
            visible = (torch.arange(first, last) + 1) // ratio
            # A context of nothing runs out of bounds in their metadata kernel.
            lengths = visible.clamp(min=1).to(device, torch.int32).unsqueeze(1)
            q, weights = self._queries(request, first, last)
            sms = (
                torch.cuda.get_device_properties(0).multi_processor_count
                if (device == "cuda")
                else 1
            )
            plan = module.get_paged_mqa_logits_metadata(lengths, _PAGE, sms)
            found = module.fp8_paged_mqa_logits(
                q.unsqueeze(1),
                view,
                weights,
                lengths,
                table.expand(last - first, -1).contiguous(),
                plan,
                -(-count // _PAGE) * _PAGE,
            )
            parts.append(_masked(found.cpu()[:, :count], visible))
        return torch.cat(parts)

    def _queries(self, request: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        first = sum(self._inputs.lengths[:request])
        rows = slice(first + start, first + stop)
        codes = self._query.codes[rows].contiguous().view(torch.float8_e4m3fn)
        return codes.to(self._kernel.device), self._query.weights[rows].to(self._kernel.device)


def _masked(scores: Tensor, visible: Tensor) -> Tensor:
    """Return scores with -inf where they leave memory as it was."""
    beyond = torch.arange(scores.shape[1]) >= visible.unsqueeze(1)
    return scores.to(torch.float32).masked_fill(beyond, -torch.inf)


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def ragged() -> DeepGemmCandidate:
    """Return ``deepgemm:fp8``."""
    return DeepGemmCandidate(paged=False)


def paged() -> DeepGemmCandidate:
    """Return ``deepgemm:fp8-paged``."""
    return DeepGemmCandidate(paged=True)
