"""Where a layer is judged: on the CPU, or on a card that does the reference's arithmetic faster.

Reference, error bounds and comparisons are plain torch without a device of their own. Here the
tensors of a layer go to the device, factories make theirs there, and what was found comes back.
Candidates never see it: what they are given and what they return lies in CPU memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import Observed

Value = TypeVar("Value")

CPU = "cpu"
CARD_BUDGET_BYTES = 1 << 30
"""Bound on what a block of queries holds on a card, where small blocks are mostly launches."""


def require_device(device: str) -> None:
    """Refuse a card that torch does not find.

    Raises
    ------
    ValueError
        For ``cuda`` without a CUDA device.
    """
    if device != CPU and not torch.cuda.is_available():
        raise ValueError(
            f"--device {device}: torch finds no CUDA device (`needlepoint doctor` says why); leave "
            "--device away to judge on the CPU"
        )


@contextmanager
def on(device: str) -> Iterator[None]:
    """Make tensors without a device of their own on ``device``, in this thread."""
    if torch.get_default_device().type == device:
        yield
        return
    with torch.device(device):
        yield


def placed(value: Value, device: str) -> Value:
    """Return a value with every tensor in it on ``device``; itself where all lie there.

    Parameters
    ----------
    value
        A tensor, or a dataclass, mapping, list or tuple of such values; anything else is returned
        as it is.
    device
        ``"cpu"`` or ``"cuda"``.
    """
    if isinstance(value, Tensor):
        return cast(Value, value.to(device))
    old: dict[Any, Any]
    if is_dataclass(value) and not isinstance(value, type):
        old = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
    elif isinstance(value, Mapping):
        old = dict(value)
    elif isinstance(value, list | tuple):
        old = dict(enumerate(value))
    else:
        return value
    new = {key: placed(part, device) for key, part in old.items()}
    if all(new[key] is part for key, part in old.items()):
        return value
    if isinstance(value, Mapping):
        return cast(Value, new)
    if isinstance(value, list | tuple):
        return cast(Value, type(value)(new.values()))
    return cast(Value, replace(cast(Any, value), **new))


def observed_on(observed: Observed, device: str) -> Observed:
    """Return what a candidate returned where it is judged; pages are read on the CPU and stay.

    Its score reader is code of the candidate and keeps making tensors on the CPU.
    """
    moved = replace(placed(replace(observed, stored={}), device), stored=observed.stored)
    reader = observed.scores
    if reader is None:
        return moved

    def scores(request: int, start: int, stop: int) -> Tensor:
        with on(CPU):
            found = reader(request, start, stop)
        return found.to(device)

    return replace(moved, scores=scores)
