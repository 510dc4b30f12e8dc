"""The key side of the emulation as compiled code, for comparisons of millions of rows.

``pooling.py``, ``rows.py`` and ``narrow.py`` define the bytes; ``csrc/emulation.cpp`` says them a
second time with ``std::fma`` and is held to them by the tests. It is compiled once for this machine
with the C++ compiler and kept in the kernel cache.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from needlepoint.optimized.build.compile import cache_folder
from needlepoint.optimized.build.toolchain import CSRC, BuildError
from needlepoint.optimized.emulation.exact32 import F32
from needlepoint.optimized.emulation.narrow import StoredRows
from needlepoint.optimized.emulation.pages import LAYOUTS
from needlepoint.optimized.emulation.parallel import over_blocks

FLAGS = ("-std=c++20", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno")
_FORMATS = {"index-bf16": 0, "main-bf16": 0, "index-fp8": 1, "index-fp4": 2, "main-584": 3}
_BLOCK = 512  # rows that one thread takes at a time


@dataclass(frozen=True)
class Parameters:
    """Parameters of one compressor: as ``StoreWeights``, on the CPU.

    Attributes
    ----------
    ratio
        4 or 128.
    ape
        fp32 ``[ratio, c * head_dim]``, multiplied by log2 e.
    norm_weight
        fp32 ``[head_dim]``.
    rope_table
        fp32 ``[positions, 32, 2]``.
    norm_eps
        Epsilon of the norm.
    """

    ratio: int
    ape: Tensor
    norm_weight: Tensor
    rope_table: Tensor
    norm_eps: float


def compute_rows(
    kv: Tensor,
    score: Tensor,
    tokens: npt.NDArray[np.int64],
    entries: npt.NDArray[np.int64],
    given: Parameters,
) -> F32:
    """Return the last rows before the store, float32 ``[windows, head_dim]`` (S1 to S6).

    Parameters
    ----------
    kv, score
        fp32 or bf16 ``[rows, c * head_dim]`` on the CPU, with equal strides.
    tokens
        int64 ``[windows, slots]``: row of each slot in ``kv`` and ``score``, in time order;
        negative ones are masked. Any row may stand in any slot.
    entries
        int64 ``[windows]``: entry, which stands at position ``entry * ratio``.
    given
        Parameters.
    """
    dim = given.norm_weight.shape[0]
    out = np.empty((len(entries), dim), np.float32)
    tokens, entries = np.ascontiguousarray(tokens), np.ascontiguousarray(entries)
    function = _library().needlepoint_rows

    def block(first: int) -> None:
        function(
            given.ratio,
            dim,
            int(kv.dtype == torch.bfloat16),
            ctypes.c_void_p(kv.data_ptr()),
            ctypes.c_void_p(score.data_ptr()),
            ctypes.c_int64(kv.stride(0)),
            _address(tokens),
            _address(entries),
            ctypes.c_void_p(given.ape.data_ptr()),
            ctypes.c_void_p(given.norm_weight.data_ptr()),
            ctypes.c_void_p(given.rope_table.data_ptr()),
            ctypes.c_float(given.norm_eps),
            ctypes.c_int64(first),
            ctypes.c_int64(min(_BLOCK, len(entries) - first)),
            _address(out[first:]),
        )

    over_blocks(block, range(0, len(entries), _BLOCK))
    return out


def encode_rows(layout: str, rows: F32) -> StoredRows:
    """Return the bytes of rows float32 ``[n, head_dim]`` in a page layout (S7)."""
    widths = LAYOUTS[layout]
    values = np.empty((len(rows), widths.value_bytes), np.uint8)
    scales = np.empty((len(rows), widths.scale_bytes), np.uint8)
    function = _library().needlepoint_encode

    def block(first: int) -> None:
        count = min(_BLOCK, len(rows) - first)
        function(
            _FORMATS[layout],
            rows.shape[1],
            ctypes.c_int64(count),
            _address(rows[first:]),
            _address(values[first:]),
            _address(scales[first:]),
        )

    over_blocks(block, range(0, len(rows), _BLOCK))
    return StoredRows(values, scales)


def _address(array: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(compiled_library()))


def compiled_library(compiler: str = "c++") -> Path:
    """Return the shared library, compiled if this machine's cache does not hold it.

    Raises
    ------
    BuildError
        If there is no C++ compiler, or it refuses the source.
    """
    source = CSRC / "emulation.cpp"
    machine = Path("/proc/cpuinfo")
    kinds = machine.read_text(errors="replace").partition("\n\n")[0] if machine.exists() else ""
    flags = "".join(line for line in kinds.splitlines() if line.startswith("flags"))
    parts = (source.read_text(), *FLAGS, compiler, flags)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    root = cache_folder()
    library = root / f"emulation-{key}.so"
    if library.is_file():
        return library
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root, prefix=".emulation-") as stage:
        target = Path(stage) / library.name
        command = [compiler, *FLAGS, "-shared", "-fPIC", "-o", str(target), str(source)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise BuildError(f"no C++ compiler {compiler!r}: install one, or set PATH") from error
        except subprocess.CalledProcessError as error:
            raise BuildError(f"{source.name} does not compile:\n{error.stderr}") from error
        os.replace(target, library)
    return library
