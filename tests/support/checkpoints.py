"""A small checkpoint in the published layouts, and what its tensors are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.weights import LayerWeights, random_layer_weights
from needlepoint.verify.inputs.checkpoint_files import INDEX_FILE

CONFIG = ModelConfig(
    name="small",
    hidden_size=192,
    n_heads=2,
    q_lora_rank=160,
    index_n_heads=4,
    index_topk=8,
    compress_ratios=(4, 128, 0),
)
PUBLISHED = {
    "hidden_size": 192,
    "num_attention_heads": 2,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 160,
    "sliding_window": 128,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 8,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "compress_ratios": [4, 128, 0],
}
OFFICIAL = {
    "main.wkv": "attn.compressor.wkv.weight",
    "main.wgate": "attn.compressor.wgate.weight",
    "main.ape": "attn.compressor.ape",
    "main.norm": "attn.compressor.norm.weight",
    "index.wkv": "attn.indexer.compressor.wkv.weight",
    "index.wgate": "attn.indexer.compressor.wgate.weight",
    "index.ape": "attn.indexer.compressor.ape",
    "index.norm": "attn.indexer.compressor.norm.weight",
    "index_wq_b": "attn.indexer.wq_b.weight",
    "weights_proj": "attn.indexer.weights_proj.weight",
    "wq_a": "attn.wq_a.weight",
    "q_norm": "attn.q_norm.weight",
    "wq_b": "attn.wq_b.weight",
    "wkv": "attn.wkv.weight",
    "kv_norm": "attn.kv_norm.weight",
    "attn_sink": "attn.attn_sink",
}
THEIRS = {
    "main.wkv": "self_attn.compressor.kv_proj.weight",
    "main.wgate": "self_attn.compressor.gate_proj.weight",
    "main.ape": "self_attn.compressor.position_bias",
    "main.norm": "self_attn.compressor.kv_norm.weight",
    "index.wkv": "self_attn.compressor.indexer.kv_proj.weight",
    "index.wgate": "self_attn.compressor.indexer.gate_proj.weight",
    "index.ape": "self_attn.compressor.indexer.position_bias",
    "index.norm": "self_attn.compressor.indexer.kv_norm.weight",
    "index_wq_b": "self_attn.compressor.indexer.q_b_proj.weight",
    "weights_proj": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "wq_a": "self_attn.q_a_proj.weight",
    "q_norm": "self_attn.q_a_norm.weight",
    "wq_b": "self_attn.q_b_proj.weight",
    "wkv": "self_attn.kv_proj.weight",
    "kv_norm": "self_attn.kv_norm.weight",
    "attn_sink": "self_attn.sinks",
}
FP8 = ("index_wq_b", "wq_a", "wq_b", "wkv")
Tensors = dict[str, Tensor]
SPELLINGS = {"official": OFFICIAL, "transformers": THEIRS}


def parts(weights: LayerWeights) -> Tensors:
    found: Tensors = {}
    for name, value in vars(weights).items():
        if isinstance(value, Tensor):
            found[name] = value
        elif value is not None:
            found |= {f"{name}.{part}": tensor for part, tensor in value.tensors().items()}
    return found


def quantised(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise blocks of 128 x 128 the way the published weights are: amax / 448, power of two."""
    rows, columns = (-(-size // 128) for size in matrix.shape)
    codes = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            values = matrix[block].float()
            scale = torch.exp2((values.abs().amax() / 448).log2().ceil())
            scales[i, j] = scale
            codes[block] = (values / scale).to(torch.float8_e4m3fn)
    return codes, scales.to(torch.float8_e8m0fnu)


@cache
def drawn(layer: int) -> Tensors:
    return parts(random_layer_weights(CONFIG, layer, 5))


@cache
def drawn_fp8(layer: int, part: str) -> tuple[Tensor, Tensor]:
    return quantised(drawn(layer)[part])


def named(layer: int, spelling: str = "official", prefix: str = "") -> Tensors:
    """Return one layer's tensors as they are published."""
    found: Tensors = {}
    for part, tensor in drawn(layer).items():
        name = f"{prefix}layers.{layer}.{SPELLINGS[spelling][part]}"
        if part in FP8 and spelling == "official":
            found[name], found[name.removesuffix("weight") + "scale"] = drawn_fp8(layer, part)
        elif "norm" in part:
            found[name] = tensor.to(torch.bfloat16)
        else:
            found[name] = tensor
    return found


@dataclass(frozen=True)
class Published:
    """What the tests compare with."""

    config: ModelConfig = CONFIG
    fp8: tuple[str, ...] = FP8
    named: Callable[..., Tensors] = named
    parts: Callable[[LayerWeights], Tensors] = parts
    drawn: Callable[[int], Tensors] = drawn
    drawn_fp8: Callable[[int, str], tuple[Tensor, Tensor]] = drawn_fp8


@pytest.fixture(scope="session")
def published() -> Published:
    return Published()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a writer of a sharded checkpoint; ``change`` edits the tensors first."""

    def make(
        spelling: str = "official",
        prefix: str = "",
        change: Callable[[Tensors], object] | None = None,
    ) -> Path:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        tensors = {n: t for layer in range(3) for n, t in named(layer, spelling, prefix).items()}
        tensors["layers.0.ffn.experts.0.w1.weight"] = torch.zeros(8, 8, dtype=torch.int8)
        tensors["layers.0.attn.wo_a.weight"] = torch.zeros(8, 8, dtype=torch.float8_e4m3fn)
        if change is not None:
            change(tensors)
        shards: dict[str, Tensors] = {"model-00001-of-00002.safetensors": {}}
        shards["model-00002-of-00002.safetensors"] = {}
        for number, name in enumerate(sorted(tensors)):
            shards[f"model-0000{1 + number % 2}-of-00002.safetensors"][name] = tensors[name]
        for file, held in shards.items():
            save_file(held, folder / file)
        table = {name: file for file, held in shards.items() for name in held}
        (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": table}))
        (folder / "config.json").write_text(json.dumps(PUBLISHED))
        return folder

    return make
