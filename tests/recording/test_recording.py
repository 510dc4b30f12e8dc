from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from needlepoint.optimized.protocol.interface import (
    CandidateInfo,
    CompressorInputs,
    LayerInputs,
    Observed,
    PagedRows,
    QueryInputs,
    QueryRows,
)
from needlepoint.reference.profile import needlepoint_profile
from needlepoint.verify.recording.recording import (
    CandidateRecord,
    Manifest,
    ProfileRecord,
    RecordingError,
    RecordingWriter,
    open_recording,
)

LENGTHS = (9, 130, 3)
HEADS, INDEX_WIDTH, MAIN_WIDTH, TOPK = 2, 128, 16, 5
INFO = CandidateInfo("emulated:fused-fp8", "fp8", "cpu", "needlepoint", "fused", "0" * 64)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


HIDDEN = draw(sum(LENGTHS), 24, dtype=torch.bfloat16)


def compressor(lengths: tuple[int, ...], ratio: int, width: int) -> CompressorInputs:
    columns = width * (2 if ratio == 4 else 1)
    tokens = sum(lengths)
    return CompressorInputs(
        draw(tokens, columns), draw(tokens, columns) * 2, draw(ratio, columns), draw(width)
    )


def given_inputs(layer: int, ratio: int, lengths: tuple[int, ...] = LENGTHS) -> LayerInputs:
    tokens = sum(lengths)
    return LayerInputs(
        layer=layer,
        ratio=ratio,
        lengths=lengths,
        index=compressor(lengths, ratio, INDEX_WIDTH) if ratio == 4 else None,
        main=compressor(lengths, ratio, MAIN_WIDTH),
        query=QueryInputs(draw(tokens, HEADS, INDEX_WIDTH), draw(tokens, HEADS))
        if ratio == 4
        else None,
        rope_table=draw(max(lengths), 4, 2),
        norm_eps=1e-6,
        topk=TOPK,
        weight_scale=0.1,
        hidden=draw(tokens, 24, dtype=torch.bfloat16),
        layer_weights={"wq_a": draw(3, 24, dtype=torch.bfloat16), "index.wkv": draw(2, 2)},
        seed=3,
    )


