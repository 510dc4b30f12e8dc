"""Checkpoints in the published layouts: what is read, what is refused, what is left alone."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.weights import LayerWeights, random_layer_weights
from needlepoint.verify import checkpoint_files
from needlepoint.verify.checkpoint import Checkpoint, CheckpointError, dequantised
from needlepoint.verify.checkpoint_files import INDEX_FILE
from needlepoint.verify.inputs import load_inputs

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
Write = Callable[..., Path]


def parts(weights: LayerWeights) -> Tensors:
    found: Tensors = {}
    for name, value in vars(weights).items():
        if isinstance(value, Tensor):
            found[name] = value
        elif value is not None:
            found |= {f"{name}.{part}": tensor for part, tensor in vars(value).items()}
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


def named(layer: int, spelling: dict[str, str], prefix: str = "") -> Tensors:
    """Return one layer's tensors as they are published."""
    found: Tensors = {}
    for part, tensor in drawn(layer).items():
        name = f"{prefix}layers.{layer}.{spelling[part]}"
        if part in FP8 and spelling is OFFICIAL:
            found[name], found[name.removesuffix("weight") + "scale"] = drawn_fp8(layer, part)
        elif "norm" in part:
            found[name] = tensor.to(torch.bfloat16)
        else:
            found[name] = tensor
    return found


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a writer of a sharded checkpoint; ``change`` edits the tensors first."""

    def make(
        spelling: dict[str, str] = OFFICIAL,
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


@pytest.mark.parametrize(
    ("spelling", "prefix"), [(OFFICIAL, ""), (OFFICIAL, "model."), (THEIRS, "model."), (THEIRS, "")]
)
def test_every_layer_comes_back(write: Write, spelling: dict[str, str], prefix: str) -> None:
    checkpoint = Checkpoint(write(spelling, prefix), CONFIG, (0, 1, 2))

    for layer in range(3):
        found = parts(checkpoint.weights(layer))
        meant = drawn(layer)
        assert found.keys() == meant.keys()
        for part, tensor in found.items():
            wanted = meant[part]
            if part in FP8 and spelling is OFFICIAL:
                wanted = dequantised(*drawn_fp8(layer, part))
                torch.testing.assert_close(wanted, meant[part], rtol=0.07, atol=1e-3)
            assert tensor.dtype == (
                torch.float32 if meant[part].dim() == 1 or "ape" in part else torch.bfloat16
            )
            assert torch.equal(tensor, wanted), part


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 9))
def test_dequantised_by_definition(rows: int, columns: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
    blocks = (-(-rows // 128), -(-columns // 128))
    scales = torch.exp2(torch.randint(-20, 5, blocks, generator=draw).float())
    found = dequantised(codes, scales.to(torch.float8_e8m0fnu))
    assert found.dtype == torch.bfloat16
    for row, column in {(0, 0), (rows - 1, columns - 1), (rows // 2, columns - 1)}:
        wanted = codes[row, column].float() * scales[row // 128, column // 128]
        assert float(found[row, column]) == float(wanted)


def test_a_plain_scale_is_not_rounded_away() -> None:
    codes = torch.full((2, 2), 1.125).to(torch.float8_e4m3fn)
    assert float(dequantised(codes, torch.tensor([[1 + 2**-20]]))[0, 0]) == 1.125 * (1 + 2**-20)


def test_only_the_tensors_of_the_layer_are_read(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = checkpoint_files.Shards.tensor

    def watched(shards: checkpoint_files.Shards, name: str) -> Tensor:
        read.append(name)
        return real(shards, name)

    monkeypatch.setattr(checkpoint_files.Shards, "tensor", watched)
    checkpoint = Checkpoint(write(), CONFIG, (0, 1))
    assert read == []  # checked by headers alone

    checkpoint.weights(1)
    checkpoint.weights(1)

    assert len(read) == len(set(read))
    assert all(name.startswith("layers.1.attn.") for name in read)
    assert "layers.0.attn.wo_a.weight" not in read


def test_memory_follows_one_layer(write: Write) -> None:
    checkpoint = Checkpoint(write(), CONFIG, (0, 1))
    first = checkpoint.weights(0)
    checkpoint.weights(1)
    assert checkpoint.weights(0) is not first


def rename(tensors: Tensors, old: str, new: str | None) -> None:
    tensor = tensors.pop(old)
    if new is not None:
        tensors[new] = tensor


WKV, APE, WQ_B = (
    f"layers.0.attn.{name}" for name in ("compressor.wkv.weight", "indexer.compressor.ape", "wq_b")
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(WKV), rf"layer 0 \(ratio 4\): tensor {WKV} is missing"),
        (
            lambda t: t.update({WKV: t[WKV][:, :100].contiguous()}),
            rf"tensor {WKV}: shape \[1024, 100\], expected \[1024, 192\]",
        ),
        (
            lambda t: t.update({APE: t[APE].bfloat16()}),
            f"tensor {APE}: dtype BF16, expected F32",
        ),
        (
            lambda t: t.update({WKV: t[WKV].half()}),
            f"tensor {WKV}: dtype F16, expected BF16 or F32 or F8_E4M3",
        ),
        (
            lambda t: t.pop(f"{WQ_B}.scale"),
            rf"tensor {WQ_B}.weight: is F8_E4M3 and its block scales are missing",
        ),
        (
            lambda t: t.update({f"{WQ_B}.scale": t[f"{WQ_B}.scale"][:, :1].contiguous()}),
            rf"tensor {WQ_B}.scale: F8_E8M0 \[8, 1\], expected F8_E8M0 or F32 \[8, 2\]",
        ),
        (
            lambda t: rename(t, WKV, "layers.0.attn.compressor.wk.weight"),
            rf"tensor {WKV} is missing",
        ),
        (
            lambda t: t.update({"layers.1.attn.indexer.wq_b.weight": torch.zeros(1)}),
            r"layer 1 \(ratio 128\): tensor layers.1.attn.indexer.wq_b.weight is not one that such",
        ),
        (
            lambda t: t.update({"layers.2.attn.compressor.ape": torch.zeros(4, 4)}),
            r"layer 2 \(ratio 0\): tensor layers.2.attn.compressor.ape is not one",
        ),
        (
            lambda t: [t.pop(n) for n in list(t) if n.startswith("layers.2.")],
            r"layer 2: no tensor layers.2.attn.\* \(official\) or layers.2.self_attn.\*",
        ),
    ],
)
def test_a_wrong_tensor_is_named(
    write: Write, change: Callable[[Tensors], object], message: str
) -> None:
    folder = write(change=change)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder, CONFIG, (0, 1, 2))


def test_nan_is_named_when_its_layer_is_read(write: Write) -> None:
    def poison(tensors: Tensors) -> None:
        tensors[WKV] = tensors[WKV].clone()
        tensors[WKV][3, 4] = torch.nan

    checkpoint = Checkpoint(write(change=poison), CONFIG, (0, 1))
    checkpoint.weights(1)
    with pytest.raises(CheckpointError, match=f"tensor {WKV}: holds NaN or infinity"):
        checkpoint.weights(0)


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    path = folder / INDEX_FILE
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def misplace(folder: Path) -> None:
    edit_index(
        folder,
        lambda table: table.update({WKV: next(f for f in table.values() if f != table[WKV])}),
    )


def lie(folder: Path) -> None:
    """Declare a tensor of 2^50 elements in a file of a few bytes."""
    header = json.dumps(
        {WKV: {"dtype": "BF16", "shape": [1 << 25, 1 << 25], "data_offsets": [0, 1 << 51]}}
    ).encode()
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 64)


def cut(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])


def link_index(folder: Path) -> None:
    (folder / INDEX_FILE).unlink()
    (folder / INDEX_FILE).symlink_to(folder.parent / "nowhere.json")


def link_out(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    away = folder.parent / "away.safetensors"
    file.rename(away)
    file.symlink_to(away)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lie, r"the file is truncated or its header lies"),
        (cut, r"the file is truncated or its header lies"),
        (link_out, "is a link out of the checkpoint"),
        (link_index, "is a link out of the checkpoint"),
        (lambda f: (f / "model-00002-of-00002.safetensors").unlink(), "shard is missing"),
        (lambda f: edit_index(f, lambda t: t.update({WKV: "../x"})), "in the same folder"),
        (lambda f: edit_index(f, lambda t: t.update({WKV: "/etc/passwd"})), "in the same folder"),
        (misplace, f"tensor {WKV} is missing; model.safetensors.index.json says it is there"),
        (lambda f: (f / INDEX_FILE).write_text("[]"), "no weight_map"),
        (lambda f: (f / INDEX_FILE).write_text('{"weight_map": {}}'), "no weight_map"),
        (lambda f: (f / INDEX_FILE).write_text("{" * 40), "nested deeper"),
        (lambda f: (f / INDEX_FILE).write_bytes(b"\xff\xfe"), "is not UTF-8"),
    ],
)  # fmt: skip
def test_a_hostile_folder_is_refused(
    write: Write, spoil: Callable[[Path], object], message: str
) -> None:
    folder = write()
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder, CONFIG, (0, 1, 2))


def test_files_without_an_index(write: Write) -> None:
    folder = write()
    (folder / INDEX_FILE).unlink()
    assert Checkpoint(folder, CONFIG, (0,)).weights(0).main is not None
    save_file({WKV: torch.zeros(1)}, folder / "again.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {WKV} is in .* too"):
        Checkpoint(folder, CONFIG, (0,))


def test_an_empty_or_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model.safetensors.index.json nor"):
        Checkpoint(tmp_path, CONFIG, (0,))
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint(tmp_path / "none", CONFIG, (0,))


def test_an_input_takes_shapes_and_weights_from_it(write: Write) -> None:
    inputs = load_inputs("synthetic", checkpoint=write(), tokens=200)

    shapes = asdict(inputs.config) | {"name": "small"}
    assert shapes == asdict(CONFIG)
    assert inputs.layers == (0, 1)
    main = inputs.weights(0).main
    assert main is not None
    assert torch.equal(main.wkv, drawn(0)["main.wkv"])


def test_a_huge_foreign_tensor_is_not_touched(write: Write) -> None:
    """A sparse shard of 8 GiB beside the wanted tensors: declared, on disk, never read."""
    folder = write()
    tensors = {name: t for layer in range(3) for name, t in named(layer, OFFICIAL).items()}
    save_file(tensors, folder / "model-00001-of-00002.safetensors")
    size = 8 << 30
    header = json.dumps(
        {"layers.0.ffn.w": {"dtype": "I8", "shape": [size], "data_offsets": [0, size]}}
    ).encode()
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(file, 8 + len(header) + size)
    edit_index(
        folder,
        lambda table: (
            table.update(dict.fromkeys(tensors, "model-00001-of-00002.safetensors")),
            table.update({"layers.0.ffn.w": file.name}),
        ),
    )
    assert Checkpoint(folder, CONFIG, (0,)).weights(0).main is not None
