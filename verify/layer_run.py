"""One layer, all candidates: run them, then judge every stage against the reference.

Order matters. Candidates run before any reference stage, so that no recycled memory holds the right
answer; the given tensors are checked to be unchanged afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from needlepoint.optimized.interface import (
    INDEX,
    MAIN,
    Candidate,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import BF16_CONTRACT, Arithmetic
from needlepoint.verify.attention_side import (
    AttentionInputs,
    attend,
    attention_errors,
    attention_inputs,
)
from needlepoint.verify.contracts import ContractBlock, Contracts
from needlepoint.verify.cost import CostTally, key_error
from needlepoint.verify.given import changed_tensors, fingerprint, given_layer
from needlepoint.verify.inputs import Inputs
from needlepoint.verify.key_side import (
    KeyReference,
    StageErrors,
    key_reference,
    reference_rows,
)
from needlepoint.verify.limits import Limits
from needlepoint.verify.observed_judge import (
    has_query_side,
    joined_blocks,
    joined_picks,
    judge_keys,
    key_paths,
    read_layer_rows,
)
from needlepoint.verify.profiles import profile_of
from needlepoint.verify.progress import Progress
from needlepoint.verify.query_reference import QueryReference, RotatedQueries
from needlepoint.verify.query_side import BlockJudgement, QueryJudge
from needlepoint.verify.row_errors import RowErrors
from needlepoint.verify.rows import Rows
from needlepoint.verify.selection import PickErrors
from needlepoint.verify.stage_blocks import BUDGET_BYTES, Block, query_blocks
from needlepoint.verify.stored_rows import StoredRows, replayable

CONTRACT_NAMES = ("exact", "bf16", "official")


@dataclass(frozen=True)
class LayerOutcome:
    """What one layer says of one candidate.

    Attributes
    ----------
    layer, ratio
        Layer and its compression ratio.
    errors
        Row errors of each compared stage.
    picks
        Swaps against the profile's reference; None where there are no picks.
    costs
        Cost against each contract, by name.
    attention
        Relative errors of the attention output; None where nothing was attended.
    entry_bytes
        Bytes that one entry of the layer takes over its pools.
    peak_transient_bytes, path_taken
        As the candidate reported.
    """

    layer: int
    ratio: int
    errors: Mapping[StageKey, StageErrors]
    picks: PickErrors | None
    costs: Mapping[str, CostTally]
    attention: RowErrors | None
    entry_bytes: float
    peak_transient_bytes: int
    path_taken: str


@dataclass
class _Tally:
    """One candidate in one layer while its blocks of queries come in."""

    arithmetic: Arithmetic
    observed: Observed
    stored: Mapping[str, StoredRows]
    errors: dict[StageKey, StageErrors]
    judge: QueryJudge | None
    reference_main: Tensor
    blocks: list[BlockJudgement] = field(default_factory=list)
    attention: list[RowErrors] = field(default_factory=list)
    costs: dict[str, CostTally] = field(default_factory=dict)


class LayerRun:
    """Judges all candidates in one layer.

    Parameters
    ----------
    inputs
        The run's input.
    layer
        Layer with ratio 4 or 128.
    limits
        Limits.
    budget_bytes
        Bound on transient tensors of a block of queries.
    """

    def __init__(
        self, inputs: Inputs, layer: int, limits: Limits, budget_bytes: int = BUDGET_BYTES
    ) -> None:
        self._inputs = inputs
        self._layer = layer
        self._limits = limits
        self._budget = budget_bytes
        self._weights = inputs.weights(layer)
        self._reference = self._reference_layer(BF16_CONTRACT)
        self.layer_given = given_layer(inputs, layer, self._reference)
        self.given = self.layer_given.inputs
        self._key_references: dict[tuple[object, ...], KeyReference] = {}
        self._query_references: dict[str, QueryReference] = {}
        self._rotated: RotatedQueries | None = None

    def judge(
        self, candidates: Sequence[tuple[Candidate, Observed]], progress: Progress
    ) -> list[LayerOutcome]:
        """Judge what candidates observed, one outcome for each.

        Raises
        ------
        ValueError
            If pages, queries or scores cannot be read as what they are declared to be.
        """
        tallies = [self._start(candidate, observed) for candidate, observed in candidates]
        heads = 0 if self.given.query is None else self.given.query.q.shape[1]
        width = max(heads * 128, self._reference.config.n_heads * 512)
        blocks = list(query_blocks(self.given.lengths, self.given.ratio, width, self._budget))
        contracts = self._contracts()
        progress.start(f"layer {self._layer}: queries", len(blocks))
        for block in blocks:
            if block.start == 0:
                contracts.start_request()
            meant = self._feed(contracts, block)
            attention = _AttentionBlock(self, block)
            for tally in tallies:
                self._judge_block(tally, block, meant, attention)
            progress.advance()
        keys = contracts.keys()
        return [self._finish(tally, keys) for tally in tallies]

    def _start(self, candidate: Candidate, observed: Observed) -> _Tally:
        arithmetic = profile_of(candidate.info)
        stored = read_layer_rows(self.given, observed)
        references = {p: self._key_reference(p, arithmetic) for p in key_paths(self.given)}
        errors = judge_keys(observed, stored, references)
        judge = None
        if self.given.query is not None and has_query_side(observed):
            reference = self._query_reference(arithmetic, references[INDEX])
            judge = QueryJudge(self.given, observed, reference, stored.get(INDEX), self._limits)
        main = reference_rows(references[MAIN])
        return _Tally(arithmetic, observed, stored, errors, judge, main)

    def _judge_block(
        self,
        tally: _Tally,
        block: Block,
        meant: Mapping[str, ContractBlock],
        attention: _AttentionBlock,
    ) -> None:
        picks = reference_picks = None
        if tally.judge is not None:
            found = tally.judge.judge(block)
            tally.blocks.append(found)
            picks, reference_picks = found.candidate_picks, found.reference_picks
            if picks is not None:
                for name, contract in meant.items():
                    cost = tally.costs.setdefault(name, CostTally())
                    cost.add_picks(picks, contract, block.visible, self.given.topk)
        if MAIN in tally.stored and (picks is not None or self.given.query is None):
            own = replayable(tally.stored[MAIN].values)
            tally.attention.append(attention.errors(tally, own, picks, reference_picks))

    def _finish(self, tally: _Tally, keys: Mapping[str, Tensor]) -> LayerOutcome:
        if INDEX in tally.stored:
            own, rotated = replayable(tally.stored[INDEX].values), tally.arithmetic.hadamard
            for name, contract in keys.items():
                cost = tally.costs.setdefault(name, CostTally())
                cost.relative = key_error(own, rotated, contract)
        return LayerOutcome(
            layer=self._layer,
            ratio=self.given.ratio,
            errors=tally.errors | joined_blocks(tally.blocks),
            picks=joined_picks(tally.blocks),
            costs=tally.costs,
            attention=RowErrors.concatenate(tally.attention) if tally.attention else None,
            entry_bytes=sum(
                rows.pool.shape[1] / rows.page_size for rows in tally.observed.stored.values()
            ),
            peak_transient_bytes=tally.observed.peak_transient_bytes,
            path_taken=tally.observed.path_taken,
        )

    def _key_reference(self, path: str, arithmetic: Arithmetic) -> KeyReference:
        # The chain before the store does not depend on the storage format: share it.
        before_store = {
            name: value for name, value in arithmetic.__dict__.items() if name in _BEFORE_STORE
        }
        key = (path, *sorted((name, str(value)) for name, value in before_store.items()))
        if key not in self._key_references:
            self._key_references[key] = key_reference(path, self.given, arithmetic)
        shared = self._key_references[key]
        return replace(shared, chain=replace(shared.chain, arithmetic=arithmetic))

    def _query_reference(self, arithmetic: Arithmetic, keys: KeyReference) -> QueryReference:
        if self._rotated is None:
            self._rotated = RotatedQueries(self.given)
        profile = str(arithmetic.switches())
        if profile not in self._query_references:
            self._query_references[profile] = QueryReference(
                self.given, arithmetic, keys, self._rotated
            )
        return self._query_references[profile]

    def _contracts(self) -> Contracts:
        names = CONTRACT_NAMES if self.given.query is not None else ()
        return Contracts(self._inputs.config, self._layer, self._weights, names, self._budget)

    def _reference_layer(self, arithmetic: Arithmetic) -> ReferenceLayer:
        return ReferenceLayer(
            self._inputs.config,
            self._layer,
            self._weights,
            arithmetic,
            compute=torch.float32,
            budget_bytes=self._budget,
        )

    def _feed(self, contracts: Contracts, block: Block) -> Mapping[str, ContractBlock]:
        if self.given.query is None:
            return {}
        projected = self.layer_given.projected(block.request, block.start, block.stop)
        return contracts.feed(self.given.hidden[block.rows], projected)

    def entries_of(self, request: int) -> slice:
        """Return the key-side rows of a request."""
        return Rows(self.given.lengths, self.given.ratio).span(request)

    def reference_layer(self, arithmetic: Arithmetic) -> ReferenceLayer:
        """Return the reference of this layer under a profile."""
        return self._reference_layer(arithmetic)


class CandidateFailed(ValueError):
    """A candidate raised or broke the protocol: no verdict, ever."""


def observe(candidate: Candidate, given: LayerInputs) -> Observed:
    """Run one candidate on the given tensors of a layer.

    Raises
    ------
    CandidateFailed
        If it raises, or changes a tensor that it was given.
    """
    name, before = candidate.info.name, fingerprint(given)
    try:
        observed = candidate.run(given)
    except Exception as error:
        raise CandidateFailed(
            f"candidate {name} failed in layer {given.layer}: {type(error).__name__}: {error}"
        ) from error
    changed = changed_tensors(before, given)
    if changed:
        raise CandidateFailed(
            f"candidate {name} changed its inputs in layer {given.layer}: {', '.join(changed)}; "
            "expected the given tensors to be left alone"
        )
    return observed


class _AttentionBlock:
    """Attention over one block; what candidates of one profile share is computed once."""

    def __init__(self, run: LayerRun, block: Block) -> None:
        self._run = run
        self._block = block
        self._shared: dict[str, tuple[ReferenceLayer, AttentionInputs, Tensor]] = {}

    def errors(
        self, tally: _Tally, own: Tensor, picks: Tensor | None, meant: Tensor | None
    ) -> RowErrors:
        """Return the errors of a candidate's attention output against its profile's."""
        span = self._run.entries_of(self._block.request)
        name = str(tally.arithmetic.switches())
        if name not in self._shared:
            reference = self._run.reference_layer(tally.arithmetic)
            inputs = attention_inputs(reference, self._run.layer_given, self._block)
            rows = tally.reference_main[span]
            expected = attend(reference, inputs, rows, meant, self._block)
            self._shared[name] = (reference, inputs, expected)
        reference, inputs, expected = self._shared[name]
        found = attend(reference, inputs, own[span], picks, self._block)
        return attention_errors(found, expected)


_BEFORE_STORE = frozenset(
    {"pooled", "normed", "roped", "rotated", "rope_table", "hadamard", "ape", "state"}
)
