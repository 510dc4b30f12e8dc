"""``needlepoint doctor``: what is installed, which candidates run here, and why the others do not.

The reason beside a candidate is the error that judging it would end with: the candidate is made the
way every command makes it. Nothing is run and nothing is compiled.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

import torch
from pydantic import Field
from rich.console import Console
from rich.table import Table

from needlepoint.optimized.build.cache import (
    CachedModule,
    cached_modules,
    purge_stale,
    variant_traits,
)
from needlepoint.optimized.build.compile import cache_folder
from needlepoint.optimized.build.toolchain import BuildError, toolchain
from needlepoint.optimized.candidates.catalogue import create, names
from needlepoint.optimized.cuda.runtime import NoDevice, require_cuda
from needlepoint.verify.base.atomic import check_writable
from needlepoint.verify.cli.defaults import load_defaults
from needlepoint.verify.cli.options import DoctorOptions
from needlepoint.verify.cli.outputs import plain_console, reader_may_leave, write_record
from needlepoint.verify.report.tables import plain_table
from needlepoint.verify.schema.base import Count, Number, Record
from needlepoint.verify.schema.environment import collect_environment, driver_version

SCHEMA: Final = "needlepoint.doctor/1"

PACKAGES: Final = {
    "core": ("torch", "numpy", "scipy", "safetensors", "pydantic", "typer", "rich", "jinja2"),
    "cuda": ("apache-tvm-ffi", "ninja"),
    "server": ("openai",),
    "engines": ("sglang", "vllm", "transformers", "deep-gemm"),
}
"""Distributions by what they are for: the package itself, or one of its extras."""


class PackageInfo(Record):
    """One package that something here can use."""

    name: str
    used_by: str
    """``core`` or the extra that brings it."""
    version: str | None
    """Null if it is not installed."""


class CandidateStatus(Record):
    """Whether one candidate can run on this machine."""

    name: str
    runs: bool
    reason: str | None = None
    """The error that judging it ends with; null if it runs."""


class Card(Record):
    """One accelerator."""

    name: str
    capability: str
    memory_bytes: Count


class CudaStatus(Record):
    """Cards, driver and whether the kernels are written for them."""

    torch_cuda: str | None
    """CUDA version that torch was built for; null for a CPU build."""
    driver: str
    cards: tuple[Card, ...]
    usable: bool
    reason: str | None = None


class CompilerStatus(Record):
    """What compiles kernels."""

    usable: bool
    reason: str | None = None
    nvcc: str | None = None
    """Release of nvcc and version of apache-tvm-ffi."""
    host: str | None = None
    """First line of ``c++ --version``."""


class CachedVariant(Record):
    """One kernel in the cache. Page size is an argument of every kernel, so it is no column."""

    name: str
    inputs: str
    """Dtype of the projections; empty where the name does not say."""
    head_dim: str
    row: str
    """Format of the stored rows."""


class CacheEntry(Record):
    """One built module, or what a build that died left."""

    module: str
    architecture: str
    folder: str
    variants: tuple[CachedVariant, ...]
    flags: tuple[str, ...]
    sources_sha256: str
    age_days: Number
    stale: str | None
    """Why it would not be loaded today; null if it would."""


class CacheStatus(Record):
    """The kernel cache."""

    folder: str
    entries: tuple[CacheEntry, ...]
    removed: tuple[CacheEntry, ...] = ()


class Settings(Record):
    """Defaults of options that apply in the current folder."""

    file: str | None = None
    """The ``pyproject.toml`` with a ``[tool.needlepoint]``; null without one."""
    options: tuple[str, ...] = ()
    fault: str | None = None
    """The error that every command with defaults ends with; null if there is none."""


class Diagnosis(Record):
    """What this machine can run: the root of ``needlepoint.doctor/1``."""

    schema_: Literal["needlepoint.doctor/1"] = Field(default=SCHEMA, alias="schema")
    needlepoint: str
    python: str
    platform: str
    cpu: str
    threads: Count
    packages: tuple[PackageInfo, ...]
    candidates: tuple[CandidateStatus, ...]
    cuda: CudaStatus
    compiler: CompilerStatus
    settings: Settings = Settings()
    cache: CacheStatus | None = None
    """Null unless asked for."""


def diagnose(*, caches: bool = False, purge: bool = False) -> Diagnosis:
    """Look at this machine.

    Parameters
    ----------
    caches
        Whether to list the kernel cache.
    purge
        Whether to remove stale modules from it first.
    """
    environment = collect_environment()
    return Diagnosis(
        needlepoint=environment.needlepoint,
        python=environment.python,
        platform=environment.platform,
        cpu=environment.cpu,
        threads=environment.threads,
        packages=tuple(
            PackageInfo(name=name, used_by=used_by, version=installed_version(name))
            for used_by, listed in PACKAGES.items()
            for name in listed
        ),
        candidates=tuple(candidate_status(name) for name in names()),
        cuda=_cuda(),
        compiler=_compiler(),
        settings=_settings(Path.cwd()),
        cache=_cache(purge) if caches or purge else None,
    )


def doctor(options: DoctorOptions) -> int:
    """Run the command and return its exit code."""
    if options.json_ is not None:
        check_writable(options.json_, force=options.force)
    found = diagnose(caches=options.caches, purge=options.purge_stale)
    write_record(found, options.json_, force=options.force)
    if not options.quiet:
        with reader_may_leave():
            print_diagnosis(found, plain_console(sys.stdout))
    return 0


def candidate_status(name: str) -> CandidateStatus:
    """Return whether a candidate can run here: what keeps it from being made or from compiling."""
    try:
        if create(name).info.device == "cuda" and name.startswith("cuda:"):
            toolchain()
    except (ValueError, BuildError) as error:
        return CandidateStatus(name=name, runs=False, reason=str(error))
    return CandidateStatus(name=name, runs=True)


def installed_version(package: str) -> str | None:
    """Return the installed version of a distribution, None without one."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _settings(folder: Path) -> Settings:
    try:
        defaults = load_defaults(folder)
    except ValueError as error:
        return Settings(fault=_spelled(error))
    file = None if defaults.source is None else _spelled(defaults.source)
    return Settings(file=file, options=tuple(sorted(defaults.values)))


