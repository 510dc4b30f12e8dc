"""Files of a dump and its mapping: never unpickled, never followed out, never believed."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from needlepoint.verify.diff.dump import Dump
from needlepoint.verify.diff.files import DumpError, DumpFiles, tags
from needlepoint.verify.diff.mapping import MAPPING_FILE, load_mapping
from needlepoint.verify.recording.recording import RecordingError


class Bomb:
    """A pickle that would write a file if anyone ran it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (f"touch {self.path}",))


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    (tmp_path / "dump").mkdir()
    torch.save(Bomb(proof), tmp_path / "dump" / "a.pt")
    (tmp_path / "dump" / "b.pt").write_bytes(pickle.dumps(Bomb(proof)))
    np.save(tmp_path / "dump" / "c.npy", np.array([Bomb(proof)], dtype=object), allow_pickle=True)
    files = DumpFiles(tmp_path / "dump")

    with pytest.raises(DumpError, match=r"a pickle is never run here; save it again as torch.save"):
        files.tensor("a")
    with pytest.raises(DumpError, match="is truncated or not the zip that"):
        files.tensor("b")
    with pytest.raises(DumpError, match="expected an array of numbers"):
        files.tensor("c")
    assert not proof.exists()


def lying_npy(folder: Path) -> None:
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776,), }"
    header += b" " * (118 - len(header) - 1) + b"\n"
    (folder / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + header)


def lying_safetensors(folder: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}})
    (folder / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())


def bomb_zip(folder: Path) -> None:
    with zipfile.ZipFile(folder / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data/0", b"\0" * (64 << 20))


def cut_pt(folder: Path) -> None:
    torch.save(torch.zeros(1000), folder / "x.pt")
    raw = (folder / "x.pt").read_bytes()
    (folder / "x.pt").write_bytes(raw[: len(raw) // 2])


def link(folder: Path) -> None:
    outside = folder.parent / "secret.npy"
    np.save(outside, np.zeros(3))
    (folder / "x.npy").symlink_to(outside)


def big_endian(folder: Path) -> None:
    np.save(folder / "x.npy", np.zeros(3, dtype=">f4"))


def zip_as_npy(folder: Path) -> None:
    np.savez(folder / "x.npz", np.zeros(3))
    (folder / "x.npz").rename(folder / "x.npy")


def deep_npy(folder: Path) -> None:
    header = b"(" * 117 + b"\n"
    (folder / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + header)


def empty_pickle(folder: Path) -> None:
    with zipfile.ZipFile(folder / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", b"")
        archive.writestr("x/version", b"3")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: torch.save(torch.zeros(1).expand(600, 10**9), f / "x.pt"), "the file has"),
        (lambda f: torch.save(torch.zeros(2, device="meta"), f / "x.pt"), "x.pt: "),
        (empty_pickle, r"x.pt: cannot be read"),
        (zip_as_npy, r"x.npy: cannot be read"),
        (deep_npy, r"x.npy: cannot be read"),
        (lambda f: np.save(f / "x.npy", np.zeros(3, dtype=np.longdouble)), "little-endian"),
        (lying_npy, "expected an array of numbers"),
        (lying_safetensors, "truncated or its header lies"),
        (bomb_zip, "unpacks to 67108864 bytes"),
        (cut_pt, "is truncated or not the zip"),
        (link, "is a link out of the dump"),
        (big_endian, "expected numbers in little-endian order"),
        (lambda f: torch.save([1, 2], f / "x.pt"), "holds list, expected a tensor"),
        (lambda f: torch.save(torch.zeros(2).to_sparse(), f / "x.pt"), "expected plain numbers"),
        (lambda f: None, r"no .pt, .npy, .safetensors files"),
    ],
)
def test_hostile_files_are_refused_without_reading_the_lie(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    spoil(folder)
    with pytest.raises(RecordingError, match=message):
        DumpFiles(folder).tensor("x")


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3))
    save_file({"x": torch.zeros(3)}, tmp_path / "all.safetensors")
    with pytest.raises(DumpError, match=r"tensor 'x' is in all.safetensors too"):
        DumpFiles(tmp_path)


def test_tags_of_a_dumper_name() -> None:
    assert tags("name=a___step=3___rank=0") == {"name": "a", "step": "3", "rank": "0"}
    assert tags("plain") == {}


def test_a_mapping_may_point_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "map.toml"
    path.write_text(
        'schema = "needlepoint.dump/1"\nname = "x"\nformat = "fp8"\nprofile = "vllm"\n'
        'requests = [8]\nlayers = [0]\ndirectory = "elsewhere"\n[rows]\n"main.pooled" = "p"\n'
    )
    assert load_mapping(path).directory == "elsewhere"


def test_a_mapping_in_the_dump_may_not_point_out_of_it(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    np.save(tmp_path / "secret" / "p.npy", np.zeros(3))
    (tmp_path / "dump").mkdir()
    text = (
        'schema = "needlepoint.dump/1"\nname = "x"\nformat = "fp8"\nprofile = "vllm"\n'
        'requests = [8]\nlayers = [0]\ndirectory = "../secret"\n[rows]\n"main.pooled" = "p"\n'
    )
    (tmp_path / "dump" / MAPPING_FILE).write_text(text)

    with pytest.raises(DumpError, match="leads out of the dump; name the mapping file itself"):
        Dump(tmp_path / "dump")
    assert Dump(tmp_path / "dump" / MAPPING_FILE).mapping.directory == "../secret"
