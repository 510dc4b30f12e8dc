"""``needlepoint.probe/1``: what live endpoints answered."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from needlepoint.verify.schema.base import Count, Interval, Number, Record

SCHEMA: Final = "needlepoint.probe/1"


class ProbeCell(Record):
    """Questions at one point of the grid, one arm, all passes."""

    length: Count
    depth: Number
    kind: Literal["content", "position", "quote"]
    rows: Count
    """Questions that were answered."""
    hits: Count
    ci95: Interval | None
    unanswered: Count


class ProbePass(Record):
    """One pass of one arm."""

    start: Count
    cache: Literal["cold", "warm"]
    concurrency: Count
    rows: Count
    hits: Count
    ci95: Interval | None
    unanswered: dict[str, Count]
    """Replies that are no answers, by reason: dead, slow, busy, refused, junk."""


class ProbeArm(Record):
    """One server, or one setting of it."""

    label: str
    url: str
    """Without user, password and query."""
    model: str | None
    rows: Count
    hits: Count
    rate: Number | None
    ci95: Interval | None
    unanswered: dict[str, Count]
    prompt_tokens_max: Count | None
    cached_tokens: Count | None
    """Of all replies; null where the server does not count them."""
    picks: dict[str, Count] = Field(default_factory=dict)
    """Answers by how many layers picked the needle's estimated place, hits and misses apart."""
    cells: tuple[ProbeCell, ...]
    passes: tuple[ProbePass, ...]
    unstable: Count
    """Questions answered right in one pass and wrong in another."""


class ProbePair(Record):
    """Two arms on the questions that both answered, pass by pass."""

    first: str
    second: str
    rows: Count
    hits: Count
    """Of the second."""
    reference_hits: Count
    """Of the first."""
    lost: Count
    gained: Count
    delta: Number | None
    delta_ci95: Interval | None
    mcnemar_p: Number | None
    cluster_p: Number | None
    detectable_drop: Number | None
    conclusion: Literal["lower", "higher", "not shown"]


class ProbeResult(Record):
    """One run of ``recall --server``."""

    schema_: Literal["needlepoint.probe/1"] = Field(default=SCHEMA, alias="schema")
    verdict: Literal["match", "cannot-judge"]
    detail: str
    complete: bool
    """Whether every question was asked; false when the token budget ended the run."""
    questions: Count
    label: str
    arms: tuple[ProbeArm, ...]
    pairs: tuple[ProbePair, ...]
