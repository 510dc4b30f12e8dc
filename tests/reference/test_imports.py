from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import needlepoint.reference.profile as reference

FOLDER = Path(reference.__file__).parent


def imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_the_reference_needs_torch_alone() -> None:
    modules = sorted(FOLDER.rglob("*.py"))
    assert len(modules) > 20
    for path in modules:
        for name in imported(path.read_text(encoding="utf-8")):
            top = name.split(".")[0]
            known = top in sys.stdlib_module_names or top == "torch"
            assert known or name.startswith("needlepoint.reference"), f"{path.name} imports {name}"


def test_formats_import_nothing_of_ours() -> None:
    modules = sorted((FOLDER / "formats").glob("*.py"))
    assert len(modules) > 3
    for path in modules:
        for name in imported(path.read_text(encoding="utf-8")):
            ours = name.startswith("needlepoint")
            assert not ours or name.startswith("needlepoint.reference.formats"), path.name
