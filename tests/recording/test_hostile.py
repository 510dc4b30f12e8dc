"""Recordings that are truncated, corrupt or made to harm the reader."""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from needlepoint.reference.config import MODELS
from needlepoint.verify.recording.file import (
    TensorSource,
    read_header,
    read_tensor,
    tensor_source,
    write_tensors,
)
from needlepoint.verify.recording.manifest import Manifest, parse_json
from needlepoint.verify.recording.model import config_record, recorded_config
from needlepoint.verify.recording.recording import RecordingError, RecordingWriter, open_recording

HIDDEN = torch.arange(24, dtype=torch.bfloat16).reshape(6, 4)
MANIFEST: dict[str, Any] = {
    "schema": "needlepoint.recording/1",
    "kind": "input",
    "model": "mini",
    "requests": [4, 2],
    "tensors": {"input": {"file": "input.safetensors", "dtype": "BF16", "shape": [6, 4]}},
    "source": {"title": "anything", "nested": [1, {"a": None}]},
    "versions": {"torch": "2.13"},
}


def recording(directory: Path, **changes: object) -> Path:
    directory.mkdir(exist_ok=True)
    save_file({"input": HIDDEN}, directory / "input.safetensors")
    (directory / "manifest.json").write_text(json.dumps(MANIFEST | changes))
    return directory


def file_of(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(
    dtype: object = "F32", shape: object = (2,), begin: object = 0, end: object = 8
) -> object:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_plain_input_recording_opens(tmp_path: Path) -> None:
    opened = open_recording(recording(tmp_path))

    assert torch.equal(opened.hidden(7), HIDDEN)
    assert torch.equal(opened.rows("input", slice(1, 3)), HIDDEN[1:3])
    assert opened.layers == ()


@given(cut=st.integers(0, 103))
@settings(max_examples=40, deadline=None)
def test_every_truncation_is_an_error(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    whole = save({"input": HIDDEN})
    assert cut < len(whole)
    directory = recording(tmp_path_factory.mktemp("cut"))
    (directory / "input.safetensors").write_bytes(whole[:cut])

    with pytest.raises(RecordingError, match=r"input\.safetensors"):
        open_recording(directory)


@given(at=st.integers(0, 7 + 72), value=st.integers(0, 255))
@settings(max_examples=150, deadline=None)
def test_any_changed_header_byte_is_an_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    whole = bytearray(save({"input": HIDDEN}))
    whole[at] = value
    directory = recording(tmp_path_factory.mktemp("byte"))
    (directory / "input.safetensors").write_bytes(whole)

    try:
        opened = open_recording(directory)
    except RecordingError:
        return
    # What was accepted must also be readable.
    assert opened.hidden(0).shape == (6, 4)


HUGE = 1 << 62
BAD_HEADERS: list[tuple[object, bytes, int | None, str]] = [
    ({}, b"", HUGE, "too few for a safetensors header of 4611686018427387904 bytes"),
    ({}, b"", 100, "too few for a safetensors header of 100 bytes"),
    (b"not json", b"", None, "header: not JSON"),
    (b"\xff\xfe{}", b"", None, "header: byte 0 is not UTF-8"),
    (b"[]", b"", None, "header is not a JSON object"),
    (b'{"a":' * 40 + b"1" + b"}" * 40, b"", None, "nested deeper than 32 levels"),
    (b'{"a": 1, "a": 2}', b"", None, "key 'a' stands twice"),
    (b'{"a": NaN}', b"", None, "NaN is not a JSON number"),
    ({"a": 5}, b"", None, "tensor 'a': expected exactly dtype, shape and data_offsets"),
    ({"a": {"dtype": "F32"}}, b"", None, "expected exactly dtype, shape and data_offsets"),
    ({"a": entry("F8_E4M3")}, b"\0" * 8, None, "dtype 'F8_E4M3', expected one of BF16"),
    ({"a": entry(["F32"])}, b"\0" * 8, None, "dtype .*expected one of"),
    ({"a": entry(shape=(HUGE, HUGE))}, b"\0" * 8, None, "8 bytes, expected 8507059173023461"),
    ({"a": entry(shape=(HUGE, HUGE), end=HUGE * HUGE * 4)}, b"\0" * 8, None, "of 8; the file is"),
    ({"a": entry(shape=(-2,))}, b"\0" * 8, None, r"shape \[-2\], expected"),
    ({"a": entry(shape=(True, 2))}, b"\0" * 8, None, "shape .*non-negative integers"),
    ({"a": entry(shape=(2.0,))}, b"\0" * 8, None, "shape .*non-negative integers"),
    ({"a": entry(shape=(1,) * 9 + (2,))}, b"\0" * 8, None, "at most 8 non-negative integers"),
    ({"a": entry(shape=2)}, b"\0" * 8, None, "shape 2, expected"),
    ({"a": entry(shape=(3,))}, b"\0" * 8, None, r"8 bytes, expected 12 for F32 of shape \[3\]"),
    ({"a": entry(begin=8, end=0)}, b"\0" * 8, None, "begin <= end"),
    ({"a": entry(begin=-8, end=0)}, b"\0" * 8, None, "begin <= end"),
    ({"a": entry(begin=8, end=16)}, b"\0" * 8, None, "ends at byte 16 of 8"),
    ({"a": entry(), "b": entry()}, b"\0" * 8, None, "'b' starts at byte 0, expected 8: tensors"),
    ({"a": entry(), "b": entry(begin=4, end=12)}, b"\0" * 12, None, "overlap or leave a hole"),
    ({"a": entry(begin=4, end=12)}, b"\0" * 12, None, "starts at byte 4, expected 0"),
    ({"a": entry()}, b"\0" * 9, None, "1 bytes after the last tensor"),
    ({}, b"\0" * 3, None, "3 bytes after the last tensor"),
]


@pytest.mark.parametrize(("header", "data", "length", "message"), BAD_HEADERS)
def test_lying_headers_are_refused(
    tmp_path: Path, header: object, data: bytes, length: int | None, message: str
) -> None:
    path = file_of(tmp_path / "x.safetensors", header, data, length)

    with pytest.raises(RecordingError, match=message) as caught:
        read_header(path)
    assert "x.safetensors" in str(caught.value)


def test_an_oversized_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 17 << 20))
        file.truncate(18 << 20)  # sparse

    with pytest.raises(RecordingError, match="header of 17825792 bytes, expected at most 16777216"):
        read_header(path)


