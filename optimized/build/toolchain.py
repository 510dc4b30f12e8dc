"""The CUDA compiler, ninja and headers of this machine, and the flags that fix the arithmetic."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CSRC = Path(__file__).parents[1] / "csrc"
ARCHITECTURES = ("90a", "100a", "103a", "120a", "121a")
"""Architectures the kernels are written for, as nvcc spells them."""

FLAGS = (
    "-std=c++17",
    "-O3",
    "-fmad=false",
    "-ftz=false",
    "-prec-div=true",
    "-prec-sqrt=true",
    "-Xptxas=-v",
    "-Xcompiler=-fPIC",
    "-Xcompiler=-fvisibility=hidden",
)


class BuildError(RuntimeError):
    """A kernel module cannot be built or loaded; the message says why and what to do."""


@dataclass(frozen=True)
class Toolchain:
    """What a build runs, and what identifies it in the cache key.

    Attributes
    ----------
    nvcc, ninja
        Executables.
    cuda_home
        Folder that holds ``include`` and ``lib64``.
    ffi_include, ffi_library
        Headers and shared library of apache-tvm-ffi.
    version
        Text of ``nvcc --version`` and the apache-tvm-ffi version.
    """

    nvcc: Path
    ninja: Path
    cuda_home: Path
    ffi_include: Path
    ffi_library: Path
    version: str


@cache
def toolchain() -> Toolchain:
    """Return this machine's toolchain.

    Raises
    ------
    BuildError
        If nvcc, ninja or apache-tvm-ffi is missing; the message says how to get it.
    """
    try:
        import tvm_ffi
        from tvm_ffi import libinfo
    except ImportError as error:
        raise BuildError(
            f"apache-tvm-ffi cannot be imported ({error}); install needlepoint[cuda]"
        ) from error
    nvcc = _nvcc()
    ninja = _ninja()
    listed = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        raise BuildError(f"{nvcc} --version failed: {listed.stderr.strip()}")
    return Toolchain(
        nvcc=nvcc,
        ninja=ninja,
        cuda_home=nvcc.parent.parent,
        ffi_include=Path(libinfo.find_include_path()),
        ffi_library=Path(libinfo.find_libtvm_ffi()),
        version=f"{listed.stdout.strip()}\napache-tvm-ffi {tvm_ffi.__version__}",
    )


def _nvcc() -> Path:
    """Return nvcc: of CUDA_HOME, of the usual folder, else the one on PATH with links resolved."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    for home in homes:
        if home and (Path(home) / "bin" / "nvcc").is_file():
            return Path(home) / "bin" / "nvcc"
    found = shutil.which("nvcc")
    if found is None:
        raise BuildError(
            "no nvcc: set CUDA_HOME to a CUDA 12.9 or newer toolkit, or put its nvcc on PATH"
        )
    return Path(found).resolve()


def _ninja() -> Path:
    found = shutil.which("ninja")
    if found is not None:
        return Path(found)
    try:
        import ninja
    except ImportError as error:
        raise BuildError("no ninja: install needlepoint[cuda] or put ninja on PATH") from error
    return Path(ninja.BIN_DIR) / "ninja"
