"""Recall in ``verify``: the needles that an input marks, from what candidates already computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import Candidate, Observed
from needlepoint.reference.profile import Arithmetic
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.candidate_run import blamed
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recall.outcomes import Setting
from needlepoint.verify.recall.reference import reference_scores
from needlepoint.verify.recall.rows import given_rows, request_rows
from needlepoint.verify.recall.run import Gathered, NeedlePrompt, judge_prompt
from needlepoint.verify.recall.tally import recall_result
from needlepoint.verify.schema.recall import RecallResult

LABEL: Final = "needles that the input marks; the indexer's weights are "
RANDOM: Final = "random, so the rate says nothing about a model"


def layer_recall(
    inputs: Inputs,
    layer: int,
    observed: Sequence[tuple[Candidate, Observed]],
    contract: Arithmetic,
    limits: Limits,
) -> list[Gathered]:
    """Return what one layer says of the input's needles, one element for each candidate.

    Candidates without picks, layers without an indexer and inputs without needles say nothing.
    """
    found = [Gathered(label=marked_label(inputs)) for _ in observed]
    if not inputs.needles or inputs.config.ratio(layer) != 4:
        return found
    start = 0
    for request, length in enumerate(inputs.requests):
        needles = tuple(n.needle for n in inputs.needles if n.request == request)
        rows = slice(start, start + length)
        start += length
        if not needles or length < inputs.config.ratio(layer):
            continue
        hidden = inputs.hidden(layer)[rows]
        positions = torch.tensor([needle.query for needle in needles])
        weights = inputs.weights(layer)
        given = given_rows(inputs.config, layer, weights, hidden, positions, inputs.seed)
        reference = reference_scores(given, contract)
        prompt = NeedlePrompt(Setting(length, 0, request), needles, partial(_same, hidden))
        for gathered, (candidate, whole) in zip(found, observed, strict=True):
            if whole.topk is None:
                continue
            own = request_rows(whole, request, positions, positions + rows.start)
            with blamed(candidate.info.name, layer):
                judge_prompt(prompt, given, candidate, own, reference, contract, limits, gathered)
    return found


def input_recall(gathered: Gathered, k: int) -> RecallResult | None:
    """Return the recall of an input's needles; None where nothing was asked or answered."""
    return recall_result(gathered, k, 0, gathered.label) if gathered.outcomes else None


def marked_label(inputs: Inputs) -> str:
    """Return what figures of an input's needles are of: above all, whose weights scored them."""
    if inputs.checkpoint is None:
        return LABEL + RANDOM
    return f"{LABEL}those of checkpoint {inputs.checkpoint}"


def _same(hidden: Tensor, layer: int) -> Tensor:
    return hidden
