"""``make kernels``: every variant compiled for every architecture, with what it uses.

Prints one JSON line a variant and architecture: ``arch``, ``variant``, ``registers``, ``spills``
and shared memory, in bytes. A variant of several kernels reports the largest of each.

``--write DIR`` compiles nothing: it writes the C++ of every module, to be read. What the modules
include lies in ``optimized/csrc``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from needlepoint.optimized.build.compile import build, translation_unit
from needlepoint.optimized.build.toolchain import ARCHITECTURES, BuildError
from needlepoint.optimized.build.variants import MODULES

_KIB = 1024
_SMALL_CARDS = ("120a", "121a")
_KERNEL = re.compile(r"Compiling entry function '(?P<name>\S+)' for '\S+'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(?P<rest>.*)")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class KernelUse:
    """What one variant uses on one architecture.

    Attributes
    ----------
    arch
        ``"sm_90a"``, ..
    variant
        Name of the variant.
    registers
        Registers a thread.
    spills
        Bytes of spill stores and loads.
    smem_static, smem_dynamic
        Bytes of shared memory a block: of the kernel, and asked for by its launch.
    """

    arch: str
    variant: str
    registers: int
    spills: int
    smem_static: int
    smem_dynamic: int

    @property
    def fault(self) -> str | None:
        """Why the variant is not acceptable, or None."""
        limit = shared_memory_limit(self.arch.removeprefix("sm_"))
        if self.spills:
            return f"{self.variant} on {self.arch}: {self.spills} bytes of spills, expected none"
        if self.smem_static + self.smem_dynamic > limit:
            return (
                f"{self.variant} on {self.arch}: {self.smem_static + self.smem_dynamic} bytes of "
                f"shared memory, the card has {limit} a block"
            )
        return None


def shared_memory_limit(architecture: str) -> int:
    """Return the bytes of shared memory that a block may have."""
    return (99 if architecture in _SMALL_CARDS else 227) * _KIB


def parse_log(log: str) -> dict[str, tuple[int, int, int]]:
    """Return registers, spill bytes and shared memory of every kernel in a compiler's log.

    Raises
    ------
    BuildError
        If the log names no kernel.
    """
    found: dict[str, tuple[int, int, int]] = {}
    name, spills = "", 0
    for line in log.splitlines():
        if match := _KERNEL.search(line):
            name = match["name"]
        elif match := _SPILLS.search(line):
            spills = int(match[1]) + int(match[2])
        elif match := _USED.search(line):
            shared = _SHARED.search(match["rest"])
            found[name] = (int(match[1]), spills, int(shared[1]) if shared else 0)
    if not found:
        raise BuildError(f"no kernels in the compiler's output; expected ptxas -v lines:\n{log}")
    return found


def module_uses(module: str, architecture: str, log: str) -> Iterator[KernelUse]:
    """Yield what each variant of a module uses.

    Raises
    ------
    BuildError
        If a variant has no kernel in the log.
    """
    kernels = parse_log(log)
    for variant in MODULES[module]:
        own = [use for name, use in kernels.items() if variant.symbol in name]
        if not own:
            raise BuildError(
                f"no kernel of variant {variant.name} in module {module}: expected a name with "
                f"{variant.symbol}"
            )
        registers, spills, shared = (max(values) for values in zip(*own, strict=True))
        yield KernelUse(
            arch=f"sm_{architecture}",
            variant=variant.name,
            registers=registers,
            spills=spills,
            smem_static=shared,
            smem_dynamic=variant.smem_dynamic,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile; return 1 if a variant spills or needs too much shared memory, 2 if none compiles."""
    parser = argparse.ArgumentParser(prog="kernels", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder to build in; default a fresh one")
    parser.add_argument(
        "--write", type=Path, metavar="DIR", help="write the modules to a new folder and stop"
    )
    parser.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    parser.add_argument(
        "--arch", action="append", choices=ARCHITECTURES, help="architecture; default all"
    )
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: expected at least 1")
    if options.write is not None:
        return _write_modules(options.write)
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as fresh:
        folder = options.out or Path(fresh)
        work = [
            (architecture, module)
            for architecture, module in product(options.arch or ARCHITECTURES, MODULES)
            if MODULES[module][0].runs_on(architecture)
        ]
        with ThreadPoolExecutor(options.jobs) as pool:
            built = pool.map(lambda item: build(item[1], item[0], folder), work)
            try:
                for (architecture, module), result in zip(work, built, strict=True):
                    for use in module_uses(module, architecture, result.log):
                        sys.stdout.write(json.dumps(asdict(use)) + "\n")
                        if use.fault is not None:
                            faults.append(use.fault)
                    sys.stdout.flush()
            except (BuildError, ValueError) as error:
                pool.shutdown(cancel_futures=True)
                sys.stderr.write(f"kernels: {error}\n")
                return 2
    for fault in faults:
        sys.stderr.write(f"kernels: {fault}\n")
    return 1 if faults else 0


def _write_modules(folder: Path) -> int:
    """Write every module's C++ and print the paths; return 2 if the folder cannot be made."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        sys.stderr.write(f"kernels: {folder}: {error.strerror}; name a folder that is new\n")
        return 2
    for module in MODULES:
        path = folder / f"{module}.cu"
        path.write_text(translation_unit(module))
        sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
