"""What ``needlepoint doctor`` prints."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from needlepoint.verify.cli.doctor import CacheEntry, CacheStatus, Diagnosis
from needlepoint.verify.report.tables import plain_table


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
    for reason, names in reasons.items():
        title = "can run" if reason is None else f"cannot run: {reason}"
        console.print(f"\n{title}", soft_wrap=True)
        for name in names:
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
