"""Candidates that do something to the results of an emulated one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import (
    Candidate,
    CandidateInfo,
    LayerInputs,
    Observed,
    StageKey,
)

Change = Callable[[LayerInputs, Observed], Any]


@dataclass(frozen=True)
class WrappedCandidate:
    """An emulated candidate, and what is done to its results."""

    change: Change
    without: frozenset[StageKey] = frozenset()
    inner: str = "emulated:fused-fp8"
    claims: Mapping[str, str] | None = None
    adds: frozenset[StageKey] = frozenset()

    @property
    def info(self) -> CandidateInfo:
        claims: dict[str, Any] = {"name": "test:wrapped", **(self.claims or {})}
        return replace(create(self.inner).info, **claims)

    def stages(self, ratio: int) -> frozenset[StageKey]:
        own = create(self.inner).stages(ratio)
        return (own - self.without) | (self.adds if ratio == 4 else frozenset())

    def run(self, inputs: LayerInputs) -> Observed:
        return cast(Observed, self.change(inputs, create(self.inner).run(inputs)))


@pytest.fixture(scope="session")
def wrapped() -> Callable[..., Candidate]:
    """Return what wraps an emulated candidate."""
    return WrappedCandidate


@pytest.fixture(scope="session")
def run_options(small_model: Path) -> tuple[object, ...]:
    """Return the options of a small run."""
    return ("--input", "synthetic", "--tokens", "200", "--model", small_model)
