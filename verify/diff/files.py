"""Files of a dump directory: .pt, .npy and .safetensors; none of them is trusted.

A ``.pt`` file is a pickle. It is loaded with ``weights_only=True``, which builds tensors and plain
containers and runs nothing; a file that needs more is refused and the message says how to write it
safely. Files are mapped, not read: a tensor costs memory when its rows are looked at.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from needlepoint.verify.base.hostile_json import is_inside
from needlepoint.verify.inputs.checkpoint_files import BITS
from needlepoint.verify.recording.file import read_header, read_tensor
from needlepoint.verify.recording.manifest import RecordingError

MAX_FILES: Final = 1 << 17
_SUFFIXES: Final = (".pt", ".npy", ".safetensors")
_TAG_SEPARATOR: Final = "___"


class DumpError(RecordingError):
    """A dump that cannot be read; names the file or tensor and what was expected."""


@dataclass(frozen=True)
class _Place:
    """Where a tensor is: a file, and its key in a .safetensors file."""

    path: Path
    key: str


class DumpFiles:
    """Tensors of a dump directory by name.

    A ``.pt`` or ``.npy`` file is one tensor, named like the file without its suffix; a
    ``.safetensors`` file holds its tensors by their keys. SGLang's dumper writes
    ``name=x___step=0___rank=0___dump_index=7.pt``: such a name is a set of tags.

    Parameters
    ----------
    directory
        The dump.

    Raises
    ------
    DumpError
        Where the directory is missing or holds no tensors, a link leads out of it, a header lies,
        or two tensors have one name.
    """

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise DumpError(f"dump {directory}: is not a folder")
        self.directory = directory
        self._places: dict[str, _Place] = {}
        for path in _files(directory):
            if not is_inside(path, directory):
                raise DumpError(f"{path}: is a link out of the dump; copy it with `cp -rL`")
            keys = read_header(path, BITS) if path.suffix == ".safetensors" else (path.stem,)
            for key in keys:
                if key in self._places:
                    raise DumpError(
                        f"{path}: tensor {key!r} is in {self._places[key].path.name} too; expected "
                        "one tensor of each name"
                    )
                self._places[key] = _Place(path, key)
        if not self._places:
            raise DumpError(
                f"dump {directory}: no {', '.join(_SUFFIXES)} files; expected an engine's dump"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor, in alphabetical order."""
        return tuple(sorted(self._places))

    def find(self, wanted: str) -> str:
        """Return the name of the one tensor that is asked for.

        Parameters
        ----------
        wanted
            A name, with ``*`` and ``?`` as wild cards; or tags as ``name=x,step=0``, of which
            SGLang's file names must hold every one.

        Raises
        ------
        DumpError
            Where there is none, or more than one.
        """
        if wanted in self._places:
            return wanted
        found = [name for name in self.names if _fits(name, wanted)]
        if len(found) == 1:
            return found[0]
        if not found:
            shown = ", ".join(self.names[:5])
            raise DumpError(
                f"dump {self.directory}: no tensor {wanted!r}; it has {len(self._places)}, the "
                f"first are {shown}"
            )
        raise DumpError(
            f"dump {self.directory}: {wanted!r} fits {len(found)} tensors, {found[0]!r} and "
            f"{found[1]!r} among them; name one, for example by its dump_index"
        )

    def tensor(self, wanted: str) -> Tensor:
        """Return the tensor that :meth:`find` finds, backed by its file where that is possible.

        Raises
        ------
        DumpError
            As :meth:`find`; where the file is no tensor, truncated, lies about its size, or would
            have to be unpickled.
        """
        place = self._places[self.find(wanted)]
        if place.path.suffix == ".safetensors":
            return read_tensor(place.path, place.key)
        if place.path.suffix == ".npy":
            return _read_npy(place.path)
        return _read_pt(place.path)


def tags(name: str) -> Mapping[str, str]:
    """Return the tags of a name that SGLang's dumper wrote; empty for any other name."""
    pairs = (part.partition("=") for part in name.split(_TAG_SEPARATOR))
    return {key: value for key, equals, value in pairs if equals}


def _fits(name: str, wanted: str) -> bool:
    asked = [part.partition("=") for part in wanted.split(",")]
    if all(equals for _, equals, _ in asked):
        own = tags(name)
        return all(own.get(key.strip()) == value.strip() for key, _, value in asked)
    return fnmatchcase(name, wanted)


def _files(directory: Path) -> Iterator[Path]:
    for count, path in enumerate(sorted(directory.iterdir())):
        if count >= MAX_FILES:
            raise DumpError(f"dump {directory}: more than {MAX_FILES} files; give a smaller dump")
        if path.suffix in _SUFFIXES and path.is_file():
            yield path


def _read_npy(path: Path) -> Tensor:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a shape that overflows; the error follows
            # Mapped: the declared shape is held against the file's size before anything is read.
            found = np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # the header is an expression that can be wrong in any way
        raise DumpError(
            f"{path}: cannot be read ({type(error).__name__}: {str(error)[:200]}); expected an "
            "array of numbers as numpy.save writes it"
        ) from error
    numbers = found.dtype.kind in "fiub" and found.dtype.itemsize <= 8
    if not numbers or found.dtype.byteorder == ">":
        raise DumpError(f"{path}: dtype {found.dtype}, expected numbers in little-endian order")
    return torch.from_numpy(np.array(found))


def _read_pt(path: Path) -> Tensor:
    _require_plain_zip(path)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise DumpError(
            f"{path}: needs more than tensors and plain containers, and a pickle is never run "
            "here; save it again as torch.save({'value': tensor.detach().cpu()}, path) or with "
            "safetensors"
        ) from error
    except Exception as error:  # a hostile archive can make the unpickler fail in any way
        raise DumpError(
            f"{path}: cannot be read ({type(error).__name__}); expected one tensor as torch.save "
            "writes it"
        ) from error
    if isinstance(found, dict):
        found = found.get("value")
    if not isinstance(found, Tensor):
        raise DumpError(
            f"{path}: holds {type(found).__name__}, expected a tensor or a dict with the tensor "
            "under 'value' as SGLang's dumper writes it"
        )
    odd = found.is_nested or found.is_quantized or found.is_complex()
    if found.layout != torch.strided or odd or found.device.type != "cpu":
        raise DumpError(f"{path}: a {found.layout} {found.dtype} tensor, expected plain numbers")
    declared, held = found.numel() * found.element_size(), path.stat().st_size
    if declared > held:  # strides of 0 repeat a few bytes as often as they like
        raise DumpError(
            f"{path}: shape {list(found.shape)} is {declared} bytes, the file has {held}; save it "
            "again with .contiguous()"
        )
    return found.detach()


def _require_plain_zip(path: Path) -> None:
    """Refuse files that torch.load would unpickle or unpack into more than they are."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise DumpError(
            f"{path}: is truncated or not the zip that torch.save writes ({error}); save it again "
            "with torch.save"
        ) from error
    size = path.stat().st_size
    packed = [e for e in entries if e.compress_type != zipfile.ZIP_STORED or e.file_size > size]
    if packed:
        raise DumpError(
            f"{path}: entry {packed[0].filename[:100]!r} unpacks to {packed[0].file_size} bytes; "
            "expected the stored entries that torch.save writes"
        )
