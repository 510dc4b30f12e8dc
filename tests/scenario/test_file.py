"""Scenario files: what is written reads back equal, and everything else is refused by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from needlepoint.verify.scenario.events import KINDS, Prefill, Request, Scenario
from needlepoint.verify.scenario.file import (
    MAX_BYTES,
    dump_scenario,
    load_scenario,
    parse_scenario,
    scenario_digest,
)
from needlepoint.verify.scenario.random import random_scenario

GOOD = dump_scenario(Scenario("good", (Request("a", 0),), (Prefill(("a",), (3,)),)))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), index=st.integers(0, 10**6))
def test_what_is_written_reads_back_equal(seed: int, index: int) -> None:
    scenario = random_scenario(seed, index)

    assert parse_scenario(dump_scenario(scenario)) == scenario


def test_every_kind_is_written_and_read() -> None:
    kinds: set[str] = set()
    for index in range(60):
        text = dump_scenario(random_scenario(0, index))
        kinds |= {line.split('"')[1] for line in text.splitlines() if line.startswith("kind")}

    assert kinds == set(KINDS)


def test_the_digest_is_of_what_happens_and_not_of_the_name() -> None:
    one, other = (
        Scenario(name, (Request("a", 0),), (Prefill(("a",), (3,)),)) for name in ("one", "other")
    )
    longer = Scenario("one", (Request("a", 0),), (Prefill(("a",), (4,)),))

    assert scenario_digest(one) == scenario_digest(other) != scenario_digest(longer)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("scenario/1", "scenario/2", "schema 'needlepoint.scenario/2', expected"),
        ('name = "good"\n', "", "name is missing"),
        ('name = "good"', 'nome = "good"', "unknown field 'nome'"),
        ('name = "good"', 'name = "a\\nb"', "expected one printable line"),
        ('name = "good"', 'name = "a\\u009b2J"', "x9b2J': expected one printable line"),
        ('name = "good"', 'name = "good"\nslots = "4"', "slots is '4', expected a whole number"),
        ('name = "good"', 'name = "good"\nslots = true', "slots is True, expected a whole number"),
        ('name = "a"', 'name = ""', "request 0: name ''"),
        ('name = "a"', "name = 3", "request 0: name 3"),
        ("text = 0", 'text = "0"', "request 0: text is '0', expected a whole number"),
        ('kind = "prefill"', 'kind = "reboot"', "event 0: kind 'reboot', expected one of prefill"),
        ('kind = "prefill"', 'kind = "decode"', "unknown field 'tokens', expected requests"),
        ("tokens = [3]", "", r"event 0 \(prefill\): tokens is missing"),
        ("tokens = [3]", "tokens = 3", "tokens is 3, expected a list of whole numbers"),
        ("tokens = [3]", "tokens = [3.0]", "expected a list of whole numbers"),
        ("[[event]]", "[event]", r"event: expected tables \[\[event\]\]"),
        ("[[request]]", "[[requests]]", r"0 tables \[\[request\]\]"),
        ("text = 0", "text = ", "not valid TOML"),
    ],
)
def test_wrong_files_are_refused_by_name(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in GOOD
    path = tmp_path / "bad.toml"
    path.write_text(GOOD.replace(old, new))

    with pytest.raises(ValueError, match=message) as caught:
        load_scenario(path)
    assert str(path) in str(caught.value)


def test_a_pipe_is_no_scenario(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is no file; expected a scenario"):
        load_scenario(tmp_path / "pipe")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load_scenario(tmp_path / "missing.toml")
    large = tmp_path / "large.toml"
    large.write_text("#" * (MAX_BYTES + 1))
    with pytest.raises(ValueError, match="expected at most"):
        load_scenario(large)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is not UTF-8"):
        load_scenario(binary)
