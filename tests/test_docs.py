"""The documents say what is: commands print what is shown, links resolve, rooms are named.

In a ``console`` block a line that starts with ``$`` is a command and the lines up to the next one
are its output. ``...`` alone on a line stands for any number of lines, within a line for any text;
trailing blanks do not count. The blocks of one document run in order in one folder that holds
nothing but ``docs/examples`` of the checkout.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.cli.defaults import load_defaults
from needlepoint.verify.diff.mapping import load_mapping
from needlepoint.verify.numerics.limits import Limits

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
DOCUMENTS = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "fixtures/README.md"})
TOY_STAGE = ROOT / "tests" / "base" / "toy_stage.py"
ROOMS = (ROOT / "docs/architecture.md").read_text().partition("## Rooms")[2]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
SIDES = ("optimized", "verify")

Step = tuple[str, str]
"""A command and the output that the document shows."""


def name(path: Path) -> str:
    """Return a document's path from the root of the checkout."""
    return str(path.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def steps(block: str) -> list[Step]:
    """Return the commands of a console block; a command goes on after a backslash."""
    found: list[Step] = []
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        end = 1
        while lines[end - 1].endswith("\\"):
            end += 1
        command = " ".join(line.rstrip("\\").strip() for line in lines[:end])
        found.append((command, "\n".join(lines[end:])))
    return found


def agrees(shown: str, printed: str) -> bool:
    """Return whether printed text is what a document shows."""
    pattern = ""
    for line in shown.strip("\n").splitlines():
        if line.strip() == "...":
            pattern += r"(?:[^\n]*\n)*?"
        else:
            pattern += r"[^\n]*".join(re.escape(p) for p in line.rstrip().split("...")) + r"\n"
    text = "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").splitlines())
    return re.fullmatch(pattern, text) is not None


