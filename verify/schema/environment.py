"""Where a run was made: versions and hardware, and nothing that identifies a person or a host."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import numpy as np
import torch

from needlepoint.verify.schema.result import Environment
from needlepoint.verify.schema.version import own_version


def collect_environment(device: str = "cpu") -> Environment:
    """Describe this process.

    Parameters
    ----------
    device
        ``cpu`` or the product name of the accelerator that the candidates ran on.
    """
    return Environment(
        needlepoint=own_version(),
        python=platform.python_version(),
        torch=torch.__version__,
        numpy=np.__version__,
        # Without the kernel release: hosting providers write names into it.
        platform=f"{platform.system()} {platform.machine()}",
        cpu=cpu_name(Path("/proc/cpuinfo")),
        threads=torch.get_num_threads(),
        device=device,
        world=world_size(),
    )


def cpu_name(cpuinfo: Path) -> str:
    """Return the processor's product name, or its architecture where that is not published."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def driver_version() -> str:
    """Return the NVIDIA driver's version, or why it cannot be told."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        return "none (there is no nvidia-smi)"
    except (OSError, subprocess.CalledProcessError) as error:
        return f"unknown ({error})"
    return next(iter(done.stdout.splitlines()), "unknown").strip()


def world_size() -> int:
    """Return the number of processes that torchrun announced, 1 outside torchrun.

    Raises
    ------
    ValueError
        If ``WORLD_SIZE`` is not a positive number.
    """
    size = os.environ.get("WORLD_SIZE")
    if size is None:
        return 1
    if not size.isdigit() or int(size) < 1:
        raise ValueError(
            f"environment variable WORLD_SIZE {size!r}: expected a positive number; "
            "start the run with torchrun, or unset it"
        )
    return int(size)
