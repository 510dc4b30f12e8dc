"""Missing, surplus, misshaped, mistyped and unreadable tensors are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from needlepoint.verify.inputs.checkpoint import Checkpoint, CheckpointError

Published: TypeAlias = Any
Tensors = dict[str, Tensor]
Write = Callable[..., Path]


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
    published: Published, write: Write, change: Callable[[Tensors], object], message: str
) -> None:
    folder = write(change=change)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder, published.config, (0, 1, 2))


def test_nan_is_named_when_its_layer_is_read(published: Published, write: Write) -> None:
    def poison(tensors: Tensors) -> None:
        tensors[WKV] = tensors[WKV].clone()
        tensors[WKV][3, 4] = torch.nan

    checkpoint = Checkpoint(write(change=poison), published.config, (0, 1))
    checkpoint.weights(1)
    with pytest.raises(CheckpointError, match=f"tensor {WKV}: holds NaN or infinity"):
        checkpoint.weights(0)
