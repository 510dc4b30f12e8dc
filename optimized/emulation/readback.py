"""Stored rows and queries back to fp32, as the score kernel reads them.

This is the candidate's own reader: it takes the bytes from the pages that it wrote. The judge has
another one (``verify/layout/pages.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.emulation.narrow import FP4_BLOCK, U8, widen_bf16
from needlepoint.optimized.emulation.pages import planes
from needlepoint.optimized.protocol.interface import PagedRows, QueryRows
from needlepoint.reference.formats import e2m1_decode, e4m3_decode

_E4M3 = e4m3_decode(torch.arange(256, dtype=torch.uint8)).to(torch.float32).numpy()
_E2M1 = e2m1_decode(torch.arange(16, dtype=torch.uint8)).to(torch.float32).numpy()


@dataclass(frozen=True)
class DecodedKeys:
    """Index keys of one request as the score kernel uses them.

    Attributes
    ----------
    values
        float32 ``[entries, 128]``; fp4 values carry their scales, fp8 values do not.
    scale
        float32 ``[entries]`` applied after the head sum (fp8), or None.
    """

    values: Tensor
    scale: Tensor | None


def stored_bytes(paged: PagedRows, request: int) -> tuple[U8, U8]:
    """Return value bytes ``[entries, ..]`` and scale bytes ``[entries, ..]`` of one request."""
    entry = np.arange(paged.entries[request])
    page = paged.page_table[request].numpy()[entry // paged.page_size]
    slot = entry % paged.page_size
    values, scales = planes(paged)
    return values[page, slot], scales[page, slot]


def read_index_keys(paged: PagedRows, request: int) -> DecodedKeys:
    """Return the index keys of one request, read through its page table.

    Raises
    ------
    ValueError
        If the layout is not one of index keys.
    """
    values, scales = stored_bytes(paged, request)
    if paged.layout == "index-bf16":
        return DecodedKeys(torch.from_numpy(widen_bf16(values.view(np.uint16))), None)
    if paged.layout == "index-fp8":
        scale = torch.from_numpy(scales.view("<f4").reshape(-1).astype(np.float32))
        return DecodedKeys(torch.from_numpy(_E4M3[values]), scale)
    if paged.layout == "index-fp4":
        return DecodedKeys(torch.from_numpy(_decode_fp4(values, scales)), None)
    raise ValueError(f"layout {paged.layout!r}: expected one of index keys")


def read_queries(query: QueryRows, rows: slice) -> Tensor:
    """Return queries as the score kernel uses them: float32 ``[n, heads, 128]``.

    An fp8 query comes without its scale, which is folded into the weights.
    """
    codes = query.codes[rows]
    if query.format == "bf16":
        return codes.to(torch.float32)
    if query.format == "fp8":
        return torch.from_numpy(_E4M3[codes.numpy()])
    if query.scales is None:
        raise ValueError("fp4 queries without scales: expected one UE8M0 byte for each 32 dims")
    return torch.from_numpy(_decode_fp4(codes.numpy(), query.scales[rows].numpy()))


def _decode_fp4(packed: U8, exponents: U8) -> np.ndarray:
    values = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), np.float32)
    values[..., 0::2] = _E2M1[packed & 0xF]
    values[..., 1::2] = _E2M1[packed >> 4]
    steps = (exponents.astype(np.uint32) << 23).view(np.float32)
    blocks = values.reshape(*exponents.shape, FP4_BLOCK) * steps[..., None]
    return blocks.reshape(values.shape)
