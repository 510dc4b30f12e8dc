"""Safetensors files: tensors read slice by slice, and a writer that streams.

The header is checked first (``safetensors_header.py``); tensors are read by the library. The writer
is our own because the library's needs every tensor in memory at once, and index scores of a long
prompt do not fit; it orders tensors as the library does, so equal tensors give equal bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from needlepoint.verify.base.hostile_json import RecordingError
from needlepoint.verify.base.stage_tensors import DTYPE_NAMES
from needlepoint.verify.recording.safetensors_header import MAX_DIMS as MAX_DIMS
from needlepoint.verify.recording.safetensors_header import MAX_HEADER_BYTES as MAX_HEADER_BYTES
from needlepoint.verify.recording.safetensors_header import HeaderEntry as HeaderEntry
from needlepoint.verify.recording.safetensors_header import read_header as read_header

DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_CHUNK_BYTES: Final = 64 << 20


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
    if dtype not in DTYPE_NAMES:
        raise RecordingError(f"tensor {name}: dtype {dtype}, expected one of {', '.join(DTYPES)}")
    return DTYPE_NAMES[dtype]


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
