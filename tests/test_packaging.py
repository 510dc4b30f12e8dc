"""The wheel: built without a warning, the same files as the tree, and enough by itself."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
FOLDERS = ("reference", "optimized", "verify", "fixtures", "benchmarks")
HEAVY = ("numpy", "scipy", "pydantic", "typer", "rich", "safetensors", "jinja2", "junitparser")


@dataclass(frozen=True)
class Wheel:
    """A wheel built from a copy of the tracked sources, unpacked, and what the build printed."""

    site: Path
    said: str

    def files(self) -> set[str]:
        """Return the files of the package."""
        paths = (path for path in (self.site / "needlepoint").rglob("*") if path.is_file())
        return {path.relative_to(self.site / "needlepoint").as_posix() for path in paths}

    def run(self, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python with the wheel and nothing of the checkout."""
        environment = {**os.environ, "PYTHONPATH": str(self.site), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=where,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )


def tracked() -> list[str]:
    """Return the files of a clean clone, with those that are not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    return sorted({name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in tracked():
        if name.startswith((".typing", "tests")):
            continue
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [*build, "--wheel-dir", str(out), str(source)],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    (built,) = out.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(out / "site")
    return Wheel(out / "site", done.stdout + done.stderr)


def test_the_build_prints_no_warning(wheel: Wheel) -> None:
    lines = wheel.said.splitlines()
    assert any("needlepoint/verify/cli/app.py" in line for line in lines), "nothing was printed"
    warned = [line for line in lines if re.search(r"warn|deprecat|would be ignored", line, re.I)]
    assert not warned


def test_the_wheel_holds_what_the_tree_holds(wheel: Wheel) -> None:
    expected = {name for name in tracked() if name.startswith(tuple(f"{f}/" for f in FOLDERS))}
    expected.remove("verify/face/__init__.py")  # it is the package's own module
    assert wheel.files() == expected | {"__init__.py"}


def test_site_packages_gains_one_name(wheel: Wheel) -> None:
    names = {path.name for path in wheel.site.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"needlepoint"}


def test_the_package_page_says_who_it_is_for(wheel: Wheel) -> None:
    (path,) = wheel.site.glob("*.dist-info/METADATA")
    found = email.message_from_string(path.read_text())
    classifiers = found.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    assert not [one for one in classifiers if one.startswith("License")]  # the expression says it
    assert found["License-Expression"] == "Apache-2.0"
    page = found.get_payload()
    assert isinstance(page, str)
    assert "needlepoint.check(MyKernel(), tokens=600)" in page
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert not [link for link in links if not link.startswith("https://")]  # a page has no folders


def test_verify_runs_from_an_empty_directory(wheel: Wheel, tmp_path: Path) -> None:
    report = wheel.site.parent / "report.html"
    found = wheel.run(
        tmp_path,
        *("-m", "needlepoint.verify", "--tokens", "700", "--candidate", "emulated:fused-fp8"),
        *("--html", str(report), "--force"),
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("match:")
    assert list(tmp_path.iterdir()) == []
    assert report.read_text().startswith("<!DOCTYPE html>")


def test_three_lines_lead_to_a_verdict(wheel: Wheel, tmp_path: Path) -> None:
    for name in ("my_candidate.py", "three_lines.py"):
        (tmp_path / name).write_text((ROOT / "docs" / "examples" / name).read_text())
    code = (
        "import three_lines as t, needlepoint as n, needlepoint.fixtures as f; "
        "print(t.result.summary()); print(n.__file__, n.verify.__file__, f.__file__)"
    )
    found = wheel.run(tmp_path, "-c", code)
    assert found.returncode == 0, found.stderr
    said, places = found.stdout.splitlines()
    assert said.startswith("match: ")
    assert all(path.startswith(str(wheel.site)) for path in places.split())


def test_the_reference_needs_torch_alone(wheel: Wheel, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        f"for name in {HEAVY}: sys.modules[name] = None\n"  # an import of it raises
        "import needlepoint.reference.layer, needlepoint.reference.formats\n"
        "import needlepoint\n"
        "print(sorted(m for m in sys.modules if m.startswith('needlepoint.') and "
        "not m.startswith('needlepoint.reference')))\n"
    )
    found = wheel.run(tmp_path, "-c", code)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "[]\n"


def test_every_folder_with_sources_is_a_listed_package() -> None:
    listed = set(TOOLS["setuptools"]["packages"])
    on_disk = {
        "needlepoint." + ".".join(Path(name).parent.parts)
        for name in tracked()
        if name.startswith(FOLDERS) and Path(name).suffix in {".py", ".cpp", ".cuh", ".h"}
    }
    on_disk.remove("needlepoint.verify.face")  # it is the package's own module
    assert listed >= on_disk | {"needlepoint"}
    for name in listed - on_disk - {"needlepoint"}:  # folders of data
        assert (ROOT / Path(*name.split(".")[1:])).is_dir()


def test_typing_view_points_at_the_same_folders() -> None:
    for name, folder in TOOLS["setuptools"]["package-dir"].items():
        place = Path(*name.split("."))
        place = place / "__init__.py" if name == "needlepoint" else place
        folder = f"{folder}/__init__.py" if name == "needlepoint" else folder
        assert (ROOT / ".typing" / place).resolve() == (ROOT / folder).resolve()


@pytest.mark.parametrize("side", ["reference", "optimized", "verify"])
def test_import_contracts_name_every_room(side: str) -> None:
    named: set[str] = set()
    for contract in TOOLS["importlinter"]["contracts"]:
        for container in contract.get("containers", [""]):
            for layer in contract.get("layers", ()):
                for part in re.split(r"[|:]", layer):
                    named.add(f"{container}.{part.strip()}".removeprefix("."))
    rooms = {
        f"needlepoint.{side}.{Path(name).parts[1].removesuffix('.py')}"
        for name in tracked()
        if name.startswith(f"{side}/") and name.endswith(".py")
    }
    without = ("__init__", "__main__", "face")
    free = {f"needlepoint.{side}.{name}" for name in without}
    assert rooms - free <= named
