"""``--swap``: one stage at a time done by the reference, and the reverse.

For each stage that a candidate shows, the layer is run to its end twice more: the candidate with
this one stage replaced by the reference, and the reference with this one stage of the candidate.
The end of a layer is its attention output and its picks. Nothing of the candidate is run again:
what it did in a stage is the residual of that stage (:class:`KeyMixture`), moved to other inputs.
Scores work alike. A selection's residual is what it picked against its own scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    QUERY,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.reference.indexer import index_scores
from needlepoint.reference.topk import select_topk
from needlepoint.verify.base.rows import Rows
from needlepoint.verify.base.stage_blocks import Block
from needlepoint.verify.base.stages import (
    ATTENTION,
    INPUT,
    POOLED,
    PROJECTED,
    QUERIES,
    SCORES,
    STORED,
    TOPK,
    WEIGHTS,
    declared_stages,
    stage_order,
)
from needlepoint.verify.judge.sides.key_side import KeyReference, reference_rows
from needlepoint.verify.judge.sides.profile_side import ProfileBlock, ProfileSide
from needlepoint.verify.judge.sides.query_reference import ReferenceBlock, unrounded_fp32
from needlepoint.verify.judge.sides.query_side import query_rows, usable_scores
from needlepoint.verify.layout.stored_rows import (
    StoredRows,
    decoded_queries,
    replayable,
    unfolded_weights,
)
from needlepoint.verify.numerics.error_bound import exact, key_chain, precision_of, rounding
from needlepoint.verify.numerics.selection import pick_sets
from needlepoint.verify.schema.swap import SwapEffect, SwapResult, SwapStage

Own = frozenset[StageKey]


class KeyMixture:
    """Rows of one key path with some stages of the candidate and the others of the reference.

    A stage of the candidate is the reference's replay of it plus a *residual*: what the candidate
    found minus the replay from its own last stage. A mixture adds the residuals of its own stages
    to replays of whatever enters them. With all of them it is the candidate, with none the
    reference.

    Parameters
    ----------
    reference
        The profile's reference of the path.
    dense
        Observed stages before the store, by name.
    stored
        Observed rows, or None.
    """

    def __init__(
        self, reference: KeyReference, dense: Mapping[str, Tensor], stored: StoredRows | None
    ) -> None:
        self._reference = reference
        self._order = list(reference.chain.stages)
        self._residual: dict[str, Tensor] = {}
        entering = reference.stages[POOLED].value
        for stage in self._order:
            meant = self._rounded(stage, entering)
            found = meant
            if stage in dense:
                found = replayable(dense[stage])
                self._residual[stage] = found - meant
            entering = self._next(stage, found)
        if stored is not None:
            self._residual[STORED] = replayable(stored.values) - self._store(entering)
        # One mixture differs from the next in one stage: what is asked for again is kept.
        self._kept: dict[frozenset[str], Tensor] = {}

    @property
    def stages(self) -> tuple[StageKey, ...]:
        """Stages that can be swapped, in order."""
        return tuple((self._reference.path, stage) for stage in self._residual)

    def rows(self, own: frozenset[StageKey]) -> Tensor:
        """Return the decoded rows, float64 ``[entries, d]``.

        Parameters
        ----------
        own
            Stages that are the candidate's; those of other paths are ignored.
        """
        mine = frozenset(s for s in self._residual if (self._reference.path, s) in own)
        if mine not in self._kept:
            self._kept[mine] = self._rows(mine)
        return self._kept[mine]

    def _rows(self, own: frozenset[str]) -> Tensor:
        entering = self._reference.stages[POOLED].value
        for stage in self._order:
            found = self._rounded(stage, entering)
            if stage in own:
                found = found + self._residual[stage]
            entering = self._next(stage, found)
        rows = self._store(entering)
        return rows + self._residual[STORED] if STORED in own else rows

    def _rounded(self, stage: str, value: Tensor) -> Tensor:
        point = precision_of(stage, self._reference.chain.arithmetic)
        return rounding(exact(value), point).value

    def _next(self, stage: str, found: Tensor) -> Tensor:
        """Return what the stage behind ``stage`` computes; what the store receives at the end."""
        if stage == self._order[-1]:
            return found
        following = self._order[self._order.index(stage) + 1]
        return key_chain(stage, exact(found), self._reference.chain)[following].value

    def _store(self, entering: Tensor) -> Tensor:
        stages = {**self._reference.stages, self._order[-1]: exact(entering)}
        return reference_rows(replace(self._reference, stages=stages))


def same_rows(one: Tensor, other: Tensor) -> bool:
    """Return whether two mixtures hold the same rows."""
    return one is other or torch.equal(one, other)


@dataclass
class _Sum:
    """Effect of one mixture over the blocks so far."""

    error2: float = 0.0
    size2: float = 0.0
    picks: int = 0
    needles: int = 0


@dataclass(frozen=True)
class _Query:
    """Query side of one block: the candidate's parts where it shows them, else the reference's."""

    stored: Tensor
    weights: Tensor
    own_stored: Tensor
    own_weights: Tensor
    own_scores: Tensor
    residual: Tensor
    dropped: Tensor
    added: Tensor


class SwapTally:
    """Swaps of one candidate in one layer, block by block of queries.

    Parameters
    ----------
    inputs
        Given tensors of the layer.
    profile
        The candidate's profile.
    observed
        What it returned.
    stored
        Its stored rows by path.
    """

    def __init__(
        self,
        inputs: LayerInputs,
        profile: ProfileSide,
        observed: Observed,
        stored: Mapping[str, StoredRows],
    ) -> None:
        self._inputs = inputs
        self._profile = profile
        self._observed = observed
        self._keys: dict[str, KeyMixture] = {}
        for path, reference in profile.keys.items():
            dense = {s: x for (p, s), x in observed.dense.items() if p == path}
            self._keys[path] = KeyMixture(reference, dense, stored.get(path))
        self._rows = Rows(inputs.lengths, inputs.ratio)
        self._stages = self._swappable()
        self._all = frozenset(self._stages)
        self._sums: dict[Own, _Sum] = {own: _Sum() for own in self._mixtures()}

    def add(self, block: Block, prepared: ProfileBlock) -> None:
        """Add one block of queries.

        Parameters
        ----------
        block
            The queries.
        prepared
            The profile's reference of the block.
        """
        meant = prepared.query
        side = None if meant is None else self._query(block, meant)
        known: dict[bytes, Tensor] = {}
        for own, total in self._sums.items():
            picks = None
            if meant is not None and side is not None:
                member = self._picked(block, meant, side, own)
                wanted = pick_sets(meant.picks, block.visible, self._inputs.topk, block.columns)
                total.picks += int((wanted.member & ~member).sum())
                total.needles += _lost_best(meant.scores, member, block)
                # One tensor for equal picks, so that attention over them is computed once.
                picks = known.setdefault(member.cpu().numpy().tobytes(), _as_picks(member))
            rows = self._keys[MAIN].rows(own)
            errors = self._profile.attention_errors(
                prepared, rows, self._profile.changed_rows(rows), picks, block
            )
            total.error2 += float(errors.error_norm.square().sum())
            total.size2 += float(prepared.expected.square().sum())

    def result(self) -> SwapResult:
        """Return the swaps of the layer."""
        total = self._effect(self._all)
        stages = []
        for key in self._stages:
            replaced = self._effect(self._all - {key})
            stages.append(
                SwapStage.model_validate(
                    {
                        "stage": key[1],
                        "path": key[0],
                        "alone": self._effect(frozenset({key})),
                        "replaced": replaced,
                        "share_error": _share(total.attention_error, replaced.attention_error),
                        "share_lost_picks": _share(total.lost_picks, replaced.lost_picks),
                        "share_lost_needles": _share(total.lost_needles, replaced.lost_needles),
                    }
                )
            )
        fixed = (INPUT, PROJECTED, ATTENTION)
        hidden = [
            ".".join(key)
            for key in declared_stages(self._inputs.ratio)
            if key not in self._all and key[1] not in fixed
        ]
        return SwapResult(total=total, stages=tuple(stages), not_swappable=tuple(hidden))

    def _swappable(self) -> tuple[StageKey, ...]:
        stages = [key for mixture in self._keys.values() for key in mixture.stages]
        if self._observed.query is not None:
            stages += [(QUERY, QUERIES), (QUERY, WEIGHTS)]
        if self._observed.scores is not None:
            stages.append((INDEX, SCORES))
        if self._observed.topk is not None:
            stages.append((INDEX, TOPK))
        return tuple(sorted(stages, key=stage_order))

    def _mixtures(self) -> list[Own]:
        alone = [frozenset({key}) for key in self._stages]
        return list(dict.fromkeys([self._all, *alone, *(self._all - one for one in alone)]))

    def _query(self, block: Block, meant: ReferenceBlock) -> _Query:
        arithmetic = self._profile.arithmetic
        stored = own_stored = meant.stored.value
        weights = own_weights = rounding(meant.weights, arithmetic.weights).value
        if self._observed.query is not None:
            part = query_rows(self._observed.query, block.rows)
            own_stored = replayable(decoded_queries(part, arithmetic.index_query))
            own_weights = replayable(unfolded_weights(part))
        replayed = self._scores(block, self._all, own_stored, own_weights)
        own_scores = replayed
        if self._observed.scores is not None:
            found = self._observed.scores(block.request, block.start, block.stop)
            own_scores = usable_scores(found, block)
        hidden = torch.arange(block.columns) >= block.visible.unsqueeze(1)
        residual = (own_scores - replayed).masked_fill(hidden, 0.0)
        by_scores = self._selected(block, own_scores)
        picked = by_scores
        if self._observed.topk is not None:
            picks = self._observed.topk[block.rows]
            picked = pick_sets(picks, block.visible, self._inputs.topk, block.columns).member
        return _Query(
            stored,
            weights,
            own_stored,
            own_weights,
            own_scores,
            residual,
            by_scores & ~picked,
            picked & ~by_scores,
        )

    def _picked(self, block: Block, meant: ReferenceBlock, side: _Query, own: Own) -> Tensor:
        """Return the entries that a mixture picks, bool ``[queries, columns]``."""
        keys, everything = self._keys[INDEX], self._all
        same_keys = same_rows(keys.rows(own), keys.rows(everything))
        before = {(QUERY, QUERIES), (QUERY, WEIGHTS), (INDEX, SCORES)} & everything
        if same_keys and before <= own:
            scores = side.own_scores  # to the bit: a sum of parts might part a tie
        elif not before & own and same_rows(keys.rows(own), keys.rows(frozenset())):
            scores = meant.scores
        else:
            stored = side.own_stored if (QUERY, QUERIES) in own else side.stored
            weights = side.own_weights if (QUERY, WEIGHTS) in own else side.weights
            scores = self._scores(block, own, stored, weights)
            if (INDEX, SCORES) in own:
                scores = scores + side.residual
        member = self._selected(block, scores)
        return (member & ~side.dropped) | side.added if (INDEX, TOPK) in own else member

    def _scores(self, block: Block, own: Own, stored: Tensor, weights: Tensor) -> Tensor:
        rows = self._keys[INDEX].rows(own)[self._rows.span(block.request)][: block.columns]
        scoring = unrounded_fp32(self._profile.arithmetic)
        return index_scores(stored, weights, rows, block.visible, scoring)

    def _selected(self, block: Block, scores: Tensor) -> Tensor:
        picks = select_topk(scores, self._inputs.topk)
        return pick_sets(picks, block.visible, self._inputs.topk, block.columns).member

    def _effect(self, own: Own) -> SwapEffect:
        total = self._sums[own]
        error = math.sqrt(total.error2 / total.size2) if total.size2 else 0.0
        selects = self._inputs.query is not None
        return SwapEffect(
            attention_error=error if math.isfinite(error) else None,
            lost_picks=total.picks if selects else None,
            lost_needles=total.needles if selects else None,
        )


def _share(total: float | None, replaced: float | None) -> float | None:
    """Return the share of a total that goes when a stage is replaced.

    None where nothing is lost, and where more is lost without it: another stage undoes its error.
    """
    if not total or replaced is None or replaced > total:
        return None
    return (total - replaced) / total


def _lost_best(scores: Tensor, member: Tensor, block: Block) -> int:
    """Return how many queries do not pick the best entry by the reference's scores."""
    if not block.columns:
        return 0
    best = scores.argmax(1, keepdim=True)
    return int((~member.gather(1, best)[:, 0] & (block.visible > 0)).sum())


def _as_picks(member: Tensor) -> Tensor:
    """Return sets as int32 picks, ascending and -1 padded."""
    width = max(1, int(member.sum(1).max())) if member.numel() else 1
    none = member.shape[1]
    entries = torch.where(member, torch.arange(none), none).sort(1).values[:, :width]
    return torch.where(entries < none, entries, -1).to(torch.int32)
