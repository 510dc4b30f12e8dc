"""The needles that an input marks: as prompts of ``recall --input``, and in ``verify``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from torch import Tensor

from needlepoint.optimized.protocol.interface import Candidate, Observed
from needlepoint.reference.profile import Arithmetic
from needlepoint.verify.base.placement import CPU, placed
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.candidate_run import blamed
from needlepoint.verify.judge.layer_run import LayerRun
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recall.model import MakePrompt, NeedlePrompt, RecallModel, Setting
from needlepoint.verify.recall.queries import LayerReference, request_outputs, request_queries
from needlepoint.verify.recall.run import Gathered, judge_queries
from needlepoint.verify.recall.tally import recall_result
from needlepoint.verify.schema.recall import RecallResult

LABEL: Final = "needles that the input marks; the indexer's weights are "
RANDOM: Final = "random, so the rate says nothing about a model"


def marked_label(inputs: Inputs) -> str:
    """Return what figures of an input's needles are of: above all, whose weights scored them."""
    if inputs.checkpoint is None:
        return LABEL + RANDOM
    return f"{LABEL}those of checkpoint {inputs.checkpoint}"


def marked_prompts(inputs: Inputs) -> list[MakePrompt]:
    """Return one prompt for each request of an input that has needles.

    Raises
    ------
    ValueError
        Where no request has any.
    """
    found = [partial(_same, prompt) for _, _, prompt in _requests(inputs)]
    if not found:
        raise ValueError(
            f'input {inputs.name}: no needle spans; add "needles" to its manifest, or leave '
            "--input out for the shipped passages"
        )
    return list[MakePrompt](found)


def marked_model(inputs: Inputs) -> RecallModel:
    """Return the layers of an input that have an indexer.

    Raises
    ------
    ValueError
        Where none has.
    """
    layers = tuple(layer for layer in inputs.layers if inputs.config.ratio(layer) == 4)
    if not layers:
        raise ValueError(
            f"input {inputs.name}: layers {list(inputs.layers)} have no indexer; recall needs one "
            "of ratio 4"
        )
    return RecallModel(inputs.config, layers, inputs.weights, inputs.seed)


def layer_recall(
    inputs: Inputs,
    run: LayerRun,
    observed: Sequence[tuple[Candidate, Observed]],
    contract: Arithmetic,
    limits: Limits,
) -> list[Gathered]:
    """Return what one layer of ``verify`` says of the input's needles, for each candidate.

    Projections, weights and outputs are those of the run. Candidates without picks, layers without
    an indexer and inputs without needles say nothing.
    """
    found = [Gathered(label=marked_label(inputs)) for _ in observed]
    if not inputs.needles or run.given.ratio != 4:
        return found
    layer = run.given.layer
    reference = LayerReference(inputs.config, layer, placed(run.weights, CPU), contract)
    for request, start, prompt in _requests(inputs):
        if prompt.setting.length < run.given.ratio:
            continue
        queries = request_queries(prompt, reference, run.projected.request(request))
        for gathered, (candidate, whole) in zip(found, observed, strict=True):
            if whole.topk is None:
                continue
            positions = queries.positions
            outputs = request_outputs(whole, request, positions, positions + start)
            with blamed(candidate.info.name, layer):
                judge_queries(queries, candidate, outputs, limits, gathered)
    return found


def input_recall(gathered: Gathered, k: int) -> RecallResult | None:
    """Return the recall of an input's needles; None where nothing was asked or answered."""
    return recall_result(gathered, k, 0, gathered.label) if gathered.outcomes else None


def _requests(inputs: Inputs) -> Iterator[tuple[int, int, NeedlePrompt]]:
    """Yield number, first row and prompt of every request that has needles."""
    start = 0
    for request, length in enumerate(inputs.requests):
        needles = tuple(n.needle for n in inputs.needles if n.request == request)
        if needles:
            rows = slice(start, start + length)
            setting = Setting(length, 0, request)
            yield request, start, NeedlePrompt(setting, needles, partial(_rows_of, inputs, rows))
        start += length


def _rows_of(inputs: Inputs, rows: slice, layer: int) -> Tensor:
    return inputs.hidden(layer)[rows]


def _same(prompt: NeedlePrompt) -> NeedlePrompt:
    return prompt
