"""Kernel modules compiled at run time and kept in a cache that never serves a stale library.

A module's folder in the cache is named by everything its bytes depend on: the translation unit,
every header it includes, flags, compiler, apache-tvm-ffi and architecture. A build happens in a
stage folder beside it, under a lock, and becomes visible by one rename; its manifest holds the
library's digest, which is checked before every load.

Environment
-----------
``NEEDLEPOINT_KERNEL_CACHE``
    Folder of the cache; default ``$XDG_CACHE_HOME/needlepoint/kernels``.
``NEEDLEPOINT_KERNEL_BUILD``
    ``auto`` (default) builds what is missing, ``force`` builds again, ``never`` refuses to compile.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from needlepoint.optimized.build.toolchain import ARCHITECTURES, CSRC, FLAGS, BuildError, toolchain
from needlepoint.optimized.build.variant import module_source
from needlepoint.optimized.build.variants import MODULES

BUILD_VARIABLE = "NEEDLEPOINT_KERNEL_BUILD"
CACHE_VARIABLE = "NEEDLEPOINT_KERNEL_CACHE"
BUILD_CHOICES = ("auto", "force", "never")
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class BuiltModule:
    """A compiled kernel module.

    Attributes
    ----------
    name, architecture
        Module and architecture, for example ``"query"`` and ``"90a"``.
    key
        Digest of everything the library depends on.
    library
        The shared library.
    log
        What the compiler printed: registers, spills and shared memory of every kernel.
    path_taken
        ``"built"`` or ``"cached"``.
    """

    name: str
    architecture: str
    key: str
    library: Path
    log: str
    path_taken: str


def translation_unit(module: str) -> str:
    """Return the C++ source of a module; what it includes lies in ``csrc``."""
    return module_source(module, MODULES[module])


def headers(source: str, folder: Path = CSRC) -> tuple[Path, ...]:
    """Return every header of ours that a source includes, directly or not, sorted by name."""
    found: dict[str, Path] = {}
    pending = _INCLUDE.findall(source)
    while pending:
        name = pending.pop()
        path = folder / name
        if name not in found and path.is_file():
            found[name] = path
            pending += _INCLUDE.findall(path.read_text())
    return tuple(found[name] for name in sorted(found))


def sources_sha256(module: str, folder: Path = CSRC) -> str:
    """Return the digest of a module's translation unit and headers: what defines its arithmetic."""
    digest = hashlib.sha256(translation_unit(module).encode())
    for path in headers(translation_unit(module), folder):
        name = path.relative_to(folder).as_posix()
        digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def module_key(module: str, architecture: str, folder: Path = CSRC) -> str:
    """Return the cache key of a module on one architecture."""
    parts = (sources_sha256(module, folder), *FLAGS, toolchain().version, architecture)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """Return the cache folder, which need not exist."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "needlepoint" / "kernels"


def build(
    module: str, architecture: str, cache: Path | None = None, folder: Path = CSRC
) -> BuiltModule:
    """Return a compiled module, from the cache or by compiling it.

    Parameters
    ----------
    module
        Key of :data:`~needlepoint.optimized.build.variants.MODULES`.
    architecture
        One of :data:`~needlepoint.optimized.build.toolchain.ARCHITECTURES`.
    cache
        Cache folder; default :func:`cache_folder`.
    folder
        Folder of the CUDA sources.

    Raises
    ------
    ValueError
        For an unknown module, architecture or value of ``NEEDLEPOINT_KERNEL_BUILD``.
    BuildError
        If compiling fails, or is needed but forbidden.
    """
    if module not in MODULES:
        raise ValueError(f"kernel module {module!r}: expected one of {sorted(MODULES)}")
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"architecture sm_{architecture}: expected one of "
            f"{[f'sm_{name}' for name in ARCHITECTURES]}"
        )
    if not MODULES[module][0].runs_on(architecture):
        raise ValueError(
            f"kernel module {module} on sm_{architecture}: it exists for "
            f"{[f'sm_{name}' for name in MODULES[module][0].architectures or ()]}"
        )
    choice = os.environ.get(BUILD_VARIABLE, "auto")
    if choice not in BUILD_CHOICES:
        raise ValueError(f"{BUILD_VARIABLE}={choice!r}: expected one of {list(BUILD_CHOICES)}")
    root = cache_folder() if cache is None else cache
    key = module_key(module, architecture, folder)
    final = root / f"{module}-sm_{architecture}-{key}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = open_lock(root / f"{final.name}.lock")
    except OSError as error:  # a cache that is only read, or no folder
        found = None if choice == "force" else load_built(final, module, architecture, key)
        if found is not None:
            return found
        raise BuildError(
            f"kernel cache {root}: {error.strerror}; expected a folder that can be written, or "
            f"that holds {final.name}: set {CACHE_VARIABLE}"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed, also if this process dies
        if choice != "force":
            found = load_built(final, module, architecture, key)
            if found is not None:
                return found
        if choice == "never":
            raise BuildError(
                f"kernel module {module} for sm_{architecture} is not whole in {root} and "
                f"{BUILD_VARIABLE}=never forbids compiling; unset it to build it there"
            )
        log = _compile(module, architecture, final, folder)
    return BuiltModule(module, architecture, key, final / f"{module}.so", log, "built")


def open_lock(path: Path) -> BinaryIO:
    """Open a lock file, which may be new; never what a link in its place leads to."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")


