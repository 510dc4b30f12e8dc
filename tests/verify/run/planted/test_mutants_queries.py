"""Faults planted in the query side: queries, weights, scores and picks; see ``catch``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from needlepoint.optimized import emulated, query, scoring
from needlepoint.optimized import select as selection
from needlepoint.optimized.interface import (
    LayerInputs,
    Observed,
    PagedRows,
    QueryInputs,
    QueryRows,
)
from needlepoint.optimized.memory import TransientMeter
from needlepoint.optimized.readback import DecodedKeys, read_index_keys
from needlepoint.optimized.scoring import Scorer, fused_scores
from needlepoint.verify.result import Result

Plant = Callable[[pytest.MonkeyPatch], None]
Change = Callable[[LayerInputs, Observed], Observed]
Fault = dict[str, object]


def fault(stage: str, plant: Plant | None = None, **more: object) -> Fault:
    """Return the arguments of the ``catch`` fixture."""
    return {"stage": stage, "plant": plant, **more}


def code(module: object, name: str, value: object) -> Plant:
    return lambda patch: patch.setattr(module, name, value)


def scores_without_relu(queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
    out.copy_(torch.einsum("shd,td,sh->st", queries, keys, weights))


def scores_without_weights(queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
    fused_scores(queries, torch.ones_like(weights), keys, out)


def scores_without_a_head(queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
    fused_scores(queries[:, 1:], weights[:, 1:], keys, out)


def scores_of_bf16_weights(queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
    fused_scores(queries, weights.to(torch.bfloat16).to(torch.float32), keys, out)


def scores_times(factor: float) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    def score(queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
        fused_scores(queries, weights, keys, out)
        out.mul_(factor)

    return score


def unscaled_keys(paged: PagedRows, request: int) -> DecodedKeys:
    return DecodedKeys(read_index_keys(paged, request).values, None)


def shifted_keys(paged: PagedRows, request: int) -> DecodedKeys:
    """Every key read with the scale of the one before it."""
    keys = read_index_keys(paged, request)
    assert keys.scale is not None
    return DecodedKeys(keys.values, keys.scale.roll(1))


whole_block = Scorer._block


def seeing(more: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a :meth:`Scorer._block` whose visibility is off by some entries."""

    def block(
        self: Scorer, request: int, first: int, keys: DecodedKeys, *meter: TransientMeter
    ) -> tuple[Tensor, Tensor]:
        scores, visible = whole_block(self, request, first, keys, *meter)
        if more < 0:
            visible = (visible + more).clamp(min=0)
            hidden = torch.arange(scores.shape[1]) >= visible[:, None]
            return scores.masked_fill(hidden, -torch.inf), visible
        visible = (visible + more).clamp(max=scores.shape[1])
        shown = torch.arange(scores.shape[1]) < visible[:, None]
        return torch.where(shown & torch.isneginf(scores), 0.0, scores), visible

    return block


def picks_by(change: Callable[[Tensor, Tensor, int], Tensor]) -> Plant:
    return code(scoring, "select_topk", change)