def test_metadata_is_ignored(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    assert list(read_header(tmp_path / "x.safetensors")) == ["a"]


def test_pickles_are_not_read(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "boom"),)

    directory = recording(tmp_path / "r")
    (directory / "input.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(RecordingError, match=r"input\.safetensors"):
        open_recording(directory)
    torch.save({"input": HIDDEN}, directory / "input.safetensors")
    with pytest.raises(RecordingError, match=r"input\.safetensors"):
        open_recording(directory)
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    "name", ["../input.safetensors", "/etc/passwd", "..", ".hidden", "a/b", "a\0b", "", "x" * 300]
)
def test_file_names_stay_inside(tmp_path: Path, name: str) -> None:
    tensors = {"input": MANIFEST["tensors"]["input"] | {"file": name}}
    with pytest.raises(RecordingError, match=r"tensors\.input\.file: got .*should match pattern"):
        open_recording(recording(tmp_path, tensors=tensors))


@pytest.mark.parametrize("file", ["input.safetensors", "manifest.json"])
def test_links_out_of_the_directory_are_refused(tmp_path: Path, file: str) -> None:
    directory = recording(tmp_path / "r")
    (directory / file).rename(tmp_path / f"outside-{file}")
    (directory / file).symlink_to(tmp_path / f"outside-{file}")
    with pytest.raises(RecordingError, match="is a link out of the recording"):
        open_recording(directory)

    # A link to the directory itself is the user's own choice.
    recording(tmp_path / "s")
    (tmp_path / "link").symlink_to(tmp_path / "s")
    assert torch.equal(open_recording(tmp_path / "link").hidden(0), HIDDEN)


