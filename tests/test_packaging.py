"""The wheel, the type checkers' view and the folders on disk describe the same packages."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
CONFIG = TOOLS["setuptools"]
FOLDERS = ("reference", "optimized", "verify", "fixtures")
SOURCES = {".py", ".cpp", ".cu", ".cuh", ".h"}


def test_every_folder_with_sources_is_a_listed_package() -> None:
    on_disk = {
        "needlepoint." + ".".join(path.parent.relative_to(ROOT).parts)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SOURCES
    }
    assert set(CONFIG["packages"]) == on_disk


def test_typing_view_points_at_the_same_folders() -> None:
    for name, folder in CONFIG["package-dir"].items():
        link = ROOT / ".typing" / Path(*name.split("."))
        assert link.resolve() == (ROOT / folder).resolve()


def test_every_data_file_is_shipped() -> None:
    patterns = CONFIG["package-data"]["needlepoint.fixtures"]
    data = [
        path
        for path in (ROOT / "fixtures").rglob("*")
        if path.is_file() and path.suffix in {".json", ".safetensors"}
    ]
    assert data, "fixtures/ holds no data file"
    for path in data:
        relative = path.relative_to(ROOT / "fixtures")
        assert any(relative.match(pattern) for pattern in patterns), relative


def test_every_template_is_shipped() -> None:
    patterns = CONFIG["package-data"]["needlepoint.verify"]
    templates = [
        path for path in (ROOT / "verify" / "report" / "templates").iterdir() if path.is_file()
    ]
    assert len(templates) >= 3
    for path in templates:
        relative = path.relative_to(ROOT / "verify")
        assert any(relative.match(pattern) for pattern in patterns), relative


def test_import_contracts_name_every_module_of_the_reference() -> None:
    names = {path.stem for path in (ROOT / "reference").glob("*.py")} - {"__init__"}
    formats = {name for name in names if name.startswith("formats")}
    _, optimized, own = TOOLS["importlinter"]["contracts"]
    # names.py holds words and computes nothing: both sides may use them.
    others = {f"needlepoint.reference.{name}" for name in names - formats - {"names"}}
    assert set(optimized["forbidden_modules"]) == others
    assert set(own["source_modules"]) == {f"needlepoint.reference.{name}" for name in formats}
    assert others < set(own["forbidden_modules"])
