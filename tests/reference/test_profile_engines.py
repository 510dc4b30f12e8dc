"""Profiles of engines: what each is known to do, and that it is not what another does."""

from __future__ import annotations

from itertools import combinations

import pytest

from needlepoint.reference.formats import Floor, ScaleKind, Ties
from needlepoint.reference.profile import (
    CONTRACTS,
    Accumulator,
    ApePlacement,
    Arithmetic,
    Precision,
    contract_of,
)
from needlepoint.reference.profile_engines import ENGINES, TOKEN_ENGINES, engine_profile

FP32, BF = Precision.FP32, Precision.BF16
PROFILES = {(e, f): p for e, formats in ENGINES.items() for f, p in formats.items()}


def test_six_engines_have_profiles_of_their_own_name() -> None:
    assert set(ENGINES) == {
        "sglang",
        "vllm",
        "tensorrt-llm",
        "lmdeploy",
        "llama.cpp",
        "transformers",
    }
    assert all(profile.name == engine for (engine, _), profile in PROFILES.items())


@pytest.mark.parametrize(
    ("engine", "scale", "floor"),
    [
        ("sglang", ScaleKind.FP32, Floor.AMAX_1E4),
        ("vllm", ScaleKind.UE8M0, Floor.AMAX_1E4),
        ("tensorrt-llm", ScaleKind.FP32, Floor.NONE),
        ("lmdeploy", ScaleKind.UE8M0, Floor.AMAX_1E4),
    ],
)
def test_scale_rule_of_fp8_keys(engine: str, scale: ScaleKind, floor: Floor) -> None:
    fmt = engine_profile(engine, "fp8").index_key
    assert (fmt.element, fmt.scale, fmt.floor) == ("e4m3", scale, floor)


@pytest.mark.parametrize(
    ("engine", "ties", "floor"),
    [
        ("sglang", Ties.ZERO, Floor.AMAX_1E4),
        ("vllm", Ties.EVEN, Floor.AMAX_TINY),
        ("tensorrt-llm", Ties.EVEN, Floor.AMAX_TINY),
    ],
)
def test_ties_of_fp4_keys(engine: str, ties: Ties, floor: Floor) -> None:
    fmt = engine_profile(engine, "fp4").index_key
    assert (fmt.element, fmt.ties, fmt.floor) == ("e2m1", ties, floor)


def test_who_rotates_and_where_the_row_is_rounded_first() -> None:
    assert {e for (e, _), p in PROFILES.items() if not p.hadamard} == {"vllm", "transformers"}
    before = {
        "sglang": (FP32, FP32, FP32),
        "vllm": (FP32, FP32, BF),
        "tensorrt-llm": (BF, FP32, FP32),
        "lmdeploy": (BF, BF, BF),
        "llama.cpp": (FP32, FP32, FP32),
        "transformers": (BF, BF, BF),
    }
    for (engine, _), profile in PROFILES.items():
        assert (profile.pooled, profile.normed, profile.roped) == before[engine]


def test_who_adds_the_embedding_on_reading() -> None:
    reads = {e for (e, _), p in PROFILES.items() if p.ape is ApePlacement.READ}
    assert reads == {"sglang", "transformers"}


def test_only_fp8_scores_have_the_short_accumulator() -> None:
    for (_, key_format), profile in PROFILES.items():
        short = profile.accumulator is Accumulator.SM90_FP8
        assert short == (key_format == "fp8")


def test_the_fp4_query_of_sglang_is_rounded_where_its_key_is_not() -> None:
    profile = engine_profile("sglang", "fp4")
    assert (profile.roped, profile.rotated) == (FP32, FP32)
    assert (profile.of_query.roped, profile.of_query.rotated) == (BF, BF)
    assert profile.switches()["query_rotated"] == "bf16"


def test_no_two_profiles_are_one() -> None:
    switches = [profile.switches() for profile in PROFILES.values()]
    assert all(one != other for one, other in combinations(switches, 2))


def test_of_query_changes_nothing_else() -> None:
    profile: Arithmetic = engine_profile("vllm", "fp8")
    assert profile.of_query.switches() == profile.switches()


@pytest.mark.parametrize(
    ("engine", "key_format", "message"),
    [
        ("sglang", "bf16", "engine sglang: key format 'bf16', expected one of fp8, fp4"),
        ("ollama", "fp8", "engine 'ollama': expected one of sglang, vllm"),
    ],
)
def test_unknown_is_refused(engine: str, key_format: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_profile(engine, key_format)


def test_published_code_and_kernels_of_one_key_a_token_differ_in_every_switch_that_is_known() -> (
    None
):
    published = engine_profile("deepseek-v3.2", "fp8")
    sglang = engine_profile("sglang-v3.2", "fp8")
    assert (published.normed, published.roped, published.rotated) == (BF, BF, BF)
    assert (sglang.normed, sglang.roped, sglang.of_query.roped) == (FP32, BF, FP32)
    assert (published.hadamard, sglang.hadamard) == (True, False)
    assert published.index_key.scale is ScaleKind.UE8M0
    assert sglang.index_key.scale is ScaleKind.FP32
    assert all(p.name == engine for engine, f in TOKEN_ENGINES.items() for p in f.values())
    assert contract_of("official", 1).index_key == published.index_key
    assert contract_of("official", 4) is CONTRACTS["official"]
    assert contract_of("exact", 1) is CONTRACTS["exact"]