def test_files_that_are_no_files_are_refused(tmp_path: Path) -> None:
    directory = recording(tmp_path / "r")
    (directory / "input.safetensors").unlink()
    with pytest.raises(RecordingError, match="No such file"):
        open_recording(directory)
    os.mkfifo(directory / "input.safetensors")
    with pytest.raises(RecordingError, match="is not a regular file"):
        open_recording(directory)
    (directory / "manifest.json").unlink()
    with pytest.raises(RecordingError, match=r"manifest\.json: No such file"):
        open_recording(directory)
    os.mkfifo(directory / "manifest.json")
    with pytest.raises(RecordingError, match=r"manifest\.json: is not a regular file"):
        open_recording(directory)
    with pytest.raises(RecordingError, match="expected a recording directory"):
        open_recording(tmp_path / "nowhere")


BAD_MANIFESTS: list[tuple[bytes, str]] = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"\x80", "byte 0 is not UTF-8"),
    (b"[" * 100_000, "nested deeper than 32 levels"),
    (b'{"kind": 1, "kind": 2}', "key 'kind' stands twice"),
    (b'{"seed": Infinity}', "Infinity is not a JSON number"),
    (b'{"seed": ' + b"9" * 5000 + b"}", "not JSON: .*digits"),
    (b"[]", "document"),
    (b'{"kind": "\\ud800"}', "manifest.json"),
]


@pytest.mark.parametrize(("text", "message"), BAD_MANIFESTS)
def test_bad_manifests_are_refused(tmp_path: Path, text: bytes, message: str) -> None:
    directory = recording(tmp_path)
    (directory / "manifest.json").write_bytes(text)

    with pytest.raises(RecordingError, match=message) as caught:
        open_recording(directory)
    assert "manifest.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_huge_manifest_is_refused(tmp_path: Path) -> None:
    directory = recording(tmp_path)
    with (directory / "manifest.json").open("wb") as file:
        file.truncate(9 << 20)  # sparse

    with pytest.raises(RecordingError, match="9437184 bytes, expected at most 8388608"):
        open_recording(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": [4, 3]}, r"tensor input: shape \[6, 4\], expected \[7, any\]"),
        ({"requests": []}, "requests"),
        ({"requests": [6, 0]}, "requests"),
        ({"requests": [-1, 7]}, "requests"),
        ({"requests": [1 << 70]}, "requests"),
        ({"requests": "6"}, "requests"),
        ({"tensors": {}}, "manifest does not declare this file"),
        ({"tensors": {"in put": {"file": "i", "dtype": "BF16", "shape": []}}}, "in put"),
    ],
)
def test_lying_manifests_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(RecordingError, match=message):
        open_recording(recording(tmp_path, **changes))


def test_an_input_without_tensors_is_refused(tmp_path: Path) -> None:
    directory = recording(tmp_path, tensors={})
    (directory / "input.safetensors").unlink()
    with pytest.raises(RecordingError, match="declares no tensors; expected hidden states"):
        open_recording(directory)


def test_hidden_states_must_be_bf16(tmp_path: Path) -> None:
    tensors = {"input": MANIFEST["tensors"]["input"] | {"dtype": "F32"}}
    directory = recording(tmp_path, tensors=tensors)
    save_file({"input": HIDDEN.float()}, directory / "input.safetensors")

    with pytest.raises(RecordingError, match="tensor input: dtype F32, expected BF16"):
        open_recording(directory)


def test_brackets_in_strings_do_not_count_as_nesting() -> None:
    assert parse_json(json.dumps({"a": '["\\"[{' * 100}).encode(), "x") == {"a": '["\\"[{' * 100}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_model_shapes_come_back(name: str) -> None:
    config = MODELS[name]
    assert config_record(config) == name
    assert recorded_config(name) is config

    other = MODELS["mini"].__class__(**(vars(config) | {"name": "/home/user/x.json", "n_heads": 3}))
    record = config_record(other)
    assert "/home" not in json.dumps(record)
    back = recorded_config(json.loads(json.dumps(record)))
    assert vars(back) == vars(other) | {"name": "recorded"}


