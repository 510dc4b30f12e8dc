from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from needlepoint.reference.compressor import gather_taps
from needlepoint.reference.config import MODELS, ModelConfig
from needlepoint.reference.linear import project
from needlepoint.reference.profile import EXACT, Precision
from needlepoint.reference.weights import (
    CompressorWeights,
    LayerWeights,
    check_layer_weights,
    random_layer_weights,
)

MINI = MODELS["mini"]
GOLDEN = "c60b300b25b6f112163f3a3e9d494c97b58a0517c9d8d7a6a084316fd9d42262"


def tensors(weights: LayerWeights) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in vars(weights).items():
        if isinstance(value, CompressorWeights):
            found |= {f"{name}.{part}": tensor for part, tensor in value.tensors().items()}
        elif value is not None:
            found[name] = value
    return found


def digest(weights: LayerWeights) -> str:
    sha = hashlib.sha256()
    for name, tensor in tensors(weights).items():
        sha.update(name.encode())
        sha.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def test_every_layer_of_every_ratio_has_its_shapes(small_model: ModelConfig) -> None:
    for layer in range(3):
        check_layer_weights(random_layer_weights(small_model, layer, 0), small_model, layer)
    for layer in range(2):
        check_layer_weights(random_layer_weights(MINI, layer, 0), MINI, layer)


def test_matrices_are_bf16_and_the_rest_fp32() -> None:
    for name, tensor in tensors(random_layer_weights(MINI, 0, 0)).items():
        matrix = tensor.dim() == 2 and not name.endswith("ape")
        assert tensor.dtype == (torch.bfloat16 if matrix else torch.float32), name


def test_same_seed_same_bytes_on_every_machine(small_model: ModelConfig) -> None:
    weights = random_layer_weights(small_model, 0, 7)
    assert digest(weights) == digest(random_layer_weights(small_model, 0, 7))
    assert digest(weights) == GOLDEN


def test_seed_and_layer_matter(small_model: ModelConfig) -> None:
    model = ModelConfig(**{**vars(small_model), "compress_ratios": (4, 4)})
    found = {
        digest(random_layer_weights(model, layer, seed)) for layer in (0, 1) for seed in (0, 1)
    }
    assert len(found) == 4


def test_scales_are_those_of_a_working_layer() -> None:
    """Unit input stays unit size, windows prefer some tokens, norms scatter around 1."""
    weights = random_layer_weights(MINI, 0, 0)
    assert weights.index is not None
    hidden = torch.randn(512, MINI.hidden_size, generator=torch.Generator().manual_seed(0))
    kv = project(hidden, weights.index.wkv, Precision.FLOAT64)
    score = project(hidden, weights.index.wgate, Precision.FLOAT64)
    assert 0.9 < kv.std().item() < 1.1
    taps = gather_taps(kv, score, weights.index.ape, 4, EXACT)
    share = taps.logits[1:].softmax(dim=1).amax(dim=1)
    assert 0.4 < share.median().item() < 0.9  # uniform would be 1/8
    norm = weights.index.norm
    assert 0.8 < norm.median().item() < 1.2
    assert (norm > 3).sum().item() in range(2, 8)


def test_normal_draws_have_the_right_moments() -> None:
    w = random_layer_weights(MINI, 0, 1).wq_b.double() * MINI.q_lora_rank**0.5
    assert abs(w.mean().item()) < 0.01
    assert abs(w.var().item() - 1) < 0.02
    assert w.abs().max().item() > 3
