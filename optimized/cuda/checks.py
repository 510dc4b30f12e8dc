"""Checks of tensors before a launch: every failure names the argument, what came and what to pass.

The device is looked at last, so that the same checks run in tests without one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INPUT_DTYPES = (torch.float32, torch.bfloat16)


def require_tensor(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    *,
    align: int = 16,
    rows_strided: bool = False,
) -> None:
    """Check shape, dtype, strides and alignment of one argument.

    Parameters
    ----------
    name
        Name of the argument, for the message.
    tensor
        What came.
    shape
        Expected extents; None for any.
    dtypes
        Accepted dtypes.
    align
        Bytes that the first element and every row must be aligned to.
    rows_strided
        Whether the first axis may have any stride, so that columns of a wider tensor can be passed.

    Raises
    ------
    ValueError
        If anything differs.
    """
    got = tuple(tensor.shape)
    if len(got) != len(shape) or any(
        want not in (None, have) for want, have in zip(shape, got, strict=True)
    ):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{name}: shape {got}, expected ({wanted})")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name}: dtype {tensor.dtype}, expected {names}")
    inner = tensor[0] if rows_strided and got[0] > 0 else tensor
    if not inner.is_contiguous():
        kind = "each row contiguous" if rows_strided else "contiguous"
        raise ValueError(f"{name}: strides {tensor.stride()} for shape {got}, expected {kind}")
    if rows_strided and got[0] > 1 and tensor.stride(0) < inner.numel():
        raise ValueError(
            f"{name}: rows {tensor.stride(0)} elements apart, expected at least {inner.numel()}, "
            "so that rows do not overlap"
        )
    size = tensor.element_size()
    pitch = tensor.stride(0) * size if rows_strided and got[0] > 1 else 0
    if tensor.numel() and (tensor.data_ptr() % align or pitch % align):
        raise ValueError(
            f"{name}: starts at an address of remainder {tensor.data_ptr() % align} with rows "
            f"{pitch} bytes apart, expected multiples of {align} bytes"
        )


def require_same_device(**tensors: Tensor) -> torch.device:
    """Check that all tensors are on one CUDA device and return it.

    Raises
    ------
    ValueError
        Naming the first argument that is elsewhere.
    """
    device: torch.device | None = None
    for name, tensor in tensors.items():
        if tensor.device.type != "cuda":
            raise ValueError(f"{name}: on {tensor.device}, expected a CUDA device")
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise ValueError(f"{name}: on {tensor.device}, expected {device} like the others")
    if device is None:
        raise ValueError("no tensors: expected at least one argument on a CUDA device")
    return device


def require_same_dtype(first: str, a: Tensor, second: str, b: Tensor) -> str:
    """Check that two inputs share a dtype and return its name, ``"fp32"`` or ``"bf16"``.

    Raises
    ------
    ValueError
        If they differ.
    """
    if a.dtype != b.dtype:
        raise ValueError(f"{second}: dtype {b.dtype}, expected {a.dtype} like {first}")
    return "fp32" if a.dtype == torch.float32 else "bf16"