def load_built(final: Path, module: str, architecture: str, key: str) -> BuiltModule | None:
    """Return a cached module if it is whole; anything else counts as absent."""
    library, described = final / f"{module}.so", final / "manifest.json"
    try:
        if not (library.is_file() and described.is_file()):  # reading a pipe would not end
            return None
        manifest = json.loads(described.read_text())
        whole = hashlib.sha256(library.read_bytes()).hexdigest() == manifest["library_sha256"]
        log = str(manifest["log"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return BuiltModule(module, architecture, key, library, log, "cached") if whole else None


def _compile(module: str, architecture: str, final: Path, folder: Path) -> str:
    tools = toolchain()
    stage = Path(tempfile.mkdtemp(prefix=f".{module}-", dir=final.parent))
    try:
        (stage / f"{module}.cu").write_text(translation_unit(module))
        (stage / "build.ninja").write_text(_ninja_file(module, architecture, folder))
        done = subprocess.run(
            [tools.ninja, "-v"], cwd=stage, capture_output=True, text=True, check=False
        )
        log = done.stdout + done.stderr
        library = stage / f"{module}.so"
        if done.returncode != 0 or not library.is_file():
            raise BuildError(f"kernel module {module} for sm_{architecture} failed:\n{log}")
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        manifest = {
            "library_sha256": digest,
            "log": log,
            # What the key was made of, so that a listing can say why a module is stale.
            "sources_sha256": sources_sha256(module, folder),
            "flags": FLAGS,
            "compiler": tools.version,
            "variants": [variant.name for variant in MODULES[module]],
        }
        (stage / "manifest.json").write_text(json.dumps(manifest))
        if final.is_symlink() or final.is_file():
            final.unlink()
        elif final.exists():
            shutil.rmtree(final)
        stage.rename(final)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return log


def _ninja_file(module: str, architecture: str, folder: Path) -> str:
    tools = toolchain()
    flags = " ".join(FLAGS)
    return f"""ninja_required_version = 1.5
rule compile
  command = {tools.nvcc} -gencode=arch=compute_{architecture},code=sm_{architecture} {flags} \
-I{folder} -isystem {tools.ffi_include} -c $in -o $out
rule link
  command = c++ -shared -o $out $in -L{tools.cuda_home}/lib64 -lcudart \
-L{tools.ffi_library.parent} -ltvm_ffi
build {module}.o: compile {module}.cu
build {module}.so: link {module}.o
"""
