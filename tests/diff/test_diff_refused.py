"""What ``needlepoint diff`` does not judge, and which recording it names."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

Cli = Callable[..., CompletedProcess[str]]
Recorded = Callable[..., Path]
EditManifest = Callable[[Path, Callable[[dict[str, Any]], None]], None]

FP8 = "emulated:fused-fp8"


REMOVED = {
    "index.pooled": ["layer0.index.pooled"],
    "main.roped": ["layer0.main.roped"],
    "main.stored": [
        "layer0.main.stored.pages",
        *(f"layer0.main.stored.page_table.{r}" for r in range(3)),
    ],
    "index.scores": [f"layer0.index.scores.{r}" for r in range(3)],
    "index.topk": ["layer0.index.topk"],
}


def remove_tensors(recording: Path, names: list[str]) -> None:
    file = recording / "layer0.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if name not in names}, file)


def undeclare(manifest: dict[str, Any], stage: str, names: list[str]) -> None:
    layer = manifest["layers"][0]
    layer["stages"] = [key for key in layer["stages"] if ".".join(key) != stage]
    if stage == "main.stored":
        del layer["layouts"]["main"]
    for name in names:
        del manifest["tensors"][name]


@pytest.mark.parametrize("stage", REMOVED)
@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("how", ["tensor", "manifest", "both"])
def test_a_removed_stage_cannot_be_judged_and_is_named(
    stage: str, side: str, how: str, cli: Cli, recorded: Recorded, manifest: EditManifest
) -> None:
    sides = {name: recorded(FP8, name) for name in ("a", "b")}
    names = REMOVED[stage]
    if how != "manifest":
        remove_tensors(sides[side], names)
    if how != "tensor":
        manifest(sides[side], lambda value: undeclare(value, stage, names))

    done = cli("diff", sides["a"], sides["b"], "--json", "r.json")

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert stage in done.stderr
    assert f"/{side}" in done.stderr
    assert not Path("r.json").exists()


def test_the_reference_is_not_judged_against_a_candidate(cli: Cli, recorded: Recorded) -> None:
    done = cli("diff", recorded(FP8, "a"), recorded("bf16", "b"))

    assert done.returncode == 2
    assert "give it as A" in done.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--tokens", "200"), "(300, 130, 123)"),
        (("--tokens", "553", "--layers", "0"), "layer 1 is not in"),
        (("--tokens", "553", "--seed", "1"), "ape"),
    ],
)
def test_recordings_of_two_runs_are_refused(
    options: tuple[str, ...], named: str, cli: Cli, recorded: Recorded
) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b", *options)

    for left, right in ((a, b), (b, a)):
        done = cli("diff", left, right)
        assert done.returncode == 2
        assert done.stdout == ""
        assert named in done.stderr
        assert str(b) in done.stderr


def test_another_model_is_refused(cli: Cli, recorded: Recorded, manifest: EditManifest) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")
    manifest(b, lambda value: value["model"].update(index_topk=9))

    done = cli("diff", a, b)

    assert done.returncode == 2
    assert f"model {{'index_topk': 8}} in {a}, {{'index_topk': 9}} in {b}" in done.stderr


def test_a_recording_of_input_alone_is_not_judged(
    cli: Cli, recorded: Recorded, manifest: EditManifest, tmp_path: Path
) -> None:
    a = recorded(FP8, "a")
    bare = Path(shutil.copytree(a, tmp_path / "bare"))
    for layer in ("layer0", "layer1"):
        (bare / f"{layer}.safetensors").unlink()

    def only_input(value: dict[str, Any]) -> None:
        value.update(kind="input", layers=[])
        value["tensors"] = {"input": value["tensors"]["input"]}

    manifest(bare, only_input)

    done = cli("diff", a, bare)

    assert done.returncode == 2
    assert "holds input only" in done.stderr


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "reference", "candidate": None}, "name='needlepoint'"),
        ({"candidate": None, "profile": None}, "profile None, expected one of the contracts"),
    ],
)
def test_a_recording_of_nobody_is_not_judged(
    change: dict[str, Any], named: str, cli: Cli, recorded: Recorded, manifest: EditManifest
) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")
    manifest(b, lambda value: value.update(change))

    done = cli("diff", a, b)

    assert done.returncode == 2
    assert named in done.stderr
    assert str(b) in done.stderr


def test_recordings_without_layers_are_not_equal(
    cli: Cli, recorded: Recorded, manifest: EditManifest
) -> None:
    def bare(value: dict[str, Any]) -> None:
        value.update(layers=[], tensors={"input": value["tensors"]["input"]})

    sides = [recorded(FP8, name) for name in ("a", "b")]
    for side in sides:
        manifest(side, bare)
        for layer in ("layer0", "layer1"):
            (side / f"{layer}.safetensors").unlink()

    done = cli("diff", *sides)

    assert done.returncode == 2
    assert "has no layers; nothing to compare" in done.stderr


def test_a_profile_block_that_is_not_the_candidates_is_refused(
    cli: Cli, recorded: Recorded, manifest: EditManifest
) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")

    def change(content: dict[str, Any]) -> None:
        content["profile"]["switches"]["pooled"] = "bf16"

    manifest(b, change)
    done = cli("diff", a, b)
    assert done.returncode == 2
    assert "its profile block is not that of emulated:fused-fp8" in done.stderr
