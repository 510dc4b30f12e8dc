"""Rows, heads, slots and pages find their tokens again, and faults keep their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from needlepoint.optimized.protocol.interface import INDEX, MAIN, Observed
from needlepoint.verify.diff.align import align
from needlepoint.verify.diff.files import DumpError
from needlepoint.verify.diff.mapping import MAPPING_FILE, Pages
from needlepoint.verify.diff.pages import entries_of, paged_rows
from needlepoint.verify.recording.results import load_result
from needlepoint.verify.schema.result import CandidateResult

Dumps: TypeAlias = Any
Served: TypeAlias = Any
Cli = Callable[..., CompletedProcess[str]]
Judged = Callable[..., tuple[int, CandidateResult]]


@pytest.mark.parametrize(
    ("save", "heads"), [("save_pt", 1), ("save_npy", 1), ("save_st", 2), ("save_pt", 4)]
)
def test_a_chunked_padded_sharded_dump_is_aligned_and_matches(
    dumps: Dumps,
    served: Callable[..., Served],
    judged: Judged,
    tmp_path: Path,
    save: str,
    heads: int,
) -> None:
    code, result = judged(
        dumps.write(tmp_path / "dump", served(), getattr(dumps, save), heads=heads)
    )

    assert dumps.compared(result) == dict.fromkeys(dumps.all, "match")
    assert code == 0
    path = result.kernel.path_taken
    assert "4 passes placed by position, 6 padding rows left out" in path
    assert ("ranks joined" in path) == (heads > 1)
    assert "not in the dump, as recorded: index.projected, main.input, main.projected" in path
    assert "scores beyond a query's visible entries are not looked at" in path


def test_fp4_queries_and_pages(
    dumps: Dumps,
    served: Callable[..., Served],
    judged: Judged,
    tmp_path: Path,
) -> None:
    code, result = judged(dumps.write(tmp_path / "dump", served(fmt="fp4")))

    assert (code, set(dumps.compared(result).values())) == (0, {"match"})


@pytest.mark.parametrize("sound", [True, False])
def test_keys_of_single_tokens(
    dumps: Dumps, served_keys: tuple[Path, Served], cli: Cli, tmp_path: Path, sound: bool
) -> None:
    """A layer without a compressor: its key projection too, whose fault is upstream."""
    recording, run = served_keys
    names = ("index.normed", "index.roped", *dumps.token_rows, "index.topk")
    dump = dumps.write(tmp_path / "dump", run, rows=names, profile="sglang-v3.2")
    kv = run.given.index.kv if sound else run.given.index.kv * 1.01
    for step in range(4):
        dumps.save_pt(dump, dumps.stage("index.projected.kv", 0, step), run.tokens(kv, step))
    line = f'"index.projected.kv" = "{dumps.template("index.projected.kv")}"\n'
    dumps.edit(dump, "[rows]\n", f"[rows]\n{line}")

    done = cli("diff", recording, dump, "--json", tmp_path / "out.json")

    result = load_result(tmp_path / "out.json")
    found = dumps.compared(result.candidates[0])
    assert found.keys() == {
        *("index.projected", "index.normed", "index.roped", "index.stored"),
        *("query.query", "query.weights", "index.scores", "index.topk"),
    }
    assert (done.returncode, result.detail) == ((0, None) if sound else (1, "upstream"))
    assert (found["index.projected"] == "match") == sound


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
    dumps: Dumps,
    served: Callable[..., Served],
    judged: Judged,
    tmp_path: Path,
    fault: Callable[[Observed], Observed],
    where: str,
    row: tuple[int, int | None],
) -> None:
    run = served()
    code, result = judged(
        dumps.write(tmp_path / "dump", replace(run, observed=fault(run.observed)))
    )

    assert code == 1
    first = result.first_divergence
    assert first is not None
    assert (f"{first.path}.{first.stage}", first.request) == (where, row[0])
    assert row[1] is None or first.entry == row[1]
    assert where != "index.topk" or first.position == 250


def test_slots_go_back_through_the_page_table(
    dumps: Dumps,
    served: Callable[..., Served],
    judged: Judged,
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
    dump = dumps.write(tmp_path / "dump", replace(run, observed=replace(run.observed, topk=slots)))
    dumps.edit(dump, "ranks = 1", 'ranks = 1\npicks = "slots"')

    code, result = judged(dump)
    assert (code, dumps.compared(result)["index.topk"]) == (0, "match")

    dumps.edit(
        dump, 'picks = "slots"', 'picks = "entries"'
    )  # read as entries they are out of range
    code, result = judged(dump)
    assert (code, dumps.compared(result)["index.topk"]) == (1, "differ")


def test_a_slot_of_another_request_is_no_entry() -> None:
    table = torch.tensor([[4, 2], [7, 9]])
    slots = torch.tensor([[8, 17, -1], [16, 31, 28]])
    found = entries_of(slots, table, 4, (32,), 4)  # eight entries: 8 is one that is not there
    assert found.tolist() == [[4, 1, -1], [0, 8, 8]]


def test_only_pages_a_table_and_a_layout(
    dumps: Dumps,
    served: Callable[..., Served],
    judged: Judged,
    tmp_path: Path,
) -> None:
    """Decode these bytes and judge them: no stages, no passes."""
    dump = dumps.write(tmp_path / "dump", served(), rows=())
    text = (dump / MAPPING_FILE).read_text()
    head, tail = text.split("steps = [0, 1, 2, 3]")
    (dump / MAPPING_FILE).write_text(head + tail[tail.index("[pages.index]") :])

    code, result = judged(dump)

    assert (code, dumps.compared(result)) == (0, {"index.stored": "match", "main.stored": "match"})
    assert "whole requests in order" in result.kernel.path_taken


def test_picks_that_a_narrow_integer_would_wrap_stay_wrong(
    dumps: Dumps,
    served: Callable[..., Served],
    judged: Judged,
    tmp_path: Path,
) -> None:
    run = served()
    picks = run.observed.topk
    assert picks is not None
    far = picks.long() + (picks >= 0) * (1 << 32)
    dump = dumps.write(tmp_path / "picks", replace(run, observed=replace(run.observed, topk=far)))

    code, result = judged(dump)

    assert (code, dumps.compared(result)["index.topk"]) == (1, "differ")


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
