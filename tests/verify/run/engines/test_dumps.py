"""Dumps of an engine: chunked, padded, permuted, sharded; aligned, judged, and never unpickled."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from needlepoint.optimized.interface import INDEX, MAIN, Candidate, LayerInputs, Observed
from needlepoint.verify.dump import Dump
from needlepoint.verify.dump_align import align
from needlepoint.verify.dump_files import DumpError, DumpFiles, tags
from needlepoint.verify.dump_mapping import MAPPING_FILE, Pages, load_mapping
from needlepoint.verify.dump_pages import entries_of, paged_rows
from needlepoint.verify.output import load_result
from needlepoint.verify.recordings import RecordingError, open_recording
from needlepoint.verify.result import CandidateResult

Cli = Callable[..., CompletedProcess[str]]
Engine = Callable[..., Candidate]
Save = Callable[[Path, str, Tensor], None]

DENSE = ("index.pooled", "main.pooled", "index.normed", "main.normed", "index.roped", "main.roped")
TOKEN_ROWS = ("query.query.codes", "query.query.scales", "query.weights", "index.scores")


@dataclass(frozen=True)
class Served:
    """One run of an engine over the recording's requests, as a dump would show it."""

    given: LayerInputs
    observed: Observed
    steps: tuple[tuple[Tensor, Tensor], ...]  # positions and requests of each pass

    @property
    def slots(self) -> list[Tensor]:
        starts = torch.tensor((0, *self.given.lengths)).cumsum(0)
        return [(starts[r] + p)[p >= 0] for p, r in self.steps]

    def tokens(self, rows: Tensor, step: int) -> Tensor:
        """Return the rows of one pass, padding poisoned."""
        position = self.steps[step][0]
        out = rows.new_zeros((len(position), *rows.shape[1:]))
        if rows.dtype.is_floating_point and rows.dtype != torch.float8_e4m3fn:
            out += torch.nan
        out[position >= 0] = rows[self.slots[step]]
        return out

    def entries(self, rows: Tensor, step: int) -> Tensor:
        """Return the entries that the tokens of one pass complete, in the pass's order."""
        position, request = self.steps[step]
        ratio = self.given.ratio
        counts = torch.tensor([n // ratio for n in self.given.lengths])
        first = counts.cumsum(0) - counts
        done = (position >= 0) & ((position + 1) % ratio == 0)
        return rows[first[request[done]] + (position[done] + 1) // ratio - 1]

    def scores(self) -> Tensor:
        """Return all scores with what engines leave beyond the visible entries."""
        assert self.observed.scores is not None
        widest = max(self.given.lengths) // self.given.ratio
        parts = []
        for request, length in enumerate(self.given.lengths):
            part = self.observed.scores(request, 0, length)
            part = torch.nn.functional.pad(part, (0, widest - part.shape[1]), value=-torch.inf)
            parts.append(torch.where(torch.isinf(part), 1e30, part))
        return torch.cat(parts)


def batches(lengths: tuple[int, ...]) -> tuple[tuple[Tensor, Tensor], ...]:
    """Two prefill chunks that split windows, a padded mixed batch, then single tokens."""
    cuts = [[0, n // 2 + 1, n - 3, n - 2, n] for n in lengths]
    steps = []
    for number in range(4):
        position = [torch.arange(c[number], c[number + 1]) for c in cuts]
        request = [torch.full_like(p, r) for r, p in enumerate(position)]
        padding = torch.full((number,), -1)
        order = torch.randperm(
            sum(map(len, position)) + number, generator=torch.manual_seed(number)
        )
        if number < 2:
            order = order.sort().values
        steps.append(
            (torch.cat((*position, padding))[order], torch.cat((*request, padding))[order])
        )
    return tuple(steps)


@pytest.fixture(scope="module")
def reference(recordings: Callable[..., Path]) -> Path:
    return recordings("bf16")


@pytest.fixture(scope="module")
def served(reference: Path, engine: Engine) -> Callable[..., Served]:
    def run(name: str = "sglang", fmt: str = "fp8", layer: int = 0) -> Served:
        given, _ = open_recording(reference).read_layer(layer)
        return Served(given, engine(name, fmt).run(given), batches(given.lengths))

    return run


def save_pt(folder: Path, name: str, tensor: Tensor) -> None:
    torch.save({"value": tensor, "meta": {"world_size": 1}}, folder / f"{name}.pt")


def save_npy(folder: Path, name: str, tensor: Tensor) -> None:
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    np.save(folder / f"{name}.npy", tensor.numpy())


def save_st(folder: Path, name: str, tensor: Tensor) -> None:
    save_file({name: tensor.contiguous()}, folder / f"{name}.safetensors")


def stage(name: str, layer: int, step: int, rank: int = 0) -> str:
    tag = name.replace(".", "_")
    return f"name={tag}___step={step}___rank={rank}___dump_index={step * 9}___layer_id={layer}"


def template(name: str) -> str:
    return f"name={name.replace('.', '_')},layer_id={{layer}},step={{step}},rank={{rank}}"


def write_dump(
    folder: Path,
    run: Served,
    save: Save = save_pt,
    *,
    heads: int = 1,
    rows: tuple[str, ...] = (*DENSE, *TOKEN_ROWS, "index.topk"),
) -> Path:
    """Write a run as SGLang's dumper names it, with a mapping; ``heads`` ranks share the heads."""
    folder.mkdir()
    layer, query = run.given.layer, run.observed.query
    assert query is not None
    assert run.observed.topk is not None
    values: dict[str, Tensor] = {".".join(k): v for k, v in run.observed.dense.items()}
    values |= {
        "query.query.codes": query.codes,
        "query.weights": query.weights,
        "index.scores": run.scores(),
        "index.topk": run.observed.topk,
    }
    if query.scales is not None:
        values["query.query.scales"] = query.scales
    lines = {}
    for name in rows:
        for step in range(len(run.steps)):
            cut = run.entries if name in DENSE else run.tokens
            part = cut(values[name], step)
            sharded = name.startswith("query.") and heads > 1
            for rank, piece in enumerate(part.chunk(heads, 1) if sharded else (part,)):
                save(folder, stage(name, layer, step, rank), piece)
        shard = ', shard = "heads"' if name.startswith("query.") and heads > 1 else ""
        lines[name] = f'{{ tensor = "{template(name)}"{shard} }}'
    for step, (position, request) in enumerate(run.steps):
        save(folder, f"name=positions___step={step}", position)
        save(folder, f"name=requests___step={step}", request)
    pools = ""
    for path, paged in run.observed.stored.items():
        widest = max(len(t) for t in paged.page_table)
        table = torch.full((len(paged.page_table), widest), -7)
        for r, t in enumerate(paged.page_table):
            table[r, : len(t)] = t
        save(folder, f"name={path}_pages", paged.pool.view(len(paged.pool), paged.page_size, 1, -1))
        save(folder, f"name={path}_table", table)
        pools += f"""
[pages.{path}]
tensor = "name={path}_pages"
table = "name={path}_table"
layout = "{paged.layout}"
page_size = {paged.page_size}
"""
    body = "\n".join(f'"{name}" = {line}' for name, line in lines.items())
    mapping = folder / MAPPING_FILE
    mapping.write_text(
        f"""schema = "needlepoint.dump/1"
name = "sglang under test"
format = "{query.format}"
profile = "sglang"
requests = {list(run.given.lengths)}
layers = [{layer}]
steps = [0, 1, 2, 3]
ranks = {heads}
scale_folded = {str(query.scale_folded).lower()}

[tokens]
positions = "name=positions,step={{step}}"
requests = "name=requests,step={{step}}"

[rows]
{body}
{pools}"""
    )
    return folder


@pytest.fixture
def judged(cli: Cli, reference: Path, tmp_path: Path) -> Callable[..., tuple[int, CandidateResult]]:
    def run(dump: Path) -> tuple[int, CandidateResult]:
        out = tmp_path / "result.json"
        done = cli("diff", reference, dump, "--json", out, "--force")
        assert out.is_file(), done.stderr
        (candidate,) = load_result(out).candidates
        return done.returncode, candidate

    return run


def compared(result: CandidateResult) -> dict[str, str]:
    return {
        f"{s.path}.{s.stage}": str(s.verdict)
        for s in result.layers[0].stages
        if s.kind == "compared"
    }


ALL = {
    *DENSE,
    *("index.stored", "main.stored", "query.query", "query.weights", "index.scores", "index.topk"),
}


@pytest.mark.parametrize(
    ("save", "heads"), [(save_pt, 1), (save_npy, 1), (save_st, 2), (save_pt, 4)]
)
def test_a_chunked_padded_sharded_dump_is_aligned_and_matches(
    served: Callable[..., Served],
    judged: Callable[..., tuple[int, CandidateResult]],
    tmp_path: Path,
    save: Save,
    heads: int,
) -> None:
    code, result = judged(write_dump(tmp_path / "dump", served(), save, heads=heads))

    assert compared(result) == dict.fromkeys(ALL, "match")
    assert code == 0
    path = result.kernel.path_taken
    assert "4 passes placed by position, 6 padding rows left out" in path
    assert ("ranks joined" in path) == (heads > 1)
    assert "not in the dump, as recorded: index.projected, main.input, main.projected" in path
    assert "scores beyond a query's visible entries are not looked at" in path


def test_fp4_queries_and_pages(
    served: Callable[..., Served],
    judged: Callable[..., tuple[int, CandidateResult]],
    tmp_path: Path,
) -> None:
    code, result = judged(write_dump(tmp_path / "dump", served(fmt="fp4")))

    assert (code, set(compared(result).values())) == (0, {"match"})


def swap_rows(observed: Observed) -> Observed:
    rows = observed.dense[MAIN, "pooled"].clone()
    rows[[5, 6]] = rows[[6, 5]]
    return replace(observed, dense={**observed.dense, (MAIN, "pooled"): rows})


def stale_page(observed: Observed) -> Observed:
    paged = observed.stored[INDEX]
    pool = paged.pool.clone()
    page = int(paged.page_table[0][0])
    pool[page, 5 * 128 : 6 * 128] = pool[page, 4 * 128 : 5 * 128]
    return replace(observed, stored={**observed.stored, INDEX: replace(paged, pool=pool)})


def lost_pick(observed: Observed) -> Observed:
    assert observed.topk is not None
    picks = observed.topk.clone()
    picks[250, 0] = next(e for e in range(60) if e not in picks[250].tolist())
    return replace(observed, topk=picks)


@pytest.mark.parametrize(
    ("fault", "where", "row"),
    [
        (swap_rows, "main.pooled", (0, 5)),
        (stale_page, "index.stored", (0, 5)),
        (lost_pick, "index.topk", (0, None)),
    ],
)
def test_a_fault_keeps_its_place_through_the_alignment(
    served: Callable[..., Served],
    judged: Callable[..., tuple[int, CandidateResult]],
    tmp_path: Path,
    fault: Callable[[Observed], Observed],
    where: str,
    row: tuple[int, int | None],
) -> None:
    run = served()
    code, result = judged(write_dump(tmp_path / "dump", replace(run, observed=fault(run.observed))))

    assert code == 1
    first = result.first_divergence
    assert first is not None
    assert (f"{first.path}.{first.stage}", first.request) == (where, row[0])
    assert row[1] is None or first.entry == row[1]
    assert where != "index.topk" or first.position == 250


def edit(folder: Path, old: str, new: str) -> None:
    path = folder / MAPPING_FILE
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_slots_go_back_through_the_page_table(
    served: Callable[..., Served],
    judged: Callable[..., tuple[int, CandidateResult]],
    tmp_path: Path,
) -> None:
    run = served()
    paged, entries = run.observed.stored[INDEX], run.observed.topk
    assert entries is not None
    slots, first = torch.full_like(entries, -1), 0
    for table, length in zip(paged.page_table, run.given.lengths, strict=True):
        block = entries[first : first + length].long()
        slot = table.long()[block.clamp(min=0) // 64] * 64 + block % 64
        slots[first : first + length] = torch.where(block < 0, -1, slot).int()
        first += length
    dump = write_dump(tmp_path / "dump", replace(run, observed=replace(run.observed, topk=slots)))
    edit(dump, "ranks = 1", 'ranks = 1\npicks = "slots"')

    code, result = judged(dump)
    assert (code, compared(result)["index.topk"]) == (0, "match")

    edit(dump, 'picks = "slots"', 'picks = "entries"')  # read as entries they are out of range
    code, result = judged(dump)
    assert (code, compared(result)["index.topk"]) == (1, "differ")


def test_a_slot_of_another_request_is_no_entry() -> None:
    table = torch.tensor([[4, 2], [7, 9]])
    slots = torch.tensor([[8, 17, -1], [16, 31, 28]])
    found = entries_of(slots, table, 4, (32,), 4)  # eight entries: 8 is one that is not there
    assert found.tolist() == [[4, 1, -1], [0, 8, 8]]


def test_only_pages_a_table_and_a_layout(
    served: Callable[..., Served],
    judged: Callable[..., tuple[int, CandidateResult]],
    tmp_path: Path,
) -> None:
    """Decode these bytes and judge them: no stages, no passes."""
    dump = write_dump(tmp_path / "dump", served(), rows=())
    text = (dump / MAPPING_FILE).read_text()
    head, tail = text.split("steps = [0, 1, 2, 3]")
    (dump / MAPPING_FILE).write_text(head + tail[tail.index("[pages.index]") :])

    code, result = judged(dump)

    assert (code, compared(result)) == (0, {"index.stored": "match", "main.stored": "match"})
    assert "whole requests in order" in result.kernel.path_taken


def test_projections_in_the_dump_say_whether_the_fault_is_upstream(
    served: Callable[..., Served], cli: Cli, reference: Path, engine: Engine, tmp_path: Path
) -> None:
    run = served()
    assert run.given.index is not None

    def dump_of(name: str, kv: Tensor) -> Path:
        index = replace(run.given.index, kv=kv)  # type: ignore[type-var]
        given = replace(run.given, index=index)
        found = replace(run, given=given, observed=engine("sglang", "fp8").run(given))
        folder = write_dump(tmp_path / name, found)
        for part in ("kv", "score"):
            for step in range(4):
                rows = found.tokens(getattr(index, part), step)
                save_pt(folder, stage(f"index.projected.{part}", 0, step), rows)
        lines = "".join(
            f'"index.projected.{p}" = "{template(f"index.projected.{p}")}"\n'
            for p in ("kv", "score")
        )
        edit(folder, "[rows]\n", f"[rows]\n{lines}")
        return folder

    kv = run.given.index.kv
    other_order = kv * (1 + 2**-23 * torch.randn(kv.shape, generator=torch.manual_seed(0)).sign())
    wrong = kv.clone()
    wrong[17] *= 1.05
    sound = cli("diff", reference, dump_of("sound", other_order), "--json", tmp_path / "a.json")
    moved = cli("diff", reference, dump_of("moved", wrong), "--json", tmp_path / "b.json")

    assert sound.returncode == 0
    assert load_result(tmp_path / "a.json").detail is None
    assert moved.returncode == 1
    result = load_result(tmp_path / "b.json")
    assert result.detail == "upstream"
    # The engine made the right thing of what it got: no stage behind is blamed.
    stages = compared(result.candidates[0])
    assert {name for name, verdict in stages.items() if verdict == "differ"} == {"index.projected"}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: edit(d, "requests = [300", "requests = [301"), "requests of .* tokens, the"),
        (lambda d: edit(d, "steps = [0, 1, 2, 3]", "steps = [0, 1, 2]"), "tokens are in no pass"),
        (lambda d: edit(d, "steps = [0, 1, 2, 3]", "steps = [0, 1, 2, 3, 3]"), "comes twice"),
        (lambda d: edit(d, "layers = [0]", "layers = [1]"), "no tensor"),
        (lambda d: edit(d, 'profile = "sglang"', 'profile = "slang"'), "profile 'slang', expected"),
        (lambda d: edit(d, 'layout = "index-fp8"', 'layout = "index-fp6"'), "one of index"),
        (lambda d: edit(d, 'layout = "index-fp8"', 'layout = "index-fp4"'), "8448 bytes a page"),
        (lambda d: edit(d, '"main.pooled"', '"main.polled"'), "is no tensor of a layer"),
        (lambda d: edit(d, "ranks = 1", "rank = 1"), "rank: got"),
        (lambda d: edit(d, "ranks = 1", "ranks = 1.5"), "ranks: got"),
        (lambda d: edit(d, "[rows]", "[rows"), "is not valid TOML"),
        (
            lambda d: edit(d, 'requests = "name=requests,step={step}"', ""),
            "needs exactly one of requests and lengths",
        ),
        (
            lambda d: save_pt(d, stage("main.pooled", 0, 0) + "___x=1", torch.zeros(1)),
            "fits 2 tensors",
        ),
        (
            lambda d: save_pt(d, stage("main.pooled", 0, 1), torch.zeros(3, 512)),
            r"main.pooled: shape \[3, 512\], expected .* rows, those of the tokens",
        ),
        (
            lambda d: save_pt(d, "name=positions___step=1", torch.zeros(3)),
            r"torch.float32 \[3\], expected a list of integers",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_aligned_is_named(
    served: Callable[..., Served],
    cli: Cli,
    reference: Path,
    tmp_path: Path,
    spoil: Callable[[Path], None],
    message: str,
) -> None:
    dump = write_dump(tmp_path / "dump", served(), rows=("main.pooled",))
    spoil(dump)

    done = cli("diff", reference, dump)

    assert done.returncode == 2
    assert done.stdout == ""
    assert re.search(message, done.stderr), done.stderr


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


def test_a_dump_as_a_is_refused(cli: Cli, reference: Path, tmp_path: Path) -> None:
    (tmp_path / MAPPING_FILE).touch()
    done = cli("diff", tmp_path, reference)
    assert (done.returncode, done.stdout) == (2, "")
    assert "is a dump; give it as B" in done.stderr


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


def test_picks_that_a_narrow_integer_would_wrap_stay_wrong(
    served: Callable[..., Served],
    judged: Callable[..., tuple[int, CandidateResult]],
    tmp_path: Path,
) -> None:
    run = served()
    picks = run.observed.topk
    assert picks is not None
    far = picks.long() + (picks >= 0) * (1 << 32)
    dump = write_dump(tmp_path / "picks", replace(run, observed=replace(run.observed, topk=far)))

    code, result = judged(dump)

    assert (code, compared(result)["index.topk"]) == (1, "differ")


@pytest.mark.parametrize("shift", [1 << 32, -(1 << 32), 1 << 20, -1000])
def test_page_ids_that_are_not_there_are_refused(served: Callable[..., Served], shift: int) -> None:
    run = served()
    paged = run.observed.stored[INDEX]
    widest = max(len(table) for table in paged.page_table)
    padded = [torch.nn.functional.pad(t, (0, widest - len(t))) for t in paged.page_table]
    ids = torch.stack(padded).long() + shift
    pages = Pages.model_validate(
        {"tensor": "x", "table": "y", "layout": paged.layout, "page_size": paged.page_size}
    )

    with pytest.raises(DumpError, match=r"index page table: request 0 has page -?\d+, expected"):
        paged_rows(paged.pool, ids, pages, INDEX, run.given)


@settings(max_examples=30, deadline=None)
@drawn(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 6), st.integers(0, 99))
def test_every_split_comes_back(lengths: list[int], parts: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    position = torch.cat([torch.arange(n) for n in lengths])
    request = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    order = torch.randperm(len(position), generator=draw)
    pieces = order.chunk(parts)
    found = align(tuple(lengths), [(position[p], request[p]) for p in pieces], "dump")

    rows = torch.arange(len(position)).unsqueeze(1)
    assert torch.equal(found.tokens([rows[p] for p in pieces], "x"), rows)
    entry = torch.cat([torch.arange(n // 4) for n in lengths]).unsqueeze(1)
    done = [p[(position[p] + 1) % 4 == 0] for p in pieces]
    part = [((position[d] + 1) // 4 - 1).unsqueeze(1) for d in done]
    if len(entry):
        assert torch.equal(found.entries(part, 4, "x"), entry)
