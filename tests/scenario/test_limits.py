"""A candidate of another profile is held to that profile's limits, not to bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import CandidateInfo, QueryRows, StageKey
from needlepoint.optimized.protocol.serving import (
    CacheSpec,
    LayerParameters,
    Place,
    StepBatch,
    StepOutput,
)
from needlepoint.reference.stages import CompressedRows
from needlepoint.verify.scenario.events import Accept, Decode, Draft, Fork, Prefill, Scenario
from needlepoint.verify.scenario.reference import WIDTHS, ReferenceServer
from needlepoint.verify.scenario.rules import check
from needlepoint.verify.scenario.trial import covers, try_candidate


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


EVENTS = (
    Prefill(("a", "b"), (70, 129)),
    Draft(("a",), (5,)),
    Decode(("b",)),
    Accept(("a",), (3,)),
    Fork("c", "b", 61),
    Prefill(("c", "a"), (9, 60)),
)


def test_it_passes_within_the_limits(scenario: Callable[..., Scenario]) -> None:
    made = scenario(*EVENTS)
    trial = try_candidate(made, check(made), Bf16Candidate())

    assert trial.failures == []
    assert set(trial.compared) >= {
        ("contract", 4, ("index", "stored")),
        ("contract", 4, ("index", "topk")),
        ("contract", 4, ("query", "query")),
        ("contract", 128, ("main", "stored")),
    }


@pytest.mark.parametrize("shift", [0.02, -0.5])
def test_it_fails_beyond_them(shift: float, scenario: Callable[..., Scenario]) -> None:
    made = scenario(*EVENTS)
    (found,) = try_candidate(made, check(made), Bf16Candidate(shift)).failures

    assert (found.failure.event, found.failure.problem.entry) == (0, 2)
    assert "x limit of the same tokens alone" in found.failure.problem.detail


def test_a_bf16_state_is_not_covered(scenario: Callable[..., Scenario]) -> None:
    assert covers(Bf16Candidate(), scenario(*EVENTS))
    assert not covers(Bf16Candidate(), scenario(*EVENTS, state="bf16"))
