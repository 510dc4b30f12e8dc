"""``needlepoint diff`` over edited rows, scores and picks, and over recordings that are sound."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from torch import Tensor

from needlepoint.verify.schema.result import FirstDivergence, Result, StageResult

Cli = Callable[..., CompletedProcess[str]]
Recorded = Callable[..., Path]
Edit = Callable[[Path, str, Callable[[Tensor], Tensor | None]], None]
Difference = Callable[..., Result]
Divergence = Callable[[Result], FirstDivergence]
StageOf = Callable[..., StageResult]

FP8, BF16, FP4 = (f"emulated:fused-{name}" for name in ("fp8", "bf16", "fp4"))


@pytest.mark.parametrize("who", [FP8, BF16, FP4, "exact", "bf16", "official"])
def test_equal_recordings_match(who: str, recorded: Recorded, difference: Difference) -> None:
    result = difference(recorded(who, "a"), recorded(who, "b"))

    assert result.verdict == "match"
    # 4 given, 7 index, 4 main, 2 query stages and 2 given, 4 main ones.
    assert (result.counts.expected, result.counts.compared) == (23, 23)
    errors = [s.local.error.max for e in result.candidates[0].layers for s in e.stages if s.local]
    assert set(errors) == {0.0}


def test_fused_and_unfused_candidates_of_one_profile_match(
    recorded: Recorded, difference: Difference
) -> None:
    a, b = recorded(BF16, "a"), recorded("emulated:unfused-bf16", "b")

    result = difference(a, b)

    assert result.verdict == "match"
    assert result.candidates[0].name == "emulated:unfused-bf16"
    assert (result.counts.expected, result.counts.compared) == (23, 23)


@pytest.mark.parametrize("contract", ["exact", "bf16", "official"])
@pytest.mark.parametrize("who", [FP8, BF16, FP4])
def test_a_candidate_is_judged_by_its_profile_and_costs_against_the_reference(
    contract: str, who: str, recorded: Recorded, difference: Difference
) -> None:
    a, b = recorded(contract, "a"), recorded(who, "b")

    result = difference(a, b, "--contract", contract)

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
    stage: str,
    recorded: Recorded,
    edit: Edit,
    difference: Difference,
    divergence: Divergence,
    stage_of: StageOf,
) -> None:
    name, row, token = EDITS[stage]
    a, b = recorded(FP8, "a"), recorded(FP8, "b")
    edit(b, *row_change(name, row))

    result = difference(a, b)

    first = divergence(result)
    assert f"{first.path}.{first.stage}" == stage
    assert (first.request, first.position, first.entry) == token
    upstream = first.stage in ("input", "projected")
    assert result.detail == ("upstream" if upstream else None)
    local = stage_of(result, first.path, first.stage).local
    assert local is not None
    assert (local.distance_max, local.distance_unit) == (1, "elements")


def test_scores_are_free_within_the_bounds_of_both_and_not_beyond(
    recorded: Recorded, edit: Edit, difference: Difference, divergence: Divergence
) -> None:
    a, b, c = recorded(FP8, "a"), recorded(FP8, "b"), recorded(FP8, "c")

    def nudge(scores: Tensor) -> Tensor:
        return torch.nextafter(scores, torch.tensor(torch.inf))

    def push(scores: Tensor) -> None:
        scores[99, 3] *= 1.004

    edit(b, "layer0.index.scores.1", nudge)
    edit(c, "layer0.index.scores.1", push)

    # -inf steps to the lowest number: a mask that is off is no rounding.
    assert divergence(difference(a, b)).stage == "scores"
    edit(b, "layer0.index.scores.1", lambda s: s.masked_fill(s < -1e38, -torch.inf))
    assert difference(a, b).verdict == "match"
    first = divergence(difference(a, c))
    assert (first.stage, first.request, first.position, first.entry) == ("scores", 1, 99, None)


def test_a_pick_that_no_score_explains_is_named(
    recorded: Recorded, edit: Edit, difference: Difference, divergence: Divergence
) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")

    def trade(picks: Tensor) -> None:
        chosen = set(picks[250].tolist())
        picks[250, 0] = next(entry for entry in range(62) if entry not in chosen)

    edit(b, "layer0.index.topk", trade)

    result = difference(a, b)

    first = divergence(result)
    assert (first.stage, first.request, first.position) == ("topk", 0, 250)
    topk = result.candidates[0].layers[0].topk
    assert topk is not None
    assert topk.swaps.selector == 1


def test_picks_in_another_order_are_the_same_picks(
    recorded: Recorded, edit: Edit, difference: Difference
) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")

    def reverse(picks: Tensor) -> None:
        picks[100:300] = picks[100:300].flip(1)

    edit(b, "layer0.index.topk", reverse)

    assert difference(a, b).verdict == "match"


def spoil(recording: Path, edit: Edit) -> None:
    """Make a recording as a broken kernel would: NaN scores, a wrong mask and impossible picks."""

    def scores(rows: Tensor) -> None:
        rows[7, 0] = torch.nan
        rows[8, 20] = 0.0

    def picks(rows: Tensor) -> None:
        rows[310, 0] = 1000

    edit(recording, "layer0.index.scores.1", scores)
    edit(recording, "layer0.index.topk", picks)


def test_broken_recordings_with_equal_bytes_match(
    recorded: Recorded, edit: Edit, difference: Difference
) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")
    spoil(a, edit)
    spoil(b, edit)

    assert difference(a, b).verdict == "match"


def test_nan_on_one_side_differs_whichever_side_it_is(
    recorded: Recorded,
    edit: Edit,
    difference: Difference,
    divergence: Divergence,
    stage_of: StageOf,
) -> None:
    clean, broken = recorded(FP8, "a"), recorded(FP8, "b")

    def nan(rows: Tensor) -> None:
        rows[7, 0] = torch.nan

    edit(broken, "layer0.index.scores.1", nan)

    for a, b in ((clean, broken), (broken, clean)):
        result = difference(a, b)
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


def test_layers_can_be_left_out(cli: Cli, recorded: Recorded, difference: Difference) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b", "--tokens", "553", "--layers", "0")

    result = difference(a, b, "--layers", "0")

    assert result.verdict == "match"
    assert [layer.layer for layer in result.candidates[0].layers] == [0]
    assert "layer 7 is not in" in cli("diff", a, b, "--layers", "7").stderr


def test_stages_can_be_chosen(
    cli: Cli, recorded: Recorded, edit: Edit, difference: Difference
) -> None:
    a, b = recorded(FP8, "a"), recorded(FP8, "b")
    edit(b, *row_change("layer0.index.pooled", 4))

    assert difference(a, b, "--stages", "stored,topk").verdict == "match"
    assert difference(a, b, "--stages", "index.pooled").verdict == "differ"
    lacking = cli("diff", a, b, "--stages", "stored,attention")
    assert lacking.returncode == 2
    assert "--stages main.attention: not among the stages that both recordings" in lacking.stderr


def test_limits_widen_what_is_derived_and_not_what_is_equal(
    recorded: Recorded, edit: Edit, difference: Difference
) -> None:
    a, b, c = recorded(FP8, "a"), recorded(FP8, "b"), recorded(FP8, "c")
    edit(b, *row_change("layer0.index.pooled", 4))

    def push(scores: Tensor) -> None:
        scores[99, 3] *= 1.004

    edit(c, "layer0.index.scores.1", push)
    Path("wide.toml").write_text("scale = 1e5\n")

    assert difference(a, b, "--limits", "wide.toml").verdict == "differ"
    assert difference(a, c, "--limits", "wide.toml").verdict == "match"
