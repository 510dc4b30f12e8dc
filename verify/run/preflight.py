"""Checks of a run before it starts: candidates, stages, and inputs that cannot be judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from needlepoint.optimized.protocol.interface import INDEX, Candidate, CandidateInfo, StageKey
from needlepoint.reference.formats.names import PER_TOKEN
from needlepoint.verify.base.stages import TOPK, declared_stages, require_declared
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.candidate_run import CandidateFailed, blamed
from needlepoint.verify.judge.profiles import profile_of
from needlepoint.verify.schema.result import KeyFormat


def require_distinct(candidates: Sequence[Candidate]) -> None:
    """Refuse no candidate, one of unprintable name, or two of one name: results are filed by it."""
    names = [candidate.info.name for candidate in candidates]
    if not names:
        raise ValueError("no candidate: name at least one with --candidate")
    unprintable = [name for name in names if not name or not name.isprintable()]
    if unprintable:
        raise ValueError(f"candidate name {unprintable[0]!r}: expected printable text on one line")
    for number, name in enumerate(names):
        first = names.index(name)
        if first != number:
            raise ValueError(
                f"candidates {first + 1} and {number + 1} of this run both call themselves {name} "
                "(info.name), and results are filed by that name; give each its own"
            )


def require_known(info: CandidateInfo) -> None:
    """Refuse a candidate that could not be judged, before anything has run."""
    if info.format not in get_args(KeyFormat):
        raise CandidateFailed(
            f"candidate {info.name}: key format {info.format!r}, expected one of "
            f"{', '.join(get_args(KeyFormat))}"
        )
    profile_of(info)


def require_asked(
    inputs: Inputs, candidates: Sequence[Candidate], stages: frozenset[StageKey] | None
) -> None:
    """Refuse ``--stages`` that a candidate does not declare in any layer of the run."""
    of_ratio = {inputs.config.ratio(layer): layer for layer in inputs.layers}
    of_ratio.pop(0, None)
    for candidate in candidates if stages is not None and of_ratio else ():
        declared: set[StageKey] = set()
        for ratio, layer in of_ratio.items():
            with blamed(candidate.info.name, layer):
                declared |= candidate.stages(ratio)
        require_declared(stages or (), declared, f"candidate {candidate.info.name} declares")


def require_selection(
    inputs: Inputs, candidates: Sequence[Candidate], stages: frozenset[StageKey] | None
) -> None:
    """Refuse picks that cannot be wrong: with fewer entries than k every query picks all it sees.

    Such a comparison would pass whatever the scores and the selection do.
    """
    asked = stages is None or (INDEX, TOPK) in stages
    k = inputs.config.index_topk
    for layer in inputs.layers if asked else ():
        ratio = inputs.config.ratio(layer)
        if ratio not in (PER_TOKEN, 4) or not any(
            (INDEX, TOPK) in candidate.stages(ratio) for candidate in candidates
        ):
            continue
        most = max(inputs.requests) // ratio
        if k >= most:
            raise ValueError(
                f"layer {layer}: k {k} is {'larger' if k > most else 'no smaller'} than the pool, "
                f"the longest request has {most} "
                "entries: every query would pick all it sees and no selection would be tested; "
                "give more tokens, a model of smaller index_topk, or name --stages without topk"
            )


def require_per_token(inputs: Inputs, candidates: Sequence[Candidate], *, swap: bool) -> None:
    """Refuse what layers of one key a token cannot be asked for."""
    layers = [layer for layer in inputs.layers if inputs.config.ratio(layer) == PER_TOKEN]
    if not layers:
        return
    if swap:
        raise ValueError(
            f"layer {layers[0]}: --swap prices a stage in the attention of its layer, which is "
            "not modelled at ratio 1; leave it out"
        )
    known = declared_stages(PER_TOKEN)
    for candidate in candidates:
        with blamed(candidate.info.name, layers[0]):
            declared = candidate.stages(PER_TOKEN)
        if not declared or not declared <= set(known):
            raise CandidateFailed(
                f"candidate {candidate.info.name}: does not know layers of one index key a token "
                f"(layer {layers[0]}, ratio 1), whose stages are "
                + ", ".join(".".join(key) for key in known)
            )
