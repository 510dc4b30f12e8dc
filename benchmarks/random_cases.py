"""Random cases of a correct candidate: small inputs and models on which nothing may be flagged.

Kinds of input and candidates take turns, so that any run of 36 cases sees every pair; lengths,
shapes, slices, weights and page permutations are drawn. A case depends on (seed, index) alone, and
the draws are the same on every machine: one that raises an alarm can be replayed by its index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import FACTORIES, create
from needlepoint.reference.config import MODELS, ModelConfig
from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.reference.weights import LayerWeights, random_layer_weights
from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.inputs.checks import tensor_digest
from needlepoint.verify.inputs.draw import Draw
from needlepoint.verify.inputs.load import MINI, SYNTHETIC, Inputs, load_inputs
from needlepoint.verify.inputs.synthetic import (
    VARIED,
    declares_constant,
    synthetic_hidden,
    synthetic_weights,
)
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.run.pipeline import verify
from needlepoint.verify.schema.result import MATCH, LayerResult, Result

SOURCES = (MINI, *(f"{SYNTHETIC}:{kind}" for kind in VARIED))
CANDIDATES = tuple(name for name in FACTORIES if name.startswith("emulated:"))
LONGEST = 700
"""Default longest request: five windows of 128 and a half."""

_WINDOW = 128  # the larger ratio
_SHORTEST = _WINDOW + 2  # the least that the longest request of most cases has
_RECORDED = 8192  # the shipped recording has a request of at least so many tokens
_REQUESTS = (1, 1, 1, 2, 2, 2, 3, 3, 4)  # most cases have few requests


@dataclass(frozen=True)
class RandomCase:
    """One case: everything that its input and weights are made from.

    Attributes
    ----------
    index
        Number of the case under its seed.
    source
        ``mini`` or ``synthetic:KIND``.
    candidate
        Name of an emulated candidate.
    lengths
        Tokens of each request.
    starts
        First row of the recording of each request; ignored by synthetic kinds.
    config
        Model shapes: ``mini`` made smaller, with a ratio-4 and a ratio-128 layer.
    seed
        Of weights, synthetic states and page permutations.
    """

    index: int
    source: str
    candidate: str
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    config: ModelConfig
    seed: int

    def describe(self) -> str:
        """Return the case on one line."""
        c = self.config
        return (
            f"case {self.index}: {self.candidate} on {self.source}, requests {self.lengths}, "
            f"hidden {c.hidden_size}, latent {c.q_lora_rank}, {c.n_heads} heads, "
            f"{c.index_n_heads} index heads, k {c.index_topk}, seed {self.seed}"
        )


def random_case(seed: int, index: int, longest: int = LONGEST) -> RandomCase:
    """Return a case.

    Parameters
    ----------
    seed
        Of the whole run, non-negative.
    index
        Number of the case, non-negative.
    longest
        Largest request, 130 to 8,192.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """
    if min(seed, index) < 0 or not _SHORTEST <= longest <= _RECORDED:
        raise ValueError(
            f"random case: seed {seed}, index {index}, longest request {longest}; expected "
            f"non-negative numbers and {_SHORTEST} to {_RECORDED} tokens"
        )
    draw = Draw(seed, f"random case {index}")
    source = SOURCES[index % len(SOURCES)]
    lengths = _lengths(draw, longest)
    tokens, hidden = _recorded().shape if source == MINI else (longest, 64 * _uniform(draw, 1, 6))
    config = replace(
        MODELS[MINI],
        hidden_size=hidden,
        q_lora_rank=_one_of(draw, (32, 64, 128)),
        n_heads=_one_of(draw, (1, 2)),
        index_n_heads=_one_of(draw, (2, 4, 8)),
        index_topk=_topk(draw, max(lengths) // 4),
    )
    return RandomCase(
        index=index,
        source=source,
        candidate=CANDIDATES[index % len(CANDIDATES)],
        lengths=lengths,
        starts=tuple(_uniform(draw, 0, tokens - length) for length in lengths),
        config=config,
        seed=_uniform(draw, 0, (1 << 31) - 1),
    )


def case_inputs(case: RandomCase) -> Inputs:
    """Return the input of a case: both layers, or ratio 4 alone where no window of 128 is full."""
    kind = case.source.partition(":")[2]
    if kind:
        hidden = synthetic_hidden(kind, case.lengths, case.config.hidden_size, case.seed)
    else:
        spans = zip(case.starts, case.lengths, strict=True)
        hidden = torch.cat([_recorded()[start : start + length] for start, length in spans])
    layers = tuple(
        layer for layer, r in enumerate(case.config.compress_ratios) if r <= max(case.lengths)
    )

    def weights(layer: int) -> LayerWeights:
        drawn = random_layer_weights(case.config, layer, case.seed)
        return synthetic_weights(kind, drawn, case.seed) if kind else drawn

    return Inputs(
        name=case.source,
        sha256=tensor_digest([hidden]),
        config=case.config,
        requests=case.lengths,
        layers=layers,
        seed=case.seed,
        states=dict.fromkeys(layers, hidden),
        weights_of=weights,
        constant=declares_constant(case.source.removeprefix(f"{SYNTHETIC}:")),
    )


@dataclass(frozen=True)
class CaseOutcome:
    """What the judge said of a case."""

    case: RandomCase
    result: Result | None
    """The pipeline's result; None where it refused to judge."""
    alarm: str | None
    """Why a correct candidate was flagged or refused; None where all is well."""


