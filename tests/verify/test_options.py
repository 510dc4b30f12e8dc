from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from needlepoint.verify.cli import diff, record, verify
from needlepoint.verify.options import (
    DEFAULT_CANDIDATES,
    Table,
    load_defaults,
    parse_candidates,
    parse_layers,
    parse_number,
    parse_recorded,
    parse_stages,
)


def _write(folder: Path, text: str) -> Path:
    path = folder / "pyproject.toml"
    path.write_text(text)
    return path


def test_every_option_of_verify_has_a_key_and_no_other(tmp_path: Path) -> None:
    keys = {field.alias or name for name, field in Table.model_fields.items()}
    options = set(verify.__annotations__) - {"ctx", "return"}

    assert keys == options
    assert set(diff.__annotations__) - {"ctx", "return", "a", "b"} <= keys
    assert set(record.__annotations__) - {"ctx", "return", "out"} <= keys


def test_nearest_file_wins_and_its_paths_are_its_own(tmp_path: Path) -> None:
    _write(tmp_path, "[tool.needlepoint]\nseed = 1\n")
    inner = tmp_path / "inner"
    (inner / "deep").mkdir(parents=True)
    path = _write(
        inner,
        '[tool.needlepoint]\ninput = "../recording"\nmodel = "mini"\nlimits = "etc/l.toml"\n'
        "tokens = 640\nquiet = true\n",
    )

    found = load_defaults(inner / "deep")

    assert found.source == path
    assert found.values == {
        "input": str(inner / "../recording"),
        "model": "mini",
        "limits": str(inner / "etc/l.toml"),
        "tokens": "640",
        "quiet": True,
    }


@pytest.mark.parametrize("text", ["", "[tool.other]\nx = 1\n", "[project]\nname = 'x'\n"])
def test_a_file_without_the_table_gives_no_defaults(text: str, tmp_path: Path) -> None:
    _write(tmp_path, text)

    assert load_defaults(tmp_path).values == {}
    assert load_defaults(tmp_path).source is None


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("token = 3", "unknown key 'token'"),
        ("tokens = 0", "tokens = 0"),
        ("tokens = '3'", "tokens = '3'"),
        ("contract = 'fp64'", "contract = 'fp64'"),
        ("candidate = 'a'", "candidate = 'a'"),
        ("candidate = [1]", r"candidate\.0 = 1"),
        ("device = 'tpu'", "device = 'tpu'"),
        ("force = 1", "force = 1"),
        ("json_ = 'r.json'", "unknown key 'json_'"),
    ],
)
def test_wrong_keys_and_values_name_file_and_key(line: str, named: str, tmp_path: Path) -> None:
    path = _write(tmp_path, f"[tool.needlepoint]\n{line}\n")

    with pytest.raises(ValueError, match=named) as caught:
        load_defaults(tmp_path)

    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"[tool.needlepoint", b"x = '\xff'", b"[tool]\nneedlepoint = 3"]
)
def test_broken_files_are_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_bytes(content)

    with pytest.raises(ValueError, match=r"pyproject\.toml"):
        load_defaults(tmp_path)


def test_example_of_every_key_is_accepted(tmp_path: Path) -> None:
    text = (
        "[tool.needlepoint]\n"
        'input = "mini"\nmodel = "v4-pro"\ncontract = "exact"\ncandidate = ["a:b"]\n'
        'layers = "2"\ntokens = 1\nseed = 0\ndevice = "cpu"\nstages = "stored"\n'
        'limits = "l.toml"\ngate = ["recall.lost<=0"]\njson = "r.json"\njunitxml = "r.xml"\n'
        "force = true\nquiet = false\ndebug = false\n"
    )
    _write(tmp_path, text)

    assert set(load_defaults(tmp_path).values) == set(tomllib.loads(text)["tool"]["needlepoint"])


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
