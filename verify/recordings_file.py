"""Safetensors files: a header check that trusts nothing, and a writer that streams.

The format is an 8-byte little-endian header length, a JSON header, then the tensors' bytes. Every
claim of the header is checked against the file's size before the library sees the file, so a lie
about a shape is an error and never an allocation. Tensors are read by the library, slice by slice.
The writer is our own because the library's needs every tensor in memory at once, and index scores
of a long prompt do not fit; it orders tensors as the library does, so equal tensors give equal
bytes.
"""

from __future__ import annotations

import json
import math
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from needlepoint.verify.manifest import RecordingError, parse_json

MAX_HEADER_BYTES: Final = 16 << 20
MAX_DIMS: Final = 8

DTYPES: Final[dict[str, torch.dtype]] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_BITS: Final = {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK_BYTES: Final = 64 << 20


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor as its file's header declares it, after every check."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written: its header, and its values in consecutive blocks of rows."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[Tensor]]


def tensor_source(tensor: Tensor) -> TensorSource:
    """Return the source of a tensor that is in memory."""
    return TensorSource(tensor.dtype, tuple(tensor.shape), lambda: (tensor,))


def dtype_name(dtype: torch.dtype, name: str) -> str:
    """Return the safetensors name of a dtype.

    Raises
    ------
    RecordingError
        For a dtype that recordings do not hold; ``name`` is the tensor to blame.
    """
    if dtype not in _NAMES:
        raise RecordingError(f"tensor {name}: dtype {dtype}, expected one of {', '.join(DTYPES)}")
    return _NAMES[dtype]


def read_header(path: Path, bits: Mapping[str, int] = _BITS) -> dict[str, HeaderEntry]:
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


def read_tensor(path: Path, name: str, rows: slice | None = None) -> Tensor:
    """Return one tensor, or a range of its rows, of a file that :func:`read_header` accepted.

    Raises
    ------
    RecordingError
        Where the file no longer is what it was.
    """
    try:
        with safe_open(path, framework="pt") as file:
            if rows is None:
                return cast(Tensor, file.get_tensor(name))
            return cast(Tensor, file.get_slice(name)[rows.start : rows.stop])
    except (SafetensorError, OSError) as error:
        raise RecordingError(f"{path}: tensor {name}: {error}") from error


def write_tensors(path: Path, tensors: Mapping[str, TensorSource]) -> None:
    """Write a safetensors file, streaming each tensor block by block.

    Raises
    ------
    RecordingError
        Where blocks do not add up to the declared shape and dtype, or the disk refuses the bytes.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, dict[str, object]] = {}
    begin = 0
    for name in names:
        source = tensors[name]
        end = begin + math.prod(source.shape) * source.dtype.itemsize
        header[name] = {
            "dtype": dtype_name(source.dtype, name),
            "shape": list(source.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    try:
        with path.open("xb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in names:
                source, written = tensors[name], 0
                for block in source.blocks():
                    if block.dtype != source.dtype:
                        raise RecordingError(
                            f"tensor {name}: a block of {block.dtype}, expected {source.dtype}"
                        )
                    written += sum(file.write(piece) for piece in byte_pieces(block))
                expected = math.prod(source.shape) * source.dtype.itemsize
                if written != expected:
                    raise RecordingError(
                        f"tensor {name}: {written} bytes, expected {expected} for shape "
                        f"{list(source.shape)}"
                    )
    except OSError as error:
        raise RecordingError(f"{path}: cannot write: {error.strerror}") from error


def byte_pieces(block: Tensor) -> Iterable[memoryview]:
    """Yield the bytes of a tensor, elements in order, in pieces."""
    flat = block.detach().cpu().contiguous().reshape(-1)
    if flat.numel() == 0:
        return
    if flat.stride(0) != 1:  # one element may have any stride, and a view of its bytes needs 1
        flat = flat.clone(memory_format=torch.contiguous_format)
    flat = flat.view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        yield memoryview(flat[start : start + _CHUNK_BYTES].numpy().data)


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
