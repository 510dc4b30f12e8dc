"""Projections are what their kind says, and every call takes the tokens that it should."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from needlepoint.optimized.emulation.pages import allocate
from needlepoint.optimized.serving.plan import StorePlan
from needlepoint.verify.workloads.calls import Calls, Feed, window_tokens
from needlepoint.verify.workloads.projections import KINDS, draw


def test_kinds_are_what_they_say() -> None:
    drawn = {kind: draw(kind, (64, 32), torch.Generator().manual_seed(0)) for kind in KINDS}

    assert set(drawn["tied"].flatten().tolist()) <= {-1.0, 0.0, 1.0}
    assert torch.equal(drawn["integers"], drawn["integers"].round())
    assert (drawn["sparse"] == 0).all(dim=1).any()
    assert drawn["tiny"].abs().max() < 1e-4 < 1e3 < drawn["huge"].abs().max()
    with pytest.raises(ValueError, match="kind 'flat': expected one of"):
        draw("flat", (1,), torch.Generator())


def test_a_round_is_planned_call_by_call_without_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(StorePlan, "to", lambda plan, device: plan)
    lengths = (9, 17)
    pages = allocate("index-fp8", 64, [2, 4], seed=1)
    order = np.arange(100, 126)
    for feed in (Feed("prefill", 2, (0,)), Feed("chunks", 2, (3, 6)), Feed("decode", 2, (1,))):
        calls = Calls.plan(4, feed, order, lengths, pages, torch.float32)
        taken = torch.cat(
            [rows[: plan.tokens] for plan, rows in zip(calls.plans, calls.rows, strict=True)]
        )
        assert sorted(taken.tolist()) == order.tolist()
        assert sum(len(plan.windows.entry) for plan in calls.plans) == 6
        assert calls.state is (None if feed.name == "prefill" else torch.float32)
        assert {plan.decode for plan in calls.plans} == {feed.name == "decode"}


def test_windows_are_made_of_consecutive_tokens() -> None:
    tokens, entries = window_tokens(4, (9, 4))

    assert entries.tolist() == [0, 1, 0]
    assert tokens.tolist() == [
        [-1, -1, -1, -1, 0, 1, 2, 3],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [-1, -1, -1, -1, 9, 10, 11, 12],
    ]
    assert window_tokens(128, (256,))[0].tolist() == torch.arange(256).view(2, 128).tolist()
