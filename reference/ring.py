"""A ring of token rows that knows which absolute position each row holds.

Serving engines keep the last tokens of a request in small buffers and give them to the next request
without clearing them. Code that reads such a buffer by slot alone can mix two requests. Here every
read names the positions that it wants and compares them with the labels of the slots, so rows of an
earlier request are never returned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.reference.profile import Precision
from needlepoint.reference.rounding import round_to

_DTYPES = {
    Precision.FLOAT64: torch.float64,
    Precision.FP32: torch.float32,
    Precision.BF16: torch.bfloat16,
}


class PositionRing:
    """The last ``slots`` rows of one request; position ``p`` lives in slot ``p % slots``.

    Parameters
    ----------
    slots
        Rows kept.
    width
        Elements of a row.
    precision
        Storage precision; writing rounds once.
    """

    def __init__(self, slots: int, width: int, precision: Precision) -> None:
        self.precision = precision
        self.rows = torch.zeros(slots, width, dtype=_DTYPES[precision])
        self.positions = torch.full((slots,), -1, dtype=torch.int64)

    def write(self, first_position: int, rows: Tensor) -> None:
        """Store consecutive rows from ``first_position``; only the last ``slots`` of them stay.

        Parameters
        ----------
        first_position
            Absolute position of ``rows[0]``.
        rows
            float64 ``[n, width]``.
        """
        slots = len(self.rows)
        kept = rows[-slots:]
        positions = torch.arange(first_position, first_position + len(rows))[-slots:]
        self.rows[positions % slots] = round_to(kept, self.precision).to(self.rows.dtype)
        self.positions[positions % slots] = positions

    def read(self, start: int, stop: int) -> Tensor:
        """Return the rows of positions ``start .. stop - 1`` as float64 ``[stop - start, width]``.

        Raises
        ------
        ValueError
            If a position is not there: negative, overwritten, never written, or the slot holds a
            row of another position.
        """
        positions = torch.arange(start, stop)
        slots = positions % len(self.rows)
        wrong = self.positions[slots] != positions
        if start < 0 or bool(wrong.any()):
            at = int(wrong.nonzero()[0]) if bool(wrong.any()) else 0
            raise ValueError(
                f"state slot {int(slots[at])} holds position {int(self.positions[slots[at]])}, "
                f"expected {start + at}; feed the tokens of a request in order, without gaps"
            )
        return self.rows[slots].to(torch.float64)
