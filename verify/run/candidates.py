"""One candidate over all layers: its verdict, its first divergence, its costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from needlepoint.optimized.protocol.interface import CandidateInfo
from needlepoint.verify.base.stages import COMPARED
from needlepoint.verify.judge.cost import cache_bytes_per_token, contract_cost
from needlepoint.verify.judge.layer_outcome import LayerOutcome
from needlepoint.verify.judge.layer_run import CONTRACT_NAMES
from needlepoint.verify.judge.profiles import profile_of
from needlepoint.verify.judge.repeat import RepeatTally
from needlepoint.verify.judge.results.layers import uncompressed_layer
from needlepoint.verify.judge.results.stages import row_tensors
from needlepoint.verify.judge.results.verdicts import candidate_verdict, first_divergence
from needlepoint.verify.recall.marked import input_recall
from needlepoint.verify.recall.run import Gathered, join
from needlepoint.verify.schema.result import (
    CandidateResult,
    FormatCost,
    Kernel,
    LayerResult,
    MemoryLaw,
    MemoryResult,
    Profile,
)


@dataclass
class CandidateOutcome:
    """What all layers said of one candidate, gathered layer by layer.

    Attributes
    ----------
    info
        Identity and profile.
    law
        Law of its transient memory, where it has one.
    layers
        Results of its layers.
    rows
        Per-row errors by name.
    outcomes
        What is summed up over layers: costs, bytes and paths taken.
    repeat
        Its repeated runs; None where it ran once.
    recall
        What layers with an indexer said of the needles that the input marks.
    """

    info: CandidateInfo
    law: MemoryLaw | None = None
    layers: list[LayerResult] = field(default_factory=list)
    rows: dict[str, Tensor] = field(default_factory=dict)
    outcomes: list[LayerOutcome] = field(default_factory=list)
    repeat: RepeatTally | None = None
    recall: Gathered = field(default_factory=Gathered)
    topk: int = 0

    @property
    def name(self) -> str:
        """The candidate's name."""
        return self.info.name

    def add(self, outcome: LayerOutcome, result: LayerResult) -> None:
        """Add one layer."""
        self.layers.append(result)
        for stage in result.stages:
            if stage.kind == COMPARED:
                errors = outcome.errors[stage.path, stage.stage]
                self.rows |= row_tensors(errors, f"{self.name}/layer{outcome.layer}")
        if outcome.picks is not None and len(gaps := outcome.picks.gaps()):
            # A looser limit explains more swaps: what it takes for each is kept for `rejudge`.
            self.rows[f"{self.name}/layer{outcome.layer}/index/topk/swaps"] = gaps.float()
        self.outcomes.append(outcome.without_rows())

    def add_recall(self, gathered: Gathered, k: int) -> None:
        """Add the needles of one layer."""
        self.recall, self.topk = join([self.recall, gathered]), k

    def add_uncompressed(self, layer: int, lengths: tuple[int, ...]) -> None:
        """Add a layer of ratio 0: listed, nothing to judge."""
        self.layers.append(uncompressed_layer(layer, lengths))


def merged_outcomes(parts: Sequence[Sequence[CandidateOutcome]]) -> list[CandidateOutcome]:
    """Return one outcome for each candidate from outcomes over different layers.

    Parameters
    ----------
    parts
        Outcomes of the same candidates in the same order, each over layers of its own.
    """
    found: list[CandidateOutcome] = []
    for own in zip(*parts, strict=True):
        whole = CandidateOutcome(own[0].info, own[0].law, repeat=own[0].repeat)
        for part in own:
            whole.layers += part.layers
            whole.rows |= part.rows
            whole.outcomes += part.outcomes
            whole.recall = join([whole.recall, part.recall])
            whole.topk = max(whole.topk, part.topk)
        whole.layers.sort(key=lambda layer: layer.layer)
        found.append(whole)
    return found


def candidate_result(outcome: CandidateOutcome) -> CandidateResult:
    """Return the result of one candidate."""
    info = outcome.info
    profile = profile_of(info)
    parts = outcome.outcomes
    costs = {
        name: contract_cost([part.costs[name] for part in parts if name in part.costs])
        for name in CONTRACT_NAMES
    }
    sizes: dict[int, float] = {}
    for part in parts:
        if part.entry_bytes:
            sizes[part.ratio] = sizes.get(part.ratio, 0.0) + part.entry_bytes
    return CandidateResult.model_validate(
        {
            "name": info.name,
            "format": info.format,
            "device": info.device,
            "kernel": Kernel(
                variant=info.variant,
                source_sha256=info.source_sha256,
                path_taken="; ".join(dict.fromkeys(p.path_taken for p in parts if p.path_taken)),
            ),
            "profile": Profile(name=profile.name, switches=profile.switches()),
            "verdict": candidate_verdict(outcome.layers),
            "first_divergence": first_divergence(outcome.layers),
            "layers": tuple(outcome.layers),
            "recall": input_recall(outcome.recall, outcome.topk),
            "format_cost": FormatCost(**costs, cache_bytes_per_token=cache_bytes_per_token(sizes)),
            "memory": MemoryResult(
                peak_transient_bytes=max((p.peak_transient_bytes for p in parts), default=0),
                law=outcome.law,
            ),
            "repeat": None if outcome.repeat is None else outcome.repeat.result(),
        }
    )
