"""What SGLang's plans and slots say, and which environment variables could change a path."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import LayerInputs, PagedRows

_INVALID = 0xFFFFFFFF


def switches(*prefixes: str) -> str:
    """Return which environment variables of these prefixes are set, in words."""
    found = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(prefixes))
    return f"environment {', '.join(found)}" if found else f"no {'/'.join(prefixes)}* set"


def completed(plan: Tensor, inputs: LayerInputs) -> tuple[Tensor, Tensor]:
    """Return the token that completes each row of a plan, and the entry it becomes.

    Parameters
    ----------
    plan
        uint8 ``[rows, 16]``: sequence length (u32) and token number (u16) first.
    inputs
        Lengths and ratio.
    """
    raw = plan.cpu().contiguous()
    length = raw.view(torch.int32)[:, 0].to(torch.int64) & _INVALID
    token = raw.view(torch.int16)[:, 2].to(torch.int64) & 0xFFFF
    real = length != _INVALID
    if not bool(real[: int(real.sum())].all()):
        raise ValueError("SGLang's plan has rows behind its end; expected them in front")
    length, token = length[real], token[real]
    ends = torch.tensor(inputs.lengths).cumsum(0)
    request = torch.searchsorted(ends, token, right=True)
    counts = torch.tensor([n // inputs.ratio for n in inputs.lengths])
    first = counts.cumsum(0) - counts
    return token, first[request] + length // inputs.ratio - 1


def entry_slots(paged: PagedRows) -> Tensor:
    """Return the slot of every entry, requests one after another: page times page size plus row."""
    parts = []
    for table, count in zip(paged.page_table, paged.entries, strict=True):
        entry = torch.arange(count)
        page = table.to(torch.int64)[entry // paged.page_size]
        parts.append(page * paged.page_size + entry % paged.page_size)
    return torch.cat(parts)
