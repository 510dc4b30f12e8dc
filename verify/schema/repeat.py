"""Repeat part of ``needlepoint.result/1``; null where a candidate ran once."""

from __future__ import annotations

from typing import Literal

from needlepoint.verify.schema.base import Count, Path, Record, StageName


class RepeatStage(Record):
    """One stage of one layer over all runs."""

    layer: Count
    stage: StageName
    path: Path
    hash: str
    """Of the judged run's content, in order."""
    distinct: Count
    """Different hashes over the runs: 1 if every run gave the same numbers."""


class Moved(Record):
    """The first stage, in layer and stage order, that was not the same in every run."""

    layer: Count
    stage: StageName
    path: Path
    what: Literal["before scores", "scores", "selection", "scores or selection"]
    """The last where the candidate shows no scores."""


class RepeatResult(Record):
    """Whether a candidate gives the same numbers every time."""

    runs: Count
    changed: Count
    """Stages, over all layers, that were not the same in every run."""
    moved_first: Moved | None
    rows_changed: Count
    """Queries whose set of picks changed in any run."""
    picks_changed: Count
    """Picks of later runs that the first run did not pick."""
    stages: tuple[RepeatStage, ...] = ()
