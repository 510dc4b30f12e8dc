from __future__ import annotations

import json
from dataclasses import fields

import pytest

from needlepoint.reference.formats import BF16, FLOAT64, FP4_OFFICIAL, FP8_PLAIN, MAIN_FP8
from needlepoint.reference.profile import (
    CONTRACTS,
    ApePlacement,
    Arithmetic,
    Precision,
    needlepoint_profile,
)

F64, FP32, BF = Precision.FLOAT64, Precision.FP32, Precision.BF16

TABLE: dict[str, dict[str, object]] = {
    "exact": {
        "projected": F64,
        **dict.fromkeys(("pooled", "normed", "roped", "rotated"), F64),
        **dict.fromkeys(("index_key", "index_query", "main_nope"), FLOAT64),
        "main_rope": F64,
        "weights": F64,
        **dict.fromkeys(("dot", "weighted", "head_sum"), F64),
        "probabilities": F64,
        "rope_table": F64,
    },
    "bf16": {
        "projected": FP32,
        **dict.fromkeys(("pooled", "normed", "roped", "rotated"), BF),
        **dict.fromkeys(("index_key", "index_query", "main_nope"), BF16),
        "main_rope": BF,
        "weights": FP32,
        **dict.fromkeys(("dot", "weighted", "head_sum"), FP32),
        "probabilities": FP32,
        "rope_table": FP32,
    },
    "official": {
        "projected": FP32,
        **dict.fromkeys(("pooled", "normed", "roped", "rotated"), BF),
        **dict.fromkeys(("index_key", "index_query"), FP4_OFFICIAL),
        "main_nope": MAIN_FP8,
        "main_rope": BF,
        "weights": BF,
        **dict.fromkeys(("dot", "weighted", "head_sum"), BF),
        "probabilities": BF,
        "rope_table": FP32,
    },
}


@pytest.mark.parametrize("name", TABLE)
def test_contract_is_the_published_table(name: str) -> None:
    contract = CONTRACTS[name]
    assert {key: getattr(contract, key) for key in TABLE[name]} == TABLE[name]
    assert contract.name == name
    assert contract.hadamard
    assert contract.ape is ApePlacement.READ
    assert contract.state is contract.projected  # lossless: the contracts do not depend on calls
    assert contract.latent is (F64 if name == "exact" else BF)


@pytest.mark.parametrize(
    ("key_format", "key", "main"),
    [("bf16", BF16, BF16), ("fp8", FP8_PLAIN, MAIN_FP8), ("fp4", FP4_OFFICIAL, MAIN_FP8)],
)
def test_our_kernels_round_once(key_format: str, key: object, main: object) -> None:
    profile = needlepoint_profile(key_format)
    assert profile.name == "needlepoint"
    assert (profile.index_key, profile.index_query, profile.main_nope) == (key, key, main)
    steps = (profile.pooled, profile.normed, profile.roped, profile.rotated)
    assert steps == (FP32, FP32, FP32, FP32)


def test_unknown_format() -> None:
    with pytest.raises(ValueError, match=r"'int8'.*bf16"):
        needlepoint_profile("int8")


def test_switches_are_plain_data() -> None:
    switches = CONTRACTS["official"].switches()
    assert set(switches) == {f.name for f in fields(Arithmetic)} - {"name"}
    assert json.loads(json.dumps(switches)) == switches
    assert switches["index_key"] == "fp4-official"
    assert switches["hadamard"] is True
    assert switches["ape"] == "read"
