"""The stages of a layer as the judge sees them: order, rows and kind, read from the registry.

Which stages a layer has depends on its compression ratio alone: 4 (compressor, indexer and
attention), 128 (compressor and attention), 1 (an indexer with a key for every token, no compressor)
or 0 (attention over the window). ``input`` and ``attention`` belong to no path of their own and
stand under ``main``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from needlepoint.optimized.protocol.stages import (
    PATHS,
    REGISTRY,
    STAGES,
    Feeds,
    StageKey,
    stage_named,
)
from needlepoint.optimized.protocol.stages import RATIOS as RATIOS
from needlepoint.verify.schema.base import Kind

INPUT: Final = "input"
PROJECTED: Final = "projected"
POOLED: Final = "pooled"
NORMED: Final = "normed"
ROPED: Final = "roped"
ROTATED: Final = "rotated"
STORED: Final = "stored"
QUERIES: Final = "query"
WEIGHTS: Final = "weights"
SCORES: Final = "scores"
TOPK: Final = "topk"
ATTENTION: Final = "attention"

GIVEN: Final[Kind] = "given"
COMPARED: Final[Kind] = "compared"
CONSEQUENCE: Final[Kind] = "consequence"
NOT_COVERED: Final[Kind] = "not covered"
SKIPPED: Final[Kind] = "skipped"


def stage_order(key: StageKey) -> tuple[int, int]:
    """Return the sort key of a stage: stage first, then path, as divergences are ranked.

    Raises
    ------
    ValueError
        Where the path or the stage is unknown.
    """
    path, stage = key
    if path not in PATHS or stage not in STAGES:
        raise ValueError(
            f"stage {path}.{stage}: expected PATH.STAGE with a path of {', '.join(PATHS)} and a "
            f"stage of {', '.join(STAGES)}"
        )
    return STAGES.index(stage), PATHS.index(path)


def declared_stages(ratio: int) -> tuple[StageKey, ...]:
    """Return every stage of a layer of this ratio, in order.

    Raises
    ------
    ValueError
        Where the ratio is not 0, 1, 4 or 128.
    """
    return tuple(sorted(_feeds(ratio), key=stage_order))


def feeds(key: StageKey, ratio: int) -> tuple[StageKey, ...]:
    """Return the stages that a stage is computed from.

    Raises
    ------
    ValueError
        Where a layer of this ratio has no such stage.
    """
    _check_stage(key, ratio)
    return _feeds(ratio)[key]


def is_key_side(key: StageKey) -> bool:
    """Return whether rows of the stage are compressed entries rather than tokens."""
    return stage_named(key[1]).rows == "entries"


def rows_expected(key: StageKey, lengths: Sequence[int], ratio: int) -> int:
    """Return how many rows the stage has for requests of these lengths.

    Parameters
    ----------
    key
        (path, stage).
    lengths
        Tokens of each request.
    ratio
        Compression ratio of the layer.

    Returns
    -------
    int
        ``sum(length // ratio)`` for key-side stages, ``sum(lengths)`` for all others.

    Raises
    ------
    ValueError
        Where a layer of this ratio has no such stage.
    """
    _check_stage(key, ratio)
    if is_key_side(key):
        return sum(length // ratio for length in lengths)
    return sum(lengths)


def stage_kind(key: StageKey, brought: Collection[StageKey]) -> Kind:
    """Return the kind of a stage before anything ran.

    ``skipped`` is never returned: it is what a ``compared`` stage becomes where the comparison did
    not happen.

    Parameters
    ----------
    key
        (path, stage).
    brought
        Stages the candidate brings. ``input`` and ``projected`` are the common input of both sides
        unless the candidate brings its own.
    """
    stage_order(key)
    kind = stage_named(key[1]).kind
    if kind == CONSEQUENCE:
        return CONSEQUENCE
    if key in brought:
        return COMPARED
    return GIVEN if kind == GIVEN else NOT_COVERED


def require_declared(
    wanted: Collection[StageKey], declared: Collection[StageKey], whose: str
) -> None:
    """Refuse stages that were asked for and are not there to compare.

    A stage that was asked for on several paths is there if one of them has it.

    Parameters
    ----------
    wanted
        What ``--stages`` names.
    declared
        What there is.
    whose
        Words for the message, such as ``candidate x declares``.

    Raises
    ------
    ValueError
        Naming the stage and what there is.
    """
    for key in sorted(wanted, key=stage_order):
        if not any(have in wanted and have[1] == key[1] for have in declared):
            has = ", ".join(".".join(have) for have in sorted(declared)) or "none"
            raise ValueError(
                f"--stages {'.'.join(key)}: not among the stages that {whose} in these layers: "
                f"{has}; name some of them"
            )


def _feeds(ratio: int) -> dict[StageKey, tuple[StageKey, ...]]:
    """Return every stage of a layer and what it is computed from."""
    if ratio not in RATIOS:
        raise ValueError(f"compression ratio {ratio}: expected one of 0, 1, 4 and 128")
    nothing: Feeds = {}
    return {
        (path, stage.name): before
        for stage in REGISTRY
        for path, before in stage.feeds.get(ratio, nothing).items()
    }


def _check_stage(key: StageKey, ratio: int) -> None:
    if key not in _feeds(ratio):
        raise ValueError(
            f"stage {'.'.join(key)}: a layer of ratio {ratio} has only "
            + ", ".join(".".join(known) for known in declared_stages(ratio))
        )
