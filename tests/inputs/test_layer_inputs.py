from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from needlepoint.optimized.protocol.interface import LayerInputs
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.verify.inputs import layer_inputs as given_module
from needlepoint.verify.inputs.layer_inputs import (
    GivenLayer,
    changed_tensors,
    fingerprint,
    given_layer,
)
from needlepoint.verify.inputs.load import Inputs

Load = Callable[..., Inputs]


def reference_of(inputs: Inputs, layer: int) -> ReferenceLayer:
    return ReferenceLayer(inputs.config, layer, inputs.weights(layer), BF16_CONTRACT)


def give(inputs: Inputs, layer: int) -> GivenLayer:
    return given_layer(inputs, layer, reference_of(inputs, layer))


def test_a_ratio_4_layer_is_given_both_paths_and_queries(small_inputs: Load) -> None:
    inputs = small_inputs(tokens=400, layers=(0, 1))

    four, many = give(inputs, 0).inputs, give(inputs, 1).inputs

    assert (four.layer, four.ratio, four.lengths) == (0, 4, (147, 130, 123))
    assert four.index is not None
    assert four.query is not None
    assert four.index.kv.shape == four.index.score.shape == (400, 256)
    assert four.main.kv.shape == (400, 1024)
    assert four.query.q.shape == (400, 4, 128)
    assert four.query.weights.shape == (400, 4)
    assert four.rope_table.shape == (147, 32, 2)
    assert four.weight_scale == 128**-0.5 * 4**-0.5
    assert (four.topk, four.norm_eps) == (8, 1e-6)
    assert many.index is None
    assert many.query is None
    assert many.main.kv.shape == (400, 512)
    assert {t.dtype for t in (four.index.kv, four.query.q, many.main.score)} == {torch.float32}


def test_projections_are_the_reference_s_rounded_to_fp32(small_inputs: Load) -> None:
    inputs = small_inputs(tokens=400)
    layer, reference = give(inputs, 0), reference_of(inputs, 0)

    # Request 1 alone: nothing depends on what it is batched with.
    projected = reference.project_inputs(inputs.hidden(0)[147:277], 0)

    assert projected.index is not None
    assert projected.query is not None
    assert layer.inputs.index is not None
    assert layer.inputs.query is not None
    rows = slice(147, 277)
    assert torch.equal(layer.inputs.index.kv[rows], projected.index.kv.float())
    assert torch.equal(layer.inputs.query.q[rows], projected.query.q.float())
    back = layer.projected(1, 10, 20)
    assert back.first_position == 10
    assert back.main is not None
    assert torch.equal(back.main.score, layer.inputs.main.score[157:167].double())
    assert torch.equal(back.window, projected.window[10:20].float().double())


@pytest.mark.parametrize("tokens", [128, 256])
def test_blocks_of_tokens_change_no_bit(
    tokens: int, small_inputs: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = small_inputs(tokens=600)
    whole = give(inputs, 0)
    monkeypatch.setattr(given_module, "_BLOCK_TOKENS", tokens)

    parts = give(inputs, 0)

    assert fingerprint(parts.inputs) == fingerprint(whole.inputs)
    assert torch.equal(parts.latent, whole.latent)
    assert torch.equal(parts.window, whole.window)


def test_a_layer_without_a_compressor_is_refused(small_inputs: Load) -> None:
    inputs = small_inputs(layers=(0, 2))
    with pytest.raises(ValueError, match="layer 2 has ratio 0"):
        give(inputs, 2)


def test_a_change_of_any_given_tensor_shows(small_inputs: Load) -> None:
    given: LayerInputs = give(small_inputs(), 0).inputs
    before = fingerprint(given)
    assert changed_tensors(before, given) == []
    assert given.index is not None
    assert given.query is not None
    tensors = {
        "index.kv": given.index.kv,
        "index.ape": given.index.ape,
        "main.score": given.main.score,
        "main.norm_weight": given.main.norm_weight,
        "query.q": given.query.q,
        "query.weights": given.query.weights,
        "rope_table": given.rope_table,
        "hidden": given.hidden,
        **given.layer_weights,
    }
    assert {"index.wkv", "weights_proj", "attn_sink"} <= tensors.keys()
    for name, tensor in tensors.items():
        bytes_ = tensor.view(torch.uint8).flatten()
        bytes_[-1] ^= 1
        assert name in changed_tensors(before, given)
        bytes_[-1] ^= 1
    assert changed_tensors(before, given) == []
    fewer = {name: t for name, t in given.layer_weights.items() if name != "wkv"}
    assert changed_tensors(before, replace(given, layer_weights=fewer)) == ["wkv"]
