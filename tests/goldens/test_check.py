"""What ``fixtures check`` must catch, planted one at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.goldens import check as goldens_check
from needlepoint.verify.goldens.check import check, replay
from needlepoint.verify.goldens.compute import compute, golden_sources
from needlepoint.verify.goldens.manifest import GoldenError, load_golden

ROOT = Path(__file__).parents[2]
REFERENCES = ("reference-bf16", "reference-official")


def test_every_shipped_fixture_is_the_accepted_one() -> None:
    report = check(ROOT)
    assert report.faults == ()
    assert report.fixtures >= 3
    assert report.tensors >= 20


@pytest.mark.parametrize("name", REFERENCES)
def test_the_reference_gives_the_bytes_of_its_goldens(name: str) -> None:
    loaded = load_golden(name)
    assert loaded.golden.kind == "reference"
    assert len(loaded.tensors) >= 8
    assert replay(loaded) == []


def test_accepted_fixtures_have_no_fault(checkout: Path) -> None:
    report = check(checkout)
    assert (report.faults, report.fixtures) == ((), 2)


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def flip_a_bit(root: Path) -> None:
    flip(root / "fixtures/tiny-one/golden.safetensors")


def rename(root: Path) -> None:
    path = root / "fixtures/states/golden.safetensors"
    path.rename(path.with_name("other.safetensors"))


def delete(root: Path) -> None:
    (root / "fixtures/states/golden.safetensors").unlink()


def link(root: Path) -> None:
    path = root / "fixtures/states/golden.safetensors"
    path.rename(root.parent / "elsewhere.safetensors")
    path.symlink_to(root.parent / "elsewhere.safetensors")


def truncate(root: Path) -> None:
    path = root / "fixtures/tiny-one/golden.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def add_folder(root: Path) -> None:
    (root / "fixtures/new").mkdir()
    save_file({"x": torch.ones(2)}, root / "fixtures/new/x.safetensors")


def add_tensor(root: Path) -> None:
    path = root / "fixtures/states/golden.safetensors"
    save_file({**load_file(path), "x": torch.ones(2)}, path)


def edit_generator(root: Path) -> None:
    (root / "fixtures/make_states.py").write_text("# makes something else\n")


def stop_using(root: Path) -> None:
    (root / "tests/test_it.py").write_text("NAMES = ('states',)  # no longer 'tiny-one'\n")


def edit_manifest(
    root: Path, change: Callable[[dict[str, dict[str, dict[str, object]]]], object]
) -> None:
    path = root / "fixtures/goldens.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_pin(root: Path) -> None:
    edit_manifest(root, lambda value: value["goldens"]["states"].update(device="other"))


def drop_entry(root: Path) -> None:
    edit_manifest(root, lambda value: value["goldens"].pop("states"))


def empty_manifest(root: Path) -> None:
    (root / "fixtures/goldens.json").unlink()


PLANTED: dict[Callable[[Path], None], str] = {
    flip_a_bit: r"tiny-one: golden.safetensors: tensor layer0\.\S+ has other bytes than those",
    rename: "states: other.safetensors is not in goldens.json; was it renamed",
    delete: "states: golden.safetensors is missing",
    link: "states: golden.safetensors is a link; expected the file itself",
    truncate: "tiny-one: .* truncated",
    add_folder: "new/x.safetensors: no fixture of goldens.json holds this file",
    add_tensor: "states: golden.safetensors: tensor x is not pinned",
    edit_generator: "states: fixtures/make_states.py changed since this was accepted",
    stop_using: "tiny-one: unused; no string in tests, .* names it",
    edit_pin: "states: its entry in goldens.json is not the one that was last accepted",
    drop_entry: "states: was accepted and is no longer in goldens.json",
    empty_manifest: "goldens.json: pins nothing; nothing was checked",
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_exit_1(
    plant: Callable[[Path], None], checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant(checkout)
    assert run_app(app, ["fixtures", "check", "--root", str(checkout)]) == 1
    out = capsys.readouterr().out
    assert any(
        line.startswith("fault: ") and re.search(PLANTED[plant], line) for line in out.splitlines()
    ), out


def test_a_docstring_is_no_use(checkout: Path) -> None:
    (checkout / "tests/test_it.py").write_text("NAMES = ('states', 'a tiny-one too')\n")
    assert any(fault.startswith("tiny-one: unused") for fault in check(checkout).faults)


def change_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what the reference is computed by be other than what was accepted."""

    def changed(root: Path, made_by: str) -> str:
        return "0" * 64 if made_by == "reference" else golden_sources(root, made_by)

    monkeypatch.setattr(goldens_check, "golden_sources", changed)


def test_changed_sources_are_computed_again(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_sources(monkeypatch)
    report = check(checkout)
    assert report.faults == ()
    assert report.notes == (
        "tiny-one: its sources changed since it was accepted; computed again, the same",
    )


def test_values_that_todays_sources_do_not_give_are_stale(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_sources(monkeypatch)
    original = compute

    def moved(definition: object) -> object:
        found = original(definition)  # type: ignore[arg-type]
        found.tensors["layer0.main.stored.pages"][0, 0] ^= 1
        return found

    monkeypatch.setattr(goldens_check, "compute", moved)
    (fault,) = check(checkout).faults
    assert fault == "tiny-one: stale: today's sources give other bytes of layer0.main.stored.pages"


def test_a_fixture_is_not_loaded_with_a_flipped_bit(checkout: Path) -> None:
    assert load_golden("tiny-one", checkout / "fixtures").tensors
    flip_a_bit(checkout)
    with pytest.raises(
        GoldenError, match=r"tiny-one/golden.safetensors: tensor \S+ has other bytes"
    ):
        load_golden("tiny-one", checkout / "fixtures")
    with pytest.raises(GoldenError, match=r"golden 'none': not in .*; it has states, tiny-one"):
        load_golden("none", checkout / "fixtures")


def test_a_manifest_of_another_schema_is_named(checkout: Path) -> None:
    (checkout / "fixtures/goldens.json").write_text('{"schema": "needlepoint.goldens/9"}')
    with pytest.raises(GoldenError, match=r"goldens\.json: schema: .* expected schema"):
        check(checkout)


def test_the_root_is_found_from_inside(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(checkout / "tests")
    assert run_app(app, ["fixtures", "check"]) == 0
    assert capsys.readouterr().out == "2 fixtures, 13 tensors: 0 faults\n"
    assert run_app(app, ["fixtures", "list"]) == 0
    assert "tiny-one: reference, 5 tensors, reference over synthetic:small, 24 tokens\n" in (
        capsys.readouterr().out
    )
    monkeypatch.chdir(checkout.parent)
    assert run_app(app, ["fixtures", "check"]) == 2
    assert "go to a checkout, or name one with --root" in capsys.readouterr().err
