"""Layers of a checkpoint come back as they were published, and nothing else is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from needlepoint.verify.inputs import checkpoint_files
from needlepoint.verify.inputs.checkpoint import Checkpoint, dequantised
from needlepoint.verify.inputs.load import load_inputs

Published: TypeAlias = Any
Write = Callable[..., Path]


@pytest.mark.parametrize(
    ("spelling", "prefix"),
    [("official", ""), ("official", "model."), ("transformers", "model."), ("transformers", "")],
)
def test_every_layer_comes_back(
    published: Published, write: Write, spelling: str, prefix: str
) -> None:
    checkpoint = Checkpoint(write(spelling, prefix), published.config, (0, 1, 2))

    for layer in range(3):
        found = published.parts(checkpoint.weights(layer))
        meant = published.drawn(layer)
        assert found.keys() == meant.keys()
        for part, tensor in found.items():
            wanted = meant[part]
            if part in published.fp8 and spelling == "official":
                wanted = dequantised(*published.drawn_fp8(layer, part))
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
    published: Published, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = checkpoint_files.Shards.tensor

    def watched(shards: checkpoint_files.Shards, name: str) -> Tensor:
        read.append(name)
        return real(shards, name)

    monkeypatch.setattr(checkpoint_files.Shards, "tensor", watched)
    checkpoint = Checkpoint(write(), published.config, (0, 1))
    assert read == []  # checked by headers alone

    checkpoint.weights(1)
    checkpoint.weights(1)

    assert len(read) == len(set(read))
    assert all(name.startswith("layers.1.attn.") for name in read)
    assert "layers.0.attn.wo_a.weight" not in read


def test_memory_follows_one_layer(published: Published, write: Write) -> None:
    checkpoint = Checkpoint(write(), published.config, (0, 1))
    first = checkpoint.weights(0)
    checkpoint.weights(1)
    assert checkpoint.weights(0) is not first


def test_an_input_takes_shapes_and_weights_from_it(published: Published, write: Write) -> None:
    inputs = load_inputs("synthetic", checkpoint=write(), tokens=200)

    shapes = asdict(inputs.config) | {"name": "small"}
    assert shapes == asdict(published.config)
    assert inputs.layers == (0, 1)
    main = inputs.weights(0).main
    assert main is not None
    assert torch.equal(main.wkv, published.drawn(0)["main.wkv"])
