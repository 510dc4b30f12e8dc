"""Planted faults lose needles and their cause is named; a correct candidate is not accused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.emulation import query
from needlepoint.optimized.emulation import query_rows as emulated_rows
from needlepoint.optimized.emulation.readback import DecodedKeys, read_index_keys
from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    Candidate,
    CandidateInfo,
    LayerInputs,
    Observed,
    PagedRows,
    StageKey,
)
from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.inputs.recall_needles import Needle
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recall.grid import Grid, Length, grid_prompts
from needlepoint.verify.recall.model import NeedlePrompt, RecallModel, Setting, load_trained
from needlepoint.verify.recall.pool import load_pool
from needlepoint.verify.recall.run import Gathered, run_prompts
from needlepoint.verify.recall.tally import recall_result
from needlepoint.verify.schema.recall import RecallResult

K = 64
DISTRACTORS = 16
Change = Callable[[Observed, LayerInputs, Tensor], Observed]


@pytest.fixture(scope="module")
def model() -> RecallModel:
    """Return the second trained layer at an eighth of its k: short prompts are exercised."""
    found = load_trained((1,))
    return replace(found, config=replace(found.config, index_topk=K))


@pytest.fixture(scope="module")
def prompts() -> list[Callable[[], NeedlePrompt]]:
    grid = Grid((Length(1600),), haystacks=2, distractors=(DISTRACTORS,))
    return grid_prompts(grid, load_pool())


@dataclass(frozen=True)
class Changed:
    """A candidate of rows whose observations are changed."""

    inner: Candidate
    change: Change

    @property
    def info(self) -> CandidateInfo:
        return self.inner.info

    def stages(self, ratio: int) -> frozenset[StageKey]:
        return self.inner.stages(ratio)

    def run(self, inputs: LayerInputs) -> Observed:
        raise AssertionError("recall asks for rows")

    def run_rows(self, inputs: LayerInputs, positions: Tensor) -> Observed:
        found: Observed = self.inner.run_rows(inputs, positions)  # type: ignore[attr-defined]
        return self.change(found, inputs, positions)


def unchanged(found: Observed, inputs: LayerInputs, positions: Tensor) -> Observed:
    return found


def measure(
    candidate: Candidate, prompts: list[Callable[[], NeedlePrompt]], model: RecallModel
) -> tuple[Gathered, RecallResult]:
    gathered = run_prompts(
        prompts, model, [candidate], BF16_CONTRACT, Limits.default(), NoProgress()
    )[0]
    return gathered, recall_result(gathered, K, DISTRACTORS, "test")


def fp8() -> Candidate:
    return create("emulated:fused-fp8")


def test_a_correct_candidate_is_not_accused(
    prompts: list[Callable[[], NeedlePrompt]], model: RecallModel
) -> None:
    _, found = measure(fp8(), prompts, model)
    assert found.rows == 20
    assert found.reference_rate is not None
    assert found.reference_rate > 0.8
    assert found.conclusion == "not shown"
    assert found.mcnemar_p is not None
    assert found.mcnemar_p > 0.05
    allowed = {("upstream", ""), ("outranked", "format"), ("outranked", "rounding")}
    assert {(miss.cause, miss.by) for miss in found.misses} <= allowed
    assert found.window.rows == 2
    assert found.not_exercised.rows == 0
    assert found.delta_ci95 is not None
    assert found.delta_ci95[0] < 0 < found.delta_ci95[1]


def test_a_query_that_is_not_rotated_loses_needles_and_is_named(
    prompts: list[Callable[[], NeedlePrompt]], model: RecallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query, "hadamard", lambda x: x)
    _, found = measure(fp8(), prompts, model)
    assert found.mcnemar_p is not None
    assert found.mcnemar_p < 0.01
    assert found.lost > 8 > found.gained
    own = [m for m in found.misses if m.cause != "upstream"]
    assert {(m.cause, m.by) for m in own} == {("outranked", "query.query")}
    assert all(m.gap is not None and m.allowed is not None and m.gap > m.allowed for m in own)
    assert all(m.beyond and m.rank is not None and m.rank >= K for m in own)
    priced = [m for m in own if m.mass_kept is not None]
    assert priced
    assert all(m.output_error is not None and m.output_error > 0 for m in priced)


def _rolled(paged: PagedRows) -> PagedRows:
    return replace(paged, page_table=tuple(table.roll(1) for table in paged.page_table))


def test_a_wrong_page_loses_needles_and_is_named(
    prompts: list[Callable[[], NeedlePrompt]], model: RecallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(paged: PagedRows, request: int) -> DecodedKeys:
        return read_index_keys(_rolled(paged), request)

    def change(found: Observed, inputs: LayerInputs, positions: Tensor) -> Observed:
        return replace(found, stored={INDEX: _rolled(found.stored[INDEX])})

    monkeypatch.setattr(emulated_rows, "read_index_keys", read)
    _, found = measure(Changed(fp8(), change), prompts, model)
    assert found.mcnemar_p is not None
    assert found.mcnemar_p < 0.01
    own = [m for m in found.misses if m.cause != "upstream"]
    assert {m.cause for m in own} == {"corrupted"}
    assert all(m.by.startswith("wrong page: page ") for m in own)
    assert found.causes["corrupted"] == len(own) >= found.lost


def test_an_unmapped_page_is_unreachable(
    prompts: list[Callable[[], NeedlePrompt]], model: RecallModel
) -> None:
    def change(found: Observed, inputs: LayerInputs, positions: Tensor) -> Observed:
        paged = found.stored[INDEX]
        lost = replace(paged, page_table=tuple(torch.full_like(t, -1) for t in paged.page_table))
        picks = torch.arange(K, dtype=torch.int32).expand(len(positions), K)
        return replace(found, stored={INDEX: lost}, topk=picks)

    _, found = measure(Changed(fp8(), change), prompts, model)
    assert {(m.cause, m.by) for m in found.misses} == {("unreachable", "page not mapped")}
    assert found.conclusion == "not shown"  # two haystacks are too few, whatever McNemar says
    assert found.mcnemar_p is not None
    assert found.mcnemar_p < 0.01


def test_a_wrong_selection_is_blamed_on_the_selection(
    prompts: list[Callable[[], NeedlePrompt]], model: RecallModel
) -> None:
    def change(found: Observed, inputs: LayerInputs, positions: Tensor) -> Observed:
        # The last visible entries, whatever the scores say.
        visible = (positions + 1) // 4
        last = visible.unsqueeze(1) - K + torch.arange(K)
        return replace(found, topk=last.to(torch.int32))

    _, found = measure(Changed(fp8(), change), prompts, model)
    own = {(m.cause, m.by) for m in found.misses if m.cause != "upstream"}
    assert own <= {("outranked", "topk"), ("outranked", "format")}
    assert ("outranked", "topk") in own


def test_flat_scores_are_blamed_on_the_scores(
    prompts: list[Callable[[], NeedlePrompt]], model: RecallModel
) -> None:
    def change(found: Observed, inputs: LayerInputs, positions: Tensor) -> Observed:
        # A reduction that returns zeros: the selection falls back to the first entries.
        visible = ((positions + 1) // 4).unsqueeze(1)
        entries = inputs.lengths[0] // 4
        flat = torch.zeros(len(positions), entries)
        flat = flat.masked_fill(torch.arange(entries) >= visible, -torch.inf)
        picks = torch.arange(K, dtype=torch.int32).expand(len(positions), K)
        return replace(found, scores=lambda request, start, stop: flat[start:stop], topk=picks)

    _, found = measure(Changed(fp8(), change), prompts, model)
    own = {(m.cause, m.by) for m in found.misses if m.cause != "upstream"}
    assert own <= {("outranked", "index.scores"), ("outranked", "rounding")}
    assert ("outranked", "index.scores") in own


@dataclass(frozen=True)
class Whole:
    """The same candidate without ``run_rows``: recall runs its whole layer."""

    inner: Candidate
    spoil: bool = False

    @property
    def info(self) -> CandidateInfo:
        return self.inner.info

    def stages(self, ratio: int) -> frozenset[StageKey]:
        return self.inner.stages(ratio)

    def run(self, inputs: LayerInputs) -> Observed:
        found = self.inner.run(inputs)
        if not self.spoil:
            return found
        main = found.stored[MAIN]
        return replace(
            found, stored={**found.stored, MAIN: replace(main, pool=torch.zeros_like(main.pool))}
        )


def test_whole_runs_and_rows_agree(model: RecallModel) -> None:
    grid = Grid((Length(600),), depths=(0.0, 0.5), haystacks=1, needles=1, distractors=(4,))
    short = grid_prompts(grid, load_pool())
    rows, _ = measure(fp8(), short, model)
    whole, _ = measure(Whole(fp8()), short, model)
    assert [(o.hits, o.rank, o.reference_rank) for o in rows.outcomes] == [
        (o.hits, o.rank, o.reference_rank) for o in whole.outcomes
    ]


def test_lost_main_rows_attenuate_a_picked_needle(model: RecallModel) -> None:
    grid = Grid((Length(600),), depths=(0.0, 0.5), haystacks=1, needles=1, distractors=(4,))
    short = grid_prompts(grid, load_pool())
    gathered, _ = measure(Whole(fp8(), spoil=True), short, model)
    found = [m for m in gathered.misses if m.cause.cause == "attenuated"]
    assert found
    assert all(m.outcome.hits[K] for m in found)
    assert all(m.price is not None and m.price.kept is not None for m in found)
    sound, _ = measure(Whole(fp8()), short, model)
    assert not [m for m in sound.misses if m.cause.cause == "attenuated"]


def test_attention_is_not_said_to_be_judged_without_main_rows(model: RecallModel) -> None:
    grid = Grid((Length(600),), depths=(0.0, 0.5), haystacks=1, needles=1, distractors=(4,))
    short = grid_prompts(grid, load_pool())
    _, rows = measure(fp8(), short, model)
    _, whole = measure(Whole(fp8()), short, model)

    assert "attenuated" not in rows.causes
    assert whole.causes["attenuated"] == 0


def test_an_incomplete_window_is_unreachable(model: RecallModel) -> None:
    pool = load_pool()
    hidden = pool.states[: 4 * K + 400]
    query = 4 * K + 397  # the window of its own token is not complete
    near = Needle(query - 1, query + 1, query, 1.0)
    across = Needle(query - 150, query + 1, query, 0.5)
    prompt = NeedlePrompt(Setting(len(hidden), DISTRACTORS, 0), (near, across), lambda _: hidden)
    gathered, found = measure(fp8(), [lambda: prompt], model)
    assert [o.windowed for o in gathered.outcomes] == [True, False]
    assert [o.rank for o in gathered.outcomes] == [None, None]
    assert [(m.cause, m.by) for m in found.misses] == [("unreachable", "window not complete")]


@pytest.mark.parametrize("length", [4 * K - 4, 4 * K, 4 * K + 4])
def test_up_to_the_boundary_nothing_is_exercised(model: RecallModel, length: int) -> None:
    pool = load_pool()
    rows = torch.arange(length)
    needle = Needle(20, 22, length - 1, 0.1)
    prompt = NeedlePrompt(Setting(length, DISTRACTORS, 0), (needle,), lambda _: pool.states[rows])
    _, found = measure(fp8(), [lambda: prompt], model)
    exercised = length > 4 * K
    assert found.rows == exercised
    assert found.not_exercised.rows == (not exercised)
    assert found.not_exercised.picked == (not exercised)
    at_k = [c for c in found.cells if c.k == K]
    assert [c.exercised for c in at_k] == [exercised]
    if not exercised:
        assert (found.rate, found.ci95, found.mcnemar_p) == (None, None, None)


def test_the_rate_of_the_shipped_model_falls_at_smaller_k() -> None:
    """A grid on which nothing is ever missed could not show a loss."""
    model = load_trained()
    prompts = grid_prompts(Grid((Length(2560),), haystacks=2, distractors=(64,)), load_pool())
    gathered, _ = measure(fp8(), prompts, model)
    exercised = [o for o in gathered.outcomes if o.exercised(512) and not o.windowed]
    rates = {k: sum(o.reference_hits[k] for o in exercised) / len(exercised) for k in (512, 64)}

    assert len(exercised) == 20
    assert rates[512] > 0.8
    assert rates[64] < rates[512] - 0.1


def test_several_layers(prompts: list[Callable[[], NeedlePrompt]], model: RecallModel) -> None:
    both = replace(model, layers=(0, 1))
    _, found = measure(fp8(), prompts[:1], both)
    assert [layer.layer for layer in found.layers] == [0, 1]
    assert found.rows == sum(layer.rows for layer in found.layers) == 20
    assert sum(found.reach) == 10
    assert sum(i * n for i, n in enumerate(found.reach)) == found.hits
    assert all(layer.rank_median is not None for layer in found.layers)


def test_margins_decide_hits(prompts: list[Callable[[], NeedlePrompt]], model: RecallModel) -> None:
    _, found = measure(create("emulated:fused-fp4"), prompts, model)
    rates = {m.margin: m.hits / m.rows for m in found.margins if m.rows}
    assert rates[-4.0] == 0.0
    assert rates[4.0] == 1.0
    assert all(m.rows for m in found.margins if abs(m.margin) <= 1)


def test_no_length_goes_beyond_the_text(tmp_path: Path) -> None:
    grid = Grid((Length(30_000),), haystacks=1)
    with pytest.raises(ValueError, match=r"distinct passages.*make_recall --passages"):
        grid_prompts(grid, load_pool())
