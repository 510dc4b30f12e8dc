"""What the kernel cache holds: every built module, why it is stale, and removal of stale ones.

A module is stale if ``compile.build`` would not load it today: its sources, flags or compiler
changed, it is no module any more, or its library is damaged.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from needlepoint.optimized.build.compile import cache_folder, load_built, open_lock, sources_sha256
from needlepoint.optimized.build.toolchain import ARCHITECTURES, CSRC, FLAGS, BuildError, toolchain
from needlepoint.optimized.build.variants import INDEX_ROWS, INPUTS, MAIN_ROWS, MODULES

_ROWS = sorted({*INDEX_ROWS, *MAIN_ROWS})
_FOLDER = re.compile(r"([a-z0-9_]+)-sm_([0-9a-z]+)-([0-9a-f]{32})")
_HEAD_DIM = re.compile(r"_d([0-9]+)(?:_|$)")
_INPUTS = re.compile(rf"^(?!step_)\w*?_({'|'.join(INPUTS)})(?:_(?:{'|'.join(_ROWS)}))?$")
_ROW = re.compile(rf"_(?:{'|'.join(INPUTS)}|store_d[0-9]+)_({'|'.join(_ROWS)})$")
_STAGE = re.compile(r"\.[a-z0-9_]+-[a-z0-9_]{8}")
ABANDONED_AFTER_S = 24 * 3600
"""A stage folder this old belongs to no running build."""


@dataclass(frozen=True)
class CachedModule:
    """One built module in the cache, or the abandoned stage folder of a build that died.

    Attributes
    ----------
    folder
        Its folder.
    module, architecture
        For example ``"query"`` and ``"90a"``; empty for a stage folder.
    variants
        Names of the kernels in it.
    sources_sha256
        Digest of the sources it was built from; empty if its manifest cannot be read.
    flags
        Compiler flags it was built with.
    age_s
        Seconds since it was built.
    stale
        Why it would not be loaded today; None if it would.
    """

    folder: Path
    module: str
    architecture: str
    variants: tuple[str, ...]
    sources_sha256: str
    flags: tuple[str, ...]
    age_s: float
    stale: str | None


@dataclass(frozen=True)
class VariantTraits:
    """What a variant's name says; an empty string where it says nothing.

    Page size is no trait: it is an argument of every kernel.
    """

    inputs: str
    head_dim: str
    row: str


def variant_traits(name: str) -> VariantTraits:
    """Return input dtype, head_dim and row format of a variant."""
    head_dim, inputs, row = _HEAD_DIM.search(name), _INPUTS.search(name), _ROW.search(name)
    return VariantTraits(
        inputs=inputs[1] if inputs else "",
        head_dim=head_dim[1] if head_dim else "",
        row=row[1] if row else "",
    )


def cached_modules(cache: Path | None = None, sources: Path = CSRC) -> tuple[CachedModule, ...]:
    """Return everything in the cache that a build left there, by name.

    Parameters
    ----------
    cache
        Cache folder; default :func:`needlepoint.optimized.build.compile.cache_folder`.
    sources
        Folder of the CUDA sources.
    """
    root = cache_folder() if cache is None else cache
    if not root.is_dir():
        return ()
    found = []
    for folder in sorted(root.iterdir()):
        if folder.is_symlink() or not folder.is_dir():
            continue
        if match := _FOLDER.fullmatch(folder.name):
            found.append(_module(folder, match[1], match[2], match[3], sources))
        elif _STAGE.fullmatch(folder.name) and _age(folder) > ABANDONED_AFTER_S:
            reason = "a build that never finished"
            found.append(CachedModule(folder, "", "", (), "", (), _age(folder), reason))
    return tuple(found)


def purge_stale(cache: Path | None = None, sources: Path = CSRC) -> tuple[CachedModule, ...]:
    """Remove stale modules and return them; one that is being built right now is left alone."""
    removed = []
    for cached in cached_modules(cache, sources):
        if cached.stale is None:
            continue
        with _lock_if_free(cached) as free:
            if free:
                shutil.rmtree(cached.folder, ignore_errors=True)
                removed.append(cached)
    return tuple(removed)


def _module(folder: Path, module: str, architecture: str, key: str, sources: Path) -> CachedModule:
    manifest = _manifest(folder)
    variants = manifest.get("variants")
    flags = manifest.get("flags")
    return CachedModule(
        folder=folder,
        module=module,
        architecture=architecture,
        variants=tuple(map(str, variants)) if isinstance(variants, list) else (),
        sources_sha256=str(manifest.get("sources_sha256", "")),
        flags=tuple(map(str, flags)) if isinstance(flags, list) else (),
        age_s=_age(folder),
        stale=_staleness(folder, module, architecture, key, manifest, sources),
    )


def _staleness(
    folder: Path,
    module: str,
    architecture: str,
    key: str,
    manifest: Mapping[str, object],
    sources: Path,
) -> str | None:
    if module not in MODULES:
        return f"there is no module {module} any more"
    if architecture not in ARCHITECTURES:
        return f"no kernel is written for sm_{architecture} any more"
    if load_built(folder, module, architecture, key) is None:
        return "damaged: library and manifest do not agree"
    if manifest.get("sources_sha256") != sources_sha256(module, sources):
        return "its sources changed"
    if manifest.get("flags") != list(FLAGS):
        return "the compiler flags changed"
    try:
        compiler = toolchain().version
    except BuildError:
        return None  # without a compiler nothing else could be built in its place
    return None if manifest.get("compiler") == compiler else "the compiler changed"


def _manifest(folder: Path) -> Mapping[str, object]:
    try:
        path = folder / "manifest.json"
        found = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _age(folder: Path) -> float:
    return max(0.0, time.time() - folder.stat().st_mtime)


@contextmanager
def _lock_if_free(cached: CachedModule) -> Iterator[bool]:
    """Yield whether no build holds the module's lock; the empty lock file stays for later ones."""
    if not cached.module:
        yield True
        return
    try:
        lock = open_lock(cached.folder.with_name(f"{cached.folder.name}.lock"))
    except OSError:  # a cache that is only read
        yield False
        return
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
