"""``needlepoint recall``: the grid over shipped passages, or the needles of a recording.

Beside the recall of a format stands what it costs: bytes of its keys, transients of its scoring.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from needlepoint.optimized.protocol.interface import Candidate
from needlepoint.optimized.protocol.optional import MeasuresPrompts
from needlepoint.reference.config import MODELS
from needlepoint.reference.profile import CONTRACTS
from needlepoint.verify.base.progress import Progress
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.memory_law import PROMPT_HEADS, PROMPT_TOKENS, transient_law
from needlepoint.verify.judge.profiles import profile_of
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recall.grid import Grid, grid_prompts
from needlepoint.verify.recall.marked import marked_label, marked_model, marked_prompts
from needlepoint.verify.recall.model import LABEL, MakePrompt, RecallModel, load_trained
from needlepoint.verify.recall.pool import load_pool
from needlepoint.verify.recall.run import Gathered, run_prompts
from needlepoint.verify.recall.tally import recall_result
from needlepoint.verify.schema.environment import collect_environment
from needlepoint.verify.schema.recall import RecallCost
from needlepoint.verify.schema.result import (
    CANNOT_JUDGE,
    MATCH,
    SCHEMA,
    CandidateResult,
    Contract,
    Counts,
    FormatCost,
    InputInfo,
    Kernel,
    MemoryResult,
    Profile,
    Result,
)

MEMORY_BYTES: Final = 8 << 30
LAYERS: Final = MODELS["v4-flash"].compress_ratios.count(4)
_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
MEASURED: Final = "recall measured, no stage judged"
NOTHING: Final = (
    "no needle was exercised: every query saw at most k entries or reads it through its window"
)


@dataclass(frozen=True)
class RecallSource:
    """What recall is measured on; ``distractors`` is the density of the top-level figures."""

    prompts: list[MakePrompt]
    model: RecallModel
    info: InputInfo
    distractors: int
    label: str


def grid_source(grid: Grid, layers: Sequence[int] | None) -> RecallSource:
    """Return the grid over a pool of passages, through the shipped indexer.

    Raises
    ------
    ValueError
        If the pool is not usable or cannot fill a length.
    """
    pool, model = load_pool(grid.passages), load_trained(layers, grid.seed)
    if pool.states.shape[1] != model.config.hidden_size:
        raise ValueError(
            f"passages {pool.name}: states are {pool.states.shape[1]} wide, the shipped indexer "
            f"reads {model.config.hidden_size}"
        )
    prompts = grid_prompts(grid, pool)
    info = InputInfo(
        name=f"recall:{pool.name}",
        sha256=pool.sha256,
        tokens=max(length.tokens for length in grid.lengths),
        requests=len(prompts),
        model=model.config.name,
        seed=grid.seed,
    )
    return RecallSource(prompts, model, info, grid.distractors[0], LABEL)


def input_source(inputs: Inputs) -> RecallSource:
    """Return the marked needles of an input, through its own layers.

    Raises
    ------
    ValueError
        If it has no needles, or no layer with an indexer.
    """
    info = InputInfo(
        name=inputs.name,
        sha256=inputs.sha256,
        tokens=inputs.tokens,
        requests=len(inputs.requests),
        model=inputs.config.name,
        seed=inputs.seed,
    )
    label = marked_label(inputs)
    return RecallSource(marked_prompts(inputs), marked_model(inputs), info, 0, label)


def measure_recall(
    source: RecallSource,
    candidates: Sequence[Candidate],
    contract: Contract,
    limits: Limits,
    progress: Progress,
    memory: int = MEMORY_BYTES,
) -> PipelineOutput:
    """Measure the recall of candidates beside a contract's.

    The verdict is ``match`` where something was measured: a rate is no verdict on a kernel. Only a
    gate turns it.

    Raises
    ------
    ValueError
        If a prompt cannot be made or a candidate fails.
    """
    gathered = run_prompts(
        source.prompts, source.model, candidates, CONTRACTS[contract], limits, progress
    )
    results = tuple(
        _candidate(candidate, found, source, memory)
        for candidate, found in zip(candidates, gathered, strict=True)
    )
    measured = all(r.recall is not None and r.recall.rows for r in results)
    device = "cuda" if any(c.info.device == "cuda" for c in candidates) else "cpu"
    result = Result.model_validate(
        {
            "schema": SCHEMA,
            "verdict": MATCH if measured else CANNOT_JUDGE,
            "detail": MEASURED if measured else NOTHING,
            "contract": contract,
            "environment": collect_environment(device),
            "input": source.info,
            "counts": Counts(expected=0, compared=0),
            "candidates": results,
        }
    )
    return PipelineOutput(result, {})


def parse_memory(text: str) -> int:
    """Return the bytes of ``8GiB``.

    Raises
    ------
    ValueError
        Where the text has another form.
    """
    match = re.fullmatch(r"([0-9]{1,15})(KiB|MiB|GiB|)", text.replace(" ", ""))
    if match is None or int(match[1]) == 0:
        raise ValueError(f"--memory {text!r}: expected a size such as 8GiB")
    return int(match[1]) * _UNITS[match[2]]


def _candidate(
    candidate: Candidate, found: Gathered, source: RecallSource, memory: int
) -> CandidateResult:
    info, profile, config = candidate.info, profile_of(candidate.info), source.model.config
    recall = recall_result(found, config.index_topk, source.distractors, source.label)
    recall = recall.model_copy(update={"cost": _cost(candidate, found.row_bytes, memory)})
    a_token = None if found.row_bytes is None else found.row_bytes / 4
    return CandidateResult.model_validate(
        {
            "name": info.name,
            "format": info.format,
            "device": info.device,
            "kernel": Kernel(
                variant=info.variant,
                source_sha256=info.source_sha256,
                path_taken="queries of needles",
            ),
            "profile": Profile(name=profile.name, switches=profile.switches()),
            "verdict": MATCH if recall.rows else CANNOT_JUDGE,
            "first_divergence": None,
            "layers": (),
            "recall": recall,
            "format_cost": FormatCost(cache_bytes_per_token=a_token),
            "memory": MemoryResult(peak_transient_bytes=None, law=transient_law(candidate)),
        }
    )


def _cost(candidate: Candidate, key_bytes: float | None, memory: int) -> RecallCost:
    """Return whether the format can be afforded: ``memory`` bytes filled with its index keys."""
    measured = predicted = None
    if isinstance(candidate, MeasuresPrompts):
        measured, predicted = candidate.prompt_transients(PROMPT_TOKENS, PROMPT_HEADS)
    a_token = None if key_bytes is None else key_bytes / 4
    return RecallCost(
        key_bytes=key_bytes,
        bytes_per_token=a_token,
        layers=LAYERS,
        memory_bytes=memory,
        tokens_that_fit=None if a_token is None else int(memory / (a_token * LAYERS)),
        prompt_tokens=PROMPT_TOKENS,
        transient_measured=measured,
        transient_predicted=predicted,
    )
