"""Run prompts with needles: reference and candidates on the queries of the needles.

Prompts are independent, so they run side by side, one thread each, as far as their tokens go into
one budget: two long prompts run one after the other. What is kept of a prompt is a few numbers a
needle: memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import INDEX, MAIN, Candidate, Observed
from needlepoint.optimized.protocol.optional import ComputesRows
from needlepoint.reference.config import ModelConfig
from needlepoint.reference.profile import Arithmetic
from needlepoint.reference.weights import LayerWeights
from needlepoint.verify.base.memory import trim_malloc
from needlepoint.verify.base.progress import Progress
from needlepoint.verify.base.workers import Budget, workers
from needlepoint.verify.inputs.recall_needles import Needle
from needlepoint.verify.judge.candidate_run import blamed
from needlepoint.verify.layout.stored_rows import replayable
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recall.attention import PickPrice, Prices
from needlepoint.verify.recall.causes import ATTENUATED, Cause, explain, mapped_rows
from needlepoint.verify.recall.margins import MarginTally
from needlepoint.verify.recall.outcomes import (
    Outcome,
    Setting,
    outcomes,
    smaller_ks,
)
from needlepoint.verify.recall.reference import reference_scores
from needlepoint.verify.recall.rows import GivenRows, candidate_rows, given_rows

SIDE_BY_SIDE: Final = 12_288
"""Tokens of all prompts that run at a time; a longer prompt runs alone."""
ATTENUATION = 0.5
"""A picked needle with less than this part of its attention left is reported as attenuated."""


@dataclass(frozen=True)
class NeedlePrompt:
    """One request and its needles.

    Attributes
    ----------
    setting
        What it was made for.
    needles
        In any order, one query each.
    hidden
        Hidden states of a layer: bf16 ``[length, hidden_size]``.
    """

    setting: Setting
    needles: tuple[Needle, ...]
    hidden: Callable[[int], Tensor]


@dataclass(frozen=True)
class RecallModel:
    """The layers that prompts go through.

    Attributes
    ----------
    config, layers
        Shapes, and layers of ratio 4.
    weights
        Makes the weights of a layer.
    seed
        Of page permutations.
    """

    config: ModelConfig
    layers: tuple[int, ...]
    weights: Callable[[int], LayerWeights]
    seed: int


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
    prompts: Sequence[Callable[[], NeedlePrompt]],
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
    layers = {layer: model.weights(layer) for layer in model.layers}
    budget = Budget(SIDE_BY_SIDE)

    def one(make: Callable[[], NeedlePrompt]) -> list[Gathered]:
        prompt = make()
        found = [Gathered() for _ in candidates]
        with budget.hold(prompt.setting.length):
            for layer, weights in layers.items():
                _run_layer(prompt, layer, weights, model, candidates, contract, limits, found)
            trim_malloc()
        progress.advance()
        return found

    # A candidate that runs whole layers may hold a device, or much memory: one at a time.
    if all(isinstance(c, ComputesRows) and c.info.device == "cpu" for c in candidates):
        with workers() as pool:
            parts = pool.map(one, prompts)
    else:
        parts = [one(make) for make in prompts]
    return [join(part[i] for part in parts) for i in range(len(candidates))]


def _run_layer(
    prompt: NeedlePrompt,
    layer: int,
    weights: LayerWeights,
    model: RecallModel,
    candidates: Sequence[Candidate],
    contract: Arithmetic,
    limits: Limits,
    found: Sequence[Gathered],
) -> None:
    positions = torch.tensor([needle.query for needle in prompt.needles])
    hidden = prompt.hidden(layer)
    given = given_rows(model.config, layer, weights, hidden, positions, model.seed)
    reference = reference_scores(given, contract)
    for candidate, gathered in zip(candidates, found, strict=True):
        own = candidate_rows(candidate, given)
        with blamed(candidate.info.name, layer):
            judge_prompt(prompt, given, candidate, own, reference, contract, limits, gathered)


def judge_prompt(
    prompt: NeedlePrompt,
    given: GivenRows,
    candidate: Candidate,
    own: Observed,
    reference: Tensor,
    contract: Arithmetic,
    limits: Limits,
    gathered: Gathered,
) -> None:
    """Add what one candidate made of one prompt in one layer.

    Parameters
    ----------
    prompt, given
        What was asked.
    candidate, own
        Who answered, and its rows.
    reference
        ``[rows, entries]``, the contract's scores.
    contract, limits
        For prices and causes.
    gathered
        Where it is added.

    Raises
    ------
    ValueError
        If the candidate has no picks.
    """
    k, visible = given.inputs.topk, given.visible
    picks, rows = own.topk, len(prompt.needles)
    if picks is None:
        raise ValueError("no picks; recall needs the stage index.topk")
    scores = None
    if own.scores is not None:
        scores = masked(own.scores(0, 0, rows), visible)
    found = outcomes(
        prompt.setting,
        given.layer,
        prompt.needles,
        visible,
        given.inputs.ratio,
        picks,
        scores,
        reference,
        smaller_ks(k),
    )
    gathered.outcomes += found
    if INDEX in own.stored:
        paged = own.stored[INDEX]
        gathered.row_bytes = paged.pool.shape[1] / paged.page_size
    if scores is not None:
        for row in range(rows):
            gathered.margins.add(scores[row], reference[row], picks[row], int(visible[row]), k)
    counted = [(row, o) for row, o in enumerate(found) if o.exercised(k) and not o.windowed]
    missed = [(row, o) for row, o in counted if not o.hits[k]]
    causes = explain(given, candidate.info, own, missed, limits)
    main = None
    if MAIN in own.stored:
        main = replayable(mapped_rows(own.stored[MAIN], width=given.config.head_dim).rows.values)
        gathered.main_rows = True
    prices = Prices(given, contract, picks, reference, main)
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
        whole.margins.merge([part.margins])
        whole.row_bytes = part.row_bytes if whole.row_bytes is None else whole.row_bytes
        whole.main_rows |= part.main_rows
        whole.label = whole.label or part.label
    return whole
