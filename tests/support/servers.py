"""Candidates that serve step by step, or fail to, for tests of scenarios."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from needlepoint.optimized.candidates.emulated import Order
from needlepoint.optimized.protocol.interface import (
    CandidateInfo,
    LayerInputs,
    Observed,
    QueryRows,
    StageKey,
)
from needlepoint.optimized.protocol.serving import (
    CacheSpec,
    LayerParameters,
    Place,
    StepBatch,
    StepOutput,
)
from needlepoint.optimized.serving.emulated import EmulatedServer
from needlepoint.reference.stages import CompressedRows
from needlepoint.verify.scenario.reference import WIDTHS, ReferenceServer
from needlepoint.verify.selftest.faults.scenario import FaultyCandidate


class WholePromptsOnly:
    """A candidate without ``serve``."""

    info = CandidateInfo("whole", "fp8", "cpu", "needlepoint", "-", "0" * 64)

    def stages(self, ratio: int) -> frozenset[StageKey]:
        return frozenset({("main", "stored")})

    def run(self, inputs: LayerInputs) -> Observed:
        raise AssertionError("a scenario asked for a whole prompt")


def raising(error: Callable[[], BaseException]) -> FaultyCandidate:
    """Return a candidate whose server raises at its first step."""

    class Raising(EmulatedServer):
        def step(self, batch: StepBatch) -> StepOutput:
            raise error()

    return FaultyCandidate("fp8", Order.FUSED, Raising)


class Bf16Server(ReferenceServer):
    """The reference under the bf16 contract, in pages of bf16 rows; ``shift`` spoils a row."""

    shift = 0.0

    def __init__(self, ratio: int, spec: CacheSpec) -> None:
        super().__init__(ratio, 0, spec)
        pools = {
            path: tuple(
                torch.full((len(pool), spec.page_size * WIDTHS[path] * 2), 255, dtype=torch.uint8)
                for pool in pools
            )
            for path, pools in self._cache.pools.items()
        }
        layouts = {path: f"{path}-bf16" for path in pools}
        self._cache = replace(self._cache, pools=pools, layouts=layouts)

    def _write(self, path: str, place: Place, rows: CompressedRows) -> None:
        size = self._cache.page_size
        entry = torch.arange(rows.first_entry, rows.first_entry + len(rows.stored.values))
        pool = self._cache.pools[path][place.pool]
        view = pool.view(torch.bfloat16).view(len(pool), size, WIDTHS[path])
        found = rows.stored.values * (1 + self.shift * (entry[:, None] == 2))
        view[place.pages[path].long()[entry // size], entry % size] = found.bfloat16()

    def step(self, batch: StepBatch) -> StepOutput:
        out = super().step(batch)
        if out.query is None:
            return out
        codes: Tensor = out.query.codes.bfloat16()
        weights = out.query.weights.float()
        return replace(out, query=QueryRows("bf16", codes, None, weights, False))


@dataclass(frozen=True)
class Bf16Candidate:
    shift: float = 0.0

    @property
    def info(self) -> CandidateInfo:
        return CandidateInfo("contract", "bf16", "cpu", "bf16", "test", "0" * 64)

    def stages(self, ratio: int) -> frozenset[StageKey]:
        return frozenset()

    def serve(self, parameters: LayerParameters, spec: CacheSpec) -> Bf16Server:
        server = Bf16Server(parameters.ratio, spec)
        server.shift = self.shift
        return server
