"""Candidates that are not the sound one: planted faults, and controls that must not be flagged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.candidates import create
from needlepoint.optimized.interface import (
    Candidate,
    CandidateInfo,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.verify.inputs import Inputs
from needlepoint.verify.pipeline import PipelineOutput
from needlepoint.verify.result import Result

Change = Callable[[LayerInputs, Observed], Observed]


@dataclass
class Watched:
    """A candidate whose results are changed before they are handed over, and kept."""

    inner: Candidate
    change: Change | None = None
    seen: dict[str, Tensor] | None = None

    @property
    def info(self) -> CandidateInfo:
        return self.inner.info

    def stages(self, ratio: int) -> frozenset[StageKey]:
        return self.inner.stages(ratio)

    def run(self, inputs: LayerInputs) -> Observed:
        observed = self.inner.run(inputs)
        observed = observed if self.change is None else self.change(inputs, observed)
        self.seen = everything(inputs, observed)
        return observed


def everything(inputs: LayerInputs, observed: Observed) -> dict[str, Tensor]:
    """Return the bytes of all that a candidate returned."""
    found = {".".join(key): rows for key, rows in observed.dense.items()}
    found |= {path: rows.pool for path, rows in observed.stored.items()}
    if observed.query is not None:
        found |= {"codes": observed.query.codes, "weights": observed.query.weights}
    if observed.scores is not None and observed.topk is not None:
        found["topk"] = observed.topk
        for request, length in enumerate(inputs.lengths):
            found[f"scores {request}"] = observed.scores(request, 0, length)
    return {name: tensor.contiguous().view(torch.uint8).clone() for name, tensor in found.items()}


Case = tuple[str, int, int, str]
Sound = Callable[[str, int, int, str], tuple[Inputs, dict[str, Tensor]]]


@pytest.fixture(scope="session")
def sound(small_inputs: Callable[..., Inputs], judge: Callable[..., PipelineOutput]) -> Sound:
    """Return input and results of the sound candidate, which must match."""
    made: dict[Case, tuple[Inputs, dict[str, Tensor]]] = {}

    def run(
        kind: str, tokens: int, layer: int, key_format: str
    ) -> tuple[Inputs, dict[str, Tensor]]:
        case = (kind, tokens, layer, key_format)
        if case not in made:
            inputs = small_inputs("gaussian" if kind == "zeros" else kind, tokens, layers=(layer,))
            if kind == "zeros":
                inputs = replace(inputs, states={layer: torch.zeros_like(inputs.hidden(layer))})
            candidate = Watched(create(f"emulated:fused-{key_format}"))
            assert judge(inputs, candidate).result.verdict == "match"
            assert candidate.seen is not None
            made[case] = inputs, candidate.seen
        return made[case]

    return run


@pytest.fixture
def altered(
    sound: Sound, judge: Callable[..., PipelineOutput], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Return a function that judges a candidate that is not the sound one, and differs from it.

    ``plant`` changes its code, ``change`` what it returned; the rest is candidate and input,
    ``zeros`` being hidden states of zero.
    """

    def run(
        plant: Callable[[pytest.MonkeyPatch], None] | None = None,
        change: Change | None = None,
        key_format: str = "fp8",
        kind: str = "gaussian",
        tokens: int = 132,
        layer: int = 0,
    ) -> Result:
        inputs, before = sound(kind, tokens, layer, key_format)
        if plant is not None:
            plant(monkeypatch)
        candidate = Watched(create(f"emulated:fused-{key_format}"), change)
        result = judge(inputs, candidate).result
        assert candidate.seen is not None
        same = [torch.equal(candidate.seen[part], before[part]) for part in before]
        assert not all(same)
        return result

    return run


@pytest.fixture
def catch(altered: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that plants a fault and asserts that it is caught where it was born.

    ``stage`` is ``path.stage`` of the first divergence; ``token`` (request, position, entry) must
    be named; stages in ``hit`` differ by their own doing, stages in ``clear`` must not be charged;
    everything else is for :func:`altered`.
    """

    def run(
        stage: str,
        token: tuple[int, int, int | None] | None = None,
        hit: tuple[str, ...] = (),
        clear: tuple[str, ...] = (),
        **case: object,
    ) -> Result:
        result = altered(**case)
        assert result.verdict == "differ"
        first = result.candidates[0].first_divergence
        assert first is not None
        assert (first.layer, f"{first.path}.{first.stage}") == (case.get("layer", 0), stage)
        if token is not None:
            assert (first.request, first.position, first.entry) == token
        stages = {f"{s.path}.{s.stage}": s for s in result.candidates[0].layers[0].stages}
        for names, verdict in ((hit, "differ"), (clear, "match")):
            assert {stages[name].verdict for name in names} <= {verdict}
        return result

    return run
