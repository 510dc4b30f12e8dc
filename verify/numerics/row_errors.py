"""Row errors: what a comparison says about each row of a stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from needlepoint.optimized.protocol.stages import StageKey
from needlepoint.reference.parallel import sized
from needlepoint.verify.numerics.error_model import LEAN, U
from needlepoint.verify.numerics.tally import join_tallies, no_tally

_BLOCK_ELEMENTS = 1 << 18
_CARD_ELEMENTS = 1 << 24
"""Elements of one temporary: comparisons go by blocks of rows so that memory stays bounded."""


@dataclass(frozen=True)
class RowErrors:
    """Errors of the rows of one stage; every tensor has one number a row."""

    # float64, largest error of an element or scale in units of its a-priori radius. Infinite where
    # nothing in reach rounds to what was found, and for NaN.
    ratio: Tensor
    # float64, norm of candidate minus reference and of the reference, as stored values.
    error_norm: Tensor
    reference_norm: Tensor
    distance: Tensor  # int64, largest distance in ULP or codes.
    # int64, dim of the largest ratio; first dim of the block where the scale is at fault.
    dim: Tensor
    # float64, reference and candidate value there (scales where the scale is at fault).
    expected: Tensor
    found: Tensor
    scale_fault: Tensor  # bool, whether the largest ratio is that of a scale.
    tally: Tensor  # float64 ``[rows, columns]``, directions and widths (``tally.py``).

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.ratio)

    def relative(self, floor: float) -> Tensor:
        """Return ``norm(c - r) / max(norm(r), floor)``, float64 [rows]."""
        return self.error_norm / self.reference_norm.clamp(min=floor)

    def with_entries(self, ratio: Tensor, swaps: Tensor, lost: Tensor, gained: Tensor) -> RowErrors:
        """Return rows of picks: error, number of swaps, best lost entry and what replaced it."""
        return replace(
            self,
            ratio=ratio,
            distance=swaps,
            expected=lost.to(torch.float64),
            found=gained.to(torch.float64),
        )

    def with_ratio(self, ratio: Tensor) -> RowErrors:
        """Return the same rows with another error, float64 [rows]."""
        return replace(self, ratio=ratio)

    def failed(self, limit: float) -> Tensor:
        """Return the rows beyond a limit, bool [rows]; NaN counts as beyond."""
        return ~(self.ratio <= limit)

    def join(self, other: RowErrors, first_dim: int) -> RowErrors:
        """Return the errors of rows whose dims are split in two parts.

        Parameters
        ----------
        other
            Errors of the dims from ``first_dim`` on, same rows.
        first_dim
            Where the other part starts.
        """
        moved = replace(other, dim=other.dim + first_dim)
        worse = moved.ratio > self.ratio
        picked = {
            name: torch.where(worse, getattr(moved, name), getattr(self, name))
            for name in ("ratio", "dim", "expected", "found", "scale_fault")
        }
        return RowErrors(
            error_norm=torch.hypot(self.error_norm, other.error_norm),
            reference_norm=torch.hypot(self.reference_norm, other.reference_norm),
            distance=torch.maximum(self.distance, other.distance),
            tally=join_tallies(self.tally, other.tally),
            **picked,
        )

    @staticmethod
    def concatenate(parts: list[RowErrors]) -> RowErrors:
        """Return the errors of consecutive blocks of rows as one.

        Raises
        ------
        ValueError
            If there are no blocks: an empty comparison is not a comparison.
        """
        if not parts:
            raise ValueError("row errors: no blocks to concatenate, expected at least one")
        names = [field.name for field in fields(RowErrors)]
        return RowErrors(**{n: torch.cat([getattr(p, n) for p in parts]) for n in names})


def worst_of(
    ratio: Tensor,
    found: Tensor,
    expected: Tensor,
    distance: Tensor,
    tally: Tensor | None = None,
) -> RowErrors:
    """Reduce the errors of elements, each [rows, n], to those of rows.

    Parameters
    ----------
    ratio
        float64 errors in units of the radius, without NaN.
    found, expected
        float64 candidate and reference values.
    distance
        int64 distances.
    tally
        [rows, columns]; None where nothing was counted.
    """
    dim = ratio.argmax(1, keepdim=True)
    return RowErrors(
        ratio=ratio.gather(1, dim)[:, 0],
        error_norm=torch.linalg.vector_norm(found - expected, dim=1),
        reference_norm=torch.linalg.vector_norm(expected, dim=1),
        distance=distance.amax(1),
        dim=dim[:, 0],
        expected=expected.gather(1, dim)[:, 0],
        found=found.gather(1, dim)[:, 0],
        scale_fault=torch.zeros_like(dim[:, 0], dtype=torch.bool),
        tally=no_tally(len(ratio)) if tally is None else tally,
    )


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Yield slices of rows that hold about a quarter of a million elements each, more on a card."""
    step = max(1, sized(_BLOCK_ELEMENTS, _CARD_ELEMENTS) // max(1, width))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


@dataclass(frozen=True)
class StageErrors:
    """Row errors of one stage, both ways."""

    key: StageKey
    local: RowErrors
    accumulated: RowErrors
    distance_unit: str | None = None
    """What ``distance`` counts; None for the stage's usual unit."""
    lean: float = LEAN.value * U
    """What fp32 may push all rows one way, relative; infinite where no direction is tested."""
