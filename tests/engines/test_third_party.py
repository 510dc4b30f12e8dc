"""The example package: installed as its pyproject says, found by name, judged, and able to fail."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

Cli = Callable[..., CompletedProcess[str]]
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "mykernel"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Lay the package out as an installer does: its module, and metadata with its entry points."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    site = tmp_path / "site"
    info = site / f"mykernel-{project['project']['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mykernel\nVersion: 0.1\n")
    lines = []
    for group, points in project["project"]["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for module in project["tool"]["setuptools"]["py-modules"]:
        shutil.copy(EXAMPLE / f"{module}.py", site)
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "mykernel", raising=False)
    return site


def run(cli: Cli) -> CompletedProcess[str]:
    return cli(
        *("verify", "--candidate", "mykernel:pool", "--input", "synthetic"),
        *("--tokens", "400", "--layers", "1", "--quiet"),
    )


def test_it_is_found_and_judged(cli: Cli, installed: Path) -> None:
    done = run(cli)
    assert (done.returncode, done.stdout) == (0, "match: 1 of 1 stages compared, 1 candidate\n")


def test_its_faults_are_found(cli: Cli, installed: Path) -> None:
    file = installed / "mykernel.py"
    file.write_text(file.read_text().replace("(score + ape)", "score"))
    done = run(cli)
    assert done.returncode == 1
    assert re.match(r"differ: layer 1 main.pooled, request \d position 127 ", done.stdout)


def test_it_is_thirty_lines() -> None:
    lines = (EXAMPLE / "mykernel.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 30


def test_without_it_the_name_is_unknown(cli: Cli) -> None:
    done = run(cli)
    assert done.returncode == 2
    assert "candidate 'mykernel:pool'" in done.stderr
