"""What the reference keeps of one request between calls."""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.reference.compressor import CompressorState
from needlepoint.reference.config import ModelConfig
from needlepoint.reference.formats.names import PER_TOKEN
from needlepoint.reference.profile import Arithmetic, Precision
from needlepoint.reference.ring import PositionRing


class RowStore:
    """Decoded rows of a request by entry, in a buffer that grows by doubling.

    Parameters
    ----------
    width
        Elements of a row.
    """

    def __init__(self, width: int) -> None:
        self.count = 0
        self._buffer = torch.empty(0, width, dtype=torch.float64)

    @property
    def rows(self) -> Tensor:
        """float64 ``[count, width]``, a view that a later append may leave behind."""
        return self._buffer[: self.count]

    def append(self, rows: Tensor) -> None:
        """Add rows at the end."""
        needed = self.count + len(rows)
        if needed > len(self._buffer):
            grown = torch.empty(
                max(needed, 2 * len(self._buffer)), rows.shape[1], dtype=torch.float64
            )
            grown[: self.count] = self.rows
            self._buffer = grown
        self._buffer[self.count : needed] = rows
        self.count = needed

    def restart(self) -> None:
        """Forget the count and keep the buffer."""
        self.count = 0


class KeyState:
    """State of one key path: tokens that open windows still need, and the finished rows.

    Parameters
    ----------
    ratio
        1, 4 or 128.
    width
        Dims of a finished row.
    arithmetic
        Decides how the tokens are stored.
    """

    def __init__(self, ratio: int, width: int, arithmetic: Arithmetic) -> None:
        self.tokens = CompressorState(ratio, width * (2 if ratio == 4 else 1), arithmetic)
        self.rows = RowStore(width)

    def restart(self) -> None:
        """Keep the buffers, forget their contents."""
        self.tokens.restart()
        self.rows.restart()


class RequestState:
    """State of one request in one layer; :meth:`ReferenceLayer.forward` advances it.

    Parameters
    ----------
    config
        Model shapes.
    ratio
        Compression ratio of the layer.
    arithmetic
        Decides how compressor states are stored.
    """

    def __init__(self, config: ModelConfig, ratio: int, arithmetic: Arithmetic) -> None:
        self.next_position = 0
        indexed, compressed = ratio in (PER_TOKEN, 4), ratio > PER_TOKEN
        self.main = KeyState(ratio, config.head_dim, arithmetic) if compressed else None
        self.index = KeyState(ratio, config.index_head_dim, arithmetic) if indexed else None
        # Window rows are kept as stored, so this ring never rounds.
        self.window = PositionRing(config.window_size, config.head_dim, Precision.FLOAT64)

    def restart(self) -> None:
        """Hand every buffer to a new request without clearing it, as serving engines do.

        Nothing of the old request can be read: rings are read by absolute position and row stores
        by entry below the count.
        """
        self.next_position = 0
        for path in (self.main, self.index):
            if path is not None:
                path.restart()
