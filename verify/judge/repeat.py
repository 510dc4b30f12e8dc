"""``--repeat N``: whether a candidate gives the same numbers every time, and what moved first.

Every run of a layer leaves one hash a stage, over canonical content in order: a hash that forgets
positions (an exclusive or, a norm) cannot see two rows change places. Stored rows are hashed as
codes and scales through their page tables, because where a page lies is nobody's business; picks as
sorted sets, because their order is not either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    QUERY,
    Candidate,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.verify.base.rows import Rows
from needlepoint.verify.base.stages import (
    ATTENTION,
    QUERIES,
    SCORES,
    STORED,
    TOPK,
    WEIGHTS,
    stage_order,
)
from needlepoint.verify.judge.candidate_run import blamed, observe
from needlepoint.verify.judge.sides.outputs import read_layer_rows
from needlepoint.verify.schema.repeat import Moved, RepeatResult, RepeatStage

_SCORE_BYTES = 64 << 20
"""Scores that are read at once."""


@dataclass(frozen=True)
class Snapshot:
    """One run of one layer: hash of each stage, and picks as sorted rows, -1 first."""

    hashes: Mapping[StageKey, str]
    picks: Tensor | None


def snapshot(given: LayerInputs, observed: Observed) -> Snapshot:
    """Return the hashes of what a candidate observed.

    Raises
    ------
    ValueError
        If stored rows or scores cannot be read.
    """
    hashes = {key: _digest([rows]) for key, rows in observed.dense.items()}
    for path, rows in read_layer_rows(given, observed).items():
        parts = (rows.encoded.codes, rows.encoded.scales, rows.rope)
        hashes[path, STORED] = _digest(part for part in parts if part is not None)
    query = observed.query
    if query is not None:
        codes = (query.codes,) if query.scales is None else (query.codes, query.scales)
        hashes[QUERY, QUERIES] = _digest(codes)
        hashes[QUERY, WEIGHTS] = _digest([query.weights])
    if observed.scores is not None:
        hashes[INDEX, SCORES] = _digest(_scores(given, observed))
    picks = None if observed.topk is None else observed.topk.sort(1).values
    if picks is not None:
        hashes[INDEX, TOPK] = _digest([picks])
    if observed.attention is not None:
        hashes[MAIN, ATTENTION] = _digest([observed.attention])
    return Snapshot(hashes, picks)


def repeated(
    candidate: Candidate, given: LayerInputs, first: Observed, runs: int
) -> list[Snapshot]:
    """Run a candidate again and again, and return a snapshot of each run, the first given.

    Raises
    ------
    CandidateFailed
        If a run fails or breaks the protocol.
    """
    found = []
    for run in range(runs):
        observed = observe(candidate, given) if run else first
        with blamed(candidate.info.name, given.layer):
            found.append(snapshot(given, observed))
    return found


@dataclass
class RepeatTally:
    """Repeated runs of one candidate, layer by layer."""

    runs: int
    stages: list[RepeatStage] = field(default_factory=list)
    moved: Moved | None = None
    rows_changed: int = 0
    picks_changed: int = 0

    def add(self, layer: int, snapshots: Sequence[Snapshot]) -> None:
        """Add the runs of one layer, the judged one first."""
        changed: list[StageKey] = []
        for key in sorted(snapshots[0].hashes, key=stage_order):
            found = [run.hashes.get(key) for run in snapshots]
            if len(set(found)) > 1:
                changed.append(key)
            self.stages.append(
                RepeatStage.model_validate(
                    {
                        "layer": layer,
                        "stage": key[1],
                        "path": key[0],
                        "hash": found[0],
                        "distinct": len(set(found)),
                    }
                )
            )
        if changed and self.moved is None:
            path, stage = changed[0]
            self.moved = Moved.model_validate(
                {"layer": layer, "stage": stage, "path": path, "what": _what(changed, snapshots[0])}
            )
        rows, picks = _churn([run.picks for run in snapshots if run.picks is not None])
        self.rows_changed += rows
        self.picks_changed += picks

    def result(self) -> RepeatResult:
        """Return the part of the result."""
        return RepeatResult(
            runs=self.runs,
            changed=sum(stage.distinct > 1 for stage in self.stages),
            moved_first=self.moved,
            rows_changed=self.rows_changed,
            picks_changed=self.picks_changed,
            stages=tuple(self.stages),
        )


def _what(changed: Sequence[StageKey], first: Snapshot) -> str:
    """Say whether scores or selection moved first, as far as the candidate shows both."""
    if changed[0] == (INDEX, TOPK):
        return "selection" if (INDEX, SCORES) in first.hashes else "scores or selection"
    return "scores" if changed[0] == (INDEX, SCORES) else "before scores"


def _churn(runs: Sequence[Tensor]) -> tuple[int, int]:
    """Return rows whose set of picks changed in any run, and picks that the first run lacks."""
    rows: Tensor | None = None
    picks = 0
    for run in runs[1:]:
        if run.shape != runs[0].shape:
            differ = torch.ones(len(runs[0]), dtype=torch.bool)
        else:
            differ = (run != runs[0]).any(1)
        rows = differ if rows is None else rows | differ
        for row in differ.nonzero()[:, 0].tolist():
            picks += len(set(run[row].tolist()) - set(runs[0][row].tolist()))
    return (0 if rows is None else int(rows.sum())), picks


def _scores(given: LayerInputs, observed: Observed) -> Iterator[Tensor]:
    if observed.scores is None:
        return
    for request, entries in enumerate(Rows(given.lengths, given.ratio).counts):
        step = max(1, _SCORE_BYTES // (4 * max(1, entries)))
        for start in range(0, given.lengths[request], step):
            stop = min(start + step, given.lengths[request])
            yield observed.scores(request, start, stop)


def _digest(parts: Iterable[Tensor]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(f"{part.dtype} {tuple(part.shape)};".encode())
        found.update(part.detach().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()
