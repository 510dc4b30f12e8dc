"""What a command returns: a result and the row errors that are written with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from needlepoint.verify.schema.result import Result


@dataclass(frozen=True)
class PipelineOutput:
    """A result and the per-row errors that go beside it.

    Attributes
    ----------
    result
        The record that every surface is made from.
    rows
        ``candidate/layerN/path/stage/local|accumulated|relative`` to row errors, [rows].
    reports
        Whether this process is the one that writes the result; under torchrun one rank is.
    """

    result: Result
    rows: Mapping[str, Tensor]
    reports: bool = True
