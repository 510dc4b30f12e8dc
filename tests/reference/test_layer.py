from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.formats import decode
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import BF16_CONTRACT, CONTRACTS, EXACT, OFFICIAL
from needlepoint.reference.weights import LayerWeights, random_layer_weights

Hidden = Callable[[int, int], Tensor]


@pytest.fixture
def weights(small_model: ModelConfig) -> LayerWeights:
    return random_layer_weights(small_model, 0, 0)


def test_stages_of_each_ratio(small_model: ModelConfig, hidden_states: Hidden) -> None:
    found = {}
    for number in range(3):
        layer = ReferenceLayer(
            small_model, number, random_layer_weights(small_model, number, 0), BF16_CONTRACT
        )
        stages = layer.forward(hidden_states(130, 0), layer.new_request(), keep_scores=True)
        found[small_model.ratio(number)] = list(stages.tensors())
    key_side = ("pooled", "normed", "roped")
    assert found[0] == [("main", "attention")]
    assert found[128] == [
        ("main", "projected"),
        *(("main", stage) for stage in key_side),
        ("main", "stored"),
        ("main", "attention"),
    ]
    assert set(found[4]) == {
        *((path, "projected") for path in ("index", "main", "query")),
        *((path, stage) for path in ("index", "main") for stage in key_side),
        ("index", "rotated"),
        ("index", "stored"),
        ("main", "stored"),
        ("query", "query"),
        ("query", "weights"),
        ("index", "scores"),
        ("index", "topk"),
        ("main", "attention"),
    }


def test_stored_rows_decode_to_their_values(
    small_model: ModelConfig, weights: LayerWeights, hidden_states: Hidden
) -> None:
    layer = ReferenceLayer(small_model, 0, weights, OFFICIAL)
    stages = layer.forward(hidden_states(40, 0), layer.new_request())
    assert stages.index is not None
    assert stages.main is not None
    assert stages.query is not None
    index, main, query = stages.index.stored, stages.main.stored, stages.query.stored
    assert index.rope is None
    assert index.encoded.codes.shape == (10, 128)
    assert torch.equal(decode(index.encoded, OFFICIAL.index_key), index.values)
    assert query.encoded.codes.shape == (40, 3, 128)
    assert torch.equal(decode(query.encoded, OFFICIAL.index_query), query.values)
    assert main.rope is not None
    assert main.encoded.codes.shape == (10, 64)
    assert torch.equal(decode(main.encoded, OFFICIAL.main_nope), main.values[:, :64])
    assert torch.equal(main.rope, main.values[:, 64:])


def test_picks_are_the_best_visible_entries(
    small_model: ModelConfig, weights: LayerWeights, hidden_states: Hidden
) -> None:
    layer = ReferenceLayer(small_model, 0, weights, EXACT)
    stages = layer.forward(hidden_states(60, 1), layer.new_request(), keep_scores=True)
    assert stages.scores is not None
    assert stages.topk is not None
    assert stages.topk.shape == (60, small_model.index_topk)
    for position in range(60):
        visible = (position + 1) // 4
        row = stages.scores[position].tolist()
        assert all(math.isinf(v) for v in row[visible:])
        best = sorted(range(visible), key=lambda e: (-row[e], e))[: small_model.index_topk]
        picks = [e for e in stages.topk[position].tolist() if e >= 0]
        assert picks == sorted(best)


def test_a_row_that_nobody_picks_has_no_say(
    small_model: ModelConfig, weights: LayerWeights, hidden_states: Hidden
) -> None:
    """The output of a token follows from its window and its picks."""
    layer = ReferenceLayer(small_model, 0, weights, EXACT)
    hidden = hidden_states(60, 2)
    stages = layer.forward(hidden, layer.new_request())
    assert stages.topk is not None
    assert stages.main is not None
    projected = stages.projected
    state = layer.new_request()
    window = layer.attention.window(projected, rope := layer.rope(0, 60), state.window)
    rows, picks = stages.main.stored.values, stages.topk
    again = layer.attention.attend(projected, rope, window, rows, picks)
    assert stages.attention is not None
    assert torch.equal(again, stages.attention)
    changed = rows.clone()
    changed[7] += 1
    moved = layer.attention.attend(projected, rope, window, changed, picks)
    differs = (moved != again).flatten(1).any(1)
    assert differs.tolist() == (picks == 7).any(1).tolist()
    assert differs.any()
    assert not differs.all()


