from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from needlepoint.verify.base.atomic import check_writable, write_files


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_files_appear_with_their_contents_and_nothing_else(tmp_path: Path) -> None:
    write_files({tmp_path / "a": b"one", tmp_path / "b": b""}, force=False)

    assert _names(tmp_path) == {"a", "b"}
    assert (tmp_path / "a").read_bytes() == b"one"
    assert (tmp_path / "b").read_bytes() == b""


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_files({tmp_path / "a": b"x"}, force=False)
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_existing_files_stay_without_force(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"mine")

    with pytest.raises(ValueError, match=r"b: already exists; pass --force"):
        write_files({tmp_path / "a": b"new", tmp_path / "b": b"new"}, force=False)

    assert _names(tmp_path) == {"b"}
    assert (tmp_path / "b").read_bytes() == b"mine"

    write_files({tmp_path / "a": b"new", tmp_path / "b": b"new"}, force=True)
    assert (tmp_path / "b").read_bytes() == b"new"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_in_the_second_file_leaves_the_folder_as_it_was(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_bytes(b"mine")
    synced: list[int] = []

    def fsync(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise error

    monkeypatch.setattr("os.fsync", fsync)
    kind = ValueError if isinstance(error, OSError) else KeyboardInterrupt

    with pytest.raises(kind):
        write_files({tmp_path / "a": b"new", tmp_path / "b": b"new"}, force=True)

    assert len(synced) == 2
    assert _names(tmp_path) == {"a"}
    assert (tmp_path / "a").read_bytes() == b"mine"


def test_paths_that_cannot_be_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, told in (
        (tmp_path, "is a folder; give the name of a file"),
        (Path(), r"output \.: is a folder; give the name of a file"),
        (Path("/"), "output /: is a folder"),
        (tmp_path / "none" / "r.json", r"folder .*none does not exist; create it first"),
        (tmp_path / "file" / "r.json", r"file is no folder; choose another place"),
        (Path(os.devnull), "is not an ordinary file"),
        (tmp_path / ("n" * 300), r"cannot be written \(File name too long\)"),
    ):
        with pytest.raises(ValueError, match=told):
            check_writable(path, force=True)


def test_every_name_that_a_file_may_have_can_be_written(tmp_path: Path) -> None:
    for name in ("n" * 255, "\N{SNOWMAN}" * 85):
        write_files({tmp_path / name: b"x"}, force=False)
        assert (tmp_path / name).read_bytes() == b"x"


def test_a_folder_that_takes_no_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Permission bits do not stop the root user, under whom tests may run.
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)

    with pytest.raises(ValueError, match=r"not writable \(Permission denied\)"):
        check_writable(tmp_path / "r.json", force=False)


def test_checking_leaves_nothing_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "r.json", force=False)

    assert _names(tmp_path) == set()
