"""``needlepoint.goldens/1``: one manifest that pins every file under ``fixtures/``.

A fixture is a folder ``fixtures/NAME``. The manifest ``fixtures/goldens.json`` pins the bytes of
each of its tensors, and says what made it. It is written by ``accept`` alone.

Three kinds
-----------
``given``
    Input data, made by a script of its own. Nothing is compared with it.
``reference``
    What the reference computed from an input. Proposing one runs the reference and nothing else.
``recorded``
    What a card gave, compared with the emulation alone: stages that a candidate left in a run that
    was a match, or every kernel variant over drawn cases.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, JsonValue, ValidationError
from torch import Tensor

from needlepoint.verify.recording.file import byte_pieces, read_header, read_tensor
from needlepoint.verify.recording.manifest import (
    FileName,
    ManifestPart,
    PoolRecord,
    QueryRecord,
    first_fault,
    parse_json,
    read_bounded,
)
from needlepoint.verify.schema.base import Contract, Sha256

SCHEMA: Final = "needlepoint.goldens/1"
FIXTURES: Final = "fixtures"
MANIFEST_FILE: Final = "goldens.json"
TENSORS_FILE: Final = "golden.safetensors"
PROPOSED: Final = ".proposed"
"""Ending of the folder that a proposal stands in, beside the one that it would replace."""
MAX_MANIFEST_BYTES: Final = 8 << 20

Kind = Literal["given", "reference", "recorded"]
Cases = Literal["stores", "scores"]
"""Every store and query variant byte for byte; index scores and picks of every unit."""
_NAME = r"^[a-z0-9][a-z0-9-]{0,63}$"
Name = Annotated[str, Field(pattern=_NAME)]
Text = Annotated[str, Field(min_length=1, max_length=2000)]


class TensorPin(ManifestPart):
    """One tensor: its header and the SHA-256 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: Sha256


class FilePin(ManifestPart):
    """One file: the tensors of a safetensors file, the digest of any other."""

    tensors: dict[str, TensorPin] | None = None
    sha256: Sha256 | None = None


class Definition(ManifestPart):
    """Which input a golden is computed from or recorded over, and which stages are kept."""

    input: str
    requests: tuple[int, ...]
    """Tokens of each request."""
    layers: tuple[int, ...]
    seed: int
    input_sha256: Sha256
    keep: tuple[str, ...]
    """Stages as ``index.stored``."""
    model: str | None = None
    contract: Contract | None = None
    """Arithmetic of a reference golden."""
    candidate: str | None = None
    """Who was recorded."""
    emulation: str | None = None
    """The only thing that a recorded golden is compared with."""


class CardDefinition(ManifestPart):
    """Which drawn cases the kernels of a card were run on; they follow from the sources."""

    cases: Cases


class LayerForm(ManifestPart):
    """How the stored rows and queries of one layer are laid out."""

    pools: dict[str, PoolRecord] = Field(default_factory=dict)
    query: QueryRecord | None = None


class Golden(ManifestPart):
    """One fixture."""

    kind: Kind
    generator: str
    """Script that made it, from the root of the checkout, or the command."""
    sources_sha256: Sha256
    """Of the script, or of the sources that a reference or emulation is computed by."""
    versions: dict[str, str]
    device: str
    """``cpu`` or the card's product name."""
    files: dict[FileName, FilePin]
    definition: Definition | CardDefinition | None = None
    layers: dict[str, LayerForm] = Field(default_factory=dict)
    environment: dict[str, JsonValue] | None = None
    """Of the run on the card."""
    kernel: dict[str, JsonValue] | None = None
    """What ran there: sources, variant."""

    @property
    def made_by(self) -> str:
        """What names its sources: the script of input data, the kernel cases, or the kind."""
        if self.kind == "given":
            return self.generator
        if isinstance(self.definition, CardDefinition):
            return self.definition.cases
        return self.kind


class Accepted(ManifestPart):
    """One line of history: why a fixture is what it is."""

    date: str
    name: Name
    reason: Text
    review: str
    sha256: Sha256 | None = None
    """Digest of the fixture's pins; absent where the fixture was removed."""


class Goldens(ManifestPart):
    """The whole of ``goldens.json``."""

    schema_: Literal["needlepoint.goldens/1"] = Field(default=SCHEMA, alias="schema")
    goldens: dict[Name, Golden] = Field(default_factory=dict)
    history: tuple[Accepted, ...] = ()


class GoldenError(ValueError):
    """A fixture or its manifest is not what it must be; says what to do."""


@dataclass(frozen=True)
class Loaded:
    """A fixture whose every tensor has the pinned bytes."""

    golden: Golden
    tensors: Mapping[str, Tensor]