def one_less(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    picks = selection.select_topk(scores, visible, k - 1)
    return torch.cat((picks, torch.full((len(picks), 1), -1, dtype=torch.int32)), dim=1)


def one_more_visible(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    return selection.select_topk(scores, (visible + 1).clamp(max=scores.shape[1]), k)


def without_the_best(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    if not scores.shape[1]:
        return selection.select_topk(scores, visible, k)
    best = scores.argmax(1, keepdim=True)
    # Only where there is another one to take its place.
    held = torch.where(visible[:, None] > k, -1e30, scores.gather(1, best))
    return selection.select_topk(scores.scatter(1, best, held), visible, k)


def newest_first(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Pick the last k visible entries: what a selection over zeroed scores can come down to."""
    entry = torch.arange(scores.shape[1], dtype=torch.float32).expand_as(scores)
    return selection.select_topk(entry.contiguous(), visible, k)


def twice(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    picks = selection.select_topk(scores, visible, k)
    picks[:, 1] = torch.where(picks[:, 1] >= 0, picks[:, 0], picks[:, 1])
    return picks


def holes_first(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    return selection.select_topk(scores, visible, k).flip(1)


def weights_of(change: Callable[[Tensor, Tensor], Tensor]) -> Change:
    def apply(inputs: LayerInputs, observed: Observed) -> Observed:
        rows = observed.query
        assert rows is not None
        assert rows.scales is not None
        return replace(observed, query=replace(rows, weights=change(rows.weights, rows.scales)))

    return apply


def query_codes(change: Callable[[Tensor], None]) -> Change:
    def apply(inputs: LayerInputs, observed: Observed) -> Observed:
        rows = observed.query
        assert rows is not None
        codes = rows.codes.clone()
        change(codes)
        return replace(observed, query=replace(rows, codes=codes))

    return apply


def flip_query(codes: Tensor) -> None:
    codes[120, 2, 64] ^= 0x80


def late_table(given: QueryInputs, inputs: LayerInputs, key_format: str) -> QueryRows:
    """Rotate queries at the position behind their own."""
    late = replace(inputs, rope_table=inputs.rope_table.roll(-1, 0))
    return whole_queries(given, late, key_format)


def no_constant(given: QueryInputs, inputs: LayerInputs, key_format: str) -> QueryRows:
    return whole_queries(given, replace(inputs, weight_scale=1.0), key_format)


whole_queries = query.store_queries


FAULTS: dict[str, Fault] = {
    "hadamard missing on queries": fault("query.query", code(query, "hadamard", lambda x: x)),
    "query one position late": fault("query.query", code(emulated, "store_queries", late_table)),
    "query code of the wrong sign": fault(
        "query.query", change=query_codes(flip_query), token=(0, 120, None)
    ),
    "query scale folded twice": fault("query.weights", change=weights_of(lambda w, s: w * s)),
    "query scale not folded": fault("query.weights", change=weights_of(lambda w, s: w / s)),
    "weights without constant": fault(
        "query.weights",
        code(emulated, "store_queries", no_constant),
    ),
    "relu missing": fault("index.scores", code(scoring, "fused_scores", scores_without_relu)),
    "head weights missing": fault(
        "index.scores", code(scoring, "fused_scores", scores_without_weights)
    ),
    "a head missing": fault("index.scores", code(scoring, "fused_scores", scores_without_a_head)),
    "head weights in bf16": fault(
        "index.scores", code(scoring, "fused_scores", scores_of_bf16_weights)
    ),
    # A positive constant on all scores moves no pick.
    "scores, gain 0.4 %": fault(
        "index.scores",
        code(scoring, "fused_scores", scores_times(1.004)),
        clear=("index.stored", "query.weights", "index.topk"),
    ),
    "key scale missing": fault("index.scores", code(scoring, "read_index_keys", unscaled_keys)),
    "key scale of the neighbour": fault(
        "index.scores", code(scoring, "read_index_keys", shifted_keys)
    ),
    "one entry too many visible": fault("index.scores", code(Scorer, "_block", seeing(1))),
    "newest entry not visible": fault("index.scores", code(Scorer, "_block", seeing(-1))),
    "one pick too few": fault(
        "index.topk", picks_by(one_less), clear=("index.stored", "index.scores")
    ),
    "pick of an invisible entry": fault("index.topk", picks_by(one_more_visible)),
    "best entry lost": fault("index.topk", picks_by(without_the_best)),
    "newest entries picked": fault("index.topk", picks_by(newest_first)),
    "one entry picked twice": fault("index.topk", picks_by(twice)),
    "-1 before the picks": fault("index.topk", picks_by(holes_first)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_where_it_was_born(name: str, catch: Callable[..., Result]) -> None:
    catch(**FAULTS[name])


def test_what_wrong_scores_select_is_upstream_and_has_a_price(
    catch: Callable[..., Result],
) -> None:
    """The selection did its work; the scores that it was given are to blame."""
    layer = catch(**FAULTS["head weights missing"]).candidates[0].layers[0]

    stages = {s.stage: s for s in layer.stages}
    assert stages["topk"].verdict == "match"
    assert layer.topk is not None
    assert layer.topk.swaps.upstream > 50
    assert layer.topk.swaps.selector == 0
    assert layer.topk.score_lost_max is not None
    assert layer.topk.score_lost_max > 1
    attention = stages["attention"].accumulated
    assert attention is not None
    assert attention.error.max is not None
    assert attention.error.max > 0.1
