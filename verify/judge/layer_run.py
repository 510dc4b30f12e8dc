"""One layer, all candidates: judge every stage against the reference.

Order matters. Candidates have run before any reference stage does, so that no recycled memory holds
the right answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, zip_longest

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    Candidate,
    Observed,
    StageKey,
)
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import BF16_CONTRACT, Arithmetic
from needlepoint.reference.stages import Projected
from needlepoint.verify.base.memory import trim_malloc
from needlepoint.verify.base.placement import CARD_BUDGET_BYTES, CPU, observed_on, on, placed
from needlepoint.verify.base.progress import Progress
from needlepoint.verify.base.stage_blocks import BUDGET_BYTES, Block, query_blocks
from needlepoint.verify.base.workers import Workers, workers
from needlepoint.verify.inputs.layer_inputs import GivenLayer, given_layer
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.candidate_run import blamed
from needlepoint.verify.judge.contracts import ContractBlock, Contracts
from needlepoint.verify.judge.cost import CostTally, key_error
from needlepoint.verify.judge.layer_outcome import LayerOutcome
from needlepoint.verify.judge.profiles import profile_of
from needlepoint.verify.judge.sides.attention_side import AttentionReads, attention_errors
from needlepoint.verify.judge.sides.outputs import (
    has_query_side,
    judge_keys,
    read_layer_rows,
)
from needlepoint.verify.judge.sides.profile_side import KeyReferences, ProfileBlock, ProfileSide
from needlepoint.verify.judge.sides.query_reference import RotatedQueries
from needlepoint.verify.judge.sides.query_side import QueryJudge
from needlepoint.verify.judge.swap import SwapTally
from needlepoint.verify.layout.stored_rows import StoredRows, replayable
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.numerics.row_errors import RowErrors, StageErrors

_HEAP_BLOCKS = 8  # of queries; giving memory back costs a little

CONTRACT_NAMES = ("exact", "bf16", "official")


Task = Callable[[], None]


@dataclass(frozen=True)
class BlockReference:
    """What contracts and profiles say of one block; filled by its tasks.

    Attributes
    ----------
    block
        The queries.
    contracts
        By name; empty where nothing selects.
    profiles
        By arithmetic.
    """

    block: Block
    contracts: dict[str, ContractBlock] = field(default_factory=dict)
    profiles: dict[Arithmetic, ProfileBlock] = field(default_factory=dict)


class LayerReferences:
    """Contracts and profiles of one layer, block after block.

    Parameters
    ----------
    given
        The layer's projections.
    contracts
        Contracts; fed in the order of the blocks.
    profiles
        Distinct profiles of the candidates.
    """

    def __init__(
        self, given: GivenLayer, contracts: Contracts, profiles: Mapping[Arithmetic, ProfileSide]
    ) -> None:
        self._given = given
        self._contracts = contracts
        self.profiles = profiles

    def next(self, block: Block) -> tuple[BlockReference, list[Task]]:
        """Return the reference of a block and the independent tasks that fill it.

        All tasks of a block have run before those of the next one begin.
        """
        if block.start == 0:
            self._contracts.start_request()
        reference = BlockReference(block)
        projected = self._given.projected(block.request, block.start, block.stop)
        feeds = [partial(self._feed, name, reference, projected) for name in self._contracts.names]
        sides = [partial(_prepare, side, reference) for side in self.profiles.values()]
        # Profiles share work and wait for each other: contracts go between them.
        tasks = chain.from_iterable(zip_longest(sides, feeds))
        return reference, [task for task in tasks if task is not None]

    def _feed(self, name: str, reference: BlockReference, projected: Projected) -> None:
        hidden = self._given.inputs.hidden[reference.block.rows]
        found = self._contracts.feed(name, hidden, projected)
        if found is not None:
            reference.contracts[name] = found


def _prepare(side: ProfileSide, reference: BlockReference) -> None:
    reference.profiles[side.arithmetic] = side.prepare(reference.block)


@dataclass
class _Tally:
    """One candidate in one layer while its blocks of queries come in."""

    name: str
    profile: ProfileSide
    observed: Observed
    stored: Mapping[str, StoredRows]
    errors: dict[StageKey, StageErrors]
    judge: QueryJudge | None
    main_rows: Tensor | None
    changed: Tensor | None
    attention: list[RowErrors] = field(default_factory=list)
    costs: dict[str, CostTally] = field(default_factory=dict)
    swap: SwapTally | None = None


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
    device
        Where reference and comparisons run.
    budget_bytes
        Bound on transient tensors of a block of queries; the device's usual one where not given.
    """

    def __init__(
        self,
        inputs: Inputs,
        layer: int,
        limits: Limits,
        device: str = CPU,
        budget_bytes: int | None = None,
    ) -> None:
        self._config = inputs.config
        self._layer = layer
        self._limits = limits
        self._device = device
        usual = BUDGET_BYTES if device == CPU else CARD_BUDGET_BYTES
        self._budget = usual if budget_bytes is None else budget_bytes
        self.weights = placed(inputs.weights(layer), device)
        with on(device):
            reference = self._reference(BF16_CONTRACT)
        self.projected = given_layer(inputs, layer, reference)
        self.given = self.projected.inputs

    def judge(
        self,
        candidates: Sequence[tuple[Candidate, Observed]],
        progress: Progress,
        *,
        swap: bool = False,
    ) -> list[LayerOutcome]:
        """Judge what candidates observed, one outcome for each.

        With ``swap``, one stage at a time is replaced by the reference as well, and the reverse.

        Raises
        ------
        CandidateFailed
            If pages, queries or scores cannot be read as what they are declared to be.
        """
        with on(self._device), workers(self._device) as pool:
            found = self._judge(candidates, progress, pool, swap)
        return [placed(outcome, CPU) for outcome in found]

    def _judge(
        self,
        candidates: Sequence[tuple[Candidate, Observed]],
        progress: Progress,
        pool: Workers,
        swap: bool,
    ) -> list[LayerOutcome]:
        given = placed(self.projected, self._device)
        query = given.inputs.query
        width = self._config.n_heads * self._config.head_dim
        width = width if query is None else max(width, query.q[0].numel())
        blocks = list(query_blocks(self.given.lengths, self.given.ratio, width, self._budget))
        progress.start(f"layer {self._layer}: queries", len(blocks))
        contracts = self._contracts()
        profiles = self._profiles(given, [profile_of(c.info) for c, _ in candidates], pool)
        tallies = pool.map(lambda pair: self._start(given, *pair, profiles, swap), candidates)
        references = LayerReferences(given, contracts, profiles)
        self._judge_blocks(blocks, tallies, references, pool, progress)
        keys = contracts.keys()
        return pool.map(lambda tally: self._finish(tally, keys), tallies)

    def _profiles(
        self, given: GivenLayer, arithmetics: Sequence[Arithmetic], pool: Workers
    ) -> dict[Arithmetic, ProfileSide]:
        references = KeyReferences(given.inputs)
        distinct = list(dict.fromkeys(arithmetics))
        keys = [references.of(arithmetic) for arithmetic in distinct]
        rotated = None if given.inputs.query is None else RotatedQueries(given.inputs)
        reads = AttentionReads(given)

        def side(index: int) -> ProfileSide:
            reference = self._reference(distinct[index])
            return ProfileSide(given.inputs, reference, keys[index], rotated, reads)

        return dict(zip(distinct, pool.map(side, range(len(distinct))), strict=True))

    def _start(
        self,
        layer: GivenLayer,
        candidate: Candidate,
        observed: Observed,
        profiles: Mapping[Arithmetic, ProfileSide],
        swap: bool,
    ) -> _Tally:
        name, profile = candidate.info.name, profiles[profile_of(candidate.info)]
        given = layer.inputs
        with blamed(name, self._layer):
            with on(CPU):
                rows = read_layer_rows(self.given, observed)
            stored, observed = placed(rows, self._device), observed_on(observed, self._device)
            errors = judge_keys(observed, stored, profile.keys)
        judge = None
        if profile.query is not None and has_query_side(observed):
            judge = QueryJudge(given, observed, profile.query, stored.get(INDEX), self._limits)
        main = replayable(stored[MAIN].values) if MAIN in stored else None
        changed = None if main is None else profile.changed_rows(main)
        tally = _Tally(name, profile, observed, stored, errors, judge, main, changed)
        if swap:
            tally.swap = SwapTally(given, profile, observed, stored)
        return tally

    def _judge_blocks(
        self,
        blocks: Sequence[Block],
        tallies: Sequence[_Tally],
        references: LayerReferences,
        pool: Workers,
        progress: Progress,
    ) -> None:
        """Judge every candidate block by block; the next block's reference is computed beside."""
        ready: BlockReference | None = None
        for number, block in enumerate((*blocks, None), 1):
            coming, tasks = (None, []) if block is None else references.next(block)
            if ready is not None:
                tasks += [partial(self._judge_candidate, tally, ready) for tally in tallies]
            pool.run(tasks)
            if ready is not None:
                progress.advance()
            ready = coming
            if number % _HEAP_BLOCKS == 0:
                trim_malloc()

    def _judge_candidate(self, tally: _Tally, reference: BlockReference) -> None:
        block, prepared = reference.block, reference.profiles[tally.profile.arithmetic]
        if tally.swap is not None:
            with blamed(tally.name, self._layer):
                tally.swap.add(block, prepared)
        picks = None
        if tally.judge is not None and prepared.query is not None:
            with blamed(tally.name, self._layer):
                picks = tally.judge.judge(block, prepared.query)
        if picks is not None:
            for name, contract in reference.contracts.items():
                cost = tally.costs.setdefault(name, CostTally())
                cost.add_picks(picks, contract, block.visible, self.given.topk)
        own = tally.observed.attention
        if own is not None:
            with blamed(tally.name, self._layer):
                tally.attention.append(attention_errors(own[block.rows], prepared.expected))
            return
        rows, changed = tally.main_rows, tally.changed
        if rows is None or changed is None or (picks is None and self.given.query is not None):
            return
        tally.attention.append(
            tally.profile.attention_errors(prepared, rows, changed, picks, block)
        )

    def _finish(self, tally: _Tally, keys: Mapping[str, Tensor]) -> LayerOutcome:
        if INDEX in tally.stored:
            own = replayable(tally.stored[INDEX].values)
            for name, contract in keys.items():
                cost = tally.costs.setdefault(name, CostTally())
                cost.relative = key_error(own, tally.profile.arithmetic.hadamard, contract)
        judge, errors = tally.judge, tally.errors
        outcome = LayerOutcome.of(
            self.given,
            tally.observed,
            errors if judge is None else errors | judge.errors,
            None if judge is None else judge.picks,
        )
        return replace(
            outcome,
            costs=tally.costs,
            attention=RowErrors.concatenate(tally.attention) if tally.attention else None,
            swap=None if tally.swap is None else tally.swap.result(),
        )

    def _contracts(self) -> Contracts:
        names = CONTRACT_NAMES if self.given.query is not None else ()
        return Contracts(self._config, self._layer, self.weights, names, self._budget)

    def _reference(self, arithmetic: Arithmetic) -> ReferenceLayer:
        return ReferenceLayer(
            self._config,
            self._layer,
            self.weights,
            arithmetic,
            compute=torch.float32,
            budget_bytes=self._budget,
        )