def test_contracts_agree_roughly(
    small_model: ModelConfig, weights: LayerWeights, hidden_states: Hidden
) -> None:
    found = {}
    for contract in CONTRACTS.values():
        layer = ReferenceLayer(small_model, 0, weights, contract)
        stages = layer.forward(hidden_states(60, 3), layer.new_request(), keep_scores=True)
        found[contract.name] = stages.tensors()

    def distance(name: str, key: tuple[str, str]) -> float:
        exact, other = found["exact"][key], found[name][key]
        seen = torch.isfinite(exact)
        return float((other - exact)[seen].norm() / exact[seen].norm())

    assert 1e-4 < distance("bf16", ("index", "stored")) < 1e-2
    assert 1e-2 < distance("official", ("index", "stored")) < 0.3
    assert 1e-4 < distance("bf16", ("main", "stored")) < 1e-2
    assert 1e-2 < distance("official", ("main", "stored")) < 0.1
    assert distance("bf16", ("main", "attention")) < distance("official", ("main", "attention"))


def test_fp32_compute(
    small_model: ModelConfig, weights: LayerWeights, hidden_states: Hidden
) -> None:
    layer = ReferenceLayer(small_model, 0, weights, BF16_CONTRACT, compute=torch.float32)
    stages = layer.forward(hidden_states(40, 3), layer.new_request(), keep_scores=True)
    assert stages.scores is not None
    assert stages.attention is not None
    assert stages.scores.dtype == stages.attention.dtype == torch.float32


def test_attention_and_scores_are_optional(
    small_model: ModelConfig, weights: LayerWeights, hidden_states: Hidden
) -> None:
    layer = ReferenceLayer(small_model, 0, weights, BF16_CONTRACT)
    stages = layer.forward(hidden_states(9, 3), layer.new_request(), attend=False)
    assert stages.attention is None
    assert stages.scores is None
    assert stages.topk is not None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_input_is_named_and_leaves_the_state(
    small_model: ModelConfig, weights: LayerWeights, hidden_states: Hidden, value: float
) -> None:
    layer = ReferenceLayer(small_model, 0, weights, BF16_CONTRACT)
    state = layer.new_request()
    layer.forward(hidden_states(5, 0), state)
    bad = hidden_states(6, 1)
    bad[3, 11] = value
    with pytest.raises(ValueError, match=r"position 8, dim 11"):
        layer.forward(bad, state)
    assert state.next_position == 5
    layer.forward(hidden_states(6, 1), state)


def test_no_tokens(small_model: ModelConfig, weights: LayerWeights, hidden_states: Hidden) -> None:
    layer = ReferenceLayer(small_model, 0, weights, BF16_CONTRACT)
    with pytest.raises(ValueError, match="0 tokens"):
        layer.forward(hidden_states(3, 0)[:0], layer.new_request())


def test_tokens_out_of_order(
    small_model: ModelConfig, weights: LayerWeights, hidden_states: Hidden
) -> None:
    layer = ReferenceLayer(small_model, 0, weights, BF16_CONTRACT)
    projected = layer.project_inputs(hidden_states(3, 0), 4)
    with pytest.raises(ValueError, match="start at position 4, expected 0"):
        layer.forward_projected(projected, layer.new_request())


def test_wrong_weights_are_named(small_model: ModelConfig, weights: LayerWeights) -> None:
    with pytest.raises(ValueError, match=r"wkv is \(3, 24\), expected \(128, 24\)"):
        ReferenceLayer(small_model, 0, replace(weights, wkv=weights.wkv[:3]), EXACT)
    assert weights.index is not None
    index = replace(weights.index, ape=weights.index.ape[:, :3])
    with pytest.raises(ValueError, match=r"index\.ape is \(4, 3\), expected \(4, 256\)"):
        ReferenceLayer(small_model, 0, replace(weights, index=index), EXACT)
    with pytest.raises(ValueError, match=r"weights_proj is absent, expected \(3, 24\)"):
        ReferenceLayer(small_model, 0, replace(weights, weights_proj=None), EXACT)
    with pytest.raises(ValueError, match=r"index\.ape is \(4, 256\), expected absent"):
        ReferenceLayer(small_model, 1, weights, EXACT)
    with pytest.raises(ValueError, match="layer 3"):
        ReferenceLayer(small_model, 3, weights, EXACT)


def test_inputs_are_not_changed(
    small_model: ModelConfig, weights: LayerWeights, hidden_states: Hidden
) -> None:
    layer = ReferenceLayer(small_model, 0, weights, OFFICIAL)
    hidden = hidden_states(30, 0)
    before, wkv = hidden.clone(), weights.wkv.clone()
    layer.forward(hidden, layer.new_request())
    assert torch.equal(hidden, before)
    assert torch.equal(weights.wkv, wkv)
