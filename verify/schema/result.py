"""``needlepoint.result/1``: the record of a run; every report is made from it.

The terminal report, the JSON file, JUnit and gates all read a :class:`Result`; nothing else travels
from the pipeline to them. Models are strict, closed and frozen. Every number is finite or null: a
statistic that has no finite value is null, and ``rows_not_finite`` says how many rows caused that.
Per-row errors are not in the record; they are written beside it (``verify/recording/results.py``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Literal

from pydantic import Field

from needlepoint.verify.schema.base import (
    CANNOT_JUDGE,
    DIFFER,
    MATCH,
    Contract,
    Count,
    KeyFormat,
    Kind,
    Number,
    Path,
    Record,
    Sha256,
    StageName,
    Verdict,
)
from needlepoint.verify.schema.recall import RecallCell, RecallResult, ScenarioResult
from needlepoint.verify.schema.repeat import RepeatResult
from needlepoint.verify.schema.shrink import ShrinkResult
from needlepoint.verify.schema.stage import (
    ErrorStats,
    LayerResult,
    Spread,
    StageLimit,
    StageResult,
    Swaps,
    TopkResult,
    WorstRow,
)

__all__ = [
    "CANNOT_JUDGE",
    "DIFFER",
    "MATCH",
    "SCHEMA",
    "CandidateResult",
    "Contract",
    "ContractCost",
    "Counts",
    "Environment",
    "ErrorStats",
    "FirstDivergence",
    "FormatCost",
    "GateResult",
    "InputInfo",
    "Kernel",
    "KeyFormat",
    "Kind",
    "LayerResult",
    "MemoryLaw",
    "MemoryPoint",
    "MemoryResult",
    "Path",
    "Profile",
    "RecallCell",
    "RecallResult",
    "Record",
    "Result",
    "ScenarioResult",
    "Spread",
    "StageLimit",
    "StageName",
    "StageRef",
    "StageResult",
    "Swaps",
    "TopkResult",
    "Verdict",
    "WorstRow",
    "worst_verdict",
]

SCHEMA: Final = "needlepoint.result/1"


class Environment(Record):
    """Where the run was made. Holds no host name, user name or file path."""

    needlepoint: str
    python: str
    torch: str
    numpy: str
    platform: str
    """Operating system and machine, for example ``Linux x86_64``."""
    cpu: str
    threads: Count
    device: str
    """``cpu``, or the accelerator's product name."""
    world: Count
    """Processes that took part; 1 without torchrun."""


class InputInfo(Record):
    """What both sides were given."""

    name: str
    sha256: Sha256
    tokens: Count
    requests: Count
    lengths: tuple[Count, ...] | None = None
    """Tokens of each request; null in results that do not say."""
    model: str | None = None
    seed: int | None = None


class StageRef(Record):
    """One stage of one layer of one candidate that was not compared, and why."""

    candidate: str
    layer: int
    stage: StageName
    path: Path
    reason: str = ""


class Counts(Record):
    """Stages of all candidates and layers: declared, compared, and what is missing."""

    expected: Count
    compared: Count
    skipped: tuple[StageRef, ...] = ()
    not_covered: tuple[StageRef, ...] = ()


class GateResult(Record):
    """One ``--gate`` applied to one candidate."""

    path: str
    limit: Number
    found: Number | None
    """The value furthest past the limit; null where the gate could not be judged."""
    exceeded: bool | None
    """Null where the gate could not be judged."""
    operator: Literal["<=", "<", ">=", ">", "=="] = "<="
    candidate: str | None = None
    detail: str | None = None


class ContractCost(Record):
    """What the candidate costs against one contract; ``rel_*`` are over index keys."""

    rel_mean: Number | None
    rel_max: Number | None
    overlap_mean: Number | None
    score_lost_max: Number | None


class FormatCost(Record):
    """Cost against the contracts, and bytes of the compressed caches per token."""

    exact: ContractCost | None = None
    bf16: ContractCost | None = None
    official: ContractCost | None = None
    cache_bytes_per_token: Number | None = None


class MemoryPoint(Record):
    """One measured size of the transient-memory law."""

    queries: Count
    heads: Count
    keys: Count
    bytes: Count


class MemoryLaw(Record):
    """Fit of ``bytes = bytes_per_product * queries * heads * keys`` and one prediction from it."""

    bytes_per_product: Number
    points: tuple[MemoryPoint, ...]
    predicted_tokens: Count
    predicted_bytes: Count
    """Never allocated: a prediction."""


class MemoryResult(Record):
    """Transient memory of one candidate."""

    peak_transient_bytes: Count | None
    law: MemoryLaw | None = None


class Kernel(Record):
    """Which code ran."""

    variant: str
    source_sha256: str
    path_taken: str


class Profile(Record):
    """The arithmetic that the candidate declares."""

    name: str
    switches: dict[str, str | bool]


class FirstDivergence(Record):
    """The first stage, in layer and stage order, that differs, and the token to look at."""

    layer: Count
    stage: StageName
    path: Path
    request: Count | None
    """Null, with the position, for a byte that belongs to no token."""
    position: Count | None
    entry: Count | None
    detail: str
    error: Number | None = None
    """In units of the stage's limit; null where not finite."""


class CandidateResult(Record):
    """Verdict on one candidate, decided by its profile alone."""

    name: str
    format: KeyFormat
    device: str
    kernel: Kernel
    profile: Profile
    verdict: Verdict
    first_divergence: FirstDivergence | None
    layers: tuple[LayerResult, ...]
    recall: RecallResult | None = None
    format_cost: FormatCost = FormatCost()
    memory: MemoryResult = MemoryResult(peak_transient_bytes=None)
    repeat: RepeatResult | None = None


class Result(Record):
    """One run: the root of ``needlepoint.result/1``."""

    schema_: Literal["needlepoint.result/1"] = Field(default=SCHEMA, alias="schema")
    verdict: Verdict
    detail: str | None = None
    contract: Contract
    gates: tuple[GateResult, ...] = ()
    environment: Environment
    input: InputInfo
    counts: Counts
    candidates: tuple[CandidateResult, ...]
    scenario: ScenarioResult | None = None
    shrink: ShrinkResult | None = None
    notes: tuple[str, ...] = ()
    """What became of options that change no verdict, one line each."""


def with_notes(result: Result, *notes: str) -> Result:
    """Return the result with more notes, each on one line."""
    lines = tuple(" ".join(note.split()) for note in notes)
    return result.model_copy(update={"notes": (*result.notes, *lines)})


def worst_verdict(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict of a whole from the verdicts of its parts.

    A part that could not be judged makes the whole ``cannot-judge``, even beside one that differs:
    a shortfall must not be read as a complete answer. Nothing at all is ``cannot-judge`` too.
    """
    found = set(verdicts)
    if not found or CANNOT_JUDGE in found:
        return CANNOT_JUDGE
    return DIFFER if DIFFER in found else MATCH
