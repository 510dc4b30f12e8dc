"""The reference pages are what the schema and the docstrings say today."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_pages_are_current(maker: ModuleType) -> None:
    made: dict[str, str] = maker.pages()
    assert {path.name for path in (DOCS / "reference").glob("*.md")} == set(made)
    for name, text in made.items():
        assert (DOCS / "reference" / name).read_text() == text, "run: python docs/make_reference.py"


def test_pages_hold_every_part(maker: ModuleType) -> None:
    result, python = maker.schema_page("result"), maker.python_page()
    for wanted in ("## CandidateResult", "| `first_divergence` |", "FirstDivergence or null"):
        assert wanted in result
    assert "## CaseResult" in maker.schema_page("selftest")
    for names in maker.PUBLIC.values():
        assert all(f"### `{name}`" in python for name in names)
    assert "needlepoint_judge" in python
