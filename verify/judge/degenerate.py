"""Comparisons that could not fail: each is refused, with the reason.

A limit as wide as the data passes zeros; a limit below half an ULP passes nothing; constant rows
cannot show a row in the wrong place; a selection that leaves nothing out cannot be wrong; memory
shared by both sides equals itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, split

from needlepoint.optimized.protocol.interface import INDEX, LayerInputs, Observed, StageKey
from needlepoint.verify.base.stage_tensors import output_tensors
from needlepoint.verify.base.stages import INPUT, PROJECTED, SCORES, TOPK, is_key_side
from needlepoint.verify.inputs.layer_inputs import given_tensors
from needlepoint.verify.inputs.synthetic import CONSTANT
from needlepoint.verify.numerics.row_errors import StageErrors
from needlepoint.verify.numerics.tally import Tally


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


def require_moving(
    given: LayerInputs,
    errors: Mapping[StageKey, StageErrors],
    stages: frozenset[StageKey] | None = None,
) -> None:
    """Refuse stages whose rows are all alike or empty: a row in the wrong place could not show.

    The reference's rows count: a candidate that returns a constant where the reference does not is
    wrong. Picks are judged by the scores that they are made from, also where the candidate shows
    none; requests without a complete window have nothing to compare, which is said elsewhere.

    Parameters
    ----------
    given
        The given tensors of the layer.
    errors
        Row errors of each observed stage.
    stages
        Stages that are asked for; None for all.

    Raises
    ------
    ValueError
        Naming the stage.
    """
    if not any(length // given.ratio for length in given.lengths):
        return
    for key, stage in errors.items():
        if key[1] in (INPUT, PROJECTED) or (stages is not None and key not in stages):
            continue
        what = _alike(given, stage)
        if what is not None:
            raise ValueError(
                f"layer {given.layer} {'.'.join(key)}: {what}, so a row in the wrong place could "
                "not show; give input that varies, or a kind that declares itself constant "
                f"(synthetic:{CONSTANT})"
            )


def _alike(given: LayerInputs, stage: StageErrors) -> str | None:
    """Return in which way all rows of the reference are alike; None where they are not."""
    meant = stage.accumulated
    if not meant.rows:
        return None
    if stage.key[1] in (SCORES, TOPK):
        if stage.key[1] == SCORES and not bool(meant.reference_norm.any()):
            return "no query sees an entry, or all scores are zero"
        # Scores no further apart than the radius may change places within the limit.
        apart = bool((meant.tally[:, Tally.SPREAD] > meant.tally[:, Tally.REACH]).any())
        several = max(given.lengths) // given.ratio > 1
        same = several and (not apart or _windows_alike(given, INDEX))
        return "every query scores all its entries alike" if same else None
    if not bool(meant.reference_norm.any()):
        return "every row of the reference is zero"
    content = stage.local.tally[:, Tally.CONTENT]
    overlap = is_key_side(stage.key) and given.ratio == 4
    if overlap:
        # Windows of 4 overlap: the first of a request has none before it and differs.
        content = content[torch.cat([torch.arange(n // 4) for n in given.lengths]) > 0]
    alike = len(content) > 1 and bool((content == content[0]).all())
    # One short prompt over and over has as many kinds of rows as the prompt has windows.
    if alike and (not overlap or _windows_alike(given, stage.key[0])):
        return "all rows of the reference are made from equal input"
    return None


def _windows_alike(given: LayerInputs, path: str) -> bool:
    """Return whether all windows of a path hold the same projections."""
    part, ratio = given.paths[path], given.ratio
    for rows in (part.kv, part.score):
        requests = [own for own in split(rows, list(given.lengths)) if len(own) >= ratio]
        first = requests[0][:ratio]
        for own in requests:
            count = len(own) // ratio
            windows = own[: count * ratio].reshape(count, ratio, own.shape[1])
            if not bool((windows == first).all()):
                return False
    return True


def _observed_tensors(observed: Observed) -> Iterator[tuple[str, Tensor]]:
    """Yield what holds numbers of a stage; tables and scales beside them may be shared."""
    for name, tensor in output_tensors(observed).items():
        if ".page_table." not in name and not name.endswith(".scales"):
            yield ".".join(name.split(".")[:2]), tensor


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
