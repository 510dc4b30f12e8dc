"""A checkout with small fixtures of its own: git, the sources by link, one golden accepted."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from needlepoint.verify.goldens.accept import CI_VARIABLES, accept
from needlepoint.verify.goldens.propose import InputChoice, propose_given, propose_reference

ROOT = Path(__file__).parents[2]
SOURCES = ("reference", "optimized", "verify")


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(
        ["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True
    )


@pytest.fixture(scope="session")
def accepted_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkout whose fixtures ``states`` and ``tiny-one`` were accepted and committed."""
    root = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        (root / name).symlink_to(ROOT / name)
    (root / "fixtures").mkdir()
    (root / "tests").mkdir()
    (root / "fixtures" / "make_states.py").write_text("# makes fixtures/states\n")
    (root / "tests" / "test_it.py").write_text("NAMES = ('states', 'tiny-one', 'card')\n")
    (root / ".gitignore").write_text("fixtures/*.proposed/\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "sources")
    made = root.with_name("made")
    made.mkdir()
    shutil.copy(ROOT / "fixtures/reference-official/golden.safetensors", made)
    choice = InputChoice("synthetic:small", None, (0,), 24, None, "bf16")
    propose_given(root, "states", made, "fixtures/make_states.py")
    propose_reference(root, "tiny-one", choice, ("index.stored", "main.stored", "index.topk"))
    with pytest.MonkeyPatch.context() as patch:
        for variable in CI_VARIABLES:
            patch.delenv(variable, raising=False)
        accept(root, ["states", "tiny-one"], "the first ones of this test")
    git(root, "add", ".")
    git(root, "commit", "-qm", "fixtures")
    return root


@pytest.fixture
def checkout(accepted_checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the accepted checkout, outside continuous integration."""
    for variable in CI_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    root = tmp_path / "checkout"
    shutil.copytree(accepted_checkout, root, symlinks=True)
    return root
