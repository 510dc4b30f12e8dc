"""The files of a checkpoint directory: an index, shards, and headers that are not trusted.

Only the headers of shards that hold a wanted tensor are read, and of those only the wanted tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from needlepoint.verify.base.hostile_json import is_inside
from needlepoint.verify.recording.file import HeaderEntry, read_header
from needlepoint.verify.recording.manifest import parse_json, read_bounded

INDEX_FILE: Final = "model.safetensors.index.json"
MAX_INDEX_BYTES: Final = 64 << 20
"""The index of 72,317 tensors takes about 8 MB."""

BITS: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
}
_FLAT_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; names the tensor or file and what was expected."""


def inside(directory: Path, file: str) -> Path:
    """Return the path of a file of a checkpoint.

    Raises
    ------
    CheckpointError
        Where a link leads out of the folder.
    """
    path = directory / file
    if not is_inside(path, directory):
        raise CheckpointError(
            f"{path}: is a link out of the checkpoint; give the folder that holds the files, "
            "or copy it with `cp -rL`"
        )
    return path


class Shards:
    """Which tensor is in which file.

    Parameters
    ----------
    directory
        A folder with ``model.safetensors.index.json`` and shards, or safetensors files alone.

    Raises
    ------
    CheckpointError
        Where the folder, its index or a file is missing or not what it says it is.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise CheckpointError(
                f"checkpoint {directory}: is not a folder; expected one with config.json and "
                "safetensors files"
            )
        self.directory = directory
        self._headers: dict[str, dict[str, HeaderEntry]] = {}
        indexed = os.path.lexists(directory / INDEX_FILE)  # a broken link is no missing index
        self._file_of = self._indexed() if indexed else self._listed()

    @property
    def names(self) -> Iterable[str]:
        """Every tensor of the checkpoint."""
        return self._file_of

    def entry(self, name: str) -> HeaderEntry:
        """Return dtype and shape of a tensor, from the checked header of its shard.

        Raises
        ------
        CheckpointError
            Where the shard is missing, truncated or lying, or does not hold the tensor.
        """
        file = self._file_of[name]
        header = self._header(file)
        if name not in header:
            raise CheckpointError(
                f"{self.directory / file}: tensor {name} is missing; {INDEX_FILE} says it is there"
            )
        return header[name]

    def tensor(self, name: str) -> Tensor:
        """Return one tensor; nothing else of its shard is read.

        Raises
        ------
        CheckpointError
            As :meth:`entry`, or where the file changed meanwhile.
        """
        self.entry(name)
        path = self._path(self._file_of[name])
        try:
            with safe_open(path, framework="pt") as file:
                found = cast(Tensor, file.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {name}: {error}") from error
        # Not a view of the mapped file: that would stay in memory with all its pages.
        return found.clone(memory_format=torch.contiguous_format)

    def _header(self, file: str) -> dict[str, HeaderEntry]:
        if file not in self._headers:
            try:
                self._headers[file] = read_header(self._path(file), BITS)
            except CheckpointError:
                raise
            except ValueError as error:
                raise CheckpointError(str(error)) from error
        return self._headers[file]

    def _path(self, file: str) -> Path:
        """Return the path of a shard that lies in the folder.

        Raises
        ------
        CheckpointError
            Where it is missing or a link leads out.
        """
        path = inside(self.directory, file)
        if not path.is_file():
            raise CheckpointError(f"{path}: shard is missing; the checkpoint is incomplete")
        return path

    def _indexed(self) -> dict[str, str]:
        path = inside(self.directory, INDEX_FILE)
        try:
            index = parse_json(read_bounded(path, MAX_INDEX_BYTES), str(path))
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        table = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(table, dict) or not table:
            raise CheckpointError(f"{path}: no weight_map; expected tensor names and their files")
        found: dict[str, str] = {}
        for name, file in table.items():
            if not isinstance(file, str) or _FLAT_NAME.fullmatch(file) is None:
                raise CheckpointError(
                    f"{path}: tensor {name[:200]!r} is in {str(file)[:200]!r}, expected the name "
                    "of a file in the same folder"
                )
            found[name] = file
        return found

    def _listed(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for path in sorted(self.directory.glob("*.safetensors")):
            for name in self._header(path.name):
                if name in found:
                    raise CheckpointError(
                        f"{path}: tensor {name} is in {found[name]} too; expected it once"
                    )
                found[name] = path.name
        if not found:
            raise CheckpointError(
                f"checkpoint {self.directory}: neither {INDEX_FILE} nor safetensors files"
            )
        return found
