"""Recall and scenario parts of ``needlepoint.result/1``; null in runs that measured neither."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from needlepoint.verify.schema.base import Count, Interval, Number, Path, Record, StageName

CauseName = Literal["unreachable", "upstream", "corrupted", "outranked", "attenuated"]
UNREACHABLE: Final = "unreachable"
UPSTREAM: Final = "upstream"
CORRUPTED: Final = "corrupted"
OUTRANKED: Final = "outranked"
ATTENUATED: Final = "attenuated"
CAUSES: Final[tuple[CauseName, ...]] = (UNREACHABLE, UPSTREAM, CORRUPTED, OUTRANKED, ATTENUATED)


class RecallCell(Record):
    """Recall at one point of the grid, candidate and reference on the same rows."""

    length: Count
    """Tokens."""
    depth: Number
    k: Count
    distractors: Count
    rows: Count
    hits: Count
    ci95: Interval | None
    reference_hits: Count
    lost: Count
    """Rows that the reference hits and the candidate misses."""
    gained: Count
    exercised: bool
    """False where every finished window is picked whatever the scores say."""
    mcnemar_p: Number | None = None
    holm_p: Number | None = None
    """Adjusted for the number of exercised cells of this k and density."""
    detectable_drop: Number | None = None


class RecallMiss(Record):
    """One exercised needle that was missed at the model's k, and why."""

    length: Count
    depth: Number
    haystack: Count
    layer: Count
    start: Count
    stop: Count
    """Tokens of the answer, half open."""
    query: Count
    cause: Literal["unreachable", "upstream", "corrupted", "outranked", "attenuated"]
    by: str
    """Whose doing, where it can be said."""
    rank: Count | None
    """Entries that the candidate scores higher."""
    reference_rank: Count | None
    beyond: Count | None
    """How many places outside the picks."""
    gap: Number | None
    """Reference score of the needle minus that of the entry in its place."""
    allowed: Number | None
    """The a-priori limit of that gap."""
    page: Count | None
    mass: Number | None = None
    """Attention on the needle with the reference's picks; null where it was not computed."""
    mass_kept: Number | None = None
    output_error: Number | None = None


class RecallMargin(Record):
    """Needles at one margin, in units of the candidate's own score noise."""

    margin: Number
    rows: Count
    hits: Count
    ci95: Interval | None


class RecallLayer(Record):
    """Exercised needles in one layer."""

    layer: Count
    rows: Count
    hits: Count
    reference_hits: Count
    rank_median: Number | None
    reference_rank_median: Number | None


class RecallAside(Record):
    """Rows that were run and kept out of ``rows``, ``hits``, rate and p."""

    rows: Count
    picked: Count
    reference_picked: Count


class RecallCost(Record):
    """What a candidate's index keys and scoring take, beside its recall."""

    key_bytes: Number | None
    """Bytes of one index key."""
    bytes_per_token: Number | None
    """Of one layer."""
    layers: Count
    """Layers with an indexer in v4-flash."""
    memory_bytes: Count
    tokens_that_fit: Count | None
    """Tokens whose index keys of all those layers fit ``memory_bytes``."""
    prompt_tokens: Count
    transient_measured: Count | None
    """Peak of scoring the end of a prompt of ``prompt_tokens``; null where it was not run."""
    transient_predicted: Count | None


class RecallResult(Record):
    """Recall of one candidate beside the reference, at the default k and density."""

    rows: Count
    hits: Count
    rate: Number | None
    ci95: Interval | None
    reference_rate: Number | None
    lost: Count
    gained: Count
    delta: Number | None
    delta_ci95: Interval | None
    mcnemar_p: Number | None
    detectable_drop: Number | None
    cells: tuple[RecallCell, ...] = ()
    causes: dict[str, Count] = Field(default_factory=dict)
    label: str = ""
    """What the figures are of; a mini model's say so."""
    k: Count = 0
    distractors: Count | None = None
    haystacks: Count = 0
    """Clusters: needles of one share its text."""
    design_effect: Number | None = None
    """Of the differences; intervals count ``rows / design_effect`` needles."""
    cluster_p: Number | None = None
    """Exact sign-flip test over haystacks."""
    conclusion: Literal["lower", "higher", "not shown"] = "not shown"
    not_exercised: RecallAside = RecallAside(rows=0, picked=0, reference_picked=0)
    window: RecallAside = RecallAside(rows=0, picked=0, reference_picked=0)
    """Needles inside the query's sliding window, reached there; picks beside it."""
    misses: tuple[RecallMiss, ...] = ()
    margins: tuple[RecallMargin, ...] = ()
    cost: RecallCost | None = None
    layers: tuple[RecallLayer, ...] = ()
    reach: tuple[Count, ...] = ()
    """Needles that 0, 1, 2, .. of the layers pick."""


class ScenarioFailure(Record):
    """A history that failed on a candidate; ``history`` replays it with ``--scenario FILE``."""

    candidate: str
    ratio: Count
    event: Count
    request: str
    """Name of the request; empty for a byte that nobody owns."""
    path: Path
    stage: StageName
    position: Count
    entry: Count | None
    detail: str
    history: str
    """The scenario as TOML."""


class ScenarioGap(Record):
    """A candidate that was not driven through histories."""

    candidate: str
    histories: Count
    reason: str


class ScenarioResult(Record):
    """Request histories that were replayed."""

    histories: Count
    distinct: Count
    events: dict[str, Count]
    residues4: Count
    """Residues of lengths modulo 4 that were covered."""
    residues128: Count
    failures: Count
    """Histories that failed on some candidate."""
    failing: tuple[ScenarioFailure, ...] = ()
    """The first failure of each candidate, of a history made small."""
    not_covered: tuple[ScenarioGap, ...] = ()
    """Candidates that were not driven through some or all of the histories, and why."""
    replayed: str | None = None
    """The scenario of a run over one file, as TOML."""
