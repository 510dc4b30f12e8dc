"""Dumps as an engine's dumper writes them: chunked, padded, permuted, sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from needlepoint.optimized.protocol.interface import Candidate, LayerInputs, Observed
from needlepoint.verify.cli.app import app, run_app
from needlepoint.verify.diff.mapping import MAPPING_FILE
from needlepoint.verify.recording.recording import open_recording
from needlepoint.verify.recording.results import load_result
from needlepoint.verify.schema.result import CandidateResult

Cli = Callable[..., CompletedProcess[str]]
Engine = Callable[..., Candidate]
Save = Callable[[Path, str, Tensor], None]

DENSE = ("index.pooled", "main.pooled", "index.normed", "main.normed", "index.roped", "main.roped")
KEY_SIDE = (*DENSE, "index.rotated")
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
    profile: str = "sglang",
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
            cut = run.entries if name in KEY_SIDE else run.tokens
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
profile = "{profile}"
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


@pytest.fixture(scope="module")
def served(reference: Path, engine: Engine) -> Callable[..., Served]:
    def run(name: str = "sglang", fmt: str = "fp8", layer: int = 0) -> Served:
        given, _ = open_recording(reference).read_layer(layer)
        return Served(given, engine(name, fmt).run(given), batches(given.lengths))

    return run


@pytest.fixture(scope="module")
def served_keys(
    token_models: dict[str, Path],
    token_engine: Engine,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Served]:
    """Return a recording of a layer of one index key a token, and a run over its requests."""
    out = tmp_path_factory.mktemp("recording") / "keys"
    words = ["record", "--out", str(out), "--input", "synthetic", "--tokens", "150", "--quiet"]
    assert run_app(app, [*words, "--model", str(token_models["v3.2"]), "--layers", "0"]) == 0
    given, _ = open_recording(out).read_layer(0)
    run = token_engine("sglang-v3.2", "fp8").run(given)
    return out, Served(given, run, batches(given.lengths))


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


def edit(folder: Path, old: str, new: str) -> None:
    path = folder / MAPPING_FILE
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@dataclass(frozen=True)
class Dumps:
    """Writers of dumps, and readers of what was found."""

    write: Callable[..., Path] = write_dump
    save_pt: Save = save_pt
    save_npy: Save = save_npy
    save_st: Save = save_st
    stage: Callable[..., str] = stage
    template: Callable[[str], str] = template
    edit: Callable[[Path, str, str], None] = edit
    all: frozenset[str] = frozenset(ALL)
    token_rows: tuple[str, ...] = TOKEN_ROWS
    compared: Callable[[CandidateResult], dict[str, str]] = compared


@pytest.fixture(scope="session")
def dumps() -> Dumps:
    return Dumps()
