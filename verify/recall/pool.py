"""What recall prompts are made of: passages, facts and questions, as hidden states and as text.

Each passage, fact and question was encoded by itself, so a prompt is put together from rows. A
pool may come from anyone and is read as a recording is: sizes first, then tensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final, Literal

import torch
from pydantic import Field, JsonValue, ValidationError
from torch import Tensor

from needlepoint.verify.base.hostile_json import file_inside
from needlepoint.verify.inputs.checks import tensor_digest
from needlepoint.verify.inputs.load import mini_directory
from needlepoint.verify.recording.file import read_header, read_tensor
from needlepoint.verify.recording.manifest import (
    FileName,
    ManifestPart,
    RecordingError,
    first_fault,
    parse_json,
    read_bounded,
)
from needlepoint.verify.recording.recording import open_recording

SHIPPED: Final = "recall"
MAX_MANIFEST_BYTES: Final = 64 << 20
MAX_ROWS: Final = 1 << 22
_CHECK_ROWS: Final = 1 << 12

Tokens = Annotated[int, Field(ge=1, le=1 << 20)]


class TextRecord(ManifestPart):
    """Tokens and text of a passage."""

    tokens: Tokens
    text: str


class FactRecord(ManifestPart):
    """One fact, its question, and where its answer stands."""

    text: str
    question: str
    answer: str
    group: int
    tokens: Tokens
    question_tokens: Tokens
    answer_span: tuple[int, int]
    """Tokens of the fact, half open."""


class PoolManifest(ManifestPart):
    """``manifest.json`` of a pool."""

    schema_: Literal["needlepoint.passages/1"] = Field(alias="schema")
    width: Annotated[int, Field(ge=1, le=1 << 16)]
    mini: tuple[TextRecord, ...] = ()
    """Passages whose states are those of the shipped recording, in its order."""
    passages: tuple[TextRecord, ...]
    facts: tuple[FactRecord, ...]
    files: dict[FileName, dict[str, tuple[int, int]]]
    """Tensors of each file: ``passages`` in order of files, ``facts`` and ``questions`` once."""
    sha256: JsonValue = None
    source: JsonValue = None
    encoder: JsonValue = None
    generator: JsonValue = None
    created: JsonValue = None
    versions: JsonValue = None


@dataclass(frozen=True)
class PoolFact:
    """One fact of a pool, and the rows of the pool's states that it and its question have."""

    record: FactRecord
    rows: range
    question: range


@dataclass(frozen=True)
class Pool:
    """Passages and facts.

    ``name`` is ``recall`` for the shipped one, else its folder; ``states`` are bf16
    ``[rows, width]``, of which each passage and fact has a range; ``sha256`` is theirs.
    """

    name: str
    states: Tensor
    passages: tuple[range, ...]
    texts: tuple[str, ...]
    facts: tuple[PoolFact, ...]
    sha256: str

    @property
    def passage_tokens(self) -> int:
        """Tokens of all passages."""
        return sum(map(len, self.passages))


def shipped_folder() -> Path:
    """Return the folder of the shipped pool and indexer.

    Raises
    ------
    ValueError
        Where the package was installed without it.
    """
    path = Path(str(files("needlepoint.fixtures").joinpath(SHIPPED)))
    if not path.is_dir():
        raise ValueError(f"recall fixtures: {path} is missing; install the package again")
    return path


def load_pool(folder: Path | None = None) -> Pool:
    """Load a pool: the shipped one, or a folder written by ``fixtures/make_recall.py``.

    Raises
    ------
    RecordingError
        Where a file is missing, corrupt or lying, tensors and manifest do not agree, or a state is
        not finite.
    """
    directory = shipped_folder() if folder is None else folder
    manifest = _manifest(directory)
    joined = _states(directory, manifest)
    borrowed, passages, facts, questions = _lengths(manifest)
    at = iter(_ranges([*borrowed, *passages, *facts, *questions]))
    own = tuple(next(at) for _ in [*borrowed, *passages])
    fact_rows = [next(at) for _ in facts]
    return Pool(
        name=SHIPPED if folder is None else str(folder),
        states=joined,
        passages=own,
        texts=tuple(record.text for record in (*manifest.mini, *manifest.passages)),
        facts=tuple(
            PoolFact(record, rows, next(at))
            for record, rows in zip(manifest.facts, fact_rows, strict=True)
        ),
        sha256=tensor_digest([joined]),
    )


