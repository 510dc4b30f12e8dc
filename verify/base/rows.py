"""From row to token and back.

Tensors are concatenated over requests in order. A token-side row is one token; a key-side row is
one compressed entry, which stands at the token that completes it: entry ``e`` at position
``(e + 1) * ratio - 1``. Rows are never materialised as a table; both ways are arithmetic on the
request offsets, for one row or for a tensor of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import StageKey
from needlepoint.verify.base.stages import is_key_side


@dataclass(frozen=True)
class Token:
    """Where one row stands. ``entry`` is None for token-side rows."""

    request: int
    position: int
    entry: int | None


@dataclass(frozen=True)
class Tokens:
    """Where many rows stand: int64 tensors of one shape; ``entry`` is None for token-side rows."""

    request: Tensor
    position: Tensor
    entry: Tensor | None


@dataclass(frozen=True)
class Rows:
    """The rows of one stage.

    Attributes
    ----------
    lengths
        Tokens of each request.
    ratio
        Compression ratio for key-side rows, None for token-side rows.
    """

    lengths: tuple[int, ...]
    ratio: int | None = None

    def __post_init__(self) -> None:
        if any(length < 0 for length in self.lengths):
            raise ValueError(f"request lengths {self.lengths}: expected non-negative numbers")
        if self.ratio is not None and self.ratio < 1:
            raise ValueError(f"ratio {self.ratio}: expected at least 1, or None for token rows")

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each request."""
        return tuple(length // (self.ratio or 1) for length in self.lengths)

    @property
    def offsets(self) -> tuple[int, ...]:
        """First row of each request, and the total at the end."""
        return tuple(accumulate(self.counts, initial=0))

    @property
    def total(self) -> int:
        """Rows over all requests."""
        return sum(self.counts)

    def span(self, request: int) -> slice:
        """Return the rows of one request.

        Raises
        ------
        ValueError
            Where there is no such request.
        """
        if not 0 <= request < len(self.lengths):
            raise ValueError(f"request {request}: expected 0 to {len(self.lengths) - 1}")
        return slice(self.offsets[request], self.offsets[request + 1])

    def token(self, row: int) -> Token:
        """Return where one row stands.

        Raises
        ------
        ValueError
            Where the row is out of range.
        """
        found = self.tokens(torch.tensor([row]))
        entry = None if found.entry is None else int(found.entry.item())
        return Token(int(found.request.item()), int(found.position.item()), entry)

    def tokens(self, rows: Tensor) -> Tokens:
        """Return where rows stand.

        Parameters
        ----------
        rows
            Row numbers, integer tensor of any shape.

        Returns
        -------
        Tokens
            int64 tensors of the shape of ``rows``.

        Raises
        ------
        ValueError
            Where a row is out of range.
        """
        rows = rows.to(torch.int64)
        _check_range("row", rows, self.total)
        starts = torch.tensor(self.offsets[:-1], dtype=torch.int64)
        # The last request whose first row is not after the row: requests without rows share
        # their start with the next one and are passed over.
        request = torch.searchsorted(starts, rows, right=True) - 1
        local = rows - starts[request] if rows.numel() else rows
        if self.ratio is None:
            return Tokens(request, local, None)
        return Tokens(request, (local + 1) * self.ratio - 1, local)


def stage_rows(key: StageKey, lengths: Sequence[int], ratio: int) -> Rows:
    """Return the rows of a stage of a layer of this ratio."""
    return Rows(tuple(lengths), ratio if is_key_side(key) else None)


def _check_range(what: str, values: Tensor, count: int) -> None:
    outside = (values < 0) | (values >= count)
    if bool(outside.any()):
        raise ValueError(
            f"{what} {int(values[outside][0])}: expected 0 to {count - 1}"
            if count
            else f"{what} {int(values[outside][0])}: there are none"
        )
