"""What to capture: one tensor of one module's call, under the name of a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from needlepoint.optimized.protocol.stages import STAGES
from needlepoint.verify.base.stages import is_key_side

Select = Callable[[tuple[Any, ...], dict[str, Any], Any], Tensor]
"""``select(args, kwargs, output)`` of a module's call returns the tensor to keep."""


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> Tensor:
    """Return the first tensor that a module was called with."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def first_output(args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> Tensor:
    """Return the tensor that a module returned, or the first of several."""
    values = output if isinstance(output, tuple | list) else (output,)
    return next(value for value in values if isinstance(value, Tensor))


@dataclass(frozen=True)
class Tap:
    """One tensor to capture.

    Attributes
    ----------
    layer
        Layer number.
    stage
        Name in the dump, one of :data:`~needlepoint.verify.diff.mapping.ROWS`.
    module
        Name of the module in the model, as ``named_modules`` has it.
    select
        Which tensor of the call; its first two axes are batch and rows.
    """

    layer: int
    stage: str
    module: str
    select: Select = first_output


def by_window(name: str) -> bool:
    """Return whether a tensor has a row for each completed window."""
    path, _, stage = name.partition(".")
    return stage in STAGES and is_key_side((path, stage))
