"""Checkpoints of models with one index key a token: DeepSeek-V3.2's and GLM-5's names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from needlepoint.reference.config import MODELS
from needlepoint.reference.weights import random_layer_weights
from needlepoint.verify.inputs.checkpoint import Checkpoint, CheckpointError, dequantised

CONFIG = MODELS["mini-v3.2"]
FRONT = "model.layers.1.self_attn."


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """Return layer 1 as it is published: fp8 projections with fp32 block scales."""
    weights = random_layer_weights(CONFIG, 1, 5)
    assert weights.index is not None
    assert weights.index.norm_bias is not None
    assert weights.index_wq_b is not None
    assert weights.weights_proj is not None
    return {
        f"{FRONT}indexer.wk.weight": weights.index.wkv.to(torch.float8_e4m3fn),
        f"{FRONT}indexer.wk.weight_scale_inv": torch.full((1, 3), 0.5),
        f"{FRONT}indexer.k_norm.weight": weights.index.norm,
        f"{FRONT}indexer.k_norm.bias": weights.index.norm_bias,
        f"{FRONT}indexer.wq_b.weight": weights.index_wq_b,
        f"{FRONT}indexer.weights_proj.weight": weights.weights_proj,
        f"{FRONT}q_a_proj.weight": weights.wq_a,
        f"{FRONT}q_a_layernorm.weight": weights.q_norm.bfloat16(),
        f"{FRONT}q_b_proj.weight": torch.zeros(8, 8),  # the main attention is not read
        f"{FRONT}kv_a_proj_with_mqa.weight": torch.zeros(8, 8),
    }


def saved(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_the_indexer_comes_back(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    meant = random_layer_weights(CONFIG, 1, 5)

    found = Checkpoint(saved(tmp_path, tensors), CONFIG, (1,)).weights(1)

    assert found.index is not None
    assert meant.index is not None
    codes = tensors[f"{FRONT}indexer.wk.weight"]
    assert torch.equal(found.index.wkv, dequantised(codes, torch.full((1, 3), 0.5)))
    for name in ("norm", "norm_bias"):
        assert torch.equal(getattr(found.index, name), getattr(meant.index, name))
    for name in ("index_wq_b", "weights_proj", "wq_a", "q_norm"):
        assert torch.equal(getattr(found, name), getattr(meant, name))
    assert found.main is None
    assert found.wq_b.numel() == found.attn_sink.numel() == 0


@pytest.mark.parametrize("part", ["wk.weight", "k_norm.weight", "k_norm.bias"])
def test_a_missing_tensor_is_named(tmp_path: Path, tensors: dict[str, Tensor], part: str) -> None:
    del tensors[f"{FRONT}indexer.{part}"]
    with pytest.raises(CheckpointError, match=rf"indexer\.{part} is missing"):
        Checkpoint(saved(tmp_path, tensors), CONFIG, (1,))


def test_a_tensor_that_no_such_indexer_has(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    tensors[f"{FRONT}indexer.compressor.ape"] = torch.zeros(4, 4)
    with pytest.raises(CheckpointError, match="is not one that such a layer has"):
        Checkpoint(saved(tmp_path, tensors), CONFIG, (1,))


def test_the_config_of_another_model_is_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        Checkpoint(saved(tmp_path, tensors), MODELS["mini"], (1,))
