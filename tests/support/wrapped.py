"""Candidates that do something to the results of an emulated one, and what they do.

Faults are those of the self-test's catalogue wherever it has them (:func:`planted`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import (
    INDEX,
    QUERY,
    Candidate,
    CandidateInfo,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.verify.selftest.faults.catalogue import CATALOGUE
from needlepoint.verify.selftest.faults.fault import Plant
from needlepoint.verify.selftest.faults.ground import Ground
from needlepoint.verify.selftest.judge import Planted

Change = Callable[[LayerInputs, Observed], Any]


def planted(case: str | Plant) -> Change:
    """Return what a case of the self-test's catalogue, or its like, does to a sound run.

    A layer without index keys stays as it is.
    """
    plant = CATALOGUE[case].plant if isinstance(case, str) else case

    def change(inputs: LayerInputs, observed: Observed) -> Observed:
        reader = observed.scores
        if INDEX not in observed.stored or reader is None:
            return observed
        scores = tuple(reader(request, 0, n) for request, n in enumerate(inputs.lengths))
        key_format = observed.stored[INDEX].layout.removeprefix(f"{INDEX}-")
        return plant(Ground(inputs, key_format, observed, scores))

    return change


def keep(*kept: StageKey) -> Change:
    """Return only some stages."""

    def change(inputs: LayerInputs, observed: Observed) -> Observed:
        return replace(
            observed,
            dense={key: rows for key, rows in observed.dense.items() if key in kept},
            stored={
                path: rows for path, rows in observed.stored.items() if (path, "stored") in kept
            },
            query=observed.query if (QUERY, "query") in kept else None,
            scores=observed.scores if (INDEX, "scores") in kept else None,
            topk=observed.topk if (INDEX, "topk") in kept else None,
        )

    return change


def sound(inputs: LayerInputs, observed: Observed) -> Observed:
    """Change nothing."""
    return observed


def then(*changes: Change) -> Change:
    """Return one change after another."""

    def change(inputs: LayerInputs, observed: Observed) -> Any:  # noqa: ANN401
        for each in changes:
            observed = each(inputs, observed)
        return observed

    return change


@dataclass(frozen=True)
class WrappedCandidate:
    """An emulated candidate, and what is done to its results."""

    change: Change
    without: frozenset[StageKey] = frozenset()
    inner: str = "emulated:fused-fp8"
    claims: Mapping[str, str] | None = None
    adds: frozenset[StageKey] = frozenset()
    shown: frozenset[StageKey] | None = None

    @property
    def info(self) -> CandidateInfo:
        claims: dict[str, Any] = {"name": "test:wrapped", **(self.claims or {})}
        return replace(create(self.inner).info, **claims)

    def stages(self, ratio: int) -> frozenset[StageKey]:
        own = create(self.inner).stages(ratio) - self.without
        own = own if self.shown is None else own & self.shown
        return own | (self.adds if ratio == 4 else frozenset())

    def run(self, inputs: LayerInputs) -> Observed:
        return cast(Observed, self.change(inputs, create(self.inner).run(inputs)))


@dataclass(frozen=True)
class NamedPlanted:
    """A planted candidate under the name of its case."""

    case: str
    planted: Planted

    @property
    def info(self) -> CandidateInfo:
        known = self.planted.info
        return CandidateInfo(
            self.case, known.format, "cpu", known.profile, known.variant, known.source_sha256
        )

    def stages(self, ratio: int) -> frozenset[StageKey]:
        return self.planted.stages(ratio)

    def run(self, inputs: LayerInputs) -> Observed:
        return own_memory(self.planted.run(inputs))


def own_memory(observed: Observed) -> Observed:
    """Return a run in memory of its own: planted runs share what they leave alone."""
    query, picks = observed.query, observed.topk
    if query is not None:
        query = replace(query, codes=query.codes.clone(), weights=query.weights.clone())
    return replace(
        observed,
        dense={key: rows.clone() for key, rows in observed.dense.items()},
        stored={p: replace(rows, pool=rows.pool.clone()) for p, rows in observed.stored.items()},
        query=query,
        topk=None if picks is None else picks.clone(),
    )


@pytest.fixture(scope="session")
def wrapped() -> Callable[..., Candidate]:
    """Return what wraps an emulated candidate."""
    return WrappedCandidate


@pytest.fixture(scope="session")
def run_options(small_model: Path) -> tuple[object, ...]:
    """Return the options of a small run."""
    return ("--input", "synthetic", "--tokens", "200", "--model", small_model)
