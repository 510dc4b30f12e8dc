"""Read a recording directory that may be truncated, corrupt or hostile.

Opening checks the manifest, every file's header and their agreement, and reads no tensor. Nothing
is unpickled, no path leaves the directory, and nothing is allocated that the files do not hold.
Values are not looked at: NaN and infinity are for the caller to judge.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import LayerInputs, Observed
from needlepoint.verify.base.hostile_json import file_inside
from needlepoint.verify.recording.file import DTYPES, read_header, read_tensor
from needlepoint.verify.recording.layer import layer_inputs, layer_observed
from needlepoint.verify.recording.manifest import (
    LayerRecord,
    Manifest,
    RecordingError,
    load_manifest,
)
from needlepoint.verify.recording.rules import (
    SHARED_INPUT,
    check_input,
    check_layer,
    input_name,
    layer_prefix,
)


@dataclass(frozen=True)
class Recording:
    """An open recording. Tensors are read when asked for."""

    directory: Path
    manifest: Manifest

    @property
    def layers(self) -> tuple[int, ...]:
        """Recorded layers, ascending."""
        return tuple(sorted(record.layer for record in self.manifest.layers))

    def record(self, layer: int) -> LayerRecord:
        """Return the manifest entry of a layer.

        Raises
        ------
        RecordingError
            Where the layer was not recorded.
        """
        for record in self.manifest.layers:
            if record.layer == layer:
                return record
        raise RecordingError(
            f"recording {self.directory}: layer {layer} is not in it; it has "
            f"{', '.join(map(str, self.layers)) or 'none'}"
        )

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, backed by its file.

        Raises
        ------
        RecordingError
            Where the recording has no such tensor, or its file changed since it was opened.
        """
        return self.rows(name, None)

    def rows(self, name: str, rows: slice | None) -> Tensor:
        """Return a range of rows of one tensor, or all with None; reads nothing else of it."""
        if name not in self.manifest.tensors:
            raise RecordingError(f"recording {self.directory}: tensor {name} is missing")
        record = self.manifest.tensors[name]
        if 0 in record.shape:
            count = record.shape[0] if rows is None else len(range(*rows.indices(record.shape[0])))
            return torch.empty((count, *record.shape[1:]), dtype=DTYPES[record.dtype])
        return read_tensor(self.directory / record.file, name, rows)

    def input_name(self, layer: int) -> str:
        """Return the name of a layer's hidden states, which layers may share.

        Raises
        ------
        RecordingError
            Where the recording has none for this layer.
        """
        return input_name(layer, self.manifest.tensors)

    def hidden(self, layer: int) -> Tensor:
        """Return the hidden states of a layer: bf16 [tokens, hidden_size].

        Raises
        ------
        RecordingError
            Where the recording has none for this layer.
        """
        return self.tensor(self.input_name(layer))

    def read_given(self, layer: int) -> LayerInputs:
        """Return what a layer was given, backed by its file.

        Raises
        ------
        RecordingError
            Where the layer was not recorded.
        """
        names = self.manifest.tensors
        return layer_inputs(
            self.record(layer), self.manifest.requests, self.tensor, names, self.hidden(layer)
        )

    def read_layer(self, layer: int) -> tuple[LayerInputs, Observed]:
        """Return what a layer was given and what was observed, as the writer took them.

        The score reader reads only the rows it is asked for.

        Raises
        ------
        RecordingError
            Where the layer was not recorded.
        """
        record = self.record(layer)
        lengths, names = self.manifest.requests, self.manifest.tensors

        def scores(request: int, start: int, stop: int) -> Tensor:
            if not (0 <= request < len(lengths) and 0 <= start <= stop <= lengths[request]):
                raise RecordingError(
                    f"scores of request {request}, queries {start} to {stop}: out of range"
                )
            name = f"{layer_prefix(layer)}index.scores.{request}"
            return self.rows(name, slice(start, stop))

        return self.read_given(layer), layer_observed(record, lengths, self.tensor, names, scores)


def open_recording(directory: Path) -> Recording:
    """Open a recording directory and check everything but the tensors' values.

    Parameters
    ----------
    directory
        A directory written by ``needlepoint record``, or one of input.

    Raises
    ------
    RecordingError
        Where the manifest or a file is missing, corrupt or lying, a file lies outside the
        directory, a declared stage has no tensor, or a tensor is not declared. The message names
        the file or tensor, what came and what was expected.
    """
    manifest = load_manifest(directory)
    _check_files(directory, manifest)
    _check_tensors(manifest)
    return Recording(directory, manifest)


def _check_files(directory: Path, manifest: Manifest) -> None:
    """Require the files to hold exactly the tensors that the manifest declares."""
    declared: dict[str, set[str]] = {}
    for name, record in manifest.tensors.items():
        declared.setdefault(record.file, set()).add(name)
    for path in sorted(directory.glob("*.safetensors")):
        if path.name not in declared:
            raise RecordingError(f"{path}: the manifest does not declare this file; remove it")
    for file, names in declared.items():
        path = file_inside(directory, file)
        header = read_header(path)
        for name in sorted(names - set(header)):
            raise RecordingError(f"{path}: tensor {name} is missing; the manifest declares it")
        for name in sorted(set(header) - names):
            raise RecordingError(f"{path}: tensor {name!r} is not declared by the manifest")
        for name in sorted(names):
            want, have = manifest.tensors[name], header[name]
            if (want.dtype, want.shape) != (have.dtype, have.shape):
                raise RecordingError(
                    f"{path}: tensor {name} is {have.dtype} {list(have.shape)}, the manifest "
                    f"declares {want.dtype} {list(want.shape)}"
                )


def _check_tensors(manifest: Manifest) -> None:
    """Require the tensors to be those that the declared stages need, of the right shape."""
    layers = {record.layer for record in manifest.layers}
    for name, record in manifest.tensors.items():
        match = re.match(r"layer(0|[1-9][0-9]{0,8})\.", name)
        if name == SHARED_INPUT or (match and name == f"{match.group()}input"):
            check_input(name, record, manifest.requests)
        elif match is None or int(match.group(1)) not in layers:
            raise RecordingError(
                f"tensor {name} belongs to no layer that the manifest declares; declared are "
                f"{sorted(layers)}"
            )
    if manifest.kind == "input" and not manifest.tensors:
        raise RecordingError("the manifest declares no tensors; expected hidden states `input`")
    for layer in manifest.layers:
        input_name(layer.layer, manifest.tensors)
        check_layer(layer, manifest.requests, manifest.tensors)
