"""Comparisons that say nothing: each is refused, with what it lacks.

A limit as wide as the data passes zeros; a limit below half an ULP passes nothing; constant rows
cannot show a row in the wrong place; a selection that leaves nothing out cannot be wrong; memory
shared by both sides equals itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from needlepoint.optimized.interface import LayerInputs, Observed, StageKey
from needlepoint.verify.bias import Z_LIMIT
from needlepoint.verify.given import given_tensors
from needlepoint.verify.key_side import StageErrors
from needlepoint.verify.result_stage import BiasTest
from needlepoint.verify.stages import SCORES, TOPK, is_key_side
from needlepoint.verify.tally import Tally


def limit_range(errors: StageErrors) -> tuple[float | None, float | None]:
    """Return the narrowest and the widest limit that a stage can be judged by.

    Returns
    -------
    tuple
        Below the first, every row's limit is narrower than half an ULP of its largest element. From
        the second on, every row's radius is as wide as its largest element. None where there is no
        such limit.
    """
    # Of the reference's own rows: what a broken candidate found must not look like a bad limit.
    tally = errors.accumulated.tally
    tally = tally[tally[:, Tally.SIZE] > 0]
    if not len(tally):
        return None, None
    widest = float((tally[:, Tally.SIZE] / tally[:, Tally.REACH]).max())
    narrowest = float(tally[:, Tally.NARROWEST].min())
    return narrowest or None, widest if widest < math.inf else None


def passing_limit(
    worst: float, tests: Iterable[BiasTest], narrowest: float | None, widest: float | None
) -> float | None:
    """Return the smallest limit that a stage passes; None where no limit can be met.

    Parameters
    ----------
    worst
        Largest row error, local or accumulated.
    tests
        Directions of the stage.
    narrowest, widest
        As :func:`limit_range`.
    """
    leaning = max((abs(test.z) / Z_LIMIT for test in tests), default=0.0)
    needed = max(worst, narrowest or 0.0, leaning if leaning > 1 else 0.0)
    needed *= 1 + 2.0**-22  # rows are kept in fp32
    return needed if needed < (math.inf if widest is None else widest) else None


def limit_fault(value: float, narrowest: float | None, widest: float | None) -> str | None:
    """Return why a limit cannot judge a stage; None where it can."""
    if widest is not None and value >= widest:
        return (
            f"limit {value:.3g} is wider than the data: from {widest:.3g} on, rows of zeros would "
            "pass; give a smaller limit"
        )
    if narrowest is not None and value < narrowest:
        return (
            f"limit {value:.3g} is narrower than half an ULP: below {narrowest:.3g} not even the "
            "rounded reference passes; give a larger limit"
        )
    return None


def require_own_memory(given: LayerInputs, observed: Observed) -> None:
    """Refuse results that lie in the memory of what was given: they equal it whatever ran.

    Raises
    ------
    ValueError
        Naming the stage and the given tensor.
    """
    known = {_memory(tensor): name for name, tensor in given_tensors(given) if tensor.numel()}
    for name, tensor in _observed_tensors(observed):
        if tensor.numel() and _memory(tensor) in known:
            raise ValueError(
                f"{name} lies in the memory of the given {known[_memory(tensor)]}; expected a "
                "tensor that the candidate computed"
            )


def require_apart(layer: int, observed: Mapping[str, Observed]) -> None:
    """Refuse candidates that share memory: what one wrote would be judged as the other's.

    Raises
    ------
    ValueError
        Naming both candidates and the stage.
    """
    owner: dict[int, str] = {}
    for candidate, part in observed.items():
        found = [(name, _memory(t)) for name, t in _observed_tensors(part) if t.numel()]
        for name, memory in found:
            other = owner.get(memory, candidate)
            if other != candidate:
                raise ValueError(
                    f"layer {layer}: {name} of candidate {candidate} lies in memory that candidate "
                    f"{other} returned; expected each candidate to return its own"
                )
        owner |= {memory: candidate for _, memory in found}


def require_moving(given: LayerInputs, errors: Mapping[StageKey, StageErrors]) -> None:
    """Refuse stages whose rows are all alike or empty: a row in the wrong place could not show.

    Requests without a complete window have nothing to compare, which is said elsewhere.

    Raises
    ------
    ValueError
        Naming the stage.
    """
    if not any(length // given.ratio for length in given.lengths):
        return
    same_input = len(given.hidden) > 1 and bool((given.hidden == given.hidden[:1]).all())
    for key, stage in errors.items():
        # Picks are judged by the scores that they are made from.
        what = None if key[1] == TOPK else _alike(stage, same_input)
        if what is not None:
            raise ValueError(
                f"layer {given.layer} {'.'.join(key)}: {what}, so a row in the wrong place could "
                "not show; give input that varies, or an input kind that declares itself constant"
            )


def _alike(stage: StageErrors, same_input: bool) -> str | None:
    """Return in which way all rows of the reference are alike; None where they are not."""
    norm = stage.accumulated.reference_norm
    if not len(norm):
        return None
    if not bool(norm.any()):
        if stage.key[1] == SCORES:
            return "no query sees an entry, or all scores are zero"
        return "every row of the reference is zero"
    if same_input and is_key_side(stage.key):
        return "all rows of the reference are made from equal input"
    return None


def _observed_tensors(observed: Observed) -> Iterator[tuple[str, Tensor]]:
    yield from ((".".join(key), rows) for key, rows in observed.dense.items())
    for path, paged in observed.stored.items():
        yield f"{path}.stored", paged.pool
    if observed.query is not None:
        yield "query.query", observed.query.codes
        yield "query.weights", observed.query.weights
    if observed.topk is not None:
        yield "index.topk", observed.topk
    if observed.attention is not None:
        yield "main.attention", observed.attention


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