def load_golden(name: str, folder: Path | None = None) -> Loaded:
    """Return a fixture after checking the digest of every tensor.

    Parameters
    ----------
    name
        Its folder under ``fixtures/``.
    folder
        The ``fixtures`` folder; default the shipped one.

    Raises
    ------
    GoldenError
        If there is no such fixture, or a byte of it is not what the manifest pins.
    """
    root = Path(str(files("needlepoint.fixtures"))) if folder is None else folder
    goldens = load_manifest(root)
    if name not in goldens.goldens:
        known = ", ".join(sorted(goldens.goldens)) or "none"
        raise GoldenError(f"golden {name!r}: not in {root / MANIFEST_FILE}; it has {known}")
    golden = goldens.goldens[name]
    tensors: dict[str, Tensor] = {}
    for file, pin in golden.files.items():
        path = root / name / file
        if pin.tensors is None:
            continue
        header = read_header(path)
        for tensor, pinned in pin.tensors.items():
            if tensor not in header:
                raise GoldenError(f"{path}: tensor {tensor} is missing")
            tensors[tensor] = read_tensor(path, tensor)
            if digest_of(tensors[tensor]) != pinned.sha256:
                raise GoldenError(f"{path}: tensor {tensor} has other bytes than {MANIFEST_FILE}")
    return Loaded(golden, tensors)


def load_manifest(folder: Path) -> Goldens:
    """Read the manifest of a ``fixtures`` folder; an absent one is empty.

    Raises
    ------
    GoldenError
        If it is not ``needlepoint.goldens/1``.
    """
    path = folder / MANIFEST_FILE
    if not path.exists():
        return Goldens()
    value = parse_json(read_bounded(path, MAX_MANIFEST_BYTES), str(path))
    try:
        return Goldens.model_validate_json(json.dumps(value))
    except ValidationError as error:
        raise GoldenError(f"{path}: {first_fault(error)}; expected schema {SCHEMA}") from error


def manifest_bytes(goldens: Goldens) -> bytes:
    """Return the text of a manifest: keys in order, so that a diff shows what changed."""
    value = goldens.model_dump(by_alias=True, exclude_none=True, mode="json")
    value["goldens"] = dict(sorted(value["goldens"].items()))
    return (json.dumps(value, indent=1) + "\n").encode()


def pins_digest(golden: Golden) -> str:
    """Return the digest of everything that is pinned about a fixture."""
    value = golden.model_dump(by_alias=True, mode="json")
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def pin_folder(folder: Path) -> dict[str, FilePin]:
    """Return the pins of every file in a fixture's folder.

    Raises
    ------
    GoldenError
        If the folder holds anything but plain files of plain names.
    """
    found: dict[str, FilePin] = {}
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_file():
            raise GoldenError(f"{path}: expected plain files in a fixture's folder and no folders")
        found[path.name] = pin_file(path)
    return found


def pin_file(path: Path) -> FilePin:
    """Return the pins of one file."""
    if path.suffix != ".safetensors":
        return FilePin(sha256=hashlib.sha256(path.read_bytes()).hexdigest())
    pins = {
        name: TensorPin(
            dtype=entry.dtype, shape=entry.shape, sha256=digest_of(read_tensor(path, name))
        )
        for name, entry in sorted(read_header(path).items())
    }
    return FilePin(tensors=pins)


def digest_of(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes."""
    digest = hashlib.sha256()
    for piece in byte_pieces(tensor):
        digest.update(piece)
    return digest.hexdigest()


def sources_digest(root: Path, patterns: Iterable[str]) -> str:
    """Return the SHA-256 over source files, names included.

    Raises
    ------
    GoldenError
        If a pattern names no file.
    """
    digest = hashlib.sha256()
    for pattern in patterns:
        paths = sorted(root.glob(pattern))
        if not paths:
            raise GoldenError(f"{root / pattern}: no such source file")
        for path in paths:
            text = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()


def check_name(name: str) -> None:
    """Raise ``GoldenError`` unless a fixture's folder can have this name."""
    if re.fullmatch(_NAME, name) is None:
        raise GoldenError(
            f"golden {name!r}: expected a name of lower-case letters, digits and hyphens"
        )


def find_root(root: Path | None) -> Path:
    """Return the root of the checkout whose fixtures are meant.

    Raises
    ------
    GoldenError
        If there is no ``fixtures`` folder there, or, without a root, at or above this folder.
    """
    if root is not None:
        if not (root / FIXTURES).is_dir():
            raise GoldenError(f"--root {root}: has no folder {FIXTURES}/; name a checkout's root")
        return root.resolve()
    here = Path.cwd()
    for place in (here, *here.parents):
        if (place / FIXTURES / MANIFEST_FILE).is_file():
            return place
    raise GoldenError(
        f"{here}: no {FIXTURES}/{MANIFEST_FILE} here or above; go to a checkout, or name one with "
        "--root"
    )
