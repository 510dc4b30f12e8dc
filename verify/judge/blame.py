"""Where an error comes from: split of one stage's error, and its input beside its output.

Three parts of one stage, each as root mean square relative to the reference's rows: *format*, what
the stage's rounding point costs the reference itself; *arithmetic*, the candidate's accumulated
error in the rows within the limit; *fault*, the same in the rows beyond it. A stage whose output is
no worse than its input only passes on what it was given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import StageKey
from needlepoint.verify.base.stages import TOPK, feeds
from needlepoint.verify.numerics.row_errors import StageErrors
from needlepoint.verify.numerics.spread import finite
from needlepoint.verify.numerics.tally import Tally
from needlepoint.verify.schema.stage import StageBlame, StageResult


def stage_blame(errors: StageErrors, limit: float) -> StageBlame | None:
    """Return the split of one stage; its input is known only beside its neighbours.

    Parameters
    ----------
    errors
        Row errors, both ways.
    limit
        Limit that separates arithmetic from fault.
    """
    if errors.key[1] == TOPK or not errors.accumulated.rows:
        return None
    row, tally = errors.accumulated, errors.local.tally
    size2 = row.reference_norm.square().sum()
    failed = row.failed(limit)
    error2 = row.error_norm.square()
    within = torch.where(failed, 0.0, error2).sum()
    beyond = torch.where(failed, error2, 0.0).sum()
    return StageBlame(
        format=_share(tally[:, Tally.FORMAT2].sum(), tally[:, Tally.NORM2].sum()),
        arithmetic=_share(within, size2),
        fault=_share(beyond, size2),
        input=None,
        output=_share(within + beyond, size2),
    )


def with_inputs(stages: Iterable[StageResult], ratio: int) -> tuple[StageResult, ...]:
    """Return the stages of a layer, each with the error that it was given.

    A stage that was not observed hands on what it was given itself, so the search goes back to the
    observed ones.
    """
    listed = tuple(stages)
    known: dict[StageKey, StageResult] = {(s.path, s.stage): s for s in listed}
    return tuple(
        stage
        if stage.blame is None
        else stage.model_copy(
            update={
                "blame": stage.blame.model_copy(
                    update={"input": _worst_input((stage.path, stage.stage), known, ratio)}
                )
            }
        )
        for stage in listed
    )


def _worst_input(key: StageKey, known: Mapping[StageKey, StageResult], ratio: int) -> float | None:
    found: list[float] = []
    for feed in feeds(key, ratio):
        stage = known.get(feed)
        if stage is not None and stage.blame is not None:
            found += [stage.blame.output] if stage.blame.output is not None else []
        elif (before := _worst_input(feed, known, ratio)) is not None:
            found.append(before)
    return max(found, default=None)


def _share(part2: Tensor, whole2: Tensor) -> float | None:
    if not float(part2):
        return 0.0
    return finite(math.sqrt(float(part2) / float(whole2))) if float(whole2) else None
