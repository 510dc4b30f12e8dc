"""SGLang's two top-k kernels behind one call: rows of scores in, entries of the request out."""

from __future__ import annotations

from typing import Any, Final, Literal

import torch
from torch import Tensor

from needlepoint.optimized.emulation.pages import page_rows

TopK = Literal["v1", "v2"]
V1_MOST: Final = 1024
"""The largest k that their v1 takes."""
_ROW = 256
"""Columns of a score row are padded to a multiple of this: the top-k reads 16 bytes at a time."""
_PAGE = page_rows(4)


def select(module: Any, kernel: TopK, scores: Tensor, visible: Tensor, k: int) -> Tensor:  # noqa: ANN401
    """Return what a kernel picks, int32 ``[rows, k]`` on the CPU.

    Parameters
    ----------
    module
        ``sglang.kernels.ops.attention.dsv4.topk``.
    kernel
        ``"v1"`` always goes through a page table and gives slots, which are turned back into
        entries; ``"v2"`` is asked for entries.
    scores
        fp32 ``[rows, entries]`` on the device of the kernels.
    visible
        int32 ``[rows]``: entries that a row sees.
    k
        Entries to pick.

    Raises
    ------
    ValueError
        If k is more than v1 takes.
    """
    if kernel == "v1" and k > V1_MOST:
        raise ValueError(f"k {k}: SGLang's top-k v1 takes at most {V1_MOST}; name top-k v2")
    device = scores.device
    width = max(_ROW, -(-scores.shape[1] // _ROW) * _ROW)
    padded = scores.new_full((len(scores), width), -torch.inf)
    padded[:, : scores.shape[1]] = scores
    lengths = visible.to(device)
    out = torch.full((len(scores), k), -1, dtype=torch.int32, device=device)
    if kernel == "v1":
        # Pages in reverse, so that a slot is not the entry itself.
        table = torch.arange(width // _PAGE, dtype=torch.int32, device=device).flip(0)
        module.topk_transform_paged(
            padded, lengths, table.expand(len(scores), -1).contiguous(), out, _PAGE
        )
        return _entries(out, table).cpu()
    plan = module.plan_topk_v2(lengths)
    if device.type == "cuda":
        torch.cuda.synchronize()  # their plan must not directly precede the kernel
    module.topk_transform_paged_v2(padded, lengths, None, out, _PAGE, plan)
    return out.cpu()


def _entries(slots: Tensor, table: Tensor) -> Tensor:
    """Return the entries that slots hold; one past all columns for a slot of no page."""
    page, row = slots // _PAGE, slots % _PAGE
    known = (page >= 0) & (page < len(table))
    place = table.argsort()[page.clamp(0, len(table) - 1)].to(torch.int32)
    found = torch.where(known, place * _PAGE + row, len(table) * _PAGE)
    return torch.where(slots == -1, -1, found).to(torch.int32)
