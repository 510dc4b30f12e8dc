"""``--save-failures DIR``: what a candidate returned where it differs, as a recording.

The tensors that were judged are written while they are still there. A second run would be another
run: a candidate that fails now and then need not fail again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from needlepoint.optimized.protocol.interface import Candidate, LayerInputs, Observed
from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.candidate_run import missing_stages
from needlepoint.verify.judge.record import recording_head
from needlepoint.verify.recording.recording import RecordingWriter, check_recording_target


def check_failures_folder(folder: Path) -> None:
    """Refuse a folder for failures before the run, not after it.

    Raises
    ------
    ValueError
        If it is a file, or the folder it is in does not exist.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--save-failures {folder}: is a file; give the name of a folder")
    if not folder.parent.is_dir():
        raise ValueError(
            f"--save-failures {folder}: folder {folder.parent} does not exist; create it first"
        )


class SavedFailures:
    """Recordings of the candidates that differ; complete when the ``with`` block is left.

    A recording that cannot be written is a note: it costs nobody the result of the run.

    Parameters
    ----------
    folder
        Where the recordings go, one folder a candidate.
    candidates
        Candidates by what they are called on the command line.
    force
        Whether recordings may be replaced.

    Attributes
    ----------
    folders
        Folder of each candidate, by what it calls itself.

    Raises
    ------
    ValueError
        If the folder, or that of a candidate in it, cannot be written: before the run.
    """

    def __init__(self, folder: Path, candidates: Mapping[str, Candidate], *, force: bool) -> None:
        check_failures_folder(folder)
        self.folders: dict[str, Path] = {}
        self._force = force
        self._writers: dict[str, RecordingWriter] = {}
        self._layers: dict[str, list[int]] = {}
        self._faults: dict[str, str] = {}
        for name, candidate in candidates.items():
            out = folder / re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
            if out == folder or out in self.folders.values():
                out = folder / f"{out.name}-{len(self.folders)}"
            if folder.exists():
                check_recording_target(out, force=force)
            self.folders[candidate.info.name] = out

    def __enter__(self) -> SavedFailures:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, writer in self._writers.items():
            try:
                writer.__exit__(kind, error, trace)
            except ValueError as fault:
                self._faults[name] = str(fault)

    def add(
        self, inputs: Inputs, candidate: Candidate, given: LayerInputs, observed: Observed
    ) -> None:
        """Write one layer in which a candidate differs, as it was judged."""
        name = candidate.info.name
        if name in self._faults:
            return
        try:
            missing = missing_stages(candidate, given, observed)
            if missing:
                raise ValueError(
                    f"layer {given.layer} lacks {', '.join('.'.join(key) for key in missing)}, "
                    "which the candidate declares; part of a run would pass for the whole"
                )
            writer = self._writer(inputs, candidate, given.layer)
            writer.write_layer(replace(given, layer_weights={}), observed)
            self._layers.setdefault(name, []).append(given.layer)
        except (ValueError, OSError) as fault:
            self._faults[name] = str(fault)
            if name in self._writers:
                self._writers.pop(name).__exit__(type(fault), fault, None)

    def notes(self) -> tuple[str, ...]:
        """Return what was saved, and what could not be; to be asked after the block."""
        saved = [
            f"saved {name} to {self.folders[name]}: layers {', '.join(map(str, layers))}"
            for name, layers in self._layers.items()
            if name not in self._faults
        ]
        failed = [f"{name} was not saved: {fault}" for name, fault in self._faults.items()]
        return (*saved, *failed) or ("nothing was saved: no stage of any candidate differs",)

    def _writer(self, inputs: Inputs, candidate: Candidate, layer: int) -> RecordingWriter:
        name = candidate.info.name
        if name not in self._writers:
            out = self.folders[name]
            out.parent.mkdir(exist_ok=True)
            head = recording_head(inputs, candidate, BF16_CONTRACT)
            writer = RecordingWriter(out, head, inputs.hidden(layer), force=self._force)
            self._writers[name] = writer.__enter__()
        return self._writers[name]
