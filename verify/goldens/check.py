"""``needlepoint fixtures check``: every byte under ``fixtures/`` is the one that was accepted.

Faults are flipped bits, missing, renamed and unlisted files, an entry that was edited by hand, a
generator that changed, values that today's sources no longer give, and a fixture that nothing
reads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from needlepoint.verify.goldens.card import CASES
from needlepoint.verify.goldens.compute import (
    compute,
    differing,
    golden_sources,
    require_own_sources,
    runs_here,
)
from needlepoint.verify.goldens.manifest import (
    FIXTURES,
    MANIFEST_FILE,
    PROPOSED,
    CardDefinition,
    FilePin,
    Golden,
    GoldenError,
    Goldens,
    Loaded,
    load_golden,
    load_manifest,
    pin_file,
    pins_digest,
)
from needlepoint.verify.recording.manifest import RecordingError

READERS: Final = ("tests", "verify", "reference", "optimized", "benchmarks", "docs/examples")
"""Where a fixture must be named by a string for it to count as used."""


@dataclass(frozen=True)
class CheckReport:
    """What a check found."""

    fixtures: int
    tensors: int
    faults: tuple[str, ...]
    """One line each; none if everything is as accepted."""
    notes: tuple[str, ...]
    """What a reader should know and is no fault."""


def check(root: Path) -> CheckReport:
    """Check the fixtures of a checkout.

    Raises
    ------
    GoldenError
        If the manifest cannot be read.
    """
    folder = root / FIXTURES
    goldens = load_manifest(folder)
    faults: list[str] = []
    notes: list[str] = []
    tensors = 0
    if not goldens.goldens:
        faults.append(f"{folder / MANIFEST_FILE}: pins nothing; nothing was checked")
    for name, golden in sorted(goldens.goldens.items()):
        wrong = list(_file_faults(folder / name, golden))
        wrong += _history_faults(name, golden, goldens)
        tensors += sum(len(pin.tensors or ()) for pin in golden.files.values())
        if not wrong:
            wrong, said = _source_faults(root, name, golden)
            notes += said
        faults += [f"{name}: {fault}" for fault in wrong]
    faults += _unlisted(folder, goldens)
    used = named_in_sources(root, set(goldens.goldens))
    faults += [
        f"{name}: unused; no string in {', '.join(READERS)} names it, so remove it or test with it"
        for name in sorted(set(goldens.goldens) - used)
    ]
    notes += [
        f"{path.name.removesuffix(PROPOSED)}: a proposal waits in {path.relative_to(root)}"
        for path in sorted(folder.glob(f"*{PROPOSED}"))
    ]
    return CheckReport(len(goldens.goldens), tensors, tuple(faults), tuple(notes))


def named_in_sources(root: Path, names: set[str]) -> set[str]:
    """Return the names that some string in a Python file of the checkout holds."""
    found: set[str] = set()
    for place in READERS:
        for path in sorted((root / place).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            wanted = {name for name in names - found if name in text}
            if wanted:
                found |= wanted & set(_strings(ast.parse(text)))
    return found


def _strings(tree: ast.AST) -> Iterator[str]:
    """Yield string constants of a file, docstrings apart, up to a slash."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.split("/")[0]


def _file_faults(folder: Path, golden: Golden) -> Iterator[str]:
    on_disk = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    for file in sorted(on_disk - set(golden.files)):
        yield f"{file} is not in {MANIFEST_FILE}; was it renamed?"
    for file, pin in sorted(golden.files.items()):
        if file not in on_disk:
            yield f"{file} is missing"
            continue
        if (folder / file).is_symlink():
            yield f"{file} is a link; expected the file itself, so that every clone has its bytes"
            continue
        try:
            yield from _differences(file, pin, pin_file(folder / file))
        except RecordingError as error:
            yield str(error)


def _differences(file: str, pinned: FilePin, found: FilePin) -> Iterator[str]:
    if pinned.tensors is None or found.tensors is None:
        if pinned != found:
            yield f"{file} has other bytes than those accepted"
        return
    for tensor in sorted({*pinned.tensors, *found.tensors}):
        want, have = pinned.tensors.get(tensor), found.tensors.get(tensor)
        if want is None or have is None:
            yield f"{file}: tensor {tensor} is {'missing' if have is None else 'not pinned'}"
        elif (want.dtype, want.shape) != (have.dtype, have.shape):
            yield (
                f"{file}: tensor {tensor} is {have.dtype} {list(have.shape)}, accepted was "
                f"{want.dtype} {list(want.shape)}"
            )
        elif want.sha256 != have.sha256:
            yield f"{file}: tensor {tensor} has other bytes than those accepted"


def _history_faults(name: str, golden: Golden, goldens: Goldens) -> Iterator[str]:
    own = [entry for entry in goldens.history if entry.name == name]
    if not own or own[-1].sha256 != pins_digest(golden):
        yield (
            f"its entry in {MANIFEST_FILE} is not the one that was last accepted; use `needlepoint "
            "fixtures propose` and `accept`, never an editor"
        )


def _source_faults(root: Path, name: str, golden: Golden) -> tuple[list[str], list[str]]:
    """Return faults and notes about what made a fixture."""
    if golden.kind == "given":
        script = golden.generator
        if not (root / script).is_file():
            return [f"its generator {script} is missing"], []
        if golden_sources(root, golden.made_by) != golden.sources_sha256:
            return [
                f"{script} changed since this was accepted; run it and propose what it makes"
            ], []
        return [], []
    if golden.definition is None:
        return ["has no definition, so nothing can be compared with it"], []
    changed = golden_sources(root, golden.made_by) != golden.sources_sha256
    # What a card gave cannot be computed again from what is pinned, so it is replayed each time.
    if not changed and not (golden.kind == "recorded" and runs_here(root)):
        return [], []
    try:
        require_own_sources(root)
        wrong = replay(load_golden(name, root / FIXTURES))
    except GoldenError as error:
        return [f"its sources changed since it was accepted: {error}"], []
    note = f"{name}: its sources changed since it was accepted; computed again, the same"
    return [f"stale: today's sources give {fault}" for fault in wrong], (
        [note] if changed and not wrong else []
    )


def replay(loaded: Loaded) -> list[str]:
    """Return how a golden differs from what its sources give today; empty if it does not.

    Stages, rows and query bytes must be the same. Scores of a card must be within the bounds of
    both sides, and its picks those of its own scores.

    Raises
    ------
    GoldenError
        If the fixture is input data, which nothing computes.
    """
    definition = loaded.golden.definition
    if definition is None:
        raise GoldenError(f"a {loaded.golden.kind} golden without a definition: nothing to compute")
    if isinstance(definition, CardDefinition):
        return CASES[definition.cases].faults(loaded.tensors)
    changed = differing(loaded.tensors, compute(definition))
    return [f"other bytes of {', '.join(changed)}"] if changed else []


def _unlisted(folder: Path, goldens: Goldens) -> Iterator[str]:
    """Yield tensor files and removed fixtures that the manifest does not account for."""
    for path in sorted(folder.rglob("*.safetensors")):
        name = path.relative_to(folder).parts[0]
        if name not in goldens.goldens and not name.endswith(PROPOSED):
            yield f"{path.relative_to(folder)}: no fixture of {MANIFEST_FILE} holds this file"
    last = {entry.name: entry for entry in goldens.history}
    for name, entry in sorted(last.items()):
        if entry.sha256 is not None and name not in goldens.goldens:
            yield f"{name}: was accepted and is no longer in {MANIFEST_FILE}; remove it by `accept`"
