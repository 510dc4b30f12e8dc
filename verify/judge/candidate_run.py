"""Run one candidate on one layer and check that it keeps the protocol; otherwise no verdict.

Whatever goes wrong in foreign code becomes one error that names the candidate and the layer. What
it returned is held to the registry of stages, so that no comparison meets a shape or dtype that it
does not expect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import (
    MAIN,
    Candidate,
    LayerInputs,
    Observed,
    ScoreReader,
    StageKey,
)
from needlepoint.verify.base.stage_tensors import check_outputs, returned_stages
from needlepoint.verify.base.stages import ATTENTION, INPUT, PROJECTED, declared_stages
from needlepoint.verify.inputs.layer_inputs import changed_tensors, fingerprint
from needlepoint.verify.judge.degenerate import require_own_memory


class CandidateFailed(ValueError):
    """A candidate raised or broke the protocol: no verdict, ever."""


def observe(candidate: Candidate, given: LayerInputs) -> Observed:
    """Run one candidate on the given tensors of a layer.

    Parameters
    ----------
    candidate
        Who runs.
    given
        What it may read.

    Returns
    -------
    Observed
        As returned; a failure of its score reader will be a :class:`CandidateFailed` too.

    Raises
    ------
    CandidateFailed
        If it raises, changes a tensor that it was given, or returns a tensor of another shape or
        dtype than its stage has, one in the memory of what it was given, or a stage that it does
        not declare.
    """
    name, before = candidate.info.name, fingerprint(given)
    with blamed(name, given.layer):
        declared = candidate.stages(given.ratio)
        poison_free_memory(given)
        observed = candidate.run(given)
        changed = changed_tensors(before, given)
        if changed:
            raise CandidateFailed(
                f"candidate {name}, layer {given.layer}: changed its inputs "
                f"{', '.join(changed)}; expected the given tensors to be left alone"
            )
        _require_protocol(given, declared, observed)
        require_own_memory(given, observed)
        observed = _without_history(observed)
    if observed.scores is None:
        return observed
    return replace(observed, scores=_blamed_reader(observed.scores, name, given.layer))


def poison_free_memory(given: LayerInputs) -> None:
    """Fill memory that a candidate's outputs are likely to reuse with 0xFF, NaN in most formats.

    A candidate allocates its own outputs. What an earlier run left there may be the right answer,
    and a row that was never written would pass for one that was.
    """
    entries = sum(length // given.ratio for length in given.lengths)
    rows = [entries * 4 * part.norm_weight.numel() for part in (given.index, given.main) if part]
    picks = [sum(given.lengths) * given.topk * 4]
    # Two at a time, because several stages are of one size; all are freed together.
    held = [torch.full((size,), 0xFF, dtype=torch.uint8) for size in 2 * (rows + picks)]
    held.clear()


def require_unchanged(before: Mapping[str, int], given: LayerInputs, names: Iterable[str]) -> None:
    """Refuse given tensors that changed after every candidate had returned.

    Parameters
    ----------
    before
        Fingerprint of the given tensors before the first candidate ran.
    given
        The given tensors.
    names
        Candidates that ran on them.

    Raises
    ------
    CandidateFailed
        If a tensor changed: a score reader or a thread of a candidate wrote to it.
    """
    changed = changed_tensors(before, given)
    if changed:
        raise CandidateFailed(
            f"layer {given.layer}: the given tensors {', '.join(changed)} changed while they were "
            f"judged, by a score reader or a thread of candidate {', '.join(names)}; expected them "
            "to be left alone"
        )


def missing_stages(
    candidate: Candidate, given: LayerInputs, observed: Observed
) -> tuple[StageKey, ...]:
    """Return the stages that a candidate declares and did not return, in alphabetical order."""
    returned = returned_stages(given, observed)
    return tuple(sorted(set(candidate.stages(given.ratio)) - set(returned)))


@contextmanager
def blamed(candidate: str, layer: int) -> Iterator[None]:
    """Turn an error of or about a candidate into one that names it and the layer.

    Raises
    ------
    CandidateFailed
        For any exception inside.
    """
    try:
        yield
    except (CandidateFailed, KeyboardInterrupt):
        raise
    except BaseException as error:  # an exit or a cancellation in foreign code is no verdict either
        # A ValueError is written to be read; of any other the type says more than the text.
        what = f": {error}"
        if not isinstance(error, ValueError):
            what = f" failed: {type(error).__name__}: {error}"
        raise CandidateFailed(f"candidate {candidate}, layer {layer}{what}") from error


def _require_protocol(given: LayerInputs, declared: Collection[StageKey], observed: object) -> None:
    if not isinstance(observed, Observed):
        raise ValueError(f"run returned {type(observed).__name__}, expected Observed")
    returned = check_outputs(given, observed)
    known = declared_stages(given.ratio)
    for key in sorted(declared):
        if key not in known:
            raise ValueError(
                f"stages() names {'.'.join(key)}; a layer of ratio {given.ratio} has "
                + ", ".join(".".join(stage) for stage in known)
            )
    if (MAIN, ATTENTION) in declared and observed.attention is None:
        raise ValueError("stages() names main.attention and run did not return it")
    for key in returned:
        if key not in declared and key[1] not in (INPUT, PROJECTED):
            raise ValueError(
                f"run returned stage {'.'.join(key)}, which is not declared; stages() must name "
                "every stage that run() returns"
            )


def _without_history(observed: Observed) -> Observed:
    """Return the same memory without autograd's record: weights are often parameters."""
    query, own = observed.query, observed.attention
    if query is not None:
        query = replace(query, codes=query.codes.detach(), weights=query.weights.detach())
        if query.scales is not None:
            query = replace(query, scales=query.scales.detach())
    return replace(
        observed,
        dense={key: rows.detach() for key, rows in observed.dense.items()},
        query=query,
        attention=None if own is None else own.detach(),
    )


def _blamed_reader(reader: ScoreReader, candidate: str, layer: int) -> ScoreReader:
    def read(request: int, start: int, stop: int) -> Tensor:
        with blamed(candidate, layer):
            return reader(request, start, stop).detach()

    return read
