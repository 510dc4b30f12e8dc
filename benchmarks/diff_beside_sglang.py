"""``needlepoint diff`` beside SGLang's dump comparator, on the same tensors, in turn.

    python -m needlepoint.benchmarks.diff_beside_sglang A B --sglang FOLDER --packages FOLDER

``--sglang`` is the ``sglang`` folder of an unpacked wheel (0.5.23), of which ``srt/debug_utils`` is
used, unmodified; what it imports of the serving stack is replaced by stand-ins. ``--packages``
holds what it needs besides (``pip install --target FOLDER polars einops termcolor pyyaml pyzmq``).
Tensors of both recordings are first written as its own dumps, in a folder that is removed after.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open

from needlepoint.benchmarks.diff_memory import measure, watch

_RUN = """
import runpy, sys, types
def stand_in(name, **names):
    module = types.ModuleType(name)
    module.__dict__.update(names)
    sys.modules[name] = module
def nothing(*_, **__): pass
stand_in("sglang", __path__=[])
stand_in("sglang.srt", __path__=[sys.argv[1]])
stand_in("sglang.srt.managers")
names = ("sock_recv", "sock_send", "wrap_as_pickle")
stand_in("sglang.srt.managers.io_struct", **dict.fromkeys(names, nothing))
names = ("get_parallel", "get_server_args", "get_serving")
stand_in("sglang.srt.runtime_context", **dict.fromkeys(names, nothing))
stand_in("sglang.srt.utils", get_device=lambda: "cpu")
sys.argv = ["comparator", *sys.argv[2:]]
runpy.run_module("sglang.srt.debug_utils.comparator", run_name="__main__")
"""


def write_dumps(recording: Path, folder: Path) -> int:
    """Write every tensor of a recording as a dump of SGLang's, and return how many there are."""
    folder.mkdir(parents=True)
    count = 0
    for file in sorted(recording.glob("*.safetensors")):
        with safe_open(file, "pt") as held:
            for name in held.keys():
                value = {"value": held.get_tensor(name), "meta": {}}
                where = f"name={file.stem}__{name}___step=0___rank=0___dump_index={count}.pt"
                torch.save(value, folder / where)
                count += 1
    return count


def compare(a: Path, b: Path, sglang: Path, packages: Path) -> tuple[float, int, str]:
    """Return seconds, peak resident KiB and the count of tensors of SGLang's comparator."""
    sides = ["--baseline-path", str(a), "--target-path", str(b)]
    command = [sys.executable, "-c", _RUN, str(sglang / "srt"), *sides, "--preset", "raw"]
    environment = os.environ | {"PYTHONPATH": str(packages)}
    with tempfile.TemporaryFile() as out:
        start = time.monotonic()
        process = subprocess.Popen(
            [*command, "--verbosity", "minimal"], env=environment, stdout=out, stderr=out
        )
        peak = watch(process)["resident"]
        seconds = time.monotonic() - start
        out.seek(0)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", out.read().decode(errors="replace"))
    said = re.search(r"\d+ passed.*\d+ failed.*\d+ total", plain)
    if said is None:
        raise RuntimeError(f"SGLang's comparator ended with {process.returncode} and no count")
    return seconds, peak, said.group()


def main() -> None:
    """Print seconds and peaks of both, three times in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--sglang", type=Path, required=True)
    parser.add_argument("--packages", type=Path, required=True)
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.a.parent) as folder:
        dumps = [Path(folder) / side / "dump" for side in ("a", "b")]
        counts = [write_dumps(*pair) for pair in zip((options.a, options.b), dumps, strict=True)]
        print(f"{counts[0]} and {counts[1]} tensors")
        for _ in range(options.times):
            seconds, peak, said = compare(dumps[0], dumps[1], options.sglang, options.packages)
            print(f"sglang {seconds:.1f} s, {peak >> 10} MiB: {said}")
            seconds, peaks = measure(options.a, options.b)
            print(f"needlepoint {seconds:.1f} s, {peaks['resident'] >> 10} MiB")


if __name__ == "__main__":
    main()
