"""Which gates fire on a candidate that returns something else than the sound one.

The sound run is judged whole, once. Of any other run only the stages whose tensors changed are
judged again, by the same functions that judge a candidate in ``verify``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import (
    INDEX,
    CandidateInfo,
    CompressorInputs,
    LayerInputs,
    Observed,
    QueryInputs,
    StageKey,
)
from needlepoint.reference.profile import needlepoint_profile
from needlepoint.verify.base.stage_blocks import Block, query_blocks
from needlepoint.verify.base.stages import (
    NORMED,
    POOLED,
    ROPED,
    ROTATED,
    STORED,
    TOPK,
    declared_stages,
)
from needlepoint.verify.diff.byte_compare import unowned_change
from needlepoint.verify.judge.candidate_run import CandidateFailed, blamed, missing_stages, observe
from needlepoint.verify.judge.degenerate import limit_range
from needlepoint.verify.judge.repeat import snapshot
from needlepoint.verify.judge.sides.key_side import KeyReference, key_reference
from needlepoint.verify.judge.sides.outputs import (
    has_query_side,
    judge_keys,
    key_paths,
    read_layer_rows,
)
from needlepoint.verify.judge.sides.query_reference import (
    QueryReference,
    ReferenceBlock,
    RotatedQueries,
)
from needlepoint.verify.judge.sides.query_side import QueryJudge
from needlepoint.verify.numerics.bias import bias_tests
from needlepoint.verify.numerics.directions import limit_fault
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.numerics.row_errors import StageErrors
from needlepoint.verify.numerics.selection import PickErrors, Swap
from needlepoint.verify.selftest.faults.fault import Case, Plant
from needlepoint.verify.selftest.faults.ground import Ground
from needlepoint.verify.selftest.gates import (
    BIAS,
    INVALID,
    NOT_OBSERVED,
    PROTOCOL,
    REPEAT,
    SELECTOR,
    SKIPPED,
    UNKNOWN,
    UNOWNED,
    ordered,
)
from needlepoint.verify.selftest.others import Pair, pair_of

Part = TypeVar("Part", CompressorInputs, QueryInputs)

ALONE = "an accumulated error is beyond its limit and no local one is"
"""No sound radius allows that, so accumulated errors are no gate of their own."""

_QUERY_PARTS = frozenset(
    {"index.stored", "query.query", "query.weights", "index.scores", "index.topk"}
)


@dataclass(frozen=True)
class Finding:
    """What the gates say of one run."""

    gates: tuple[str, ...]  # Gates that fired, in stage order.
    changed: frozenset[str]  # Tensors that are not the sound run's.
    observed: Observed | None  # What was returned; None where the run was refused.
    detail: str = ""  # Why it was refused, or that an accumulated error failed alone, or empty.


@dataclass(frozen=True)
class Planted:
    """A candidate that returns what was planted on a sound run."""

    ground: Ground
    plant: Plant
    declared: frozenset[StageKey]

    @property
    def info(self) -> CandidateInfo:
        """Identity: the profile of the sound candidate."""
        name = f"planted:{self.ground.key_format}"
        return CandidateInfo(name, self.ground.key_format, "cpu", "needlepoint", "", "0" * 64)

    def stages(self, ratio: int) -> frozenset[StageKey]:
        """Return what the sound candidate declares, or less."""
        return self.declared

    def run(self, inputs: LayerInputs) -> Observed:
        """Plant on the sound run of these inputs."""
        return self.plant(replace(self.ground, given=inputs))


class GroundJudge:
    """Judges what is planted on one sound run.

    Parameters
    ----------
    ground
        The sound run.
    limits
        Limits.
    """

    def __init__(self, ground: Ground, limits: Limits) -> None:
        given = ground.given
        self.ground = ground
        self._limits = limits
        arithmetic = needlepoint_profile(ground.key_format)
        self.keys: Mapping[str, KeyReference] = {
            path: key_reference(path, given, arithmetic) for path in key_paths(given)
        }
        self.query: QueryReference | None = None
        self.blocks: list[Block] = []
        self._reference: list[ReferenceBlock] = []
        if given.query is not None:
            width = given.query.q.shape[1] * given.query.q.shape[2]
            self.blocks = list(query_blocks(given.lengths, given.ratio, width))
            self.query = QueryReference(given, arithmetic, self.keys[INDEX], RotatedQueries(given))
            self._reference = [self.query.block(block) for block in self.blocks]

    def planted(self, case: Case) -> Planted:
        """Return a candidate with a fault or control."""
        return Planted(self.ground, case.plant, self._declared(case))

    def find(self, case: Case) -> Finding:
        """Plant, hold the result to the protocol, and judge every stage that changed."""
        given = self.ground.given
        candidate = self.planted(case)
        try:
            observed = observe(candidate, _copied(given))
            changed = changed_parts(self.ground.observed, observed, given.lengths)
            with blamed(candidate.info.name, given.layer):
                errors, picks = self._judge(observed, changed)
                moved = self._moved(case, observed)
        except CandidateFailed as error:
            return Finding((PROTOCOL,), frozenset({PROTOCOL}), None, str(error))
        gates = self._fired(errors, picks) | self._beside(observed, changed)
        gates |= {REPEAT} if moved else set()
        gates |= {SKIPPED} if missing_stages(candidate, given, observed) else set()
        alone = self._failed(errors, "accumulated") and not self._failed(errors, "local")
        return Finding(ordered(gates), changed | moved, observed, ALONE if alone else "")

    def sound(self) -> Finding:
        """Judge the sound run whole."""
        observed = self.ground.observed
        errors, picks = self._judge(observed, frozenset(parts_of(observed)))
        return Finding(ordered(self._fired(errors, picks)), frozenset(), observed)

    def pair(self, name: str, observed: Observed) -> Pair | None:
        """Return the tensor of a stage and its reference, as other comparisons see them."""
        arithmetic = needlepoint_profile(self.ground.key_format)
        return pair_of(name, observed, self.ground.given, self.keys, self._reference, arithmetic)

    def picks(self, observed: Observed) -> Pair | None:
        """Return the picks of a run and the reference's; None where there are none."""
        if observed.topk is None or self.query is None:
            return None
        return observed.topk, torch.cat([block.picks for block in self._reference])

    def _declared(self, case: Case) -> frozenset[StageKey]:
        given = self.ground.given
        every = frozenset(k for k in declared_stages(given.ratio) if k[1] not in NOT_OBSERVED)
        return frozenset(k for k in every if ".".join(k) in case.declares) or every

    def _judge(
        self, observed: Observed, changed: frozenset[str]
    ) -> tuple[dict[StageKey, StageErrors], PickErrors | None]:
        """Judge the paths of which something changed, and the query side behind them."""
        given = self.ground.given
        stored = read_layer_rows(given, observed)
        touched = {path: key for path, key in self.keys.items() if _key_parts(path) & changed}
        errors = judge_keys(observed, stored, touched)
        if self.query is None or not has_query_side(observed) or not _QUERY_PARTS & changed:
            return errors, None
        judge = QueryJudge(given, observed, self.query, stored.get(INDEX), self._limits)
        for block, expected in zip(self.blocks, self._reference, strict=True):
            judge.judge(block, expected)
        return errors | judge.errors, judge.picks

    def _failed(self, errors: Mapping[StageKey, StageErrors], way: str) -> bool:
        return any(
            bool(getattr(found, way).failed(self._limits[key[1]].value).any())
            for key, found in errors.items()
        )

    def _fired(self, errors: Mapping[StageKey, StageErrors], picks: PickErrors | None) -> set[str]:
        gates = set()
        for key, found in errors.items():
            limit = self._limits[key[1]].value
            if key[1] == TOPK:
                gates |= _pick_gates(picks) if bool(found.local.failed(limit).any()) else set()
            elif limit_fault(limit, *limit_range(found)) is None:  # else the stage is refused
                gates |= {".".join(key)} if bool(found.local.failed(limit).any()) else set()
                gates |= {BIAS} if any(t.exceeded for t in bias_tests(found, limit)) else set()
        return gates

    def _moved(self, case: Case, first: Observed) -> frozenset[str]:
        """Return the stages that a second run changes, as ``--repeat`` compares runs."""
        if case.again is None:
            return frozenset()
        given = self.ground.given
        again = Planted(self.ground, case.again, self._declared(case))
        runs = [snapshot(given, run).hashes for run in (first, observe(again, _copied(given)))]
        return frozenset(".".join(key) for key in runs[0] if runs[0][key] != runs[1].get(key))

    def _beside(self, observed: Observed, changed: frozenset[str]) -> set[str]:
        """Return the gates that look at bytes rather than at stages."""
        gates = set()
        for path, rows in observed.stored.items():
            width = 128 if path == INDEX else self.ground.given.main.norm_weight.numel()
            sound = self.ground.observed.stored[path]
            if f"{path}.stored" in changed and unowned_change(rows, sound, width) is not None:
                gates.add(UNOWNED)
        return gates


