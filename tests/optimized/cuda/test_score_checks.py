"""Plans of the score kernels, and bad arguments refused by name before any device is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from needlepoint.optimized.build.score_variants import (
    HELD_HEADS,
    TILES,
    TOPK_LIMITS,
    UNITS,
    accumulator,
    default_unit,
    held_heads,
    score_name,
    score_topk_name,
    topk_name,
)
from needlepoint.optimized.build.toolchain import ARCHITECTURES
from needlepoint.optimized.build.variants import BY_NAME
from needlepoint.optimized.cuda.score_plan import keys_of_a_block, plan_scores
from needlepoint.optimized.cuda.scores import KeyPages, KeyRows, require_scores, scores
from needlepoint.optimized.cuda.topk import (
    PageTable,
    require_topk,
    score_topk,
    topk,
    topk_kind,
)
from needlepoint.optimized.cuda.topk_lists import long_plan, score_topk_lists
from needlepoint.verify.workloads.scores import ScoreCase, make_case

COUNTS, ENTRIES = (3, 0, 5), (40, 7, 9)


def case(row: str = "fp8", heads: int = 8) -> ScoreCase:
    return make_case(row, heads, COUNTS, ENTRIES, device="cpu")


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    heads=st.integers(1, 64),
    unit=st.sampled_from(UNITS),
    most=st.none() | st.integers(1, 3),
)
def test_a_plan_holds_every_row_once_and_fits_its_tiles(
    counts: list[int], heads: int, unit: str, most: int | None
) -> None:
    held = held_heads(heads)
    most = None if most is None else min(most, 64 // held)
    plan = plan_scores(counts, heads, unit, most=most)
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    seen = torch.zeros(sum(counts), dtype=torch.int32)
    largest = 0

    for tile, groups in plan.groups.items():
        for first, size, request, _ in groups.tolist():
            assert 1 <= size <= (TILES[unit][tile] // held if most is None else most)
            assert bool((owners[first : first + size] == request).all())
            seen[first : first + size] += 1
            largest = max(largest, size)

    assert bool((seen == 1).all())
    assert (plan.rows, plan.largest) == (sum(counts), largest)
    assert torch.equal(plan.row_requests.long(), owners)


@given(
    columns=st.integers(1, 2**20),
    groups=st.integers(1, 5000),
    tile=st.sampled_from([tile for tiles in TILES.values() for tile in tiles]),
    most=st.none() | st.sampled_from([2048, 4096]),
)
def test_spans_are_whole_stages(columns: int, groups: int, tile: str, most: int | None) -> None:
    span = keys_of_a_block(columns, groups, tile, 132, most)

    assert span % (64 if tile == "wide" else 128) == 0
    assert span >= 64
    assert most is None or span <= most


def test_every_name_is_a_variant_and_every_architecture_has_a_default() -> None:
    for heads in HELD_HEADS:
        for architecture in ARCHITECTURES:
            for row in ("bf16", "fp8", "fp4"):
                unit = default_unit(row, architecture)
                names = [score_name(heads, row, unit, tile) for tile in TILES[unit]]
                for name in (*names, score_topk_name(heads, row, unit)):
                    assert BY_NAME[name].runs_on(architecture)
    assert all(topk_name(kind) in BY_NAME for kind in TOPK_LIMITS)
    assert [accumulator(*key) for key in (("wgmma", "fp8"), ("wgmma", "bf16"), ("mma", "fp8"))] == [
        "sm90-fp8",
        "fp32",
        "fp32",
    ]


def test_good_arguments_are_accepted() -> None:
    for row in ("bf16", "fp8", "fp4"):
        batch = case(row)
        for keys in (batch.paged(8), batch.stored):
            with pytest.raises(ValueError, match=r"query\.codes: on cpu, expected a CUDA device"):
                require_scores(batch.query, batch.context_lens, keys, batch.plan(), 40)


def with_pages(**changes: object) -> KeyPages:
    return replace(case().paged(8), **changes)  # type: ignore[arg-type]


def with_rows(row: str = "fp8", **changes: object) -> KeyRows:
    return replace(case(row).stored, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": case("bf16").paged(8)}, "query: fp8 rows, expected bf16 like the keys"),
        ({"columns": -1}, "columns -1: expected 0 to"),
        (
            {"context_lens": torch.zeros(7, dtype=torch.int32)},
            r"context_lens: shape \(7,\), expected \(8\)",
        ),
        (
            {"context_lens": torch.zeros(8)},
            "context_lens: dtype torch.float32, expected torch.int32",
        ),
        ({"plan": plan_scores((3, 0, 6), 8)}, r"query.codes: shape \(8, 8, 128\), expected \(9"),
        ({"plan": plan_scores(COUNTS, 16)}, r"query.codes: shape \(8, 8, 128\), expected \(8, 16"),
        ({"keys": with_pages(page_size=4)}, "keys.page_size 4: expected a power of two of at le"),
        ({"keys": with_pages(page_size=12)}, "keys.page_size 12: expected a power of two"),
        ({"keys": with_pages(page_size=16)}, r"keys.pages: shape .* expected \(any, 2112\)"),
        ({"keys": with_pages(pages=torch.zeros(0, 1056, dtype=torch.uint8))}, "no pages, expect"),
        ({"keys": with_pages(table=torch.zeros(2, 5, dtype=torch.int32))}, r"keys.table: shape"),
        ({"columns": 41}, "keys.table: 5 pages of 8 rows a request, expected at least 6 for 41"),
        ({"keys": with_rows(scales=None)}, "keys.scales: None, expected a scale for each fp8 key"),
        ({"keys": with_rows(starts=torch.zeros(3))}, "keys.starts: dtype torch.float32"),
        ({"query": replace(case().query, scale_folded=False)}, "fp8 scales are not folded into"),
    ],
)
def test_bad_score_arguments_are_named(changes: dict[str, object], message: str) -> None:
    batch = case()
    arguments: dict[str, object] = {
        "query": batch.query,
        "context_lens": batch.context_lens,
        "keys": batch.paged(8),
        "plan": batch.plan(),
        "columns": 40,
    }
    with pytest.raises(ValueError, match=message):
        require_scores(**(arguments | changes))  # type: ignore[arg-type]


def test_fp4_queries_need_scales() -> None:
    batch = case("fp4")
    query = replace(batch.query, scales=None)
    with pytest.raises(ValueError, match=r"query\.scales: None, expected a UE8M0 byte"):
        require_scores(query, batch.context_lens, batch.paged(8), batch.plan(), 40)


@pytest.mark.parametrize("bad", [-1, 41])
def test_context_lens_outside_the_columns_are_refused(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = case()
    batch.context_lens[6] = bad
    device = torch.device("cpu")
    monkeypatch.setattr(
        "needlepoint.optimized.cuda.scores.require_same_device", lambda **tensors: device
    )
    with pytest.raises(ValueError, match=f"context_lens: row 6 sees {bad} keys, expected 0 to 40"):
        scores(batch.query, batch.context_lens, batch.paged(8), batch.plan(), 40)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plan_scores((1,), 65), "65 heads: supported are 1 to 64"),
        (lambda: plan_scores((1,), 0), "0 heads: supported are 1 to 64"),
        (lambda: plan_scores((1, -2), 8), r"rows of requests \[1, -2\]: expected none below 0"),
        (lambda: plan_scores((1,), 8, "simt"), "unit 'simt': expected one of"),
        (lambda: plan_scores((1,), 8, most=0), "groups of 0 rows: expected at least 1"),
        (lambda: score_name(64, "584", "mma", "wide"), "scores of 584 rows: supported rows are"),
        (lambda: score_name(64, "fp4", "wgmma", "c64"), "scores of fp4 rows by wgmma: supported"),
        (lambda: score_name(64, "fp8", "mma", "c64"), "tile 'c64' of mma: expected one of"),
        (lambda: topk_name("huge"), "top-k kernel 'huge': expected one of"),
    ],
)
def test_unsupported_shapes_say_what_is_supported(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=message):
        call()


def test_bad_topk_arguments_are_named() -> None:
    values, context_lens = torch.zeros(4, 64), torch.zeros(4, dtype=torch.int32)
    table = torch.zeros(1, 8, dtype=torch.int32)
    pages = PageTable(table, 8, context_lens)

    with pytest.raises(ValueError, match="k 2049: expected 1 to 2048"):
        topk(values, context_lens, 2049)
    with pytest.raises(ValueError, match="k 0: expected 1 to 2048"):
        topk(values, context_lens, 0)
    with pytest.raises(ValueError, match="values: 1048580 columns, expected at most 1048576"):
        require_topk(torch.empty(1, 2**20 + 4), context_lens[:1], 8, None)
    with pytest.raises(ValueError, match=r"values: .* expected multiples of 16 bytes"):
        require_topk(torch.zeros(4, 65)[:, :64], context_lens, 8, None)
    with pytest.raises(ValueError, match=r"context_lens: shape \(\), expected \(4\)"):
        require_topk(values, context_lens[0], 8, None)
    with pytest.raises(ValueError, match=r"values: shape \(64,\), expected \(any, any\)"):
        require_topk(values[0], context_lens, 8, None)
    with pytest.raises(ValueError, match=r"context_lens: shape \(3,\), expected \(4\)"):
        require_topk(values, context_lens[:3], 8, None)
    with pytest.raises(ValueError, match=r"pages\.page_size 12: expected a power of two"):
        require_topk(values, context_lens, 8, replace(pages, page_size=12))
    with pytest.raises(ValueError, match=r"pages\.row_requests: shape \(3,\), expected \(4\)"):
        require_topk(values, context_lens, 8, replace(pages, row_requests=context_lens[:3]))
    with pytest.raises(ValueError, match=r"pages\.table: 8 pages of 8 rows a request, expected at"):
        require_topk(torch.zeros(4, 68), context_lens, 8, pages)
    with pytest.raises(ValueError, match=r"pages\.table: .* at least 9 for 65 columns"):
        require_topk(values, context_lens, 8, pages, columns=65)
    with pytest.raises(ValueError, match="values: on cpu, expected a CUDA device"):
        require_topk(values, context_lens, 8, pages)


@pytest.mark.parametrize("select", [score_topk, score_topk_lists])
@pytest.mark.parametrize(
    ("k", "size", "message"),
    [
        (0, 8, "k 0: expected 1 to 2048"),
        (-1, 8, "k -1: expected 1 to 2048"),
        (4096, 8, "k 4096: expected 1 to 2048"),
        (4, 12, "pages.page_size 12: expected a power of two"),
        (4, 4, "pages.table: 5 pages of 4 rows a request, expected at least 10 for 40"),
    ],
)
def test_picks_are_checked_before_scores_are_launched(
    select: Callable[..., Tensor],
    k: int,
    size: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = case()
    for module in ("scores", "topk"):
        monkeypatch.setattr(
            f"needlepoint.optimized.cuda.{module}.require_same_device",
            lambda **tensors: torch.device("cpu"),
        )
    pages = PageTable(torch.zeros(3, 5, dtype=torch.int32), size, batch.plan().row_requests)
    plan = long_plan(list(COUNTS), 8)

    with pytest.raises(ValueError, match=message):
        select(batch.query, batch.context_lens, batch.paged(8), plan, 40, k, pages)


def test_every_tensor_of_the_scores_must_be_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel takes addresses: one of the host would be read as one of the card."""
    looked_at: set[str] = set()

    def note(**tensors: Tensor) -> torch.device:
        looked_at.update(tensors)
        return torch.device("cpu")

    monkeypatch.setattr("needlepoint.optimized.cuda.scores.require_same_device", note)
    batch = case("fp4")
    require_scores(batch.query, batch.context_lens, batch.paged(8), batch.plan(), 40)

    names = {"codes", "scales", "weights"}
    assert looked_at == {f"query.{name}" for name in names} | {
        "keys",
        "keys.scales",
        "keys.table",
        "keys.starts",
        "plan",
    }