def _spelled(text: object) -> str:
    """Return a text in which a folder's name that is not UTF-8 can be written."""
    return str(text).encode(errors="backslashreplace").decode()


def _cuda() -> CudaStatus:
    reason: str | None = None
    try:
        require_cuda()
    except NoDevice as error:
        reason = str(error)
    cards = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        cards.append(
            Card(
                name=properties.name,
                capability=f"{properties.major}.{properties.minor}",
                memory_bytes=properties.total_memory,
            )
        )
    return CudaStatus(
        torch_cuda=torch.version.cuda,
        driver=driver_version(),
        cards=tuple(cards),
        usable=reason is None,
        reason=reason,
    )


def _compiler() -> CompilerStatus:
    host = _first_line("c++")
    try:
        tools = toolchain()
    except BuildError as error:
        return CompilerStatus(usable=False, reason=str(error), host=host)
    reason = None if host is not None else "no c++: a host compiler links kernel modules"
    lines = [line for line in tools.version.splitlines() if "release" in line or "tvm-ffi" in line]
    return CompilerStatus(usable=reason is None, reason=reason, nvcc="; ".join(lines), host=host)


def _first_line(command: str) -> str | None:
    """Return the first line of ``command --version``, None without the command."""
    path = shutil.which(command)
    if path is None:
        return None
    done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    return next(iter(done.stdout.splitlines()), None)


def _cache(purge: bool) -> CacheStatus:
    removed = purge_stale() if purge else ()
    return CacheStatus(
        folder=str(cache_folder()),
        entries=tuple(_entries(cached_modules())),
        removed=tuple(_entries(removed)),
    )


