from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from needlepoint.verify.cli.options import (
    DEFAULT_CANDIDATES,
    parse_candidates,
    parse_layers,
    parse_number,
    parse_recorded,
    parse_stages,
)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_layers_of_any_spelling(layers: set[int]) -> None:
    singles = ",".join(str(layer) for layer in layers)
    ranges: list[list[int]] = []
    for layer in sorted(layers):
        if ranges and ranges[-1][1] == layer - 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    spelled = ", ".join(f"{a}-{b}" for a, b in reversed(ranges))

    assert parse_layers(singles) == parse_layers(spelled) == tuple(sorted(layers))


@pytest.mark.parametrize(
    "text", ["", ",", "2,", "a", "-1", "2-", "4-2", "1.5", "2--4", "99999", "٣"]
)
def test_wrong_layers_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--layers"):
        parse_layers(text)


def test_no_layers_means_all() -> None:
    assert parse_layers(None) is None


def test_a_stage_stands_for_every_path_that_has_it() -> None:
    assert parse_stages("stored, index.topk") == frozenset(
        {("index", "stored"), ("main", "stored"), ("index", "topk")}
    )
    assert parse_stages("query.query") == frozenset({("query", "query")})
    assert parse_stages(None) is None


@pytest.mark.parametrize("text", ["", "pooling", "main.rotated", "stored;pooled", "index"])
def test_unknown_stages_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a stage"):
        parse_stages(text)


def test_candidates_default_to_the_emulated_ones() -> None:
    assert parse_candidates([]) == DEFAULT_CANDIDATES
    assert parse_candidates(["b", "a"]) == ("b", "a")
    assert parse_candidates([], "cuda") == tuple(
        name.replace("emulated", "cuda") for name in DEFAULT_CANDIDATES
    )
    assert parse_candidates(["a"], "cuda") == ("a",)
    with pytest.raises(ValueError, match="'tpu': expected cpu or cuda"):
        parse_candidates([], "tpu")
    with pytest.raises(ValueError, match="given twice"):
        parse_candidates(["a", "b", "a"])
    with pytest.raises(ValueError, match="expected a name"):
        parse_candidates([" "])


@pytest.mark.parametrize("text", ["", "-1", "0", "1e3", "1.0", " 5", "0x10", "1" * 19, "\u0663"])
def test_numbers_are_whole_and_large_enough(text: str) -> None:
    with pytest.raises(ValueError, match=r"--tokens .* at least 1"):
        parse_number("--tokens", text, 1)


def test_number_is_returned() -> None:
    assert parse_number("--seed", "0", 0) == 0
    assert parse_number("--tokens", "8192", 1) == 8192


def test_one_candidate_is_recorded_or_the_reference() -> None:
    assert parse_recorded([], contract_asked=True) is None
    assert parse_recorded(["emulated:fused-fp8"], contract_asked=False) == "emulated:fused-fp8"
    with pytest.raises(ValueError, match="a recording holds one candidate; record each"):
        parse_recorded(["emulated:fused-fp8", "emulated:fused-fp4"], contract_asked=False)
    with pytest.raises(ValueError, match="the reference runs on the CPU; name a candidate"):
        parse_recorded([], contract_asked=False, device="cuda")
    with pytest.raises(ValueError, match="a contract is the arithmetic of the reference"):
        parse_recorded(["emulated:fused-fp8"], contract_asked=True)
