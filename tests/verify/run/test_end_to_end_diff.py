"""``needlepoint diff`` over edited recordings: what is changed is found, and its token is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from needlepoint.verify.output import load_result
from needlepoint.verify.result import FirstDivergence, Result, StageResult

Cli = Callable[..., CompletedProcess[str]]
Recorded = Callable[..., Path]
Edit = Callable[[Path, str, Callable[[Tensor], Tensor | None]], None]
EditManifest = Callable[[Path, Callable[[dict[str, Any]], None]], None]

FP8, BF16, FP4 = (f"emulated:fused-{name}" for name in ("fp8", "bf16", "fp4"))
PAGE = 64


def difference(cli: Cli, a: Path, b: Path, *options: object) -> Result:
    done = cli("diff", a, b, "--json", "r.json", "--force", *options)
    result = load_result(Path("r.json"))
    assert done.returncode == {"match": 0, "differ": 1, "cannot-judge": 2}[result.verdict]
    assert done.stdout.startswith(result.verdict)
    return result


def divergence(result: Result) -> FirstDivergence:
    found = result.candidates[0].first_divergence
    assert found is not None
    return found


def stage_of(result: Result, path: str, stage: str, layer: int = 0) -> StageResult:
    for entry in result.candidates[0].layers:
        for part in entry.stages:
            if (entry.layer, part.path, part.stage) == (layer, path, stage):
                return part
    raise AssertionError((layer, path, stage))


def row_place(recording: Path, path: str, request: int, entry: int) -> tuple[int, int]:
    """Return page and slot of an entry."""
    tensors = load_file(recording / "layer0.safetensors")
    table = tensors[f"layer0.{path}.stored.page_table.{request}"]
    return int(table[entry // PAGE]), entry % PAGE


# Byte of row j of a page, from the tables of docs/specification.md.
FIELDS: dict[str, tuple[str, str, Callable[[int], int], int]] = {
    "fp8 value": (FP8, "index", lambda j: 128 * j + 17, 0),
    "fp8 last value": (FP8, "index", lambda j: 128 * j + 127, 7),
    "fp8 scale, lowest mantissa bit": (FP8, "index", lambda j: 128 * PAGE + 4 * j, 0),
    "fp8 scale, exponent": (FP8, "index", lambda j: 128 * PAGE + 4 * j + 3, 0),
    "fp4 even dim": (FP4, "index", lambda j: 64 * j, 0),
    "fp4 odd dim": (FP4, "index", lambda j: 64 * j + 63, 4),
    "fp4 scale": (FP4, "index", lambda j: 64 * PAGE + 4 * j + 2, 0),
    "bf16 key, lowest bit": (BF16, "index", lambda j: 256 * j + 200, 0),
    "584 value": (FP8, "main", lambda j: 576 * j + 447, 3),
    "584 rope, lowest bit": (FP8, "main", lambda j: 576 * j + 448, 0),
    "584 scale": (FP4, "main", lambda j: 576 * PAGE + 8 * j + 6, 0),
    "bf16 main, sign": (BF16, "main", lambda j: 1024 * j + 1023, 7),
    "reference bf16 key": ("bf16", "index", lambda j: 256 * j, 0),
    "reference bf16 main": ("bf16", "main", lambda j: 1024 * j + 2, 0),
    "official key held in bf16": ("official", "index", lambda j: 256 * j + 1, 0),
    "exact key, lowest bit": ("exact", "index", lambda j: 1024 * j + 8, 0),
    "exact main, lowest bit": ("exact", "main", lambda j: 4096 * j + 4088, 0),
}


TOKENS = ((0, 0), (0, 70), (2, 29))
"""Requests and entries: the first of all, one of a second page, one of the last request."""


@pytest.mark.parametrize("field", FIELDS)
def test_one_flipped_byte_of_a_page_names_its_token(
    field: str, cli: Cli, recorded: Recorded, edit: Edit
) -> None:
    who, path, byte, bit = FIELDS[field]
    request, entry = TOKENS[list(FIELDS).index(field) % len(TOKENS)]
    a, b = recorded(who, "a"), recorded(who, "b")
    page, slot = row_place(b, path, request, entry)

    def flip(pages: Tensor) -> None:
        pages[page, byte(slot)] ^= 1 << bit

    edit(b, f"layer0.{path}.stored.pages", flip)

    for left, right in ((a, b), (b, a)):
        result = difference(cli, left, right)
        assert result.verdict == "differ"
        first = divergence(result)
        assert (first.layer, first.path, first.stage) == (0, path, "stored")
        assert (first.request, first.position, first.entry) == (request, 4 * entry + 3, entry)
        stored = stage_of(result, path, "stored")
        assert stored.local is not None
        assert stored.local.rows_failed == 1
        others = [
            s for c in result.candidates for e in c.layers for s in e.stages if s is not stored
        ]
        assert {s.verdict for s in others} <= {"match", None}


def test_the_report_names_the_token_on_its_first_line(
    cli: Cli, recorded: Recorded, edit: Edit
) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")
    page, slot = row_place(b, "index", 1, 5)

    def flip(pages: Tensor) -> None:
        pages[page, 128 * slot] ^= 1

    edit(b, "layer0.index.stored.pages", flip)

    done = cli("diff", a, b, "--quiet")

    assert done.returncode == 1
    assert done.stdout == "differ: layer 0 index.stored, request 1 position 23 entry 5\n"


# Page, byte and what can be said of it; page_table gives the page where it is a function of it.
UNOWNED: dict[str, tuple[str, str, Callable[[Tensor], int], int, tuple[int | None, ...]]] = {
    # Request 0 has 75 entries: slot 11 of its second page would be entry 75.
    "slot not filled yet": (FP8, "index", lambda t: int(t[1]), 128 * 11 + 5, (0, 303, 75)),
    "scale not written yet": (FP4, "index", lambda t: int(t[1]), 64 * 64 + 4 * 11, (0, 303, 75)),
    "row padding": (FP8, "main", lambda t: int(t[0]), 576 * 64 + 8 * 3 + 7, (0, 15, 3)),
    "page padding": (FP8, "main", lambda t: int(t[0]), 584 * 64 + 9, (None, None, None)),
    "page of nobody": (BF16, "index", lambda t: -1, 40, (None, None, None)),
}


@pytest.mark.parametrize("case", UNOWNED)
def test_a_byte_that_nobody_owns_is_a_difference(
    case: str, cli: Cli, recorded: Recorded, edit: Edit
) -> None:
    who, path, page_of, byte, token = UNOWNED[case]
    a, b = recorded(who, "a"), recorded(who, "b")
    tensors = load_file(b / "layer0.safetensors")
    tables = [tensors[f"layer0.{path}.stored.page_table.{r}"] for r in range(3)]
    page = page_of(tables[0])
    if page < 0:
        mapped = torch.cat(tables).tolist()
        page = next(p for p in range(len(mapped) + 3) if p not in mapped)

    def flip(pages: Tensor) -> None:
        pages[page, byte] ^= 1

    edit(b, f"layer0.{path}.stored.pages", flip)

    result = difference(cli, a, b)

    assert result.verdict == "differ"
    first = divergence(result)
    assert (first.path, first.stage) == (path, "stored")
    assert (first.request, first.position, first.entry) == token
    assert f"byte {byte} of page {page}" in first.detail
    stored = stage_of(result, path, "stored")
    assert stored.worst[0].expected is not None
    assert stored.worst[0].found is not None
    assert int(stored.worst[0].expected) ^ int(stored.worst[0].found) == 1
    assert cli("diff", a, b).stdout.startswith(f"differ: layer 0 {path}.stored, ")


@pytest.mark.parametrize(
    ("who", "path"), [(FP8, "index"), (BF16, "index"), (FP4, "index"), (FP8, "main")]
)
def test_two_swapped_rows_of_a_page_are_both_named(
    who: str, path: str, cli: Cli, recorded: Recorded, edit: Edit
) -> None:
    a, b = recorded(who, "a"), recorded(who, "b")
    page, first = row_place(b, path, 0, 2)
    planes = {
        (FP8, "index"): ((0, 128), (8192, 4)),
        (BF16, "index"): ((0, 256),),
        (FP4, "index"): ((0, 64), (4096, 4)),
        (FP8, "main"): ((0, 576), (36864, 8)),
    }[who, path]

    def swap(pages: Tensor) -> None:
        for start, width in planes:
            one = slice(start + first * width, start + (first + 1) * width)
            other = slice(start + 50 * width, start + 51 * width)
            kept = pages[page, one].clone()
            pages[page, one] = pages[page, other]
            pages[page, other] = kept

    edit(b, f"layer0.{path}.stored.pages", swap)

    result = difference(cli, a, b)

    stored = stage_of(result, path, "stored")
    assert stored.local is not None
    assert stored.local.rows_failed == 2
    named = {(row.request, row.position, row.entry) for row in stored.worst[:2]}
    assert named == {(0, 11, 2), (0, 203, 50)}
    assert result.verdict == "differ"


REMOVED = {
    "index.pooled": ["layer0.index.pooled"],
    "main.roped": ["layer0.main.roped"],
    "main.stored": [
        "layer0.main.stored.pages",
        *(f"layer0.main.stored.page_table.{r}" for r in range(3)),
    ],
    "index.scores": [f"layer0.index.scores.{r}" for r in range(3)],
    "index.topk": ["layer0.index.topk"],
}


def remove_tensors(recording: Path, names: list[str]) -> None:
    file = recording / "layer0.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if name not in names}, file)


def undeclare(manifest: dict[str, Any], stage: str, names: list[str]) -> None:
    layer = manifest["layers"][0]
    layer["stages"] = [key for key in layer["stages"] if ".".join(key) != stage]
    if stage == "main.stored":
        del layer["layouts"]["main"]
    for name in names:
        del manifest["tensors"][name]


@pytest.mark.parametrize("stage", REMOVED)
@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("how", ["tensor", "manifest", "both"])
def test_a_removed_stage_cannot_be_judged_and_is_named(
    stage: str, side: str, how: str, cli: Cli, recorded: Recorded, manifest: EditManifest
) -> None:
    sides = {name: recorded(FP8, name) for name in ("a", "b")}
    names = REMOVED[stage]
    if how != "manifest":
        remove_tensors(sides[side], names)
    if how != "tensor":
        manifest(sides[side], lambda value: undeclare(value, stage, names))

    done = cli("diff", sides["a"], sides["b"], "--json", "r.json")

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert stage in done.stderr
    assert f"/{side}" in done.stderr
    assert not Path("r.json").exists()


@pytest.mark.parametrize("who", [FP8, BF16, FP4, "exact", "bf16", "official"])
def test_equal_recordings_match(who: str, cli: Cli, recorded: Recorded) -> None:
    result = difference(cli, recorded(who, "a"), recorded(who, "b"))

    assert result.verdict == "match"
    # 4 given, 7 index, 4 main, 2 query stages and 2 given, 4 main ones.
    assert (result.counts.expected, result.counts.compared) == (23, 23)
    errors = [s.local.error.max for e in result.candidates[0].layers for s in e.stages if s.local]
    assert set(errors) == {0.0}


def test_fused_and_unfused_candidates_of_one_profile_match(cli: Cli, recorded: Recorded) -> None:
    a, b = recorded(BF16, "a"), recorded("emulated:unfused-bf16", "b")

    result = difference(cli, a, b)

    assert result.verdict == "match"
    assert result.candidates[0].name == "emulated:unfused-bf16"
    assert (result.counts.expected, result.counts.compared) == (23, 23)


@pytest.mark.parametrize("contract", ["exact", "bf16", "official"])
@pytest.mark.parametrize("who", [FP8, BF16, FP4])
def test_a_candidate_is_judged_by_its_profile_and_costs_against_the_reference(
    contract: str, who: str, cli: Cli, recorded: Recorded
) -> None:
    a, b = recorded(contract, "a"), recorded(who, "b")

    result = difference(cli, a, b, "--contract", contract)

    assert result.verdict == "match"
    assert result.counts.compared == 23
    cost = getattr(result.candidates[0].format_cost, contract)
    low, high = {FP8: (0.01, 0.05), BF16: (0.0005, 0.01), FP4: (0.05, 0.15)}[who]
    if contract == "official":
        low, high = {FP8: (0.05, 0.15), BF16: (0.05, 0.15), FP4: (0.0001, 0.05)}[who]
    assert low < cost.rel_mean < high
    topk = result.candidates[0].layers[0].topk
    assert topk is not None
    assert topk.overlap_mean is not None
    assert 0.8 < topk.overlap_mean <= 1


def test_a_fault_is_found_against_a_reference_too(cli: Cli, recorded: Recorded, edit: Edit) -> None:
    a, b = recorded("bf16", "a"), recorded(FP8, "b")
    page, slot = row_place(b, "index", 2, 7)

    def double(pages: Tensor) -> None:
        pages[page, 128 * 64 + 4 * slot + 3] += 1  # the scale, times four

    edit(b, "layer0.index.stored.pages", double)

    first = divergence(difference(cli, a, b))

    assert (first.path, first.stage) == ("index", "stored")
    assert (first.request, first.position, first.entry) == (2, 31, 7)


def test_the_reference_is_not_judged_against_a_candidate(cli: Cli, recorded: Recorded) -> None:
    done = cli("diff", recorded(FP8, "a"), recorded("bf16", "b"))

    assert done.returncode == 2
    assert "give it as A" in done.stderr


def row_change(name: str, row: int) -> tuple[str, Callable[[Tensor], None]]:
    def change(rows: Tensor) -> None:
        flat = rows[row].view(torch.uint8).flatten()
        flat[0] ^= 1

    return name, change


EDITS: dict[str, tuple[str, int, tuple[int, int, int | None]]] = {
    "index.pooled": ("layer0.index.pooled", 76, (1, 7, 1)),
    "main.normed": ("layer0.main.normed", 0, (0, 3, 0)),
    "index.roped": ("layer0.index.roped", 136, (2, 119, 29)),
    "index.rotated": ("layer0.index.rotated", 1, (0, 7, 1)),
    "query.query": ("layer0.query.query.codes", 301, (1, 1, None)),
    "query.weights": ("layer0.query.weights", 552, (2, 122, None)),
    "index.projected": ("layer0.index.projected.score", 3, (0, 3, None)),
    "main.projected": ("layer0.main.projected.kv", 430, (2, 0, None)),
    "query.projected": ("layer0.query.projected.q", 429, (1, 129, None)),
    "main.input": ("input", 300, (1, 0, None)),
}


@pytest.mark.parametrize("stage", EDITS)
def test_the_lowest_bit_of_any_recorded_row_counts(
    stage: str, cli: Cli, recorded: Recorded, edit: Edit
) -> None:
    name, row, token = EDITS[stage]
    a, b = recorded(FP8, "a"), recorded(FP8, "b")
    edit(b, *row_change(name, row))

    result = difference(cli, a, b)

    first = divergence(result)
    assert f"{first.path}.{first.stage}" == stage
    assert (first.request, first.position, first.entry) == token
    upstream = first.stage in ("input", "projected")
    assert result.detail == ("upstream" if upstream else None)
    local = stage_of(result, first.path, first.stage).local
    assert local is not None
    assert (local.distance_max, local.distance_unit) == (1, "elements")


def test_scores_are_free_within_the_bounds_of_both_and_not_beyond(
    cli: Cli, recorded: Recorded, edit: Edit
) -> None:
    a, b, c = recorded(FP8, "a"), recorded(FP8, "b"), recorded(FP8, "c")

    def nudge(scores: Tensor) -> Tensor:
        return torch.nextafter(scores, torch.tensor(torch.inf))

    def push(scores: Tensor) -> None:
        scores[99, 3] *= 1.004

    edit(b, "layer0.index.scores.1", nudge)
    edit(c, "layer0.index.scores.1", push)

    # -inf steps to the lowest number: a mask that is off is no rounding.
    assert divergence(difference(cli, a, b)).stage == "scores"
    edit(b, "layer0.index.scores.1", lambda s: s.masked_fill(s < -1e38, -torch.inf))
    assert difference(cli, a, b).verdict == "match"
    first = divergence(difference(cli, a, c))
    assert (first.stage, first.request, first.position, first.entry) == ("scores", 1, 99, None)


def test_a_pick_that_no_score_explains_is_named(cli: Cli, recorded: Recorded, edit: Edit) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")

    def trade(picks: Tensor) -> None:
        chosen = set(picks[250].tolist())
        picks[250, 0] = next(entry for entry in range(62) if entry not in chosen)

    edit(b, "layer0.index.topk", trade)

    result = difference(cli, a, b)

    first = divergence(result)
    assert (first.stage, first.request, first.position) == ("topk", 0, 250)
    topk = result.candidates[0].layers[0].topk
    assert topk is not None
    assert topk.swaps.selector == 1


def test_picks_in_another_order_are_the_same_picks(
    cli: Cli, recorded: Recorded, edit: Edit
) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")

    def reverse(picks: Tensor) -> None:
        picks[100:300] = picks[100:300].flip(1)

    edit(b, "layer0.index.topk", reverse)

    assert difference(cli, a, b).verdict == "match"


def spoil(recording: Path, edit: Edit) -> None:
    """Make a recording as a broken kernel would: NaN scores, a wrong mask and impossible picks."""

    def scores(rows: Tensor) -> None:
        rows[7, 0] = torch.nan
        rows[8, 20] = 0.0

    def picks(rows: Tensor) -> None:
        rows[310, 0] = 1000

    edit(recording, "layer0.index.scores.1", scores)
    edit(recording, "layer0.index.topk", picks)


def test_broken_recordings_with_equal_bytes_match(cli: Cli, recorded: Recorded, edit: Edit) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")
    spoil(a, edit)
    spoil(b, edit)

    assert difference(cli, a, b).verdict == "match"


def test_nan_on_one_side_differs_whichever_side_it_is(
    cli: Cli, recorded: Recorded, edit: Edit
) -> None:
    clean, broken = recorded(FP8, "a"), recorded(FP8, "b")

    def nan(rows: Tensor) -> None:
        rows[7, 0] = torch.nan

    edit(broken, "layer0.index.scores.1", nan)

    for a, b in ((clean, broken), (broken, clean)):
        result = difference(cli, a, b)
        first = divergence(result)
        assert (first.stage, first.request, first.position) == ("scores", 1, 7)
        scores = stage_of(result, "index", "scores").local
        assert scores is not None
        assert (scores.rows_failed, scores.rows_not_finite) == (1, 1)


def test_impossible_picks_on_the_left_cannot_be_judged_against(
    cli: Cli, recorded: Recorded, edit: Edit
) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")
    spoil(a, edit)

    done = cli("diff", a, b)

    assert done.returncode == 2
    assert "1 invalid pick" in done.stderr
    assert str(a) in done.stderr


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--tokens", "200"), "(300, 130, 123)"),
        (("--tokens", "553", "--layers", "0"), "layer 1 is not in"),
        (("--tokens", "553", "--seed", "1"), "ape"),
    ],
)
def test_recordings_of_two_runs_are_refused(
    options: tuple[str, ...], named: str, cli: Cli, recorded: Recorded
) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b", *options)

    for left, right in ((a, b), (b, a)):
        done = cli("diff", left, right)
        assert done.returncode == 2
        assert done.stdout == ""
        assert named in done.stderr
        assert str(b) in done.stderr


def test_layers_can_be_left_out(cli: Cli, recorded: Recorded) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b", "--tokens", "553", "--layers", "0")

    result = difference(cli, a, b, "--layers", "0")

    assert result.verdict == "match"
    assert [layer.layer for layer in result.candidates[0].layers] == [0]
    assert "layer 7 is not in" in cli("diff", a, b, "--layers", "7").stderr


def test_another_model_is_refused(cli: Cli, recorded: Recorded, manifest: EditManifest) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")
    manifest(b, lambda value: value["model"].update(index_topk=9))

    done = cli("diff", a, b)

    assert done.returncode == 2
    assert f"model {{'index_topk': 8}} in {a}, {{'index_topk': 9}} in {b}" in done.stderr


def test_stages_can_be_chosen(cli: Cli, recorded: Recorded, edit: Edit) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")
    edit(b, *row_change("layer0.index.pooled", 4))

    assert difference(cli, a, b, "--stages", "stored,topk").verdict == "match"
    assert difference(cli, a, b, "--stages", "index.pooled").verdict == "differ"
    assert difference(cli, a, b, "--stages", "attention").verdict == "cannot-judge"


def test_limits_widen_what_is_derived_and_not_what_is_equal(
    cli: Cli, recorded: Recorded, edit: Edit
) -> None:
    a, b, c = recorded(FP8, "a"), recorded(FP8, "b"), recorded(FP8, "c")
    edit(b, *row_change("layer0.index.pooled", 4))

    def push(scores: Tensor) -> None:
        scores[99, 3] *= 1.004

    edit(c, "layer0.index.scores.1", push)
    Path("wide.toml").write_text("scale = 1e5\n")

    assert difference(cli, a, b, "--limits", "wide.toml").verdict == "differ"
    assert difference(cli, a, c, "--limits", "wide.toml").verdict == "match"


def test_a_recording_of_input_alone_is_not_judged(
    cli: Cli, recorded: Recorded, manifest: EditManifest, tmp_path: Path
) -> None:
    a = recorded(FP8, "a")
    bare = Path(shutil.copytree(a, tmp_path / "bare"))
    for layer in ("layer0", "layer1"):
        (bare / f"{layer}.safetensors").unlink()

    def only_input(value: dict[str, Any]) -> None:
        value.update(kind="input", layers=[])
        value["tensors"] = {"input": value["tensors"]["input"]}

    manifest(bare, only_input)

    done = cli("diff", a, bare)

    assert done.returncode == 2
    assert "holds input only" in done.stderr


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "reference", "candidate": None}, "name='needlepoint'"),
        ({"candidate": None, "profile": None}, "profile None, expected one of the contracts"),
    ],
)
def test_a_recording_of_nobody_is_not_judged(
    change: dict[str, Any], named: str, cli: Cli, recorded: Recorded, manifest: EditManifest
) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")
    manifest(b, lambda value: value.update(change))

    done = cli("diff", a, b)

    assert done.returncode == 2
    assert named in done.stderr
    assert str(b) in done.stderr


def test_recordings_without_layers_are_not_equal(
    cli: Cli, recorded: Recorded, manifest: EditManifest
) -> None:
    def bare(value: dict[str, Any]) -> None:
        value.update(layers=[], tensors={"input": value["tensors"]["input"]})

    sides = [recorded(FP8, name) for name in ("a", "b")]
    for side in sides:
        manifest(side, bare)
        for layer in ("layer0", "layer1"):
            (side / f"{layer}.safetensors").unlink()

    done = cli("diff", *sides)

    assert done.returncode == 2
    assert "has no layers; nothing to compare" in done.stderr


def test_a_profile_block_that_is_not_the_candidates_is_refused(
    cli: Cli, recorded: Recorded, manifest: EditManifest
) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")

    def change(content: dict[str, Any]) -> None:
        content["profile"]["switches"]["pooled"] = "bf16"

    manifest(b, change)
    done = cli("diff", a, b)
    assert done.returncode == 2
    assert "its profile block is not that of emulated:fused-fp8" in done.stderr
