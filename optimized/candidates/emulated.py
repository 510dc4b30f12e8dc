"""The four emulated candidates: the specification on the CPU, into real pages and back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from needlepoint.optimized.emulation.keyside import KeySide, key_and_query_stages
from needlepoint.optimized.emulation.memory import measure_law
from needlepoint.optimized.emulation.narrow import store_bf16, store_main_fp8
from needlepoint.optimized.emulation.preconditions import (
    require_preconditions,
    require_token_preconditions,
)
from needlepoint.optimized.emulation.query import STORES, store_queries
from needlepoint.optimized.emulation.query_rows import observe_rows, scoring_transients
from needlepoint.optimized.emulation.scoring import (
    FusedScorer,
    UnfusedScorer,
    fused_scores,
    unfused_scores,
)
from needlepoint.optimized.emulation.select import select_topk
from needlepoint.optimized.emulation.specification import SPEC_VERSION, source_digest
from needlepoint.optimized.emulation.token_keys import TokenKeySide, token_stages
from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    CandidateInfo,
    LayerInputs,
    Observed,
    PagedRows,
    StageKey,
)
from needlepoint.optimized.protocol.optional import TransientLaw
from needlepoint.optimized.protocol.serving import CacheSpec, LayerParameters
from needlepoint.optimized.serving.cache import new_cache
from needlepoint.optimized.serving.emulated import EmulatedServer
from needlepoint.reference.formats.names import PER_TOKEN

_SOURCES = (
    "specification.py",
    "exact32.py",
    "pooling.py",
    "rows.py",
    "narrow.py",
    "compressor.py",
    "keyside.py",
    "token_keys.py",
    "query.py",
    "pages.py",
    "readback.py",
    "scoring.py",
    "select.py",
)


class Order(Enum):
    """In which order blocks and steps are taken, and how scores are formed."""

    FUSED = "fused"  # one block through all steps; scores without a per-head tensor
    UNFUSED = "unfused"  # one step over all blocks; scores through the per-head fp32 tensor


@dataclass(frozen=True)
class EmulatedCandidate:
    """One emulated candidate; implements the ``Candidate`` protocol.

    Attributes
    ----------
    key_format
        ``"bf16"``, ``"fp8"`` or ``"fp4"``; main rows are bf16 beside bf16 keys, else 584 bytes.
    order
        Fused or separate steps. The stored bytes are the same.
    """

    key_format: str
    order: Order

    @property
    def info(self) -> CandidateInfo:
        """Identity; the digest covers every source file that defines a number."""
        return CandidateInfo(
            name=f"emulated:{self.order.value}-{self.key_format}",
            format=self.key_format,
            device="cpu",
            profile="needlepoint",
            variant=f"specification {SPEC_VERSION}, {self.order.value}",
            source_sha256=source_digest(_SOURCES),
        )

    def stages(self, ratio: int) -> frozenset[StageKey]:
        """Return every stage from ``pooled`` to ``topk``; ratio 128 has no indexer, 0 nothing.

        Layers of one key a token (ratio 1) begin at ``normed``.
        """
        return token_stages() if ratio == PER_TOKEN else key_and_query_stages(ratio, dense=True)

    def run(self, inputs: LayerInputs) -> Observed:
        """Compute one layer.

        Raises
        ------
        ValueError
            If a tensor has a wrong shape or dtype or a precondition of the specification does not
            hold, naming the tensor and the token.
        """
        if inputs.ratio == PER_TOKEN:
            require_token_preconditions(inputs)
        else:
            require_preconditions(inputs)
        dense: dict[StageKey, Tensor] = {}
        stored: dict[str, PagedRows] = {}
        for path, side in self._sides(inputs).items():
            if self.order is Order.FUSED:
                side.run_fused()
            else:
                side.run_separate()
            dense |= {(path, stage): rows for stage, rows in side.dense.items()}
            stored[path] = side.paged
        taken = f"{self.order.value} store, {inputs.ratio} tokens an entry"
        if inputs.query is None:
            return Observed(dense=dense, stored=stored, path_taken=taken)
        query = store_queries(inputs.query, inputs, self.key_format)
        kind = FusedScorer if self.order is Order.FUSED else UnfusedScorer
        scorer = kind(query, stored[INDEX], inputs.lengths, inputs.ratio)
        return Observed(
            dense=dense,
            stored=stored,
            query=query,
            scores=scorer.read,
            topk=scorer.select(inputs.topk),
            peak_transient_bytes=scorer.peak_transient_bytes(inputs.topk),
            path_taken=f"{taken}; scores in blocks of {scorer.block_rows(0)} queries",
        )

    def serve(self, parameters: LayerParameters, spec: CacheSpec) -> EmulatedServer:
        """Open a server of one layer; implements ``StatefulCandidate``."""
        cache = new_cache(parameters, spec, self.key_format)
        score = fused_scores if self.order is Order.FUSED else unfused_scores
        return EmulatedServer(parameters, cache, self.key_format, score)

    def run_rows(self, inputs: LayerInputs, positions: Tensor) -> Observed:
        """Compute the index keys of one request and some of its queries; see ``observe_rows``."""
        return observe_rows(inputs, positions, self.key_format, fused=self.order is Order.FUSED)

    def select(self, scores: Tensor, lengths: Tensor, k: int) -> Tensor:
        """Return the picks of given scores; implements ``SelectsEntries``."""
        return select_topk(scores, lengths, k)

    def prompt_transients(self, tokens: int, heads: int) -> tuple[int | None, int]:
        """Return what scoring the end of a prompt holds; see ``scoring_transients``."""
        return scoring_transients(tokens, heads, fused=self.order is Order.FUSED)

    def transient_law(self) -> TransientLaw | None:
        """Measure the transients of unfused scoring at four sizes; None for fused scoring."""
        return measure_law(unfused_scores) if self.order is Order.UNFUSED else None

    def _sides(self, inputs: LayerInputs) -> dict[str, KeySide | TokenKeySide]:
        sides: dict[str, KeySide | TokenKeySide] = {}
        layout, store = f"index-{self.key_format}", STORES[self.key_format]
        if inputs.index is not None and inputs.ratio == PER_TOKEN:
            return {INDEX: TokenKeySide(inputs.index, inputs, layout, store)}
        if inputs.index is not None:
            sides[INDEX] = KeySide(inputs.index, inputs, layout, store, rotated=True)
        if self.key_format == "bf16":
            layout, store = "main-bf16", store_bf16
        else:
            layout, store = "main-584", store_main_fp8
        sides[MAIN] = KeySide(inputs.main, inputs, layout, store, rotated=False)
        return sides
