"""Peak memory and time of ``needlepoint diff`` on two recordings.

    python -m needlepoint.benchmarks.diff_memory A B

The command runs as a process of its own and is sampled every few milliseconds. Three peaks are
printed: resident memory, its anonymous part (what the process allocated) and its file part (pages
of the recordings that stand in the page cache and can be dropped at any time). They need not fall
together.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

_FIELDS = {"resident": "VmRSS", "anonymous": "RssAnon", "file": "RssFile"}
_SECONDS = 0.005


def sample(process: int) -> dict[str, int]:
    """Return the KiB of each kind that a process holds; nothing once it has ended."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return {}
    lines = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return {what: int(lines[key].split()[0]) for what, key in _FIELDS.items() if key in lines}


def watch(process: subprocess.Popen[bytes]) -> dict[str, int]:
    """Wait for a process and return the peak KiB of each kind."""
    peaks = dict.fromkeys(_FIELDS, 0)
    while process.poll() is None:
        for what, size in sample(process.pid).items():
            peaks[what] = max(peaks[what], size)
        time.sleep(_SECONDS)
    return peaks


def measure(a: Path, b: Path) -> tuple[float, dict[str, int]]:
    """Return seconds and the peak KiB of each kind.

    Raises
    ------
    RuntimeError
        If the two could not be compared.
    """
    start = time.monotonic()
    run = "import sys; from needlepoint.verify.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", run, "diff", str(a), str(b), "--quiet"]
    process = subprocess.Popen(command)
    peaks = watch(process)
    if process.returncode not in (0, 1):
        raise RuntimeError(f"diff ended with {process.returncode}; expected 0 or 1")
    return time.monotonic() - start, peaks


def main() -> None:
    """Print seconds and peaks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    arguments = parser.parse_args()
    size = sum(f.stat().st_size for d in (arguments.a, arguments.b) for f in d.iterdir())
    seconds, peaks = measure(arguments.a, arguments.b)
    print(f"{size / 2**20:.0f} MiB in both, {seconds:.1f} s")
    for what, kib in peaks.items():
        print(f"{what} at most {kib / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
