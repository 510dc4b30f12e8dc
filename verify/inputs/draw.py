"""Random numbers for synthetic inputs that are the same bits on every machine."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from needlepoint.verify.base.rows import Rows, Tokens

Values = NDArray[np.float64]
Integers = NDArray[np.int64]

_ROWS = 1024  # tokens drawn at once: bounds the float64 copy


class Draw:
    """A stream of draws for one seed and one purpose.

    NumPy guarantees the raw stream of PCG64 but not that of its distributions, so those are made
    here from raw words by exact arithmetic.
    """

    def __init__(self, seed: int, purpose: str) -> None:
        self._raw = np.random.PCG64([seed, zlib.crc32(purpose.encode())])

    def words(self, count: int) -> NDArray[np.uint64]:
        """Return raw 64-bit words."""
        words: NDArray[np.uint64] = np.asarray(self._raw.random_raw(count), dtype=np.uint64)
        return words

    def normal(self, shape: tuple[int, int]) -> Values:
        """Return near-normal numbers of mean 0 and variance 1.

        Each is a sum of eight uniform 16-bit integers (Irwin-Hall), exact until the one division;
        none is beyond 4.9 deviations.
        """
        fields = self.words(2 * shape[0] * shape[1]).view(np.uint16).reshape(*shape, 8)
        total = fields.sum(axis=-1, dtype=np.int64).astype(np.float64)
        values: Values = (total - 4 * 0xFFFF) / math.sqrt(8 * (2**32 - 1) / 12)
        return values

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> Integers:
        """Return integers of ``low`` to ``high``, both included; spans far below 2**32."""
        span = np.uint64(high - low + 1)
        words = self.words(math.prod(shape)).reshape(shape)
        return ((words >> np.uint64(32)) * span >> np.uint64(32)).astype(np.int64) + low

    def signs(self, shape: tuple[int, ...]) -> Values:
        """Return +1 and -1."""
        return 1.0 - 2.0 * self.integers(0, 1, shape).astype(np.float64)

    def channels(self, width: int, count: int) -> Integers:
        """Return ``count`` different channels of ``width``."""
        return np.argsort(self.words(width), kind="stable")[:count]


def fill(lengths: Sequence[int], width: int, rows: Callable[[Tokens], Values]) -> Tensor:
    """Return bf16 ``[sum(lengths), width]``, drawn a block of tokens at a time.

    ``rows`` is given where the tokens stand and returns their values ``[n, width]``.
    """
    layout = Rows(tuple(lengths))
    out = torch.empty(layout.total, width, dtype=torch.bfloat16)
    for start in range(0, layout.total, _ROWS):
        at = torch.arange(start, min(start + _ROWS, layout.total))
        values = np.ascontiguousarray(rows(layout.tokens(at)), dtype=np.float32)
        out[start : start + len(at)] = torch.from_numpy(values)
    return out