def judge_case(case: RandomCase, limits: Limits | None = None) -> CaseOutcome:
    """Run the whole pipeline on a case; a refusal to judge is an alarm too."""
    try:
        result = verify(
            case_inputs(case),
            [create(case.candidate)],
            contract=BF16_CONTRACT,
            limits=limits or Limits.default(),
            stages=None,
            progress=NoProgress(),
        ).result
    except ValueError as error:
        return CaseOutcome(case, None, f"refused: {error}")
    return CaseOutcome(case, result, _alarm(result))


def faulty_swaps(layer: LayerResult) -> Mapping[str, int]:
    """Return the swaps and picks of a layer that a correct candidate never makes."""
    if layer.topk is None:
        return {}
    swaps = layer.topk.swaps
    return {
        "selector": swaps.selector,
        "unknown": swaps.unknown,
        "upstream": swaps.upstream,
        "invalid": layer.topk.invalid,
    }


def _alarm(result: Result) -> str | None:
    (candidate,) = result.candidates
    if result.verdict != MATCH or candidate.verdict != MATCH:
        first = candidate.first_divergence
        where = result.detail if first is None else first.model_dump_json()
        return f"{result.verdict}: {where}"
    for layer in candidate.layers:
        found = {name: count for name, count in faulty_swaps(layer).items() if count}
        if found:
            return f"layer {layer.layer}: {found} although the verdict is {result.verdict}"
    return None


def _lengths(draw: Draw, longest: int) -> tuple[int, ...]:
    """Return one request of at least a window of 128 in most cases, and companions of any size."""
    count = _one_of(draw, _REQUESTS)
    if _uniform(draw, 0, 15) == 0:
        return tuple(_uniform(draw, 4, _WINDOW - 1) for _ in range(count))
    lengths = [
        _uniform(draw, _SHORTEST, longest),
        *(_companion(draw, longest) for _ in range(count - 1)),
    ]
    at = _uniform(draw, 0, count - 1)
    return (*lengths[at:], *lengths[:at])


def _companion(draw: Draw, longest: int) -> int:
    """Return a length: any, beside a boundary of either ratio, or short, in equal parts."""
    shape = _uniform(draw, 0, 3)
    if shape == 0:
        return _uniform(draw, _SHORTEST, longest)
    if shape == 1:
        return _WINDOW * _uniform(draw, 1, (longest - 1) // _WINDOW) + _uniform(draw, -1, 1)
    if shape == 2:
        return 4 * _uniform(draw, 1, _WINDOW // 4) + _uniform(draw, -1, 2)
    return _uniform(draw, 1, 5)  # none or one window of 4


def _topk(draw: Draw, entries: int) -> int:
    """Return a k that leaves out something of the longest request, wherever it can."""
    fitting = tuple(k for k in (8, 16, 64) if k < entries)
    return _one_of(draw, fitting or (max(1, entries // 2),))


def _uniform(draw: Draw, low: int, high: int) -> int:
    return int(draw.integers(low, high, (1,))[0])


def _one_of(draw: Draw, choices: tuple[int, ...]) -> int:
    return choices[_uniform(draw, 0, len(choices) - 1)]


@cache
def _recorded() -> Tensor:
    """Return the longest request of the shipped recording, all of it consecutive text."""
    inputs = load_inputs(MINI)
    return inputs.hidden(0)[: inputs.requests[0]]
