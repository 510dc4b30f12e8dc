"""One request cut in every way: the same bytes up to query and weights, scores within rounding."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import CONTRACTS, Arithmetic
from needlepoint.reference.request import RequestState
from needlepoint.reference.stages import ChunkStages
from needlepoint.reference.weights import random_layer_weights

Hidden = Callable[[int, int], Tensor]
Stages = dict[tuple[str, str], Tensor]

NEAR = {("index", "scores"): 2**-20, ("main", "attention"): 2**-20}
COARSE = {("index", "scores"): 2**-6, ("main", "attention"): 2**-6}  # one step of bf16
PICKS = ("index", "topk")


def make(model: ModelConfig, layer: int, arithmetic: Arithmetic) -> ReferenceLayer:
    return ReferenceLayer(model, layer, random_layer_weights(model, layer, 5), arithmetic)


def run(
    layer: ReferenceLayer, hidden: Tensor, cuts: list[int], state: RequestState | None = None
) -> Stages:
    """Feed a request in calls and join their stages; scores are padded to the last width."""
    state = state or layer.new_request()
    ends = [0, *cuts, len(hidden)]
    calls = [
        layer.forward(hidden[a:b], state, keep_scores=True) for a, b in itertools.pairwise(ends)
    ]
    return join(calls)


def join(calls: list[ChunkStages]) -> Stages:
    parts = [call.tensors() for call in calls]
    width = max(
        (p["index", "scores"].shape[1] for p in parts if ("index", "scores") in p), default=0
    )
    joined: Stages = {}
    for key in parts[0]:
        tensors = [p[key] for p in parts]
        if key == ("index", "scores"):
            tensors = [
                torch.nn.functional.pad(t, (0, width - t.shape[1]), value=-torch.inf)
                for t in tensors
            ]
        joined[key] = torch.cat(tensors)
    return joined


def check_same(found: Stages, wanted: Stages, arithmetic: Arithmetic) -> None:
    assert found.keys() == wanted.keys()
    near = COARSE if arithmetic.name == "official" else NEAR
    for key, tensor in found.items():
        other = wanted[key]
        if key in near:
            assert torch.equal(torch.isinf(tensor), torch.isinf(other)), key
            size = other[~torch.isinf(other)].abs().amax() if other.numel() else 1.0
            torch.testing.assert_close(tensor, other, rtol=0, atol=float(near[key] * size))
        elif key == PICKS:
            check_same_picks(tensor, other, wanted["index", "scores"], near["index", "scores"])
        else:
            assert torch.equal(tensor, other), key


def check_same_picks(found: Tensor, wanted: Tensor, scores: Tensor, step: float) -> None:
    """Allow picks to differ only where the scores are as near as rounding."""
    assert torch.equal((found >= 0).sum(1), (wanted >= 0).sum(1))
    for row in (found != wanted).any(1).nonzero().flatten().tolist():
        lost = set(wanted[row].tolist()) - set(found[row].tolist())
        gained = set(found[row].tolist()) - set(wanted[row].tolist())
        size = scores[row][~torch.isinf(scores[row])].abs().max()
        for a, b in itertools.product(lost, gained):
            assert abs(scores[row, a] - scores[row, b]) <= 4 * step * size


@pytest.mark.parametrize("contract", CONTRACTS)
def test_every_two_way_split_at_ratio_4(
    small_model: ModelConfig, hidden_states: Hidden, contract: str
) -> None:
    """47 tokens: window of 8, five picks (discarding from token 23 on), every residue mod 4."""
    layer = make(small_model, 0, CONTRACTS[contract])
    hidden = hidden_states(47, 1)
    whole = run(layer, hidden, [])
    for cut in range(1, 47):
        check_same(run(layer, hidden, [cut]), whole, layer.arithmetic)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("layer_number", [0, 1, 2])
def test_token_by_token(
    small_model: ModelConfig, hidden_states: Hidden, contract: str, layer_number: int
) -> None:
    layer = make(small_model, layer_number, CONTRACTS[contract])
    tokens = 131 if layer_number == 1 else 29
    hidden = hidden_states(tokens, 2)
    whole = run(layer, hidden, [])
    check_same(run(layer, hidden, list(range(1, tokens))), whole, layer.arithmetic)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_every_length_is_a_prefix_of_the_next(
    small_model: ModelConfig, hidden_states: Hidden, contract: str
) -> None:
    layer = make(small_model, 0, CONTRACTS[contract])
    hidden = hidden_states(34, 3)
    whole = run(layer, hidden, [])
    for tokens in range(1, 34):
        found = run(layer, hidden[:tokens], [])
        rows = {key: len(t) for key, t in found.items()}
        assert rows["index", "stored"] == rows["main", "stored"] == tokens // 4
        assert (
            rows["query", "query"] == rows["index", "topk"] == rows["main", "attention"] == tokens
        )
        prefix = {key: t[: rows[key]] for key, t in whole.items()}
        prefix["index", "scores"] = prefix["index", "scores"][:, : tokens // 4]
        check_same(found, prefix, layer.arithmetic)


@pytest.mark.parametrize("tokens", [1, 2, 3, 126, 127, 128, 129, 130, 254, 255, 256, 257, 258])
def test_lengths_around_windows_of_128(
    small_model: ModelConfig, hidden_states: Hidden, tokens: int
) -> None:
    layer = make(small_model, 1, CONTRACTS["bf16"])
    hidden = hidden_states(tokens, 4)
    whole = run(layer, hidden, [])
    assert len(whole["main", "stored"]) == tokens // 128
    for cut in {1, 3, 64, 126, 127, 128, 129, tokens - 1} & set(range(1, tokens)):
        check_same(run(layer, hidden, [cut]), whole, layer.arithmetic)


@settings(max_examples=30, deadline=None)
@given(
    layer_number=st.integers(0, 2),
    tokens=st.integers(1, 150),
    cuts=st.sets(st.integers(1, 149), max_size=6),
    threads=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 3),
)
def test_any_cuts_and_threads(
    small_model: ModelConfig,
    hidden_states: Hidden,
    layer_number: int,
    tokens: int,
    cuts: set[int],
    threads: int,
    seed: int,
) -> None:
    layer = make(small_model, layer_number, CONTRACTS["bf16"])
    hidden = hidden_states(tokens, seed)
    torch.set_num_threads(1)
    whole = run(layer, hidden, [])
    torch.set_num_threads(threads)
    found = run(layer, hidden, sorted(c for c in cuts if c < tokens))
    check_same(found, whole, layer.arithmetic)


@pytest.mark.parametrize("layer_number", [0, 1, 2])
@pytest.mark.parametrize("first_call", [1, 2, 3, 7])
def test_reused_buffers_leak_nothing(
    small_model: ModelConfig, hidden_states: Hidden, layer_number: int, first_call: int
) -> None:
    """A recycled state must give the bytes of a fresh one, however short the first call is."""
    layer = make(small_model, layer_number, CONTRACTS["bf16"])
    state = layer.new_request()
    layer.forward(hidden_states(143, 7), state)
    state.restart()
    hidden = hidden_states(133, 8)
    found = run(layer, hidden, [first_call], state)
    wanted = run(layer, hidden, [first_call])
    assert found.keys() == wanted.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, wanted[key]), key
