"""Reading files that are not trusted: bounded reads, and JSON that may be hostile."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path
from typing import Final, NoReturn

from pydantic import JsonValue, ValidationError

MAX_JSON_DEPTH: Final = 32


class RecordingError(ValueError):
    """A recording that cannot be read or written; names the file or tensor and what to expect."""


def first_fault(error: ValidationError) -> str:
    """Return one line about the first field that a model refused: where, what came, why."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"]) or "document"
    return f"{place}: got {str(first['input'])[:80]!r}: {first['msg']}"


def is_inside(path: Path, directory: Path) -> bool:
    """Return whether a path stays in a directory, which may itself be a link, where links lead."""
    return path.resolve().is_relative_to(directory.resolve())


def file_inside(directory: Path, name: str, what: str = "recording") -> Path:
    """Return the path of a file of a directory, which may itself be a link.

    Raises
    ------
    RecordingError
        Where a link leads out of the directory.
    """
    path = directory / name
    if not is_inside(path, directory):
        raise RecordingError(f"{path}: is a link out of the {what}; expected a file in it")
    return path


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file of at most ``limit`` bytes.

    Raises
    ------
    RecordingError
        Where the file is missing, not a regular file, unreadable or larger.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise RecordingError(f"{path}: is not a regular file; expected a recording's file")
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise RecordingError(
            f"{path}: {error.strerror}; expected a recording directory as written by "
            "`needlepoint record`"
        ) from error
    if len(raw) > limit:
        raise RecordingError(f"{path}: {status.st_size} bytes, expected at most {limit}")
    return raw


def parse_json(raw: bytes, where: str) -> JsonValue:
    """Parse JSON that may be hostile.

    Parameters
    ----------
    raw
        The text.
    where
        What to call it in errors.

    Raises
    ------
    RecordingError
        For bytes that are not UTF-8, nesting deeper than :data:`MAX_JSON_DEPTH`, repeated keys,
        NaN or infinity, numbers with thousands of digits, or anything that is not JSON.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecordingError(f"{where}: byte {error.start} is not UTF-8; expected JSON") from error
    depth = 0
    # Depth is counted before parsing, so that no parser recurses on it. Strings are skipped.
    for token in re.finditer(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token.group(), 0)
        if depth > MAX_JSON_DEPTH:
            raise RecordingError(f"{where}: JSON nested deeper than {MAX_JSON_DEPTH} levels")

    def unique(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
        found: dict[str, JsonValue] = {}
        for key, value in pairs:
            if key in found:
                raise RecordingError(f"{where}: key {key[:200]!r} stands twice in one JSON object")
            found[key] = value
        return found

    def refuse(constant: str) -> NoReturn:
        raise RecordingError(f"{where}: {constant} is not a JSON number")

    try:
        value: JsonValue = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except RecordingError:
        raise
    except ValueError as error:
        raise RecordingError(f"{where}: not JSON: {error}") from error
    return value