def test_shapes_of_an_older_recording_come_back() -> None:
    """It has no field of what it could not hold: layers of one index key a token."""
    other = MODELS["mini"].__class__(**(vars(MODELS["mini"]) | {"n_heads": 3}))
    record = config_record(other)
    assert isinstance(record, dict)
    older = {k: v for k, v in record.items() if k not in ("index_norm_eps", "index_rope")}
    assert recorded_config(older) == recorded_config(record)
    with pytest.raises(RecordingError, match=r"model fields \['n_heads'\] are missing"):
        recorded_config({k: v for k, v in older.items() if k != "n_heads"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": "3"}, "n_heads: got '3'"),
        ({"n_heads": 0}, "n_heads is 0, expected a positive number"),
        ({"compress_ratios": [4, 5]}, "compress_ratios"),
        ({"extra": 1}, r"model fields \['extra'\] are missing or unknown"),
    ],
)
def test_wrong_model_shapes_are_refused(changes: dict[str, object], message: str) -> None:
    other = MODELS["mini"].__class__(**(vars(MODELS["mini"]) | {"n_heads": 3}))
    record = config_record(other)
    assert isinstance(record, dict)
    with pytest.raises(RecordingError, match=message):
        recorded_config(json.loads(json.dumps(record | changes)))


def test_a_model_name_is_never_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text("{}")
    with pytest.raises(RecordingError, match=r"model 'config\.json', expected one of mini"):
        recorded_config("config.json")


def test_streamed_files_are_read_by_the_library_and_in_its_order(tmp_path: Path) -> None:
    tensors = {
        "b.u8": torch.arange(5, dtype=torch.uint8),
        "a.f64": torch.arange(6, dtype=torch.float64).reshape(2, 3),
        "c.empty": torch.empty(3, 0),
        "c.none": torch.full((), 7, dtype=torch.int32).expand(2)[:0],
        "a.bf16": torch.arange(3, dtype=torch.bfloat16),
        "d.one": torch.full((), 7, dtype=torch.int32).expand(1),
    }
    write_tensors(tmp_path / "x", {name: tensor_source(t) for name, t in tensors.items()})

    assert (tmp_path / "x").read_bytes() == save(tensors)
    for name, tensor in tensors.items():
        if tensor.numel():
            assert torch.equal(read_tensor(tmp_path / "x", name), tensor)


def test_blocks_must_add_up(tmp_path: Path) -> None:
    def write(*blocks: torch.Tensor) -> None:
        source = TensorSource(torch.float32, (3, 2), lambda: blocks)
        write_tensors(tmp_path / "x", {"a": source})

    with pytest.raises(RecordingError, match=r"tensor a: 16 bytes, expected 24 for shape \[3, 2\]"):
        write(torch.ones(1, 2), torch.ones(1, 2))
    (tmp_path / "x").unlink()
    with pytest.raises(RecordingError, match=r"a block of torch\.float64, expected torch\.float32"):
        write(torch.ones(3, 2, dtype=torch.float64))
    (tmp_path / "x").unlink()
    write(torch.ones(2, 2).t(), torch.zeros(1, 2))
    assert read_tensor(tmp_path / "x", "a").tolist() == [[1, 1], [1, 1], [0, 0]]


def test_an_existing_file_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("mine")
    with pytest.raises(RecordingError, match="x: cannot write: File exists"):
        write_tensors(tmp_path / "x", {"a": tensor_source(torch.ones(2))})
    assert (tmp_path / "x").read_text() == "mine"


def test_an_input_recording_is_written_whole(tmp_path: Path) -> None:
    head = Manifest(kind="input", model="mini", requests=(4, 2), tensors={}, source={"title": "x"})
    with RecordingWriter(tmp_path / "out", head, HIDDEN):
        pass

    assert torch.equal(open_recording(tmp_path / "out").hidden(0), HIDDEN)
    wrong = head.model_copy(update={"requests": (4, 3)})
    with (
        pytest.raises(RecordingError, match=r"tensor input: shape \[6, 4\], expected \[7, any\]"),
        RecordingWriter(tmp_path / "other", wrong, HIDDEN),
    ):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
