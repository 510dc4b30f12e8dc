"""A golden changes only by a proposal that was reviewed, and for a reason that is kept."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.goldens import accept as goldens_accept
from needlepoint.verify.goldens.accept import CI_VARIABLES, accept, remove
from needlepoint.verify.goldens.check import check
from needlepoint.verify.goldens.manifest import GoldenError, load_manifest
from needlepoint.verify.goldens.propose import InputChoice, propose_given, propose_reference

REASON = "the norm rounds once less"
CHOICE = InputChoice("synthetic:small", None, (0,), 24, 7, "bf16")


def test_a_proposal_stands_beside_and_changes_nothing(checkout: Path) -> None:
    proposal = propose_reference(checkout, "tiny-one", CHOICE, None)
    assert proposal.folder == checkout / "fixtures/tiny-one.proposed"
    assert any("values moved" in line for line in proposal.review)
    report = check(checkout)
    assert report.faults == ()
    assert report.notes == ("tiny-one: a proposal waits in fixtures/tiny-one.proposed",)


def test_an_unchanged_reference_moves_nothing(checkout: Path) -> None:
    proposal = propose_reference(checkout, "tiny-one", None, None)
    assert proposal.review == ("5 of 5 tensors unchanged",)


def test_accepting_keeps_the_reason(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkout)
    command = ["fixtures", "propose", "tiny-one", "--input", "synthetic:small", "--tokens", "24"]
    assert run_app(app, [*command, "--layers", "0", "--seed", "7"]) == 0
    assert "needlepoint fixtures accept tiny-one --reason" in capsys.readouterr().out
    assert run_app(app, ["fixtures", "accept", "tiny-one", "--reason", REASON]) == 0
    assert capsys.readouterr().out.startswith("accepted tiny-one: layer0.")
    entry = load_manifest(checkout / "fixtures").history[-1]
    assert (entry.name, entry.reason) == ("tiny-one", REASON)
    assert "values moved" in entry.review
    assert check(checkout).faults == ()
    assert not (checkout / "fixtures/tiny-one.proposed").exists()


def test_the_review_counts_values_and_names_picks(checkout: Path) -> None:
    states = checkout.parent / "states"
    shutil.copytree(checkout / "fixtures/states", states)
    tensors = load_file(states / "golden.safetensors")
    name = "layer0.query.weights"
    tensors[name][3, 2] = torch.nextafter(tensors[name][3, 2], torch.tensor(torch.inf))
    save_file(tensors, states / "golden.safetensors")
    proposal = propose_given(checkout, "states", states, None)
    size = f"{tensors[name].numel():,}"
    moved = f"golden.safetensors:{name}: 1 of {size} values moved, by at most 1 ulp"
    assert moved in proposal.review


def test_accept_refuses_in_continuous_integration(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    propose_reference(checkout, "tiny-one", CHOICE, None)
    before = (checkout / "fixtures/goldens.json").read_bytes()
    for variable in CI_VARIABLES:
        monkeypatch.setenv(variable, "true")
        with pytest.raises(GoldenError, match=f"{variable} is set"):
            accept(checkout, ["tiny-one"], REASON)
        monkeypatch.delenv(variable)
    assert (checkout / "fixtures/goldens.json").read_bytes() == before


@pytest.mark.parametrize("change", ["untracked", "edited", "staged", "other proposal"])
def test_accept_refuses_beside_other_changes(change: str, checkout: Path) -> None:
    propose_reference(checkout, "tiny-one", CHOICE, None)
    if change == "untracked":
        (checkout / "new.py").touch()
    elif change == "other proposal":
        (checkout / ".gitignore").write_text("")
        subprocess.run(["git", "-C", str(checkout), "commit", "-qam", "x"], check=False)
        (checkout / "fixtures/states.proposed").mkdir()
        (checkout / "fixtures/states.proposed/x").touch()
    else:
        (checkout / "tests/test_it.py").write_text("NAMES = ('states', 'tiny-one', 'more')\n")
        if change == "staged":
            subprocess.run(["git", "-C", str(checkout), "add", "."], check=True)
    with pytest.raises(GoldenError, match="the tree has other changes"):
        accept(checkout, ["tiny-one"], REASON)


def test_accept_refuses_without_git(checkout: Path) -> None:
    propose_reference(checkout, "tiny-one", CHOICE, None)
    shutil.rmtree(checkout / ".git")
    with pytest.raises(GoldenError, match="accept in a git checkout"):
        accept(checkout, ["tiny-one"], REASON)


@pytest.mark.parametrize("reason", ["", "   ", "x", "update"])
def test_accept_refuses_without_a_reason(reason: str, checkout: Path) -> None:
    propose_reference(checkout, "tiny-one", CHOICE, None)
    with pytest.raises(GoldenError, match="say in a few words why"):
        accept(checkout, ["tiny-one"], reason)


def test_accept_refuses_what_was_not_proposed(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GoldenError, match="no proposal in"):
        accept(checkout, ["tiny-one"], REASON)
    proposal = propose_reference(checkout, "tiny-one", CHOICE, None)
    path = proposal.folder / "golden.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(GoldenError, match="was changed after it was proposed"):
        accept(checkout, ["tiny-one"], REASON)
    propose_reference(checkout, "tiny-one", CHOICE, None)
    monkeypatch.setattr(goldens_accept, "golden_sources", lambda root, kind: "0" * 64)
    with pytest.raises(GoldenError, match="sources changed after it was proposed"):
        accept(checkout, ["tiny-one"], REASON)


@pytest.mark.parametrize("name", ["../small", "Small", "a/b", ""])
def test_names_stay_in_the_folder(name: str, checkout: Path) -> None:
    with pytest.raises(GoldenError, match="lower-case letters, digits and hyphens"):
        propose_reference(checkout, name, CHOICE, None)
    with pytest.raises(GoldenError, match="lower-case letters, digits and hyphens"):
        accept(checkout, [name], REASON)


def test_removing_a_fixture_keeps_the_reason(checkout: Path) -> None:
    remove(checkout, ["tiny-one"], "nothing needs it any more")
    manifest = load_manifest(checkout / "fixtures")
    assert "tiny-one" not in manifest.goldens
    assert manifest.history[-1].sha256 is None
    assert check(checkout).faults == ()


def test_another_kind_is_refused(checkout: Path) -> None:
    with pytest.raises(GoldenError, match="golden tiny-one: is reference, not given"):
        propose_given(checkout, "tiny-one", checkout / "fixtures/states", "fixtures/make_states.py")
    with pytest.raises(GoldenError, match="golden states: is given, not reference"):
        propose_reference(checkout, "states", CHOICE, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--result", "r.json"], "go with --from DIR"),
        ([], "is new; name the input it is computed from"),
        (["--input", "elsewhere"], "expected mini or synthetic:KIND"),
        (["--from", "nowhere", "--generator", "fixtures/make_states.py"], "expected a folder with"),
        (["--from", "fixtures/states"], "expected the script that made it"),
        (["--from", "fixtures/states", "--generator", "/etc/passwd"], "expected the script"),
    ],
)
def test_bad_proposals_are_named(
    words: list[str],
    message: str,
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(checkout)
    assert run_app(app, ["fixtures", "propose", "fresh", *words]) == 2
    assert message in capsys.readouterr().err
    assert "fresh" not in json.loads((checkout / "fixtures/goldens.json").read_text())["goldens"]
