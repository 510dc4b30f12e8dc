"""No [queries, heads, keys] tensor, and transients within the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from needlepoint.reference.attention import sparse_attention
from needlepoint.reference.config import ModelConfig
from needlepoint.reference.indexer import index_scores
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import CONTRACTS, Arithmetic
from needlepoint.reference.topk import select_topk
from needlepoint.reference.weights import random_layer_weights

MIB = 1 << 20


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers the largest tensor that any operator returned, in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: int = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
        return out


def largest_bytes(work: Callable[[], object]) -> int:
    """Return the bytes of the largest tensor that an operator returns during the work."""
    meter = Largest()
    with meter:
        work()
    return meter.bytes


def test_the_meter_sees_a_tensor_of_all_heads() -> None:
    q, k = torch.zeros(64, 16, 128), torch.zeros(4096, 128)
    assert largest_bytes(lambda: torch.einsum("shd,td->sht", q, k)) >= 64 * 16 * 4096 * 4


@pytest.mark.parametrize("compute", [torch.float64, torch.float32])
@pytest.mark.parametrize("arithmetic", CONTRACTS.values(), ids=lambda a: a.name)
def test_scores_never_hold_all_heads(arithmetic: Arithmetic, compute: torch.dtype) -> None:
    queries, heads, keys = 64, 64, 4096
    q = torch.ones(queries, heads, 128, dtype=torch.float64)
    k = torch.ones(keys, 128, dtype=torch.float64)
    visible = torch.full((queries,), keys)
    found = largest_bytes(lambda: index_scores(q, q[..., 0], k, visible, arithmetic, compute))
    assert found <= 4 * MIB  # a tile, the queries or the scores themselves
    assert queries * heads * keys * 4 == 64 * MIB


def test_a_tile_does_not_grow_with_keys() -> None:
    def largest(keys: int) -> int:
        q = torch.ones(16, 64, 128, dtype=torch.float64)
        k, visible = torch.ones(keys, 128, dtype=torch.float64), torch.full((16,), keys)
        return largest_bytes(lambda: index_scores(q, q[..., 0], k, visible, CONTRACTS["bf16"]))

    assert largest(1024) == largest(4096) == 4 * MIB


def test_selection_needs_no_more_than_places_of_its_scores() -> None:
    scores = torch.zeros(128, 4096)  # one plateau: the worst case for ties
    assert largest_bytes(lambda: select_topk(scores, 64)) <= scores.numel() * 8


def test_attention_gathers_within_its_budget() -> None:
    q = torch.ones(100, 2, 128, dtype=torch.float64)
    rows = torch.ones(100, 128, dtype=torch.float64)
    picks = torch.zeros(100, 512, dtype=torch.int32)

    def largest(budget: int) -> int:
        return largest_bytes(
            lambda: sparse_attention(
                q, rows, rows, picks, torch.zeros(2), window_size=8, budget_bytes=budget
            )
        )

    assert largest(MIB) <= MIB < 100 * 512 * 128 * 8
    assert largest(64 * MIB) > MIB


@pytest.mark.parametrize("layer_number", [0, 1])
def test_a_layer_stays_within_its_budget(small_model: ModelConfig, layer_number: int) -> None:
    """Transients follow the budget; what remains is as wide as the tokens themselves."""
    model = replace(small_model, n_heads=16, index_n_heads=8)
    tokens, budget = 2048, MIB
    layer = ReferenceLayer(
        model,
        layer_number,
        random_layer_weights(model, layer_number, 0),
        CONTRACTS["bf16"],
        budget_bytes=budget,
    )
    hidden = torch.ones(tokens, model.hidden_size, dtype=torch.bfloat16)
    found = largest_bytes(lambda: layer.forward(hidden, layer.new_request()))
    widest_row = max(model.n_heads * model.head_dim, model.index_n_heads * 128) * 8
    # Taps hold every token of an overlapping window twice.
    assert found <= max(budget, tokens * widest_row, 2 * tokens * 2 * model.head_dim * 8)
    assert layer_number or tokens * model.index_n_heads * (tokens // 4) * 4 > 30 * MIB
