"""What a launch found outside the specification's preconditions, and the error that says so.

Every kernel checks what it computes: prescaled scores of magnitude 2**22 or more, and numbers that
are not finite or so large that a sum overflows. The bytes of such a row mean nothing. The kernel
notes the lowest window (or token of a query) in two device words; the host reads them after the
launch, at once or, where a graph is replayed, when it likes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.optimized.serving.plan import StorePlan

_NONE = 2**31 - 1
_SCORE = "a score that is not finite or prescales to a magnitude of 2**22 or more"
_ROW = "kv that is not finite or so large that a sum of the row overflows"


def new_faults(device: torch.device | str) -> Tensor:
    """Return the fault words of launches on a device: int32 ``[2]``, nothing found."""
    return torch.full((2,), _NONE, dtype=torch.int32, device=device)


def require_no_store_faults(faults: Tensor, plan: StorePlan) -> None:
    """Wait for the launches that write ``faults`` and raise if a store found a fault.

    Parameters
    ----------
    faults
        Words of :func:`new_faults` that the launches were given.
    plan
        Their plan, which names the entry.

    Raises
    ------
    ValueError
        If a window lies outside the preconditions; its stored row means nothing.
    """
    score, row = faults.tolist()
    for name, what, window in (("score", _SCORE, score), ("kv", _ROW, row)):
        if window == _NONE:
            continue
        if plan.decode:
            token, entry = plan.segments[window, 2:4].tolist()
        else:
            token, entry = int(plan.windows.token[window]), int(plan.windows.entry[window])
        raise ValueError(
            f"{name}: the window that ends at row {token} (entry {entry} of its request) holds "
            f"{what}; its stored row means nothing. Expected finite numbers below the limits of "
            "docs/specification.md, Preconditions"
        )


def require_no_query_faults(faults: Tensor) -> None:
    """Wait for the launches that write ``faults`` and raise if a query is not finite.

    Raises
    ------
    ValueError
        If a query row or a head weight is not finite after its steps, naming the token.
    """
    query, weight = faults.tolist()
    for name, token in (("q", query), ("weights", weight)):
        if token != _NONE:
            raise ValueError(
                f"{name}: token {token} holds a number that is not finite or so large that a sum "
                "overflows; its stored query means nothing. Expected finite numbers below the "
                "limits of docs/specification.md, Preconditions"
            )