def _pick_gates(picks: PickErrors | None) -> set[str]:
    if picks is None:
        return {SELECTOR}
    found = {SELECTOR} if picks.count(Swap.SELECTOR) else set()
    found |= {UNKNOWN} if picks.count(Swap.UNKNOWN) else set()
    found |= {INVALID} if bool(picks.invalid.any()) else set()
    # Picks of the reference that the candidate's own scores do not justify swap nothing.
    return found or {SELECTOR}


def _key_parts(path: str) -> frozenset[str]:
    return frozenset(f"{path}.{stage}" for stage in (POOLED, NORMED, ROPED, ROTATED, STORED))


def _copied(given: LayerInputs) -> LayerInputs:
    """Return inputs that a candidate may spoil."""

    def clone(part: Part) -> Part:
        return replace(part, **{name: value.clone() for name, value in part.tensors().items()})

    return replace(
        given,
        index=None if given.index is None else clone(given.index),
        main=clone(given.main),
        query=None if given.query is None else clone(given.query),
        rope_table=given.rope_table.clone(),
    )


def parts_of(observed: Observed) -> dict[str, tuple[Tensor, ...]]:
    """Return every tensor of a run by stage, scores left out: they are read, not held."""
    found: dict[str, tuple[Tensor, ...]] = {
        ".".join(key): (rows,) for key, rows in observed.dense.items()
    }
    for path, rows in observed.stored.items():
        found[f"{path}.stored"] = (rows.pool, *rows.page_table)
    if observed.query is not None:
        scales = observed.query.scales
        found["query.query"] = (observed.query.codes, *(() if scales is None else (scales,)))
        found["query.weights"] = (observed.query.weights,)
    if observed.topk is not None:
        found["index.topk"] = (observed.topk,)
    return found


def read_scores(observed: Observed, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the scores of every request; none without a reader."""
    if observed.scores is None:
        return ()
    return tuple(observed.scores(request, 0, length) for request, length in enumerate(lengths))


def changed_parts(sound: Observed, observed: Observed, lengths: tuple[int, ...]) -> frozenset[str]:
    """Return the stages of which a byte is not the sound run's."""
    before, after = parts_of(sound), parts_of(observed)
    before["index.scores"] = read_scores(sound, lengths)
    after["index.scores"] = read_scores(observed, lengths)
    return frozenset(
        name
        for name in before.keys() | after.keys()
        if not _same(before.get(name, ()), after.get(name, ()))
    )


def _same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return len(one) == len(other) and all(
        a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)))
        for a, b in zip(one, other, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.flatten().clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