class Shell:
    """Runs the commands of one document: ours and scripts in this process, the rest in bash."""

    def __init__(self) -> None:
        self.code = 0

    def run(self, command: str) -> str:
        """Return what the command prints, standard error included."""
        if command == "echo $?":
            return f"{self.code}\n"
        words = shlex.split(command)
        search = ""
        while words and "=" in words[0]:
            variable, _, search = words.pop(0).partition("=")
            assert variable == "PYTHONPATH", command
        script = words[1] if words[0] == "python" and words[1].endswith(".py") else None
        if script is None and words[0] != "needlepoint":
            done = subprocess.run(
                ["bash", "-c", command],
                env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            self.code = done.returncode
            return done.stdout
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            if script is None:
                with searching(search):
                    self.code = run_app(app, words[1:])
            else:
                with searching(str(Path(script).parent)), pytest.MonkeyPatch.context() as patch:
                    patch.setattr(sys, "argv", words[1:])
                    runpy.run_path(script, run_name="__main__")
                self.code = 0
        return out.getvalue()


@contextmanager
def searching(folders: str) -> Iterator[None]:
    """Import from more folders for a while, and forget what was imported then."""
    added = [str(Path(folder).resolve()) for folder in folders.split(":") if folder]
    known = set(sys.modules)
    sys.path[:0] = added
    importlib.invalidate_caches()
    try:
        yield
    finally:
        del sys.path[: len(added)]
        for module in set(sys.modules) - known:
            file = getattr(sys.modules[module], "__file__", None)
            if file is not None and str(Path(file).parent) in added:
                del sys.modules[module]


def with_blocks(language: str) -> list[Path]:
    """Return the documents that have blocks of a language."""
    return [path for path in DOCUMENTS if blocks(path.read_text(), language)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder with the examples, made the current one; 80 columns, no colour."""
    shutil.copytree(EXAMPLES, tmp_path / "docs" / "examples")
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("document", with_blocks("console"), ids=name)
def test_commands_print_what_is_shown(document: Path) -> None:
    shell = Shell()
    for block in blocks(document.read_text(), "console"):
        for command, shown in steps(block):
            printed = shell.run(command)
            assert agrees(shown, printed), f"$ {command}\nshown:\n{shown}\n\nprinted:\n{printed}"


def flat(text: str) -> str:
    """Return a text without the indents of its lines."""
    return "\n".join(line.strip() for line in text.strip().splitlines())


@pytest.mark.parametrize("document", with_blocks("python"), ids=name)
def test_python_blocks_are_parts_of_the_examples(document: Path) -> None:
    examples = [flat(path.read_text()) for path in (*EXAMPLES.glob("*.py"), TOY_STAGE)]
    for block in blocks(document.read_text(), "python"):
        assert any(flat(block) in text for text in examples), block


@pytest.mark.parametrize("document", with_blocks("toml"), ids=name)
def test_toml_blocks_are_accepted(document: Path, folder: Path) -> None:
    for block in blocks(document.read_text(), "toml"):
        if "[tool.needlepoint]" in block:
            (folder / "pyproject.toml").write_text(block)
            assert load_defaults(folder).values
        elif "needlepoint.dump/1" in block:
            (folder / "dump.toml").write_text(block)
            assert load_mapping(folder / "dump.toml").rows
        elif "[project.entry-points" in block:
            assert block in (EXAMPLES / "mykernel" / "pyproject.toml").read_text()
        else:
            (folder / "limits.toml").write_text(block)
            assert Limits.load(folder / "limits.toml") != Limits.default()


def anchor(heading: str) -> str:
    """Return the anchor of a heading: lower case, no punctuation, hyphens for blanks."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_relative_links_resolve(document: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, part = target.partition("#")
        found = (document.parent / path) if path else document
        assert found.exists(), target
        headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE) if part else []
        assert not part or part in map(anchor, headings), target


@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path.name != "CHANGELOG.md"], ids=name
)
def test_paths_in_prose_exist(document: Path) -> None:
    folders = "reference|optimized|verify|fixtures|tests|benchmarks|docs"
    named = re.findall(rf"`((?:{folders})/[\w./*-]*)`", document.read_text())
    missing = [path for path in named if "NAME" not in path and not any(ROOT.glob(path))]
    assert not missing


@pytest.mark.parametrize("side", SIDES)
def test_architecture_names_the_rooms_that_exist(side: str) -> None:
    named = re.findall(rf"^\| `{side}/(\w+)/` \|", ROOMS, re.MULTILINE)
    folders = [path for path in (ROOT / side).iterdir() if path.name != "__pycache__"]
    assert sorted(named) == sorted(path.name for path in folders if path.is_dir())


@pytest.mark.parametrize("side", SIDES)
def test_architecture_has_the_rooms_in_the_order_of_the_import_contracts(side: str) -> None:
    levels: dict[str, int] = {}
    for contract in CONFIG["tool"]["importlinter"]["contracts"]:
        for container in contract.get("containers", [""]):
            for level, layer in enumerate(contract.get("layers", ())):
                for module in layer.split("|"):
                    levels[f"{container}.{module.strip()}".removeprefix(".")] = level
    named = re.findall(rf"^\| `{side}/(\w+)/` \|", ROOMS, re.MULTILINE)
    modules = [f"needlepoint.{side}.{room}" for room in named]
    found = [levels[module] for module in modules if module in levels]
    assert len(found) > 3
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a\nb", "a  \nb\n", True),
        ("a\n...\nd", "a\nb\nc\nd\n", True),
        ("a\n...\nd", "a\nd\n", True),
        ("a ... c", "a b c\n", True),
        ("", "", True),
        ("a\n...", "a\nb\n", True),
        ("a", "a\nb\n", False),
        ("a\n...\nd", "a\nb\nc\n", False),
        ("a ... c", "a b\nc\n", False),
        ("1.5", "125\n", False),
        ("", "a\n", False),
    ],
)
def test_the_comparison_itself(shown: str, printed: str, same: bool) -> None:
    assert agrees(shown, printed) is same
