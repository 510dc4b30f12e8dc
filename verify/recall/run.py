"""Run prompts with needles: reference and candidates on the queries of the needles.

Prompts are independent, so they run side by side, one thread each, as far as their tokens go into
one budget: two long prompts run one after the other. What is kept of a prompt is a few numbers a
needle: memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import INDEX, MAIN, Candidate, Observed
from needlepoint.optimized.protocol.optional import ComputesRows
from needlepoint.reference.profile import Arithmetic
from needlepoint.verify.base.memory import trim_malloc
from needlepoint.verify.base.progress import Progress
from needlepoint.verify.base.workers import Budget, workers
from needlepoint.verify.judge.candidate_run import blamed
from needlepoint.verify.layout.stored_rows import replayable
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recall.attention import PickPrice, Prices
from needlepoint.verify.recall.causes import Cause, explain, mapped_rows
from needlepoint.verify.recall.model import MakePrompt, RecallModel
from needlepoint.verify.recall.outcomes import MarginTally, Outcome, outcomes
from needlepoint.verify.recall.queries import (
    LayerReference,
    NeedleQueries,
    candidate_outputs,
    project_request,
)
from needlepoint.verify.schema.recall import ATTENUATED

SIDE_BY_SIDE: Final = 12_288
"""Tokens of all prompts that run at a time; a longer prompt runs alone."""
ATTENUATION = 0.5
"""A picked needle with less than this part of its attention left is reported as attenuated."""


@dataclass(frozen=True)
class Miss:
    """One missed needle and why; ``price`` is None where it was not computed."""

    outcome: Outcome
    cause: Cause
    price: PickPrice | None


@dataclass
class Gathered:
    """What all prompts said of one candidate.

    Attributes
    ----------
    outcomes
        One a needle and layer.
    misses
        Of exercised needles outside the window, at the model's k.
    margins
        Needles of a controlled margin.
    row_bytes
        Bytes that one index key takes in its pages; None without pages.
    main_rows
        Whether it handed back main rows, by which alone attention can be judged.
    label
        What the figures are of, where the source does not say it.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    margins: MarginTally = field(default_factory=MarginTally)
    row_bytes: float | None = None
    main_rows: bool = False
    label: str = ""


def run_prompts(
    prompts: Sequence[MakePrompt],
    model: RecallModel,
    candidates: Sequence[Candidate],
    contract: Arithmetic,
    limits: Limits,
    progress: Progress,
) -> list[Gathered]:
    """Run every prompt through every layer; one element for each candidate.

    Parameters
    ----------
    prompts
        Each makes one prompt when its turn comes.
    model
        Shapes, layers and weights.
    candidates
        Who is asked.
    contract
        The reference that hits are paired with.
    limits
        Limits for causes.
    progress
        Told of every prompt.

    Raises
    ------
    ValueError
        If a prompt cannot be made or a candidate fails.
    """
    progress.start("recall: prompts", len(prompts))
    layers = [
        LayerReference(model.config, layer, model.weights(layer), contract)
        for layer in model.layers
    ]
    whole = not all(isinstance(candidate, ComputesRows) for candidate in candidates)
    budget = Budget(SIDE_BY_SIDE)

    def one(make: MakePrompt) -> list[Gathered]:
        prompt = make()
        found = [Gathered() for _ in candidates]
        with budget.hold(prompt.setting.length):
            for layer in layers:
                queries = project_request(prompt, layer, model.seed, whole=whole)
                _run_candidates(queries, candidates, limits, found)
                del queries
            trim_malloc()
        progress.advance()
        return found

    # A candidate that runs whole layers may hold a device, or much memory: one at a time.
    if not whole and all(candidate.info.device == "cpu" for candidate in candidates):
        with workers() as pool:
            parts = pool.map(one, prompts)
    else:
        parts = [one(make) for make in prompts]
    return [join(part[i] for part in parts) for i in range(len(candidates))]


def _run_candidates(
    queries: NeedleQueries,
    candidates: Sequence[Candidate],
    limits: Limits,
    found: Sequence[Gathered],
) -> None:
    for candidate, gathered in zip(candidates, found, strict=True):
        outputs = candidate_outputs(candidate, queries)
        with blamed(candidate.info.name, queries.inputs.layer):
            judge_queries(queries, candidate, outputs, limits, gathered)


def judge_queries(
    queries: NeedleQueries,
    candidate: Candidate,
    outputs: Observed,
    limits: Limits,
    gathered: Gathered,
) -> None:
    """Add what one candidate made of one prompt in one layer.

    Parameters
    ----------
    queries
        What was asked.
    candidate, outputs
        Who answered, and its rows.
    limits
        For causes.
    gathered
        Where it is added.

    Raises
    ------
    ValueError
        If the candidate has no picks.
    """
    k, picks = queries.inputs.topk, outputs.topk
    if picks is None:
        raise ValueError("no picks; recall needs the stage index.topk")
    scores = None
    if outputs.scores is not None:
        scores = masked(outputs.scores(0, 0, len(picks)), queries.visible)
    found = outcomes(queries, picks, scores)
    gathered.outcomes += found
    if INDEX in outputs.stored:
        paged = outputs.stored[INDEX]
        gathered.row_bytes = paged.pool.shape[1] / paged.page_size
    if scores is not None:
        for row, outcome in enumerate(found):
            reference = queries.scores[row]
            gathered.margins.add(scores[row], reference, picks[row], outcome.visible, k)
    counted = [(row, o) for row, o in enumerate(found) if o.exercised(k) and not o.windowed]
    missed = [(row, o) for row, o in counted if not o.hits[k]]
    causes = explain(queries, candidate.info, outputs, missed, limits)
    main = None
    if MAIN in outputs.stored:
        width = queries.reference.config.head_dim
        main = replayable(mapped_rows(outputs.stored[MAIN], width=width).rows.values)
        gathered.main_rows = True
    prices = Prices(queries, picks, main)
    for row, outcome in missed:
        price = prices.of(row, outcome) if outcome.reference_hits[k] else None
        gathered.misses.append(Miss(outcome, causes[row], price))
    # With the reference's own rows a picked needle keeps its attention.
    for row, outcome in counted if main is not None else ():
        price = prices.of(row, outcome) if outcome.hits[k] else None
        if price is not None and price.kept is not None and price.kept < ATTENUATION:
            gathered.misses.append(Miss(outcome, Cause(ATTENUATED, "main rows", None), price))


def masked(scores: Tensor, visible: Tensor) -> Tensor:
    """Return scores a selection can be replayed from: finite where visible, -inf elsewhere."""
    lowest = torch.finfo(torch.float32).min
    wide = torch.where(torch.isfinite(scores), scores, lowest)
    return wide.masked_fill(torch.arange(scores.shape[1]) >= visible.unsqueeze(1), -torch.inf)


def join(parts: Iterable[Gathered]) -> Gathered:
    """Return what several prompts or layers said of one candidate."""
    whole = Gathered()
    for part in parts:
        whole.outcomes += part.outcomes
        whole.misses += part.misses
        whole.margins.merge(part.margins)
        whole.row_bytes = part.row_bytes if whole.row_bytes is None else whole.row_bytes
        whole.main_rows |= part.main_rows
        whole.label = whole.label or part.label
    return whole
