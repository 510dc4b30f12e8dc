"""A deep result with row errors: one stage of one layer differs at one token."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from needlepoint.verify.result import CandidateResult, Result

Deep = tuple[Result, dict[str, Tensor]]
BAD_LAYER, BAD_ROW = 17, 127


@pytest.fixture
def deep(differing: Result) -> Callable[[int, int], Deep]:
    """Return a function that makes a result of so many layers and candidates."""

    def make(layers: int, candidates: int) -> Deep:
        rows: dict[str, Tensor] = {}
        made = [_candidate(differing.candidates[1], i, layers, rows) for i in range(candidates)]
        source = differing.input.model_copy(update={"lengths": (8192,)})
        return differing.model_copy(update={"candidates": tuple(made), "input": source}), rows

    return make


def _candidate(
    one: CandidateResult, index: int, layers: int, rows: dict[str, Tensor]
) -> CandidateResult:
    name, first = f"candidate-{index}", one.layers[0]
    pooled = next(stage for stage in first.stages if stage.stage == "pooled")
    extra = [pooled.model_copy(update={"stage": name}) for name in ("normed", "roped", "rotated")]
    generator = torch.Generator().manual_seed(index)
    made = []
    for number in range(layers):
        stages = []
        for stage in (*first.stages, *extra):
            bad = stage.verdict == "differ" and number == BAD_LAYER
            verdict = stage.verdict and ("differ" if bad else "match")
            stages.append(stage.model_copy(update={"verdict": verdict, "worst": stage.worst * 16}))
            for kind in ("local", "accumulated"):
                errors = torch.rand(stage.rows_compared, generator=generator) ** 3 * 0.4
                if bad:
                    errors[BAD_ROW] = math.inf
                if stage.local is not None:
                    rows[f"{name}/layer{number}/{stage.path}/{stage.stage}/{kind}"] = errors
        made.append(first.model_copy(update={"layer": number, "stages": tuple(stages)}))
    where = one.first_divergence
    divergence = where and where.model_copy(update={"layer": BAD_LAYER})
    return one.model_copy(
        update={"name": name, "layers": tuple(made), "first_divergence": divergence}
    )
