"""Bad input through the command line: exit 2, one message with the value, nothing left behind."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Cli = Callable[..., CompletedProcess[str]]
Recorded = Callable[..., Path]
EditManifest = Callable[[Path, Callable[[dict[str, Any]], None]], None]

FP8 = "emulated:fused-fp8"
ENOUGH = ("--tokens", "200")


def refused(done: CompletedProcess[str], *named: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("needlepoint: error: ")
    assert done.stderr.count("\n") == 1
    for text in named:
        assert text in done.stderr
    assert [path.name for path in Path().iterdir()] == ["pyproject.toml"]


@pytest.mark.parametrize("command", [("verify", "--json", "r.json"), ("record", "--out", "out")])
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--input", "synthetic", "--tokens", "0"), "'0': expected a whole number of at least 1"),
        (("--input", "synthetic", "--tokens", "-4"), "-4"),
        (("--input", "synthetic", "--tokens", "3"), "ratio 4 needs a request of at least 4"),
        (("--input", "synthetic", "--tokens", "127"), "the longest has 127"),
        (("--input", "mini", "--tokens", "100"), "ratio 128 needs a request of at least 128"),
        (("--input", "mini", "--tokens", "99999999"), "tokens 99999999: the recording has"),
        (("--input", "synthetic:gauss", *ENOUGH), "synthetic kind 'gauss'"),
        (("--input", "nowhere"), "'nowhere'"),
        (("--input", "synthetic", *ENOUGH, "--layers", "0,77"), "77"),
        (("--input", "synthetic", *ENOUGH, "--candidate", "emulated:int8"), "emulated:int8"),
    ],
)
def test_wrong_values_of_options(
    command: tuple[str, ...], options: tuple[str, ...], named: str, cli: Cli, small_model: Path
) -> None:
    model = ("--model", small_model) if "mini" not in options else ()
    refused(cli(*command, *options, *model), named)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"index_top_k": 8, "index_topk": None}, "index_topk"),
        ({"num_attention_heads": "one"}, "num_attention_heads"),
        ({"compress_ratios": [4, 5]}, "5"),
        ({"index_topk": 0}, "index_topk"),
    ],
)
def test_an_unusable_model(
    change: dict[str, object], named: str, cli: Cli, small_model: Path, tmp_path: Path
) -> None:
    config = json.loads(small_model.read_text()) | change
    path = tmp_path / "model.json"
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    done = cli("verify", "--input", "synthetic", *ENOUGH, "--model", path, "--json", "r.json")

    refused(done, str(path), named)


@pytest.mark.parametrize("model", ["v4-flesh", "none.json"])
def test_an_unknown_model_names_the_presets(model: str, cli: Cli) -> None:
    refused(cli("verify", "--model", model), model, "v4-flash")


def test_an_unknown_key_of_the_table_is_named(cli: Cli) -> None:
    Path("pyproject.toml").write_text("[tool.needlepoint]\nmodell = 'mini'\n")

    refused(cli("verify"), "unknown key 'modell'", "pyproject.toml")


def test_k_larger_than_the_pool_cannot_be_judged(cli: Cli, small_model: Path) -> None:
    # 31 tokens are 7 entries, one less than k; 36 are 9, of which the last query leaves one out.
    common = ("--input", "synthetic", "--model", small_model, "--layers", "0", "--candidate", FP8)

    done = cli("verify", *common, "--tokens", "31", "--json", "r.json")

    refused(done, "layer 0: k 8 is larger than the pool, the longest request has 7 entries")
    assert cli("verify", *common, "--tokens", "36").returncode == 0
    assert cli("verify", *common, "--tokens", "31", "--stages", "stored,scores").returncode == 0
    assert cli("record", *common, "--tokens", "31", "--out", "short").returncode == 0


def test_a_selection_that_discards_nothing_says_so(cli: Cli, small_model: Path) -> None:
    common = ("--input", "synthetic", "--model", small_model, "--layers", "0", "--candidate", FP8)

    done = cli("verify", *common, "--tokens", "32")

    refused(done, "layer 0: k 8 is no smaller than the pool, the longest request has 8 entries")
    # Two recordings are compared all the same, and say so.
    for name in ("a", "b"):
        assert cli("record", *common, "--tokens", "32", "--out", name).returncode == 0
    assert cli("diff", "a", "b", "--json", "r.json").returncode == 0
    layer = json.loads(Path("r.json").read_text())["candidates"][0]["layers"][0]
    details = {s["stage"]: s["detail"] for s in layer["stages"] if s["kind"] == "compared"}
    assert layer["topk"]["discarded_mean"] == 0
    assert details["topk"] == "no query sees more entries than it picks"


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_input_that_is_not_finite_names_its_place(
    value: float, cli: Cli, recorded: Recorded, small_model: Path
) -> None:
    recording = recorded(FP8, "a")
    hidden = load_file(recording / "input.safetensors")["input"]
    hidden[310, 5] = value  # request 1, position 10
    save_file({"input": hidden}, recording / "input.safetensors")

    done = cli("verify", "--input", recording, "--json", "r.json", "--model", small_model)

    refused(done, str(value), "request 1, position 10, dim 5")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def zero_header(path: Path) -> None:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    path.write_bytes(raw[:8] + bytes(length) + raw[8 + length :])


def lie(path: Path) -> None:
    """Let the header claim one row more than the file holds."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    name = next(iter(header))
    header[name]["shape"][0] += 1
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGE = (truncate, cut_header, zero_header, lie, empty)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_of_an_input(
    damage: Callable[[Path], None], cli: Cli, recorded: Recorded
) -> None:
    recording = recorded(FP8, "a")
    damage(recording / "input.safetensors")

    refused(cli("verify", "--input", recording, "--json", "r.json"), "input.safetensors")


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("side", ["a", "b"])
def test_damaged_files_of_a_recording(
    damage: Callable[[Path], None], side: str, cli: Cli, recorded: Recorded
) -> None:
    sides = {name: recorded(FP8, name) for name in ("a", "b")}
    damage(sides[side] / "layer0.safetensors")

    done = cli("diff", sides["a"], sides["b"], "--json", "r.json", "--junitxml", "r.xml")

    refused(done, f"/{side}/layer0.safetensors")


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ([-1, 1], "page id -1 at position 0"),
        ([0, 99], "page id 99 at position 1"),
        ([2, 2], "page id 2 at position 1 is mapped twice"),
    ],
)
def test_pages_that_a_recording_cannot_have(
    table: list[int],
    named: str,
    cli: Cli,
    recorded: Recorded,
    edit: Callable[[Path, str, Callable[[Tensor], Tensor | None]], None],
) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")

    def change(_: Tensor) -> Tensor:
        return torch.tensor(table, dtype=torch.int32)

    edit(b, "layer0.index.stored.page_table.0", change)

    refused(cli("diff", a, b, "--json", "r.json"), named, str(b), "layer 0")


def test_a_page_size_that_is_not_the_pool_s(
    cli: Cli, recorded: Recorded, manifest: EditManifest
) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")

    def halve(value: dict[str, Any]) -> None:
        value["layers"][0]["layouts"]["index"]["page_size"] = 32

    manifest(b, halve)

    # 132 bytes a row: pages of 8,448 bytes were made for 64 rows.
    refused(cli("diff", a, b), "8448 bytes (page size 64)", "4224 bytes for page size 32", str(b))


def test_a_manifest_that_does_not_fit_its_tensors(
    cli: Cli, recorded: Recorded, manifest: EditManifest
) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")

    def shorten(value: dict[str, Any]) -> None:
        value["tensors"]["layer0.index.pooled"]["shape"][0] -= 1

    manifest(b, shorten)

    refused(cli("diff", a, b), "layer0.index.pooled", str(b))


def test_what_stood_in_the_way_of_a_recording_is_left_alone(
    cli: Cli, small_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    common = ("--input", "synthetic", "--model", small_model, *ENOUGH, "--out", out)

    refused(cli("record", *common), "--force")
    refused(cli("record", *common, "--force"), "is a folder, but not a recording")

    assert [path.name for path in out.iterdir()] == ["notes.txt"]
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "work"}
