"""The built wheel works by itself: from an empty directory, with nothing of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the tracked sources and unpack it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if name.startswith((".typing", "tests", "docs")):
            continue
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(out), str(source)], check=True, capture_output=True)
    site = out / "site"
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def run(site: Path, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=where,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_verify_runs_from_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    found = run(
        installed,
        tmp_path,
        *("-m", "needlepoint.verify", "--tokens", "700", "--candidate", "emulated:fused-fp8"),
        *("--html", str(installed.parent / "report.html"), "--force"),
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("match:")
    assert list(tmp_path.iterdir()) == []
    assert (installed.parent / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_the_wheel_is_what_ran(installed: Path, tmp_path: Path) -> None:
    code = (
        "import needlepoint.verify as v, needlepoint.fixtures as f; print(v.__file__, f.__file__)"
    )
    found = run(installed, tmp_path, "-c", code)
    assert found.returncode == 0, found.stderr
    assert all(path.startswith(str(installed)) for path in found.stdout.split())


def test_site_packages_gains_one_name(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == {"needlepoint"}
