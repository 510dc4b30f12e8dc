"""Contracts as candidates, several profiles side by side, and the shipped recording."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import (
    MAIN,
    Candidate,
    PagedRows,
    QueryRows,
)
from needlepoint.reference.profile import CONTRACTS
from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.record import record
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.recording.results import load_result

Cli = Callable[..., CompletedProcess[str]]
Judge = Callable[..., PipelineOutput]
Load = Callable[..., Inputs]
Rows = TypeVar("Rows", PagedRows, QueryRows)
Options = tuple[object, ...]


@pytest.mark.parametrize("contract", ["bf16", "exact"])
def test_a_contract_is_a_profile_too(
    contract: str, judge: Judge, small_inputs: Load, as_candidate: Callable[..., Candidate]
) -> None:
    inputs = small_inputs(tokens=400)
    candidate = as_candidate(inputs, CONTRACTS[contract])

    result = judge(inputs, candidate).result

    assert result.verdict == "match"
    assert result.counts.compared == 17
    assert result.candidates[0].profile.name == contract
    cost = getattr(result.candidates[0].format_cost, contract)
    assert cost.rel_max < 1e-5
    # `exact` has a query latent that is not rounded to bf16, unlike the given queries.
    assert cost.overlap_mean > 0.99


@pytest.mark.parametrize(
    ("contract", "change"),
    [
        # Not a bf16 number, although as close to the reference as fp32 gets.
        ("bf16", lambda x: x * (1 + 2.0**-12)),
        ("exact", lambda x: x * (1 + 2.0**-12)),
        ("exact", lambda x: x.to(torch.bfloat16).to(torch.float64)),
    ],
)
def test_a_contract_as_profile_is_judged_by_its_own_roundings(
    contract: str,
    change: Callable[[Tensor], Tensor],
    judge: Judge,
    small_inputs: Load,
    as_candidate: Callable[..., Candidate],
) -> None:
    inputs = small_inputs(layers=(0,))

    result = judge(inputs, as_candidate(inputs, CONTRACTS[contract], change)).result

    first = result.candidates[0].first_divergence
    assert first is not None
    assert (first.layer, first.path, first.stage) == (0, MAIN, "normed")


def test_candidates_of_several_profiles_are_judged_side_by_side(
    judge: Judge, small_inputs: Load, as_candidate: Callable[..., Candidate]
) -> None:
    inputs = small_inputs(layers=(0,))
    names = ("emulated:fused-bf16", "emulated:fused-fp8", "emulated:fused-fp4")
    others = [as_candidate(inputs, CONTRACTS[name]) for name in ("bf16", "exact")]
    candidates = [*(create(name) for name in names), *others]

    together = judge(inputs, *candidates).result
    alone = [judge(inputs, candidate).result.candidates[0] for candidate in candidates]

    assert together.verdict == "match"
    assert list(together.candidates) == alone


def test_nothing_is_recorded_of_layers_without_a_compressor(
    small_inputs: Load, tmp_path: Path
) -> None:
    inputs = replace(small_inputs(layers=(0, 2)), layers=(2,))

    with pytest.raises(ValueError, match=r"layers \[2\] have ratio 0"):
        record(
            inputs,
            None,
            tmp_path / "out",
            contract=CONTRACTS["bf16"],
            force=False,
            progress=NoProgress(),
        )
    assert not list(tmp_path.iterdir())


def test_the_shipped_recording_matches(cli: Cli) -> None:
    options = ("--tokens", "600", "--candidate", "emulated:fused-fp4", "--json", "r.json")

    assert cli("verify", *options).returncode == 0

    result = load_result(Path("r.json"))
    assert (result.input.name, result.input.model) == ("mini", "mini")
    assert (result.counts.expected, result.counts.compared) == (17, 17)
