"""Output files appear whole or not at all, and never over an existing file unless asked.

Every file is first written beside its target under a temporary name, flushed to disk, and renamed
when all files of the run are ready. An error or Ctrl-C before that leaves the folder as it was.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def check_writable(path: Path, *, force: bool) -> None:
    """Refuse an output path before the long run, not after it.

    Parameters
    ----------
    path
        File to be written later.
    force
        Whether an existing file may be replaced.

    Raises
    ------
    ValueError
        Where the folder is missing or not writable, the path is a folder or a device, the name
        is too long, or the file exists and ``force`` is not set.
    """
    folder = path.parent
    try:
        if path.is_dir():
            raise ValueError(f"output {path}: is a folder; give the name of a file")
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"output {path}: {folder} is no folder; choose another place")
        if not folder.is_dir():
            raise ValueError(f"output {path}: folder {folder} does not exist; create it first")
        if path.exists() and not path.is_file():
            raise ValueError(f"output {path}: is not an ordinary file; give the name of a file")
        if path.exists() and not force:
            raise ValueError(f"output {path}: already exists; pass --force to overwrite it")
    except OSError as error:  # a name that is too long, a folder that may not be searched
        raise ValueError(
            f"output {path}: cannot be written ({error.strerror}); choose another name or place"
        ) from error
    try:
        # The only reliable test: permission bits say nothing about read-only or full file systems.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"output {path}: folder {folder} is not writable ({error.strerror}); "
            "choose another place"
        ) from error


def write_files(files: Mapping[Path, bytes], *, force: bool) -> None:
    """Write all files, or none.

    Parameters
    ----------
    files
        Contents by target path. Later entries appear last, so put the file that refers to the
        others at the end.
    force
        Whether existing files may be replaced.

    Raises
    ------
    ValueError
        Where :func:`check_writable` refuses a path, or the disk refuses the bytes.
    """
    for path in files:
        check_writable(path, force=force)
    staged: list[tuple[Path, Path]] = []
    try:
        for path, data in files.items():
            staged.append((_stage(path, data), path))
        while staged:
            temporary, path = staged[0]
            temporary.replace(path)
            staged.pop(0)
    except OSError as error:
        raise ValueError(
            f"output: cannot write {error.filename or ''}: {error.strerror}"
        ) from error
    finally:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)


def _stage(path: Path, data: bytes) -> Path:
    """Write ``data`` under a temporary name beside ``path``; remove it if that fails."""
    # A part of the name is enough to know it by, and fits wherever the whole name does.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        # mkstemp is private to the user; a result is an ordinary file.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary
