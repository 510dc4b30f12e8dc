from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from needlepoint.verify.cli.options import (
    DEFAULT_CANDIDATES,
    LAST,
    RecallOptions,
    RecordOptions,
    SelftestOptions,
    VerifyOptions,
    parse_layers,
    parse_stages,
)
from needlepoint.verify.probe import server
from needlepoint.verify.probe.questions import KINDS
from needlepoint.verify.recall import grid
from needlepoint.verify.recall.grid import parse_depths
from needlepoint.verify.selftest.input import TOKENS


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
    with pytest.raises(ValueError, match=f"--layers {re.escape(repr(text))}: "):
        read(layers=text)


def test_no_layers_means_all() -> None:
    assert VerifyOptions().layers is None


def test_a_stage_stands_for_every_path_that_has_it() -> None:
    assert parse_stages("stored, index.topk") == frozenset(
        {("index", "stored"), ("main", "stored"), ("index", "topk")}
    )
    assert parse_stages(("query", "index.stored")) == parse_stages(
        [("query", "query"), ("index", "stored")]
    )
    assert parse_stages("query.query") == frozenset({("query", "query")})
    assert parse_stages(["index.stored, topk"]) == parse_stages("index.stored,topk")
    assert VerifyOptions().stages is None


@pytest.mark.parametrize("text", ["", "pooling", "main.rotated", "stored;pooled", "index"])
def test_unknown_stages_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a stage"):
        parse_stages(text)


def read(**texts: object) -> VerifyOptions:
    """Return options as the command line reads them."""
    return VerifyOptions.read(texts, "command line", lambda name, value: f"--{name} {value!r}")


def test_candidates_default_to_the_emulated_ones() -> None:
    assert VerifyOptions().candidates() == DEFAULT_CANDIDATES
    assert read(candidate=["b", "a"]).candidates() == ("b", "a")
    assert read(device="cuda").candidates() == tuple(
        name.replace("emulated", "cuda") for name in DEFAULT_CANDIDATES
    )
    assert read(candidate=["a"], device="cuda").candidates() == ("a",)
    with pytest.raises(ValueError, match="--device 'tpu': expected cpu or cuda"):
        read(device="tpu")
    with pytest.raises(ValueError, match="a is given twice"):
        read(candidate=["a", "b", "a"])
    with pytest.raises(ValueError, match="expected a name"):
        read(candidate=[" "])


@pytest.mark.parametrize("text", ["", "-1", "0", "1e3", "1.0", " 5", "0x10", "1" * 19, "\u0663"])
def test_numbers_are_whole_and_large_enough(text: str) -> None:
    with pytest.raises(ValueError, match=r"--tokens .* at least 1"):
        read(tokens=text)


def test_number_is_returned() -> None:
    assert (read(seed="0").seed, read(tokens="8192").tokens) == (0, 8192)


def test_one_candidate_is_recorded_or_the_reference() -> None:
    def recorded(**texts: object) -> str | None:
        shown = "{} {}".format
        return RecordOptions.read({"out": "d", **texts}, "command line", shown).recorded()

    one, two = ["emulated:fused-fp8"], ["emulated:fused-fp8", "emulated:fused-fp4"]
    assert recorded(contract="exact") is None
    assert recorded(candidate=one) == "emulated:fused-fp8"
    with pytest.raises(ValueError, match="a recording holds one candidate; record each"):
        recorded(candidate=two)
    with pytest.raises(ValueError, match="the reference runs on the CPU; name a candidate"):
        recorded(device="cuda")
    with pytest.raises(ValueError, match="a contract is the arithmetic of the reference"):
        recorded(candidate=one, contract="bf16")


def test_defaults_are_those_of_the_rooms_that_take_them() -> None:
    """Options are read without torch, so figures of rooms that need it are written again there."""
    recall = RecallOptions()
    assert parse_depths(recall.depths) == grid.DEPTHS
    assert recall.needles == grid.NEEDLES
    assert recall.questions == ",".join(KINDS)
    told = str(RecallOptions.options()["haystacks"].description)
    assert told.endswith(f"default: {grid.HAYSTACKS}, of a server {server.HAYSTACKS}.")
    assert f"at most {TOKENS}." in str(SelftestOptions.options()["tokens"].description)


@pytest.mark.parametrize("name", VerifyOptions.options())
def test_what_an_option_says_for_itself_is_what_it_reads(name: str) -> None:
    """Every option has help, and its words read back as itself."""
    field = VerifyOptions.options()[name]
    assert field.description
    assert field.description.endswith(".")
    texts = {
        "candidate": ["a:b", "c:d"],
        "gate": ["recall.lost<=0", "recall.gained<=1"],
        "layers": "2,4-6",
        "stages": "index.stored,topk",
        "contract": "exact",
        "device": "cuda",
    }
    if field.annotation is bool:
        value: object = True
    elif name in texts:
        value = texts[name]
    else:
        value = "7"
    words = read(**{name: value}).words()
    given = {name: [words[i] for i in range(1, len(words), 2)] or value}
    if not isinstance(value, list):
        given = {name: words[1] if len(words) > 1 else value}
    assert read(**given) == read(**{name: value})
    writes = {*LAST, "json", "shrink", "save-failures"} - {"gate"}
    assert bool(words) == (name not in writes)
