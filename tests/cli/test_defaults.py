"""``[tool.needlepoint]``: keys as on the command line, and messages for what is no key."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import pytest
import typer

from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.cli.defaults import load_defaults
from needlepoint.verify.cli.options import VerifyOptions

COMMANDS = typer.main.get_command(app)


def _options(command: str) -> set[str]:
    """Return the long options of a command, without dashes."""
    found = COMMANDS.commands[command]  # type: ignore[attr-defined]
    names = {name for parameter in found.params for name in parameter.opts}
    return {name.removeprefix("--") for name in names if name.startswith("--")} - {"help"}


def _write(folder: Path, text: str) -> Path:
    path = folder / "pyproject.toml"
    path.write_text(text)
    return path


def test_every_option_of_verify_is_a_key_in_its_own_spelling() -> None:
    keys = set(VerifyOptions.options())

    assert keys == _options("verify")
    assert _options("diff") <= keys
    assert _options("record") - {"out"} <= keys


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
        "tokens": 640,
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
        ("token = 3", r"unknown key 'token' in \[tool\.needlepoint\]; did you mean 'tokens'\?"),
        ("save_failures = 'x'", "unknown key 'save_failures' .*; did you mean 'save-failures'"),
        ("Gates = []", "unknown key 'Gates' .*; did you mean 'gate'"),
        ("junit = 'x'", "unknown key 'junit' .*; did you mean 'junitxml'"),
        ("zzz = 1", "unknown key 'zzz' .*; expected one of candidate, .*, save-failures, "),
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


def test_what_is_no_table_is_told_with_its_value(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool]\nneedlepoint = 3\n")

    with pytest.raises(ValueError, match=r"\[tool\.needlepoint\] is 3; expected a table"):
        load_defaults(tmp_path)


def test_example_of_every_key_is_accepted(tmp_path: Path) -> None:
    text = (
        "[tool.needlepoint]\n"
        'input = "mini"\nmodel = "v4-pro"\ncontract = "exact"\ncandidate = ["a:b"]\n'
        'layers = "2"\ntokens = 1\nseed = 0\ndevice = "cpu"\nstages = "stored"\n'
        'limits = "l.toml"\ngate = ["recall.lost<=0"]\njson = "r.json"\njunitxml = "r.xml"\n'
        'save-failures = "./failing"\nforce = true\nquiet = false\ndebug = false\n'
    )
    _write(tmp_path, text)

    found = load_defaults(tmp_path)
    assert set(found.values) == set(tomllib.loads(text)["tool"]["needlepoint"])
    assert found.values["save-failures"] == str(tmp_path / "failing")


FAULTS = ("[tool.needlepoint]\nsave_failures = 'x'\n", "[tool.needlepoint]\ntokens = -1\n", "[tool")


@pytest.mark.parametrize("text", FAULTS)
def test_a_faulty_table_stops_commands_but_not_those_that_help(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("needlepoint.verify.cli.doctor.names", lambda: ())
    path = _write(tmp_path, text)
    for arguments in (["verify"], ["rejudge", "x.json"], ["fixtures", "list"], ["verify", "-x"]):
        assert run_app(app, arguments) == 2
        fault = capsys.readouterr().err
        assert fault.startswith(f"needlepoint: error: {path}: ")
    for arguments in (["--version"], ["--help"], ["verify", "--help"], ["-h"]):
        assert run_app(app, arguments) == 0
    assert capsys.readouterr().err == ""
    assert run_app(app, ["doctor", "--json", "doctor.json"]) == 0
    told = fault.removeprefix("needlepoint: error: ").rstrip()
    assert f"fault: {told}\n" in capsys.readouterr().out
    settings = json.loads((tmp_path / "doctor.json").read_text())["settings"]
    assert settings == {"file": None, "options": [], "fault": told}


def test_doctor_says_which_defaults_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("needlepoint.verify.cli.doctor.names", lambda: ())
    path = _write(tmp_path, "[tool.needlepoint]\ntokens = 8\nsave-failures = 'x'\n")
    assert run_app(app, ["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"  defaults: save-failures, tokens from {path}\n" in out
    assert "fault:" not in out


@pytest.mark.parametrize("line", ["tokens = 8", "token = 8"])
def test_doctor_spells_a_folder_that_is_not_utf_8(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path / "caf") + b"\xe9"))
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("needlepoint.verify.cli.doctor.names", lambda: ())
    _write(folder, f"[tool.needlepoint]\n{line}\n")
    assert run_app(app, ["doctor", "--quiet", "--json", "doctor.json"]) == 0
    settings = json.loads(Path("doctor.json").read_text())["settings"]
    assert "caf\\udce9/pyproject.toml" in (settings["file"] or settings["fault"])
