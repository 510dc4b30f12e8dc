"""What nobody owns is watched, whether or not NumPy can share the buffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from needlepoint.optimized.protocol.serving import Cache
from needlepoint.verify.layout.geometry import geometry
from needlepoint.verify.scenario.run import Guard, Owned

GEOMETRY = geometry("index-bf16", 64)


def state(shared: bool) -> Tensor:
    """Return ``[slots, ring, 2, width]``, in rows of one piece or not."""
    made = torch.zeros(3, 8, 2, 16)
    return made if shared else torch.zeros(3, 16, 2, 8).transpose(1, 3)


@pytest.mark.parametrize("shared", [True, False])
def test_a_change_is_seen_once_and_an_owner_may_make_it(shared: bool) -> None:
    own = state(shared)
    pool = torch.zeros(2, 64 * 256, dtype=torch.uint8)
    cache = Cache({"index": own}, {"index": (pool,)}, {"index": "index-bf16"}, 64)
    guard = Guard(cache, {"index": GEOMETRY})
    none = {"index": np.zeros(0, np.int64)}

    own[1, 3] = 1.0
    assert guard.check([]) == (
        "index state of slot 1 changed; no request of this action lives there"
    )
    assert guard.check([]) is None
    own[1, 3] = 2.0
    assert guard.check([Owned(1, 0, none)]) is None
    pool[1, 7] = 1
    assert guard.check([Owned(0, 0, none)]) == (
        "index pool 0, page 1, byte 7 changed; nobody owns it"
    )
    pool[1, 8] = 1
    assert guard.check([Owned(0, 0, {"index": np.array([1])})]) is None
