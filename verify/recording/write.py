"""Write a recording directory: layer by layer, whole or not at all.

Everything goes into a hidden folder beside the target, which takes the target's name in one rename
when the last layer is written. An error or Ctrl-C before that removes the folder and leaves the
target as it was.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from pydantic import ValidationError
from torch import Tensor

from needlepoint.optimized.protocol.interface import LayerInputs, Observed
from needlepoint.verify.recording.file import (
    TensorSource,
    dtype_name,
    tensor_source,
    write_tensors,
)
from needlepoint.verify.recording.layer import layer_record, layer_sources
from needlepoint.verify.recording.manifest import (
    MANIFEST_FILE,
    LayerRecord,
    Manifest,
    RecordingError,
    TensorRecord,
    first_fault,
    load_manifest,
    manifest_json,
)
from needlepoint.verify.recording.rules import (
    SHARED_INPUT,
    check_input,
    check_layer,
    layer_prefix,
)


class RecordingWriter:
    """Writes one recording; use as a context manager and call :meth:`write_layer` per layer.

    Parameters
    ----------
    out
        Directory to appear.
    head
        The manifest without tensors and layers: kind, model, requests, candidate, provenance.
    hidden
        bf16 [tokens, hidden_size], the input that layers share; layers whose ``hidden`` differs
        bring their own.
    force
        Whether an existing recording may be replaced. Anything else is never replaced.

    Raises
    ------
    RecordingError
        On entering, where ``out`` cannot be written or exists; the run has cost nothing yet.
    """

    def __init__(
        self, out: Path, head: Manifest, hidden: Tensor | None = None, *, force: bool = False
    ) -> None:
        self._out = out.resolve()
        self._head = head
        self._hidden = hidden
        self._force = force
        self._folder = Path()
        self._tensors: dict[str, TensorRecord] = {}
        self._layers: list[LayerRecord] = []

    def __enter__(self) -> RecordingWriter:
        check_recording_target(self._out, force=self._force)
        try:
            name = tempfile.mkdtemp(dir=self._out.parent, prefix=f".{self._out.name}.")
        except OSError as error:
            raise RecordingError(
                f"recording {self._out}: folder {self._out.parent} is not writable "
                f"({error.strerror}); choose another place"
            ) from error
        self._folder = Path(name)
        try:
            if self._hidden is not None:
                self._write("input", {SHARED_INPUT: tensor_source(self._hidden)})
                check_input(SHARED_INPUT, self._tensors[SHARED_INPUT], self._head.requests)
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._discard()

    def write_layer(self, inputs: LayerInputs, observed: Observed) -> None:
        """Write one layer: what was given and what was observed.

        Index scores are read and written in blocks of at most 64 MiB.

        Raises
        ------
        RecordingError
            Where the layer was written already, its lengths are not those of the recording, a
            tensor has a dtype or shape that its stage cannot have, or the disk refuses the bytes.
        """
        if inputs.lengths != self._head.requests:
            raise RecordingError(
                f"layer {inputs.layer}: request lengths {list(inputs.lengths)}, expected those of "
                f"the recording, {list(self._head.requests)}"
            )
        if any(record.layer == inputs.layer for record in self._layers):
            raise RecordingError(f"layer {inputs.layer}: is in this recording already")
        record = layer_record(inputs, observed)
        sources = layer_sources(inputs, observed)
        if self._hidden is None or not _same(inputs.hidden, self._hidden):
            sources[f"{layer_prefix(inputs.layer)}input"] = tensor_source(inputs.hidden)
        check_layer(record, inputs.lengths, _records(sources, ""))
        self._write(f"layer{inputs.layer}", sources)
        self._layers.append(record)

    def _write(self, stem: str, sources: Mapping[str, TensorSource]) -> None:
        file = f"{stem}.safetensors"
        records = _records(sources, file)
        write_tensors(self._folder / file, sources)
        self._tensors |= records

    def _commit(self) -> None:
        manifest = self._head.model_copy(
            update={"tensors": self._tensors, "layers": tuple(self._layers)}
        )
        try:
            # Through validation, so that no recording is written that could not be read.
            Manifest.model_validate_json(manifest_json(manifest))
        except ValidationError as error:
            raise RecordingError(f"recording {self._out}: {first_fault(error)}") from error
        try:
            (self._folder / MANIFEST_FILE).write_bytes(manifest_json(manifest))
            mask = os.umask(0)
            os.umask(mask)
            self._folder.chmod(
                0o777 & ~mask
            )  # mkdtemp is private; a recording is an ordinary folder
            check_recording_target(self._out, force=self._force)
            _swap_in(self._folder, self._out)
        except OSError as error:
            raise RecordingError(
                f"recording {self._out}: cannot write ({error.strerror}); nothing was changed"
            ) from error

    def _discard(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def check_recording_target(out: Path, *, force: bool) -> None:
    """Refuse a target before the long run, not after it.

    Raises
    ------
    RecordingError
        Where the parent folder is missing, the target is a file, it exists and ``force`` is not
        set, or it is a folder that is not a recording: ``--force`` replaces nothing else.
    """
    if not out.parent.is_dir():
        raise RecordingError(
            f"recording {out}: folder {out.parent} does not exist; create it first"
        )
    if not out.exists():
        return
    if not out.is_dir():
        raise RecordingError(f"recording {out}: is a file; give the name of a new folder")
    if not any(out.iterdir()):
        return
    if not force:
        raise RecordingError(f"recording {out}: already exists; pass --force to overwrite it")
    try:
        manifest = load_manifest(out)
    except RecordingError as error:
        raise RecordingError(
            f"recording {out}: is a folder, but not a recording; --force does not replace it"
        ) from error
    own = {MANIFEST_FILE} | {record.file for record in manifest.tensors.values()}
    foreign = sorted(path.name for path in out.iterdir() if path.name not in own)
    if foreign:
        raise RecordingError(
            f"recording {out}: also holds {foreign[0]}, which is not of the recording; --force "
            "would delete it; move it away first"
        )


def _swap_in(folder: Path, out: Path) -> None:
    """Give ``folder`` the name ``out``; what stood there goes, or stays if that fails."""
    if not out.exists():
        folder.rename(out)
        return
    aside = folder.with_name(f"{folder.name}.old")
    out.rename(aside)
    try:
        folder.rename(out)
    except BaseException:
        aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _records(sources: Mapping[str, TensorSource], file: str) -> dict[str, TensorRecord]:
    # The file is not known, and not looked at, while the rules are checked.
    return {
        name: TensorRecord.model_construct(
            file=file, dtype=dtype_name(source.dtype, name), shape=source.shape
        )
        for name, source in sources.items()
    }


def _same(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    # Bytes, not values: NaN equals itself and the two zeros differ.
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )
