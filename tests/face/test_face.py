"""``import needlepoint``: three lines to a verdict, loaded when used."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import needlepoint
from needlepoint.optimized.candidates.catalogue import create
from needlepoint.verify.cli.app import COMMANDS, FIXTURES
from needlepoint.verify.schema.result import Result

FACE = Path(__file__).parents[2] / "verify" / "face" / "__init__.py"
SMALL: dict[str, Any] = {"tokens": 600, "layers": 0, "stages": "index.stored"}
FP8 = "emulated:fused-fp8"
LOADED = "print(sorted({m.split('.')[0] for m in sys.modules} & HEAVY))"
HEAVY = {"torch", "numpy", "scipy", "pydantic", "typer", "rich", "safetensors", "jinja2"}


def loaded(code: str) -> set[str]:
    """Return which heavy packages a fresh process has loaded after some code."""
    script = f"import sys; HEAVY = {HEAVY}\n{code}\n{LOADED}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(ast.literal_eval(done.stdout.splitlines()[-1]))


def test_an_import_loads_nothing() -> None:
    assert loaded("import needlepoint; needlepoint.__version__; dir(needlepoint)") == set()


def test_version_and_help_load_no_torch() -> None:
    """One process for all: what one page loads, the pages after it would show."""
    words = [["--version"], ["--help"], ["fixtures", "--help"]]
    words += [[name, "--help"] for name in COMMANDS]
    words += [["fixtures", name, "--help"] for name in FIXTURES]
    code = (
        "from needlepoint.verify.cli.main import main\n"
        f"for words in {words}:\n    sys.argv[1:] = words\n    assert main() == 0\n"
    )
    assert loaded(code) == {"pydantic", "typer"}


def test_every_name_is_there_and_typed() -> None:
    """A name stands twice, for type checkers and for Python; both say the same place."""
    (typed,) = (node for node in ast.parse(FACE.read_text()).body if isinstance(node, ast.If))
    places = {
        alias.name: node.module
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(places) == set(needlepoint.__all__)
    assert set(needlepoint.__all__) <= set(dir(needlepoint))
    for name, module in places.items():
        assert module is not None
        found = getattr(needlepoint, name)
        if name != "verify":
            assert found is getattr(sys.modules[module], name)
    with pytest.raises(AttributeError, match="no attribute 'chekc'"):
        needlepoint.chekc  # noqa: B018


def test_a_sound_kernel_is_a_match() -> None:
    result = needlepoint.check(create(FP8), **SMALL)
    assert result.verdict == "match", result.summary()
    assert result.summary() == "match: 1 of 1 stages compared, 1 candidate"


def test_a_kernel_that_differs_raises_nothing() -> None:
    result = needlepoint.check("emulated:fused-bf16", profile="bf16", **SMALL)
    assert result.verdict == "differ"
    first, *rest = result.summary().splitlines()
    assert first.startswith("differ: layer 0 index.stored, request 0 position ")
    assert any("expected" in line and "found" in line for line in rest)


def test_the_result_is_that_of_the_command(
    cli: Callable[..., CompletedProcess[str]],
) -> None:
    words = ["--tokens", "600", "--layers", "0", "--stages", "index.stored", "--candidate", FP8]
    gate = "format_cost.bf16.rel_mean<=0"
    assert cli("verify", *words, "--gate", gate, "--json", "command.json").returncode == 1
    result = needlepoint.check(FP8, **SMALL, gates=gate, json="python.json")
    files = [json.loads(Path(name).read_text()) for name in ("command.json", "python.json")]
    for one in (*files, as_json := json.loads(result.model_dump_json(by_alias=True))):
        for candidate in one["candidates"]:
            candidate.pop("memory")
    assert files[0] == files[1] == as_json
    assert Path("python.rows.safetensors").is_file()
    read = needlepoint.load_result("python.json")
    assert read == result
    assert isinstance(read, Result)
    assert read.summary().startswith(f"differ: gate {gate} exceeded")


def test_several_candidates_are_judged_in_order() -> None:
    named: list[str | needlepoint.Candidate] = ["emulated:fused-bf16", create(FP8)]
    result = needlepoint.verify(named, **SMALL)
    assert [c.name for c in result.candidates] == ["emulated:fused-bf16", FP8]
    assert "2 candidates" in result.summary()
    for wrong in ([], [FP8, FP8]):
        with pytest.raises(ValueError, match="expected at least one, and every one once"):
            needlepoint.verify(wrong)


def test_two_recordings_are_compared(recordings: Callable[..., Path]) -> None:
    a, b = recordings("bf16"), recordings(FP8)
    assert needlepoint.diff(a, str(b), stages="main.pooled").verdict == "match"
    with pytest.raises(ValueError, match="needlepoint option stages='x': 'x' is not a stage"):
        needlepoint.diff(a, b, stages="x")


def test_options_are_those_of_the_command(tmp_path: Path) -> None:
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"token": 3}, r"needlepoint option 'token': expected one of input, model, .*, gates, "),
        ({"debug": True}, "needlepoint option 'debug': expected one of "),
        ({"tokens": "3"}, "needlepoint option tokens='3': expected a whole number of at least 1"),
        ({"contract": "fp64"}, "needlepoint option contract='fp64': expected one of exact, "),
        ({"save_failures": 3}, "needlepoint option save_failures=3: expected a path"),
        ({"json": tmp_path}, "is a folder; give the name of a file"),
        ({"seconds": 3}, "--seconds: is the time of --scenario all"),
    )
    for options, told in wrong:
        with pytest.raises(ValueError, match=told):
            needlepoint.check(FP8, **options)


def test_examples_of_candidates_import_from_the_face_alone() -> None:
    examples = FACE.parents[2] / "docs" / "examples"
    for name in ("my_candidate", "mykernel/mykernel", "capture_transformers", "three_lines"):
        tree = ast.parse((examples / f"{name}.py").read_text())
        named = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not [module for module in named if (module or "").startswith("needlepoint.")], name


def test_the_package_that_is_called_pickles_by_name() -> None:
    """As ``needlepoint.check`` does: pools of processes send a function by its name."""
    assert pickle.loads(pickle.dumps(needlepoint.verify)) is needlepoint.verify