def _entries(modules: Iterable[CachedModule]) -> Iterable[CacheEntry]:
    for cached in modules:
        traits = {name: variant_traits(name) for name in cached.variants}
        yield CacheEntry(
            module=cached.module,
            architecture=cached.architecture,
            folder=Path(cached.folder).name,
            variants=tuple(
                CachedVariant(
                    name=name, inputs=found.inputs, head_dim=found.head_dim, row=found.row
                )
                for name, found in traits.items()
            ),
            flags=cached.flags,
            sources_sha256=cached.sources_sha256,
            age_days=cached.age_s / 86400,
            stale=cached.stale,
        )


def print_diagnosis(found: Diagnosis, console: Console) -> None:
    """Print a diagnosis; what can run comes first."""
    running = [candidate.name for candidate in found.candidates if candidate.runs]
    console.print(
        f"{len(running)} of {len(found.candidates)} candidates can run here", soft_wrap=True
    )
    if found.settings.fault is not None:
        console.print(f"fault: {found.settings.fault}", soft_wrap=True)
    reasons: dict[str | None, list[str]] = {}
    for candidate in found.candidates:
        reasons.setdefault(candidate.reason, []).append(candidate.name)
    for reason, refused in reasons.items():
        title = "can run" if reason is None else f"cannot run: {reason}"
        console.print(f"\n{title}", soft_wrap=True)
        for name in refused:
            console.print(f"  {name}")
    console.print("\nMachine")
    for name, value in _facts(found):
        console.print(f"  {name}: {value}", soft_wrap=True)
    console.print("\nPackages")
    console.print(_packages(found))
    if found.cache is not None:
        _print_cache(found.cache, console)


def _facts(found: Diagnosis) -> Iterable[tuple[str, str]]:
    yield "needlepoint", f"{found.needlepoint}, python {found.python}"
    yield "processor", f"{found.platform}, {found.cpu}, {found.threads} threads"
    cuda = found.cuda
    for card in cuda.cards:
        memory = f"{card.memory_bytes / 2**30:.0f} GiB"
        yield "card", f"{card.name}, capability {card.capability}, {memory}"
    if not cuda.usable:
        yield "card", cuda.reason or "none"
    yield "driver", cuda.driver
    yield "torch built for", f"CUDA {cuda.torch_cuda}" if cuda.torch_cuda else "CPU"
    compiler = found.compiler
    yield "kernel compiler", compiler.nvcc or compiler.reason or "none"
    yield "host compiler", compiler.host or "none"
    if found.settings.file is not None:
        yield (
            "defaults",
            f"{', '.join(found.settings.options) or 'none'} from {found.settings.file}",
        )


def _packages(found: Diagnosis) -> Table:
    table = plain_table("package", "for", "version")
    for package in found.packages:
        table.add_row(package.name, package.used_by, package.version or "not installed")
    return table


def _print_cache(cache: CacheStatus, console: Console) -> None:
    stale = sum(entry.stale is not None for entry in cache.entries)
    console.print(
        f"\nKernel cache {cache.folder}: {len(cache.entries)} modules, {stale} stale, "
        f"{len(cache.removed)} removed",
        soft_wrap=True,
    )
    for entry in cache.entries:
        _print_entry(entry, console)
    for entry in cache.removed:
        console.print(f"  removed {entry.folder}: {entry.stale}", soft_wrap=True)
    if stale and not cache.removed:
        console.print("  --purge-stale removes stale modules", soft_wrap=True)


def _print_entry(entry: CacheEntry, console: Console) -> None:
    name = f"{entry.module} sm_{entry.architecture}" if entry.module else entry.folder
    state = f"stale: {entry.stale}" if entry.stale else "current"
    console.print(
        f"\n  {name}  {state}\n"
        f"    {entry.age_days:.1f} days old, sources {entry.sources_sha256[:12] or '-'}, "
        f"flags {' '.join(entry.flags) or '-'}",
        soft_wrap=True,
    )
    if entry.variants:
        table = plain_table("   variant", "inputs", "head_dim", "rows", "page")
        for variant in entry.variants:
            table.add_row(
                f"   {variant.name}",
                variant.inputs or "-",
                variant.head_dim or "-",
                variant.row or "-",
                "any",
            )
        console.print(table)
