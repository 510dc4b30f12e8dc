"""DeepGEMM's and SGLang's score and top-k kernels as sides of a bench, where they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from needlepoint.benchmarks.timing import Call, Side
from needlepoint.optimized.cuda.scores import KeyPages
from needlepoint.optimized.engines.sglang import find_sglang, load_sglang
from needlepoint.verify.workloads.scores import ScoreCase

DEEPGEMM = "deep_gemm"
_TOPK = "sglang.kernels.ops.attention.dsv4.topk"
_HEAD_BYTES = 4


def torch_scores(case: ScoreCase) -> Tensor:
    """Score as engines fall back to: a bf16 product, with one number a head and pair in memory."""
    per_head = torch.einsum("shd,td->sht", case.query.codes, case.stored.values)
    return (per_head.relu_() * case.query.weights.unsqueeze(-1).bfloat16()).sum(1)


@dataclass(frozen=True)
class ScoreEngines:
    """What is installed beside us.

    Attributes
    ----------
    deepgemm, topk_module
        Modules, None where they are absent.
    absent
        Why, for the report.
    """

    deepgemm: Any
    topk_module: Any
    absent: tuple[str, ...]

    def ragged_scores(self, case: ScoreCase) -> Tensor | None:
        """Return DeepGEMM's scores of one request."""
        if self.deepgemm is None:
            return None
        out: Tensor = self._ragged_call(case)()  # type: ignore[assignment]
        return out

    def ragged(self, case: ScoreCase) -> Side | None:
        """Return DeepGEMM's fp8 scores of one request over the same keys."""
        return None if self.deepgemm is None else Side("DeepGEMM", [self._ragged_call(case)])

    def _ragged_call(self, case: ScoreCase) -> Call:
        codes = case.query.codes.view(torch.float8_e4m3fn)
        keys = (case.stored.values.view(torch.float8_e4m3fn), case.stored.scales)
        first = torch.zeros_like(case.context_lens)
        return partial(
            self.deepgemm.fp8_mqa_logits, codes, keys, case.query.weights, first, case.context_lens
        )

    def paged(
        self, cases: Sequence[ScoreCase], pages: Sequence[Tensor], keys: Sequence[KeyPages]
    ) -> Side | None:
        """Return DeepGEMM's fp8 scores of one query row a request."""
        if self.deepgemm is None:
            return None
        calls: list[Call] = []
        count = torch.cuda.get_device_properties("cuda").multi_processor_count
        for case, pool, paged in zip(cases, pages, keys, strict=True):
            size = paged.page_size
            lengths = case.context_lens.view(-1, 1)
            metadata = self.deepgemm.get_paged_mqa_logits_metadata(lengths, size, count)
            calls.append(
                partial(
                    self.deepgemm.fp8_paged_mqa_logits,
                    case.query.codes.view(torch.float8_e4m3fn).unsqueeze(1),
                    pool.view(pool.shape[0], size, 1, 128 + _HEAD_BYTES),
                    case.query.weights,
                    lengths,
                    paged.table,
                    metadata,
                    case.columns,
                )
            )
        return Side("DeepGEMM", calls)

    def topk(self, values: Sequence[Tensor], context_lens: Tensor, k: int) -> Side | None:
        """Return SGLang's top-k v2, untranslated."""
        if self.topk_module is None:
            return None
        module = self.topk_module
        plan = module.plan_topk_v2(context_lens)
        topk_indices = torch.empty(
            context_lens.shape[0], k, dtype=torch.int32, device=context_lens.device
        )
        torch.cuda.synchronize()
        calls = [
            partial(module.topk_transform_paged_v2, x, context_lens, None, topk_indices, 64, plan)
            for x in values
        ]
        return Side("SGLang v2", calls)


def find_engines(sglang: Path | None = None) -> ScoreEngines:
    """Return the engines that can be loaded.

    Parameters
    ----------
    sglang
        An unpacked ``sglang`` package folder; None for an installed one.
    """
    absent: list[str] = []
    deepgemm = topk = None
    try:
        deepgemm = importlib.import_module(DEEPGEMM)
    except (ImportError, OSError) as error:
        absent.append(f"DeepGEMM: {error}")
    try:
        load_sglang(find_sglang() if sglang is None else sglang)
        topk = importlib.import_module(_TOPK)
    except (ImportError, ValueError) as error:
        absent.append(f"SGLang: {error}")
    return ScoreEngines(deepgemm, topk, tuple(absent))