def _lengths(manifest: PoolManifest) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return tokens of borrowed passages, passages, facts and questions, in the order of rows."""
    return (
        [record.tokens for record in manifest.mini],
        [record.tokens for record in manifest.passages],
        [record.tokens for record in manifest.facts],
        [record.question_tokens for record in manifest.facts],
    )


def _states(directory: Path, manifest: PoolManifest) -> Tensor:
    """Return all rows as one tensor; beside it no more than the files' own rows is held."""
    parts: dict[str, list[Tensor]] = {"passages": [], "facts": [], "questions": []}
    for file, declared in manifest.files.items():
        path = file_inside(directory, file, "pool")
        header = read_header(path)
        for name, shape in declared.items():
            entry = header.get(name)
            if name not in parts or entry is None or (entry.dtype, entry.shape) != ("BF16", shape):
                raise RecordingError(
                    f"{path}: tensor {name[:80]!r} is {entry}, expected BF16 {list(shape)} and one "
                    "of passages, facts, questions"
                )
            parts[name].append(read_tensor(path, name))
    borrowed, *lengths = _lengths(manifest)
    for (name, tensors), wanted in zip(parts.items(), lengths, strict=True):
        other = any(rows.shape[1:] != (manifest.width,) for rows in tensors)
        if other or sum(map(len, tensors)) != sum(wanted):
            raise RecordingError(
                f"{directory}: {name} have {[list(rows.shape) for rows in tensors]} states, the "
                f"manifest needs {[sum(wanted), manifest.width]}"
            )
    states = [torch.empty(0, manifest.width, dtype=torch.bfloat16)]
    if borrowed:
        states.append(_mini_states(sum(borrowed), manifest.width))
    states += [rows for tensors in parts.values() for rows in tensors]
    # Part by part: a check of all rows at once holds several copies of them.
    if not all(
        bool(torch.isfinite(r).all()) for rows in states for r in torch.split(rows, _CHECK_ROWS)
    ):
        raise RecordingError(f"{directory}: hidden states are not finite; make the pool again")
    return torch.cat(states)


def _manifest(directory: Path) -> PoolManifest:
    path = file_inside(directory, "manifest.json", "pool")
    value = parse_json(read_bounded(path, MAX_MANIFEST_BYTES), str(path))
    try:
        manifest = PoolManifest.model_validate_json(json.dumps(value))
    except ValidationError as error:
        raise RecordingError(f"{path}: {first_fault(error)}") from error
    if sum(r.tokens for r in manifest.passages) > MAX_ROWS:
        raise RecordingError(f"{path}: more than {MAX_ROWS} tokens of passages")
    for record in manifest.facts:
        first, stop = record.answer_span
        if not 0 <= first < stop <= record.tokens or record.answer not in record.text:
            raise RecordingError(
                f"{path}: fact {record.text[:60]!r}: answer {record.answer[:20]!r} at tokens "
                f"{first} to {stop} of {record.tokens}; expected a part of the fact"
            )
    return manifest


def _mini_states(count: int, width: int) -> Tensor:
    hidden = open_recording(mini_directory()).tensor("input")
    if hidden.shape != (count, width):
        raise RecordingError(
            f"the shipped recording has {list(hidden.shape)} states, the pool borrows "
            f"{[count, width]}"
        )
    return hidden


def _ranges(lengths: list[int]) -> list[range]:
    found, start = [], 0
    for length in lengths:
        found.append(range(start, start + length))
        start += length
    return found
