"""Folders that lie, link out or lack files are refused; what is foreign is left alone."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import save_file

from needlepoint.verify.inputs.checkpoint import Checkpoint, CheckpointError
from needlepoint.verify.inputs.checkpoint_files import INDEX_FILE

Published: TypeAlias = Any
Write = Callable[..., Path]

WKV = "layers.0.attn.compressor.wkv.weight"


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
    published: Published, write: Write, spoil: Callable[[Path], object], message: str
) -> None:
    folder = write()
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(folder, published.config, (0, 1, 2))


def test_files_without_an_index(published: Published, write: Write) -> None:
    folder = write()
    (folder / INDEX_FILE).unlink()
    assert Checkpoint(folder, published.config, (0,)).weights(0).main is not None
    save_file({WKV: torch.zeros(1)}, folder / "again.safetensors")
    with pytest.raises(CheckpointError, match=rf"tensor {WKV} is in .* too"):
        Checkpoint(folder, published.config, (0,))


def test_an_empty_or_missing_folder(published: Published, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model.safetensors.index.json nor"):
        Checkpoint(tmp_path, published.config, (0,))
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint(tmp_path / "none", published.config, (0,))


def test_a_huge_foreign_tensor_is_not_touched(published: Published, write: Write) -> None:
    """A sparse shard of 8 GiB beside the wanted tensors: declared, on disk, never read."""
    folder = write()
    tensors = {name: t for layer in range(3) for name, t in published.named(layer).items()}
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
    assert Checkpoint(folder, published.config, (0,)).weights(0).main is not None
