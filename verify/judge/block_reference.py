"""Everything that one block of queries is judged against: contracts and profiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest

from needlepoint.reference.profile import Arithmetic
from needlepoint.reference.stages import Projected
from needlepoint.verify.base.stage_blocks import Block
from needlepoint.verify.inputs.layer_inputs import GivenLayer
from needlepoint.verify.judge.contracts import ContractBlock, Contracts
from needlepoint.verify.judge.sides.profile_side import ProfileBlock, ProfileSide

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
