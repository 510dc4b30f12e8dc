"""A kernel is judged by what its engine means to compute; another rule is found at its stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from needlepoint.optimized.protocol.interface import Candidate, CandidateInfo
from needlepoint.reference.formats import FP4_OFFICIAL, FP8_PLAIN, FP8_POW2, MAIN_FP8
from needlepoint.reference.profile import Precision
from needlepoint.reference.profile_engines import ENGINES
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.profiles import profile_of
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.schema.result import CandidateResult

Engine = Callable[..., Candidate]
Judge = Callable[..., PipelineOutput]
Load = Callable[..., Inputs]

FP32, BF = Precision.FP32, Precision.BF16
ALL = [(name, fmt) for name, formats in ENGINES.items() for fmt in formats]


def failed(result: CandidateResult) -> set[tuple[str, str]]:
    """Return the stages whose own error is beyond the limit."""
    return {
        (stage.path, stage.stage)
        for layer in result.layers
        for stage in layer.stages
        if stage.kind == "compared" and stage.verdict == "differ"
    }


@pytest.mark.parametrize("kind", ["gaussian", "small"])
def test_every_engine_matches_its_own_profile(
    judge: Judge, small_inputs: Load, engine: Engine, kind: str
) -> None:
    inputs = small_inputs(kind=kind, tokens=150, layers=(0, 1))
    candidates = [engine(name, fmt) for name, fmt in ALL]

    result = judge(inputs, *candidates).result

    assert {c.name: c.verdict for c in result.candidates} == {
        f"test:{name}-{fmt}": "match" for name, fmt in ALL
    }
    assert result.verdict == "match"
    assert result.counts.skipped == ()


WRONG: list[tuple[str, str, dict[str, object], tuple[str, str]]] = [
    ("sglang", "fp8", {"index_key": FP8_POW2}, ("index", "stored")),
    ("sglang", "fp8", {"index_query": FP8_POW2}, ("query", "query")),
    ("sglang", "fp8", {"query_input": FP32}, ("query", "query")),
    ("sglang", "fp8", {"query_input": FP32}, ("query", "weights")),
    ("sglang", "fp8", {"normed": BF}, ("index", "normed")),
    ("sglang", "fp4", {"index_query": FP4_OFFICIAL}, ("query", "query")),
    ("sglang", "fp4", {"query_rotated": FP32}, ("query", "query")),
    ("sglang", "fp4", {"query_roped": FP32}, ("query", "query")),
    ("vllm", "fp8", {"index_key": FP8_PLAIN}, ("index", "stored")),
    ("vllm", "fp8", {"roped": FP32}, ("index", "roped")),
    ("tensorrt-llm", "fp8", {"key_input": FP32}, ("index", "pooled")),
    ("tensorrt-llm", "fp8", {"pooled": FP32}, ("main", "pooled")),
    ("lmdeploy", "fp8", {"rotated": FP32}, ("index", "rotated")),
    ("llama.cpp", "bf16", {"roped": BF}, ("main", "roped")),
    ("transformers", "bf16", {"pool_weights": FP32}, ("index", "pooled")),
    ("transformers", "bf16", {"pool_terms": FP32}, ("main", "pooled")),
    ("transformers", "bf16", {"rope_table": FP32}, ("index", "roped")),
]
"""Engine, format, what it does otherwise, and the stage that must show it."""


@pytest.fixture(scope="module")
def wrong(judge: Judge, small_inputs: Load, engine: Engine) -> tuple[CandidateResult, ...]:
    engines = [
        engine(name, fmt, f"-{number}", **switches)
        for number, (name, fmt, switches, _) in enumerate(WRONG)
    ]
    return judge(small_inputs(tokens=64, layers=(0,)), *engines).result.candidates


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_switch_set_otherwise_is_found_at_its_stage(
    wrong: tuple[CandidateResult, ...], number: int
) -> None:
    assert wrong[number].verdict == "differ"
    assert WRONG[number][3] in failed(wrong[number])
    assert wrong[number].first_divergence is not None


def test_floors_that_only_small_rows_see(judge: Judge, small_inputs: Load, engine: Engine) -> None:
    """LMDeploy's floor stands on the scale, SGLang's on the amax: plain data cannot tell."""
    wrong = engine("lmdeploy", "fp8", main_nope=MAIN_FP8)

    (plain,) = judge(small_inputs(tokens=64, layers=(0,)), wrong).result.candidates
    (small,) = judge(small_inputs(kind="small", tokens=500, layers=(0,)), wrong).result.candidates

    assert plain.verdict == "match"
    assert ("main", "stored") in failed(small)


def test_a_rotated_key_under_a_profile_without_rotation(
    judge: Judge, small_inputs: Load, engine: Engine
) -> None:
    inputs = small_inputs(tokens=64, layers=(0,))

    (result,) = judge(inputs, engine("sglang", "fp8", hadamard=False)).result.candidates

    assert result.verdict == "differ"
    assert ("index", "stored") in failed(result)


def test_the_meaning_of_an_engine_has_a_price_against_the_contract(
    judge: Judge, small_inputs: Load, engine: Engine
) -> None:
    inputs = small_inputs(tokens=64, layers=(0,))

    result = judge(inputs, engine("vllm", "fp8"), engine("transformers", "bf16")).result

    vllm, transformers = (c.format_cost.bf16 for c in result.candidates)
    assert vllm is not None
    assert transformers is not None
    assert vllm.rel_mean is not None
    assert transformers.rel_mean is not None
    assert vllm.rel_mean > 3 * transformers.rel_mean > 0


@pytest.mark.parametrize(
    ("profile", "fmt", "message"),
    [
        ("vllm", "bf16", "candidate x: engine vllm: key format 'bf16', expected one of fp8, fp4"),
        ("vlm", "fp8", "candidate x: profile 'vlm', expected one of needlepoint, exact"),
    ],
)
def test_a_profile_that_does_not_exist(profile: str, fmt: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile_of(CandidateInfo("x", fmt, "cpu", profile, "", "0" * 64))


def test_the_engine_under_test_is_not_the_reference_in_disguise(
    small_inputs: Load, engine: Engine
) -> None:
    """It computes in fp32: a pooled row that equals the float64 one bit by bit would be a copy."""
    from needlepoint.reference.layer import ReferenceLayer
    from needlepoint.reference.profile import BF16_CONTRACT
    from needlepoint.verify.inputs.layer_inputs import given_layer
    from needlepoint.verify.judge.sides.key_side import key_reference

    inputs = small_inputs(tokens=64, layers=(0,))
    layer = ReferenceLayer(inputs.config, 0, inputs.weights(0), BF16_CONTRACT)
    given = given_layer(inputs, 0, layer).inputs
    candidate = engine("sglang", "fp8")
    found = candidate.run(given).dense["main", "normed"]
    meant = key_reference("main", given, profile_of(candidate.info)).stages["normed"].value
    assert found.dtype == torch.float32
    assert not torch.equal(found, meant.float())
