"""The stages of a layer: their order, what feeds what, how many rows each has, and its kind.

A stage is named by ``(path, stage)``. Which stages a layer has depends on its compression ratio
alone: 4 (compressor, indexer and attention), 128 (compressor and attention), 1 (an indexer with a
key for every token, no compressor) or 0 (attention over the window). ``input`` and ``attention``
belong to no path of their own and stand under ``main``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, get_args

from needlepoint.optimized.protocol.stage_keys import INDEX, MAIN, QUERY, StageKey
from needlepoint.verify.schema.base import Kind, StageName

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

STAGES: tuple[str, ...] = get_args(StageName)
"""Every stage name, in the order in which a token passes them."""

PATHS: tuple[str, ...] = (INDEX, MAIN, QUERY)

GIVEN: Final[Kind] = "given"
COMPARED: Final[Kind] = "compared"
CONSEQUENCE: Final[Kind] = "consequence"
NOT_COVERED: Final[Kind] = "not covered"
SKIPPED: Final[Kind] = "skipped"

RATIOS: tuple[int, ...] = (0, 1, 4, 128)

_KEY_SIDE = frozenset({POOLED, NORMED, ROPED, ROTATED, STORED})
_COMMON_INPUT = frozenset({INPUT, PROJECTED})

_MAIN_FEEDS: dict[StageKey, tuple[StageKey, ...]] = {
    (MAIN, INPUT): (),
    (MAIN, PROJECTED): ((MAIN, INPUT),),
    (MAIN, POOLED): ((MAIN, PROJECTED),),
    (MAIN, NORMED): ((MAIN, POOLED),),
    (MAIN, ROPED): ((MAIN, NORMED),),
    (MAIN, STORED): ((MAIN, ROPED),),
}
_INDEXER_FEEDS: dict[StageKey, tuple[StageKey, ...]] = {
    (INDEX, PROJECTED): ((MAIN, INPUT),),
    (QUERY, PROJECTED): ((MAIN, INPUT),),
    (INDEX, ROPED): ((INDEX, NORMED),),
    (INDEX, ROTATED): ((INDEX, ROPED),),
    (INDEX, STORED): ((INDEX, ROTATED),),
    (QUERY, QUERIES): ((QUERY, PROJECTED),),
    (QUERY, WEIGHTS): ((QUERY, PROJECTED),),
    (INDEX, SCORES): ((INDEX, STORED), (QUERY, QUERIES), (QUERY, WEIGHTS)),
    (INDEX, TOPK): ((INDEX, SCORES),),
}
_FEEDS: dict[int, dict[StageKey, tuple[StageKey, ...]]] = {
    0: {(MAIN, INPUT): (), (MAIN, ATTENTION): ((MAIN, INPUT),)},
    1: _INDEXER_FEEDS | {(MAIN, INPUT): (), (INDEX, NORMED): ((INDEX, PROJECTED),)},
    4: _MAIN_FEEDS
    | _INDEXER_FEEDS
    | {
        (INDEX, POOLED): ((INDEX, PROJECTED),),
        (INDEX, NORMED): ((INDEX, POOLED),),
        (MAIN, ATTENTION): ((MAIN, INPUT), (MAIN, STORED), (INDEX, TOPK)),
    },
    128: _MAIN_FEEDS | {(MAIN, ATTENTION): ((MAIN, INPUT), (MAIN, STORED))},
}


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
    path, stage = key
    return path != QUERY and stage in _KEY_SIDE


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
    stage = key[1]
    if stage == ATTENTION:
        return CONSEQUENCE
    if key in brought:
        return COMPARED
    return GIVEN if stage in _COMMON_INPUT else NOT_COVERED


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
    if ratio not in _FEEDS:
        raise ValueError(f"compression ratio {ratio}: expected one of 0, 1, 4 and 128")
    return _FEEDS[ratio]


def _check_stage(key: StageKey, ratio: int) -> None:
    if key not in _feeds(ratio):
        raise ValueError(
            f"stage {'.'.join(key)}: a layer of ratio {ratio} has only "
            + ", ".join(".".join(known) for known in declared_stages(ratio))
        )