def test_rows_that_are_not_contiguous_are_named() -> None:
    batch = case("bf16")
    turned = batch.stored.values.T.contiguous().T
    with pytest.raises(ValueError, match=r"keys\.values: strides .*, expected contiguous rows"):
        require_scores(
            batch.query, batch.context_lens, replace(batch.stored, values=turned), batch.plan(), 40
        )
    codes = batch.query.codes.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match=r"query\.codes: strides .*, expected contiguous rows"):
        require_scores(
            replace(batch.query, codes=codes), batch.context_lens, batch.stored, batch.plan(), 40
        )


def test_groups_are_never_larger_than_a_block_keeps() -> None:
    assert plan_scores((3000,), 64, most=1000).largest == plan_scores((3000,), 64).largest


def test_the_kernel_fits_the_rows() -> None:
    assert topk_kind(64, 8192, 512) == "rows"
    assert topk_kind(64, 32768, 1024) == "few"
    assert topk_kind(64, 32768, 2048) == "long"
    assert topk_kind(64, 65537, 512) == "long"
    assert topk_kind(4096, 32768, 1024) == "rows"
    assert topk_kind(4096, 32768, 2048) == "long"
    assert topk_kind(4096, 2**20, 512) == "long"


def test_a_budget_below_one_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = case()
    monkeypatch.setattr(
        "needlepoint.optimized.cuda.scores.require_same_device",
        lambda **tensors: torch.device("cpu"),
    )
    arguments = (batch.query, batch.context_lens, batch.paged(8), batch.plan(), 40, 4)

    with pytest.raises(ValueError, match="budget of 100 bytes: expected at least 176, one row"):
        score_topk(*arguments, budget_bytes=100)


def test_the_path_without_a_matrix_refuses_large_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = case("fp8", 64)
    plan = plan_scores(COUNTS, 64)
    assert long_plan(list(COUNTS), 64).largest == 1
    monkeypatch.setattr(
        "needlepoint.optimized.cuda.scores.require_same_device",
        lambda **tensors: torch.device("cpu"),
    )
    with pytest.raises(ValueError, match="plan: groups of up to 5 rows, expected at most 1"):
        score_topk_lists(batch.query, batch.context_lens, batch.paged(8), plan, 40, 4)