def paged(layout: str, row_bytes: int, lengths: tuple[int, ...], ratio: int) -> PagedRows:
    entries = tuple(length // ratio for length in lengths)
    tables = tuple(draw(-(-count // 8), dtype=torch.int32) for count in entries)
    pool = draw(sum(map(len, tables)) + 1, 8 * row_bytes, dtype=torch.uint8)
    return PagedRows(layout, pool, 8, tables, entries)


def query_rows(coded: str, tokens: int) -> QueryRows:
    weights = draw(tokens, HEADS)
    if coded == "bf16":
        codes = draw(tokens, HEADS, INDEX_WIDTH, dtype=torch.bfloat16)
        return QueryRows(coded, codes, None, weights, scale_folded=False)
    if coded == "fp8":
        codes = draw(tokens, HEADS, INDEX_WIDTH, dtype=torch.uint8)
        return QueryRows(coded, codes, draw(tokens, HEADS), weights, scale_folded=True)
    codes = draw(tokens, HEADS, INDEX_WIDTH // 2, dtype=torch.uint8)
    return QueryRows(
        coded, codes, draw(tokens, HEADS, 4, dtype=torch.uint8), weights, scale_folded=False
    )


def scores_of(lengths: tuple[int, ...], ratio: int, request: int) -> Tensor:
    scores = draw(lengths[request], lengths[request] // ratio)
    visible = (torch.arange(len(scores)) + 1) // ratio
    return scores.masked_fill(torch.arange(scores.shape[1]) >= visible[:, None], -torch.inf)


def observed(ratio: int, lengths: tuple[int, ...] = LENGTHS, *, coded: str = "fp8") -> Observed:
    tokens, entries = sum(lengths), sum(length // ratio for length in lengths)
    dense = {("main", stage): draw(entries, MAIN_WIDTH) for stage in ("pooled", "normed", "roped")}
    stored = {"main": paged("main-584", 20, lengths, ratio)}
    if ratio == 128:
        return Observed(dense, stored, peak_transient_bytes=12, path_taken="fused/cpu")
    steps = ("pooled", "normed", "roped", "rotated")
    dense |= {("index", step): draw(entries, INDEX_WIDTH) for step in steps}
    stored["index"] = paged("index-fp8", 132, lengths, ratio)
    return Observed(
        dense,
        stored,
        query_rows(coded, tokens),
        lambda request, start, stop: scores_of(lengths, ratio, request)[start:stop],
        draw(tokens, TOPK, dtype=torch.int32),
    )


def head(lengths: tuple[int, ...] = LENGTHS) -> Manifest:
    profile = needlepoint_profile("fp8")
    return Manifest(
        kind="candidate",
        model="mini",
        requests=lengths,
        tensors={},
        candidate=CandidateRecord(**asdict(INFO)),
        profile=ProfileRecord(name=profile.name, switches=profile.switches()),
        seed=3,
    )


def record(out: Path, *, force: bool = False) -> None:
    with RecordingWriter(out, head(), HIDDEN, force=force) as writer:
        writer.write_layer(given_inputs(2, 4), observed(4))
        writer.write_layer(given_inputs(3, 128), observed(128))


def raw(tensor: Tensor) -> bytes:
    """Return the bytes, not the values: NaN equals itself and the two zeros differ."""
    bits = tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
    return bits.numpy().tobytes()


def same(one: object, other: object) -> bool:
    """Compare nested records of tensors, to the bit."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (one.dtype, one.shape, raw(one)) == (other.dtype, other.shape, raw(other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__") and type(one) is type(other):
        names = [field.name for field in fields(one) if field.name != "scores"]  # type: ignore[arg-type]
        return all(same(getattr(one, name), getattr(other, name)) for name in names)
    return one == other


def edit(path: Path, change: dict[str, Tensor | None]) -> None:
    """Rewrite a safetensors file with the library, some tensors changed or removed."""
    tensors = load_file(path)
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path)


def edit_manifest(directory: Path, path: list[str | int], value: object) -> None:
    manifest = json.loads((directory / "manifest.json").read_text())
    node = manifest
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    (directory / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("coded", ["bf16", "fp8", "fp4"])
def test_what_was_written_comes_back_to_the_bit(tmp_path: Path, coded: str) -> None:
    inputs, seen = given_inputs(2, 4), observed(4, coded=coded)
    with RecordingWriter(tmp_path / "out", head(), HIDDEN) as writer:
        writer.write_layer(inputs, seen)
        writer.write_layer(given_inputs(3, 128), observed(128))

    recording = open_recording(tmp_path / "out")

    assert recording.layers == (2, 3)
    got_inputs, got = recording.read_layer(2)
    assert same(got_inputs, inputs)
    assert same(got, seen)
    assert got.scores is not None
    for request, length in enumerate(LENGTHS):
        want = scores_of(LENGTHS, 4, request)
        assert same(got.scores(request, 0, length), want)
        assert same(got.scores(request, 1, length - 1), want[1 : length - 1])
        assert got.scores(request, 2, 2).shape == (0, length // 4)
    plain_inputs, plain = recording.read_layer(3)
    assert same(plain_inputs, given_inputs(3, 128))
    assert same(plain, observed(128))
    assert plain.scores is None
    assert recording.manifest.candidate == CandidateRecord(**asdict(INFO))
    assert recording.manifest.profile is not None
    assert recording.manifest.profile.switches == needlepoint_profile("fp8").switches()


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4).map(tuple),
    drop=st.sets(st.sampled_from(["query", "scores", "topk", "dense", "stored"])),
)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_lengths_and_any_subset_of_stages_come_back(
    tmp_path_factory: pytest.TempPathFactory, lengths: tuple[int, ...], drop: set[str]
) -> None:
    inputs = given_inputs(0, 4, lengths)
    absent: dict[str, object] = {"query": None, "scores": None, "topk": None}
    absent |= {"dense": {}, "stored": {}}
    seen = replace(observed(4, lengths), **{name: absent[name] for name in drop})  # type: ignore[arg-type]
    out = tmp_path_factory.mktemp("r") / "out"

    with RecordingWriter(out, head(lengths)) as writer:
        writer.write_layer(inputs, seen)
    got_inputs, got = open_recording(out).read_layer(0)

    assert same(got_inputs, inputs)
    assert same(got, seen)
    assert (got.scores is None) == ("scores" in drop)


@pytest.mark.parametrize("shape", [(142, 24), (142, 4, 6)])
def test_own_attention_comes_back(tmp_path: Path, shape: tuple[int, ...]) -> None:
    seen = replace(observed(4), attention=draw(*shape))
    with RecordingWriter(tmp_path / "out", head(), HIDDEN) as writer:
        writer.write_layer(given_inputs(2, 4), seen)

    assert same(open_recording(tmp_path / "out").read_layer(2)[1], seen)


def test_names_and_kinds_on_disk(tmp_path: Path) -> None:
    record(tmp_path / "out")

    tensors = load_file(tmp_path / "out" / "layer2.safetensors")
    assert tensors["layer2.index.stored.pages"].dtype is torch.uint8
    assert {
        "layer2.index.pooled", "layer2.index.stored.page_table.0", "layer2.query.query.codes",
        "layer2.query.query.scales", "layer2.query.weights", "layer2.index.scores.0",
        "layer2.index.topk", "layer2.index.projected.kv", "layer2.index.projected.score",
        "layer2.index.given.ape", "layer2.index.given.norm_weight", "layer2.query.projected.q",
        "layer2.query.projected.weights", "layer2.main.stored.pages",
    } <= set(tensors)  # fmt: skip
    assert set(load_file(tmp_path / "out" / "input.safetensors")) == {"input"}
    # No digest of a stage tensor: an edited recording is judged, not refused.
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    keys = {key for record in manifest["tensors"].values() for key in record}
    assert keys == {"file", "dtype", "shape"}
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_equal_runs_write_equal_bytes(tmp_path: Path) -> None:
    record(tmp_path / "a")
    record(tmp_path / "b")

    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_layers_with_their_own_input_keep_it(tmp_path: Path) -> None:
    own = replace(given_inputs(3, 128), hidden=HIDDEN + 1)
    with RecordingWriter(tmp_path / "out", head(), HIDDEN) as writer:
        writer.write_layer(given_inputs(2, 4), observed(4))
        writer.write_layer(own, observed(128))

    recording = open_recording(tmp_path / "out")
    assert same(recording.hidden(2), HIDDEN)
    assert same(recording.hidden(3), HIDDEN + 1)


def test_an_edited_recording_is_read_not_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    record(out)
    _, before = open_recording(out).read_layer(2)
    pages = before.stored["index"].pool.clone()
    pages[1, 7] ^= 0xFF
    rows = before.dense[("index", "pooled")][torch.arange(34).roll(1)].contiguous()

    # The library's own writer, with other key order and no padding of ours.
    edit(
        out / "layer2.safetensors",
        {"layer2.index.stored.pages": pages, "layer2.index.pooled": rows},
    )

    _, after = open_recording(out).read_layer(2)
    assert int((after.stored["index"].pool != before.stored["index"].pool).sum()) == 1
    assert same(after.dense[("index", "pooled")], rows)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layer2.index.pooled", "tensor layer2.index.pooled is missing; the manifest declares"),
        ("layer2.index.topk", "tensor layer2.index.topk is missing"),
        ("layer2.index.scores.1", "tensor layer2.index.scores.1 is missing"),
        ("layer2.main.given.ape", "tensor layer2.main.given.ape is missing"),
    ],
)
def test_a_removed_stage_is_named(tmp_path: Path, name: str, message: str) -> None:
    out = tmp_path / "out"
    record(out)
    edit(out / "layer2.safetensors", {name: None})
    with pytest.raises(RecordingError, match=message):
        open_recording(out)

    # Still named when the manifest forgets the tensor, but not the stage.
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["tensors"][name]
    (out / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RecordingError, match=f"tensor {name} is missing"):
        open_recording(out)


def test_undeclared_tensors_and_files_are_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    record(out)
    edit(out / "layer2.safetensors", {"layer2.index.extra": draw(3)})
    with pytest.raises(RecordingError, match=r"tensor 'layer2\.index\.extra' is not declared by"):
        open_recording(out)

    extra = {"file": "layer2.safetensors", "dtype": "F32", "shape": [3]}
    edit_manifest(out, ["tensors", "layer2.index.extra"], extra)
    with pytest.raises(RecordingError, match=r"tensor layer2\.index\.extra belongs to no stage"):
        open_recording(out)

    record(out, force=True)
    save_file({"layer9.index.pooled": draw(3)}, out / "layer9.safetensors")
    with pytest.raises(RecordingError, match=r"layer9\.safetensors: the manifest does not declare"):
        open_recording(out)
    extra = {"file": "layer9.safetensors", "dtype": "F32", "shape": [3]}
    edit_manifest(out, ["tensors", "layer9.index.pooled"], extra)
    with pytest.raises(RecordingError, match=r"belongs to no layer that the manifest declares"):
        open_recording(out)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("layer2.index.pooled", draw(33, 128), r"shape \[33, 128\], expected \[34, 128\]"),
        ("layer2.index.pooled", draw(34, 64), r"shape \[34, 64\], expected \[34, 128\]"),
        ("layer2.index.topk", draw(142, 5), "dtype F32, expected I32"),
        ("layer2.index.stored.pages", draw(9, 9, dtype=torch.int32), "dtype I32, expected U8"),
        ("layer2.query.query.codes", draw(142, 2, 64, dtype=torch.uint8), r"\[142, 2, 128\]"),
        ("layer2.index.scores.0", draw(9, 3), r"shape \[9, 3\], expected \[9, 2\]"),
        ("layer2.index.given.norm_weight", draw(2, 2), r"shape \[2, 2\], expected 1 dims"),
    ],
)
def test_wrong_shapes_and_dtypes_are_named(
    tmp_path: Path, name: str, tensor: Tensor, message: str
) -> None:
    out = tmp_path / "out"
    record(out)
    edit(out / "layer2.safetensors", {name: tensor})
    with pytest.raises(RecordingError, match=f"tensor {name} is .*, the manifest declares"):
        open_recording(out)

    names = {torch.float32: "F32", torch.int32: "I32", torch.uint8: "U8"}
    edit_manifest(out, ["tensors", name, "shape"], list(tensor.shape))
    edit_manifest(out, ["tensors", name, "dtype"], names[tensor.dtype])
    with pytest.raises(RecordingError, match=f"tensor {name}.*{message}"):
        open_recording(out)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["layers", 0, "layouts", "index", "entries"], [2, 33, 0], "entries .*expected"),
        (["layers", 0, "layouts"], {}, "stage index.stored and its layout must be declared"),
        (["layers", 0, "query"], None, "query record must be declared together"),
        (["layers", 0, "stages"], [["index", "pool"]], "has no stage index.pool"),
        (["layers", 0, "stages"], [["index", "topk"]] * 2, "a stage is declared twice"),
        (["layers", 0, "ratio"], 8, "Input should be 1, 4 or 128"),
        (["layers", 1, "layer"], 2, "a layer is listed twice"),
        (["requests"], [9, 130, 4], r"tensor input: shape \[142, 24\], expected \[143, any\]"),
        (["requests"], [9, 133, 0], "requests.2.*greater than or equal to 1"),
        (["kind"], "input", "a recording of input has no layers"),
        (["kind"], "engine", "kind: got 'engine'"),
        (["schema"], "needlepoint.recording/2", "schema.*needlepoint.recording/1"),
        (["digest"], "abc", "digest.*Extra inputs are not permitted"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    tmp_path: Path, path: list[str | int], value: object, message: str
) -> None:
    record(tmp_path / "out")
    edit_manifest(tmp_path / "out", path, value)

    with pytest.raises(RecordingError, match=message):
        open_recording(tmp_path / "out")


def test_an_error_or_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def attempt(error: type[BaseException]) -> None:
        with RecordingWriter(tmp_path / "out", head(), HIDDEN) as writer:
            writer.write_layer(given_inputs(2, 4), observed(4))
            raise error

    for error in (ZeroDivisionError, KeyboardInterrupt):
        with pytest.raises(error):
            attempt(error)
        assert list(tmp_path.iterdir()) == []


def test_an_error_keeps_the_recording_that_was_there(tmp_path: Path) -> None:
    record(tmp_path / "out")
    before = (tmp_path / "out" / "manifest.json").read_bytes()

    with (
        pytest.raises(ZeroDivisionError),
        RecordingWriter(tmp_path / "out", head(), HIDDEN, force=True),
    ):
        raise ZeroDivisionError

    assert (tmp_path / "out" / "manifest.json").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_targets_that_are_refused(tmp_path: Path) -> None:
    record(tmp_path / "out")
    with pytest.raises(RecordingError, match="already exists; pass --force"):
        record(tmp_path / "out")
    record(tmp_path / "out", force=True)
    assert open_recording(tmp_path / "out").layers == (2, 3)

    with pytest.raises(RecordingError, match=r"folder .*nowhere does not exist; create it first"):
        record(tmp_path / "nowhere" / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError, match="is a file; give the name of a new folder"):
        record(tmp_path / "file", force=True)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "precious").write_text("")
    with pytest.raises(RecordingError, match="not a recording; --force does not replace it"):
        record(tmp_path / "home", force=True)
    assert (tmp_path / "home" / "precious").exists()
    (tmp_path / "out" / "notes.txt").write_text("")
    with pytest.raises(RecordingError, match=r"also holds notes\.txt, which is not of the"):
        record(tmp_path / "out", force=True)
    assert (tmp_path / "out" / "notes.txt").exists()
    (tmp_path / "empty").mkdir()
    record(tmp_path / "empty")
    assert open_recording(tmp_path / "empty").layers == (2, 3)


def test_a_disk_that_refuses_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "out")
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if target.name == "out" and not path.name.endswith(".old"):
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(RecordingError, match=r"cannot write .No space left on device.; no"):
        record(tmp_path / "out", force=True)

    assert (tmp_path / "out" / "manifest.json").read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"out"}

    def full(**options: object) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    with pytest.raises(RecordingError, match=r"is not writable .Read-only file system.; choose"):
        record(tmp_path / "other")


def test_the_writer_refuses_what_could_not_be_read(tmp_path: Path) -> None:
    inputs, seen = given_inputs(2, 4), observed(4)
    cases = [
        (replace(inputs, lengths=(142,)), seen, r"request lengths \[142\], expected"),
        (inputs, replace(seen, topk=draw(142, 5)), "tensor layer2.index.topk: dtype F32"),
        (inputs, replace(seen, topk=draw(142, 5).half().to(torch.int8)), "dtype torch.int8"),
        (inputs, replace(seen, dense={("index", "pooled"): draw(35, 128)}), r"shape \[35, 128\]"),
        (inputs, replace(seen, dense={("index", "mystery"): draw(34, 128)}), "index.mystery"),
        (inputs, replace(seen, scores=lambda r, a, b: draw(b - a, 7)), r"shape \[.*\], expected"),
        (replace(inputs, norm_eps=float("nan")), seen, "norm_eps.*finite number"),
        (replace(inputs, layer_weights={"a/b": draw(2)}), seen, "a/b"),
    ]
    for bad_inputs, bad_seen, message in cases:
        with (
            pytest.raises(ValueError, match=message),
            RecordingWriter(tmp_path / "out", head(), HIDDEN) as writer,
        ):
            writer.write_layer(bad_inputs, bad_seen)
        assert list(tmp_path.iterdir()) == []
    with RecordingWriter(tmp_path / "out", head(), HIDDEN) as writer:
        writer.write_layer(inputs, seen)
        with pytest.raises(RecordingError, match="layer 2: is in this recording already"):
            writer.write_layer(inputs, seen)


def test_unknown_layers_tensors_and_score_rows_are_named(tmp_path: Path) -> None:
    record(tmp_path / "out")
    recording = open_recording(tmp_path / "out")

    with pytest.raises(RecordingError, match="layer 5 is not in it; it has 2, 3"):
        recording.read_layer(5)
    with pytest.raises(RecordingError, match="tensor nothing is missing"):
        recording.tensor("nothing")
    scores = recording.read_layer(2)[1].scores
    assert scores is not None
    with pytest.raises(RecordingError, match="scores of request 0, queries 4 to 10: out of range"):
        scores(0, 4, 10)


def test_a_file_that_changes_after_opening_is_an_error(tmp_path: Path) -> None:
    record(tmp_path / "out")
    recording = open_recording(tmp_path / "out")
    (tmp_path / "out" / "layer2.safetensors").write_bytes(b"short")

    with pytest.raises(RecordingError, match=r"layer2\.safetensors: tensor layer2\."):
        recording.read_layer(2)
