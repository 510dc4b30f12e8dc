"""``needlepoint diff`` over edited pages: every byte counts, and its token is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from needlepoint.verify.schema.result import FirstDivergence, Result, StageResult

Cli = Callable[..., CompletedProcess[str]]
Recorded = Callable[..., Path]
Edit = Callable[[Path, str, Callable[[Tensor], Tensor | None]], None]
Difference = Callable[..., Result]
Divergence = Callable[[Result], FirstDivergence]
StageOf = Callable[..., StageResult]

FP8, BF16, FP4 = (f"emulated:fused-{name}" for name in ("fp8", "bf16", "fp4"))


PAGE = 64


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
    field: str,
    recorded: Recorded,
    edit: Edit,
    difference: Difference,
    divergence: Divergence,
    stage_of: StageOf,
) -> None:
    who, path, byte, bit = FIELDS[field]
    request, entry = TOKENS[list(FIELDS).index(field) % len(TOKENS)]
    a, b = recorded(who, "a"), recorded(who, "b")
    page, slot = row_place(b, path, request, entry)

    def flip(pages: Tensor) -> None:
        pages[page, byte(slot)] ^= 1 << bit

    edit(b, f"layer0.{path}.stored.pages", flip)

    for left, right in ((a, b), (b, a)):
        result = difference(left, right)
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
    case: str,
    cli: Cli,
    recorded: Recorded,
    edit: Edit,
    difference: Difference,
    divergence: Divergence,
    stage_of: StageOf,
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

    result = difference(a, b)

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
    who: str, path: str, recorded: Recorded, edit: Edit, difference: Difference, stage_of: StageOf
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

    result = difference(a, b)

    stored = stage_of(result, path, "stored")
    assert stored.local is not None
    assert stored.local.rows_failed == 2
    named = {(row.request, row.position, row.entry) for row in stored.worst[:2]}
    assert named == {(0, 11, 2), (0, 203, 50)}
    assert result.verdict == "differ"


def test_a_fault_is_found_against_a_reference_too(
    recorded: Recorded, edit: Edit, difference: Difference, divergence: Divergence
) -> None:
    a, b = recorded("bf16", "a"), recorded(FP8, "b")
    page, slot = row_place(b, "index", 2, 7)

    def double(pages: Tensor) -> None:
        pages[page, 128 * 64 + 4 * slot + 3] += 1  # the scale, times four

    edit(b, "layer0.index.stored.pages", double)

    first = divergence(difference(a, b))

    assert (first.path, first.stage) == ("index", "stored")
    assert (first.request, first.position, first.entry) == (2, 31, 7)
