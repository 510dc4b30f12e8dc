"""Stored rows of all requests, read from a candidate's pages and laid out for comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import PagedRows, QueryRows
from needlepoint.reference.formats import Encoded, Format, ScaleKind, decode, unpack_e2m1
from needlepoint.verify.layout.pages import DecodedRows, open_pool

_ELEMENT_OF_LAYOUT = {
    "index-fp8": "e4m3",
    "index-fp4": "e2m1",
    "index-bf16": "bf16",
    "main-584": "e4m3",
    "main-bf16": "bf16",
    "rows-f64": "float64",
}

REPLAYABLE = 2.0**59
"""Magnitude from which a stored number is not replayed: the specification's precondition."""


@dataclass(frozen=True)
class StoredRows:
    """Rows of one path, all requests."""

    layout: str  # Page layout.
    values: Tensor  # float64 ``[entries, d]``, scales applied.
    # Codes and scales as the format of the profile has them: all dims, or the 448 nope dims of
    # ``main-584``. Unscaled layouts hold their values.
    encoded: Encoded
    # float64 ``[entries, 64]``, the bf16 RoPE dims of ``main-584``; None elsewhere.
    rope: Tensor | None

    def rows(self, rows: slice) -> StoredRows:
        """Return some entries."""
        codes, scales = self.encoded.codes[rows], self.encoded.scales
        return replace(
            self,
            values=self.values[rows],
            encoded=Encoded(codes, None if scales is None else scales[rows]),
            rope=None if self.rope is None else self.rope[rows],
        )

    def require(self, fmt: Format) -> None:
        """Raise ``ValueError`` unless the layout stores elements of this format."""
        element = _ELEMENT_OF_LAYOUT[self.layout]
        if element != fmt.element:
            raise ValueError(
                f"layout {self.layout} stores {element}, the profile stores {fmt.element} "
                f"({fmt.name}); the candidate must declare the profile of what it writes"
            )


def read_stored(paged: PagedRows, row_width: int | None = None) -> StoredRows:
    """Read every row of a pool through its page tables.

    Parameters
    ----------
    paged
        Pool, page size, one page table and one entry count per request.
    row_width
        Elements of a row, for ``rows-f64`` alone.

    Raises
    ------
    ValueError
        If the pool, a page table or the layout is not usable, as ``open_pool`` and ``Pool.read``.
    """
    wide = row_width if paged.layout == "rows-f64" else None
    pool = open_pool(paged.pool, paged.layout, paged.page_size, row_width=wide)
    parts = pool.read_requests(paged.page_table, paged.entries)
    values = _join(parts, "values")
    scaled = parts[0].scales is not None
    encoded = Encoded(
        _join(parts, "codes") if scaled else values, _join(parts, "scales") if scaled else None
    )
    rope = values[:, 448:] if paged.layout == "main-584" else None
    return StoredRows(paged.layout, values, encoded, rope)


def encoded_queries(query: QueryRows, fmt: Format) -> Encoded:
    """Return stored queries: codes ``[tokens, heads, 128]``, scales ``[tokens, heads, blocks]``.

    Raises
    ------
    ValueError
        If the query is stored in another element type than the profile's.
    """
    elements = {"bf16": "bf16", "fp8": "e4m3", "fp4": "e2m1", "float64": "float64"}
    if elements.get(query.format) != fmt.element:
        raise ValueError(
            f"query format {query.format!r}, the profile stores {fmt.element} ({fmt.name}); the "
            "candidate must declare the profile of what it writes"
        )
    if query.format == "fp4":
        return Encoded(unpack_e2m1(query.codes), query.scales)
    if query.format == "fp8" and query.scales is not None:
        return Encoded(query.codes, query.scales.reshape(*query.codes.shape[:-1], -1))
    return Encoded(query.codes, None)


def decoded_queries(query: QueryRows, fmt: Format) -> Tensor:
    """Return stored queries as float64 ``[tokens, heads, 128]``, scales applied."""
    encoded = encoded_queries(query, fmt)
    if encoded.scales is not None and encoded.scales.is_floating_point():
        # A power of two may stand in an fp32 slot (vLLM, LMDeploy).
        fmt = replace(fmt, scale=ScaleKind.FP32)
    return decode(encoded, fmt)


def unfolded_weights(query: QueryRows) -> Tensor:
    """Return the head weights in canonical form: float64, without a query scale."""
    weights = query.weights.to(torch.float64)
    if not query.scale_folded or query.scales is None:
        return weights
    return weights / query.scales.reshape(weights.shape).to(torch.float64)


def replayable(values: Tensor) -> Tensor:
    """Return float64 of observed numbers with those that cannot be replayed set to 0.

    NaN, infinity and numbers beyond the specification's precondition are faults of the stage that
    holds them and are reported there. What follows is replayed without them, so that one of them
    does not hide every other row.
    """
    wide = values.to(torch.float64)
    return torch.where(wide.abs() < REPLAYABLE, wide, 0.0)


def _join(parts: list[DecodedRows], name: str) -> Tensor:
    return torch.from_numpy(np.concatenate([getattr(part, name) for part in parts]))
