from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.profile import BF16_CONTRACT, EXACT
from needlepoint.reference.request import RequestState, RowStore


@given(st.lists(st.integers(0, 9), max_size=12))
def test_rows_come_back_in_order(parts: list[int]) -> None:
    store, start = RowStore(2), 0
    for part in parts:
        rows = torch.arange(start, start + part, dtype=torch.float64).unsqueeze(1).expand(-1, 2)
        store.append(rows)
        start += part
    assert store.count == start
    assert store.rows[:, 1].tolist() == list(range(start))


def test_restart_hides_the_old_rows() -> None:
    store = RowStore(1)
    store.append(torch.ones(5, 1, dtype=torch.float64))
    store.restart()
    assert len(store.rows) == 0
    store.append(torch.zeros(2, 1, dtype=torch.float64))
    assert store.rows.tolist() == [[0.0], [0.0]]


def test_states_of_each_ratio(small_model: ModelConfig) -> None:
    kinds = {}
    for ratio in (0, 4, 128):
        state = RequestState(small_model, ratio, BF16_CONTRACT)
        kinds[ratio] = (state.index is not None, state.main is not None)
    assert kinds == {0: (False, False), 4: (True, True), 128: (False, True)}


def test_state_precision_follows_the_arithmetic(small_model: ModelConfig) -> None:
    for arithmetic, dtype in ((BF16_CONTRACT, torch.float32), (EXACT, torch.float64)):
        state = RequestState(small_model, 4, arithmetic)
        assert state.main is not None
        assert state.main.tokens.kv.rows.dtype == dtype
        assert state.main.tokens.kv.rows.shape == (8, 256)
