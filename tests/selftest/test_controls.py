"""Sound candidates and inputs that change nothing a verdict may depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.emulation import compressor, scoring
from needlepoint.optimized.protocol.interface import (
    MAIN,
    Candidate,
)
from needlepoint.reference.profile import needlepoint_profile
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.results.output import PipelineOutput


def test_blocks_of_other_sizes_change_no_verdict(
    small_inputs: Callable[..., Inputs],
    judge: Callable[..., PipelineOutput],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Entries and queries in small blocks: the stored bytes cannot depend on it."""
    inputs = small_inputs(layers=(0,))
    names = ("emulated:fused-fp8", "emulated:unfused-bf16")
    before = judge(inputs, *map(create, names))
    monkeypatch.setattr(compressor, "BLOCK", 5)
    monkeypatch.setattr(scoring, "FUSED_ROWS", 32)
    monkeypatch.setattr(scoring, "UNFUSED_BYTES", 4 * 4 * 50 * 7)

    after = judge(inputs, *map(create, names))

    assert after.result.verdict == "match"
    for name, errors in after.rows.items():
        if "/scores/" not in name:
            assert torch.equal(errors, before.rows[name])


def test_the_order_of_requests_moves_no_error(
    small_inputs: Callable[..., Inputs], judge: Callable[..., PipelineOutput]
) -> None:
    """Every token keeps its errors when the requests of a batch change places."""
    inputs = small_inputs(tokens=400)
    order = (2, 0, 1)
    lengths = tuple(inputs.requests[r] for r in order)
    states = {}
    for layer, hidden in inputs.states.items():
        parts = torch.split(hidden, list(inputs.requests))
        states[layer] = torch.cat([parts[r] for r in order])
    moved = replace(inputs, requests=lengths, states=states)
    candidate = create("emulated:fused-fp8")

    before, after = judge(inputs, candidate), judge(moved, candidate)

    assert after.result.verdict == "match"
    assert before.rows.keys() == after.rows.keys()
    for name, errors in before.rows.items():
        _, layer_name, _, stage, _ = name.split("/")
        key_side = stage in ("pooled", "normed", "roped", "rotated", "stored")
        ratio = {"layer0": 4, "layer1": 128}[layer_name] if key_side else 1
        rows_of = torch.split(errors, [n // ratio for n in inputs.requests])
        assert torch.equal(after.rows[name], torch.cat([rows_of[r] for r in order])), name


@pytest.mark.parametrize("kind", ["gaussian", "small", "outlier", "bits"])
def test_a_candidate_better_than_fp32_matches(
    kind: str,
    small_inputs: Callable[..., Inputs],
    judge: Callable[..., PipelineOutput],
    as_candidate: Callable[..., Candidate],
) -> None:
    inputs = small_inputs(kind, 400)

    result = judge(inputs, as_candidate(inputs, needlepoint_profile("bf16"))).result

    assert result.verdict == "match"
    main = {s.stage: s for s in result.candidates[0].layers[0].stages if s.path == MAIN}
    pooled = main["pooled"].local
    assert pooled is not None
    assert pooled.error.max is not None
    assert pooled.error.max < 0.2


@pytest.mark.parametrize(
    "kind", ["gaussian", "outlier", "anisotropic", "small", "ties", "pow2", "integer", "bits"]
)
def test_the_four_candidates_match_on_every_kind(
    kind: str, small_inputs: Callable[..., Inputs], judge: Callable[..., PipelineOutput]
) -> None:
    names = [
        f"emulated:{name}" for name in ("fused-bf16", "fused-fp8", "fused-fp4", "unfused-bf16")
    ]

    result = judge(small_inputs(kind, 136), *map(create, names)).result

    assert result.verdict == "match"
    assert result.counts.compared == 4 * 17
    for candidate in result.candidates:
        assert candidate.first_divergence is None
        stored = [s for e in candidate.layers for s in e.stages if s.stage == "stored"]
        assert {s.local.error.max for s in stored if s.local} == {0.0}
