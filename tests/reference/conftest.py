from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from needlepoint.reference.config import ModelConfig

Hidden = Callable[[int, int], Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors run faster on one thread; tests about threads set their own number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def small_model() -> ModelConfig:
    """Return a model with the widths that the formats need and everything else tiny.

    Layers: 0 with ratio 4, 1 with ratio 128, 2 with ratio 0.
    """
    return ModelConfig(
        name="small",
        hidden_size=24,
        n_heads=2,
        head_dim=128,
        q_lora_rank=16,
        window_size=8,
        index_n_heads=3,
        index_topk=5,
        compress_ratios=(4, 128, 0),
    )


@pytest.fixture(scope="session")
def hidden_states() -> Hidden:
    """Return ``make(tokens, seed)``: bf16 hidden states of the small model."""

    def make(tokens: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(tokens, 24, generator=generator).to(torch.bfloat16)

    return make
