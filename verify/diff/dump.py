"""An engine's dump as one side of ``needlepoint diff``.

A dump rarely holds everything that a stage is judged from. What it lacks (projections, position
embedding, norm weights, rotary table) is taken from the recording it is compared with, and the
report says so; what it has is compared first, so that "the fault is upstream" can be said.
"""

from __future__ import annotations

from pathlib import Path

from needlepoint.optimized.protocol.interface import CandidateInfo, LayerInputs
from needlepoint.verify.base.hostile_json import is_inside
from needlepoint.verify.diff.dump_layer import DumpLayer, LayerReader
from needlepoint.verify.diff.files import DumpError, DumpFiles
from needlepoint.verify.diff.mapping import MAPPING_FILE, Mapping, load_mapping
from needlepoint.verify.judge.profiles import profile_of


class Dump:
    """A dump with its mapping.

    Parameters
    ----------
    path
        A mapping file, or a folder that holds ``needlepoint-dump.toml``.

    Raises
    ------
    DumpError
        Where mapping or folder are not usable, or the profile is unknown.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        file = path / MAPPING_FILE if path.is_dir() else path
        self.mapping: Mapping = load_mapping(file)
        place = file.parent / self.mapping.directory
        # A mapping that was named is the user's own and may point elsewhere; one that lies in the
        # dump came with it and may not.
        if path.is_dir() and not is_inside(place, path):
            raise DumpError(
                f"{file}: directory {self.mapping.directory!r} leads out of the dump; name the "
                "mapping file itself to allow that"
            )
        self._files = DumpFiles(place)
        self.info = CandidateInfo(
            name=self.mapping.name,
            format=self.mapping.format,
            device="unknown",
            profile=self.mapping.profile,
            variant=f"dump {self._files.directory.resolve().name}",
            source_sha256="0" * 64,
        )
        try:
            profile_of(self.info)
        except ValueError as error:
            raise DumpError(f"{file}: {error}") from error

    def read_layer(self, base: LayerInputs) -> DumpLayer:
        """Return one layer, aligned by token, entry and page table.

        Parameters
        ----------
        base
            The same layer of the recording that the dump is compared with.

        Raises
        ------
        DumpError
            Where lengths differ, or a tensor is missing, ambiguous, misshaped or cannot be
            aligned; the message names it.
        """
        if self.mapping.requests != base.lengths:
            raise DumpError(
                f"dump {self.path}: requests of {list(self.mapping.requests)} tokens, the "
                f"recording has {list(base.lengths)}; record the same prompts"
            )
        return LayerReader(self._files, self.mapping, base).read()


def is_dump(path: Path) -> bool:
    """Return whether a path names a dump rather than a recording."""
    return path.is_file() or (path / MAPPING_FILE).is_file()
