"""From a variant's name to a launch: architecture, module, cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from needlepoint.optimized.build.arguments import Arguments
from needlepoint.optimized.build.compile import BuiltModule, build
from needlepoint.optimized.build.toolchain import ARCHITECTURES
from needlepoint.optimized.build.variants import BY_NAME


class NoDevice(ValueError):
    """No CUDA device here that the kernels can run on."""


def require_cuda() -> str:
    """Return the architecture of the current CUDA device, as nvcc spells it.

    Raises
    ------
    NoDevice
        If there is no CUDA device, or none that the kernels are written for.
    """
    if not torch.cuda.is_available():
        raise NoDevice(
            f"no CUDA device: torch {torch.__version__} sees none; run an emulated: candidate, or "
            "this one on a machine with an NVIDIA card and a CUDA build of torch"
        )
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}{minor}a"
    if architecture not in ARCHITECTURES:
        raise NoDevice(
            f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}; the kernels "
            f"are written for {[f'sm_{name}' for name in ARCHITECTURES]}"
        )
    return architecture


@cache
def module(name: str, architecture: str) -> BuiltModule:
    """Return the built module of a variant; built at most once in a process."""
    return build(BY_NAME[name].module, architecture)


@cache
def _function(name: str, architecture: str) -> Callable[..., None]:
    import tvm_ffi

    loaded = tvm_ffi.load_module(str(module(name, architecture).library))
    found: Callable[..., None] = loaded[name]
    return found


def launch(name: str, arguments: Arguments, device: torch.device) -> None:
    """Launch a variant on arguments that have been checked.

    Parameters
    ----------
    name
        Name of the variant.
    arguments
        Of the kind that the variant takes.
    device
        CUDA device that they lie on.

    Raises
    ------
    TypeError
        For arguments of another kind.
    ValueError
        If the device's architecture is not supported.
    BuildError
        If the module is missing and cannot be compiled.
    RuntimeError
        If CUDA refuses the launch; the message names the kernel.
    """
    expected = BY_NAME[name].arguments
    if type(arguments) is not expected:
        raise TypeError(f"{name}: {type(arguments).__name__}, expected {expected.__name__}")
    with torch.cuda.device(device):
        _function(name, require_cuda())(*arguments)
