"""The header of a safetensors file, checked before the library sees the file.

The format is an 8-byte little-endian header length, a JSON header, then the tensors' bytes. Every
claim of the header is checked against the file's size, so a lie about a shape is an error and never
an allocation.
"""

from __future__ import annotations

import math
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from needlepoint.verify.base.hostile_json import RecordingError, parse_json

MAX_HEADER_BYTES: Final = 16 << 20
MAX_DIMS: Final = 8

BITS: Final[dict[str, int]] = {
    **{"BF16": 16, "F16": 16, "F32": 32, "F64": 64},
    **{"U8": 8, "I32": 32, "I64": 64},
}
"""Dtypes of recordings, and the bits of an element."""


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor as its file's header declares it, after every check."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path, bits: Mapping[str, int] = BITS) -> dict[str, HeaderEntry]:
    """Check a safetensors file against its size and return what it holds.

    Parameters
    ----------
    path
        The file.
    bits
        Dtypes that it may hold, and the bits of an element; by default those of recordings.

    Raises
    ------
    RecordingError
        Where the file is missing, truncated or corrupt, or its header lies: names the tensor, what
        came and what was expected.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise RecordingError(f"{path}: is not a regular file; expected safetensors")
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
            if length is None or length > status.st_size - 8:
                raise RecordingError(
                    f"{path}: {status.st_size} bytes are too few for a safetensors header"
                    + (f" of {length} bytes" if length is not None else "")
                    + "; the file is truncated or not safetensors"
                )
            if length > MAX_HEADER_BYTES:
                raise RecordingError(
                    f"{path}: header of {length} bytes, expected at most {MAX_HEADER_BYTES}"
                )
            raw = file.read(length)
    except OSError as error:
        raise RecordingError(f"{path}: {error.strerror}; expected a safetensors file") from error
    header = parse_json(raw, f"{path}: header")
    if not isinstance(header, dict):
        raise RecordingError(f"{path}: header is not a JSON object")
    header.pop("__metadata__", None)
    ranges: list[tuple[int, int, str]] = []
    entries: dict[str, HeaderEntry] = {}
    for name, entry in header.items():
        entries[name], begin, end = _check_entry(path, name, entry, bits)
        ranges.append((begin, end, name))
    _check_ranges(path, sorted(ranges), status.st_size - 8 - length)
    return entries


def _check_entry(
    path: Path, name: str, entry: object, bits: Mapping[str, int]
) -> tuple[HeaderEntry, int, int]:
    where = f"{path}: tensor {name[:200]!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise RecordingError(f"{where}: expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in bits:
        raise RecordingError(f"{where}: dtype {dtype!r}, expected one of {', '.join(bits)}")
    if not _is_counts(shape) or len(shape) > MAX_DIMS:
        raise RecordingError(
            f"{where}: shape {str(shape)[:100]}, expected at most {MAX_DIMS} non-negative integers"
        )
    if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise RecordingError(
            f"{where}: data_offsets {str(offsets)[:100]}, expected [begin, end] with begin <= end"
        )
    begin, end = offsets
    expected = -(-math.prod(shape) * bits[dtype] // 8)
    if end - begin != expected:
        raise RecordingError(
            f"{where}: {end - begin} bytes, expected {expected} for {dtype} of shape {shape}"
        )
    return HeaderEntry(dtype, tuple(shape)), begin, end


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )


def _check_ranges(path: Path, ranges: list[tuple[int, int, str]], size: int) -> None:
    """Require the sorted byte ranges to fill the file: no overlap, no hole, nothing outside."""
    at = 0
    for begin, end, name in ranges:
        if end > size:
            raise RecordingError(
                f"{path}: tensor {name!r} ends at byte {end} of {size}; the file is truncated or "
                "its header lies"
            )
        if begin != at:
            raise RecordingError(
                f"{path}: tensor {name!r} starts at byte {begin}, expected {at}: tensors overlap "
                "or leave a hole"
            )
        at = end
    if at != size:
        raise RecordingError(f"{path}: {size - at} bytes after the last tensor, expected none")
