"""What a candidate may offer beside whole prompts, each part a protocol of one name.

A candidate has a part by having its method; nobody asks for names that are not declared here, in
``interface`` or in ``serving``, where
:class:`~needlepoint.optimized.protocol.serving.StatefulCandidate` declares ``serve``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from needlepoint.optimized.protocol.interface import LayerInputs, Observed

LAW_CHUNK = 8192
"""Queries that a serving engine's prefill scores at once."""


@runtime_checkable
class ComputesRows(Protocol):
    """Computes some queries of one request without the others; ``recall`` asks for needles'."""

    def run_rows(self, inputs: LayerInputs, positions: Tensor) -> Observed:
        """Return pages of all index keys, and query, scores and picks of some queries alone.

        Parameters
        ----------
        inputs
            One request of a layer of ratio 4. ``query`` holds the asked rows only; ``main`` is a
            stand-in that is not to be read.
        positions
            int64 ``[rows]``, positions of the queries.

        Returns
        -------
        Observed
            Row ``i`` of ``query`` and ``topk`` is the query at ``positions[i]``; the score reader
            takes row numbers.
        """
        ...


@runtime_checkable
class SelectsEntries(Protocol):
    """Selects from scores that it did not compute, so that its selection is judged alone."""

    def select(self, scores: Tensor, lengths: Tensor, k: int) -> Tensor:
        """Return the entries that the candidate picks, from scores that the judge gives.

        Parameters
        ----------
        scores
            fp32 ``[rows, entries]`` on the CPU, ``index.scores`` of some queries; -inf from
            ``lengths`` on. Not to be modified.
        lengths
            int32 ``[rows]``, entries that each row sees.
        k
            Picks a row, at least 1.

        Returns
        -------
        Tensor
            int32 ``[rows, k]`` on the CPU: entries in any order, and -1 where a row sees fewer.
        """
        ...


@runtime_checkable
class SpreadsLayers(Protocol):
    """Says whether all ranks of torchrun take part in every layer, as with heads over ranks."""

    @property
    def spreads_layers(self) -> bool:
        """True: each rank runs every layer. False, as without it: ranks share the layers out."""
        ...


@dataclass(frozen=True)
class TransientSample:
    """One measurement: transient ``bytes`` of scoring ``queries`` x ``heads`` x ``keys``."""

    queries: int
    heads: int
    keys: int
    bytes: int


@dataclass(frozen=True)
class TransientLaw:
    """bytes = bytes_per_product * queries * heads * keys, fitted to measurements.

    Attributes
    ----------
    bytes_per_product
        The fitted factor: 4 for one fp32 number per query, head and key.
    samples
        What was measured.
    """

    bytes_per_product: float
    samples: tuple[TransientSample, ...]

    def predict(self, queries: int, heads: int, keys: int) -> int:
        """Return the transient bytes of one chunk by the law."""
        return round(self.bytes_per_product * queries * heads * keys)

    def predict_prompt(self, tokens: int, heads: int, ratio: int = 4) -> int:
        """Return the transient bytes of the last prefill chunk of a prompt by the law.

        Parameters
        ----------
        tokens
            Length of the prompt, scored in chunks of :data:`LAW_CHUNK` queries.
        heads
            Indexer heads.
        ratio
            Compression ratio: the last chunk scores ``tokens // ratio`` keys.
        """
        last = tokens % LAW_CHUNK or min(tokens, LAW_CHUNK)
        return self.predict(last, heads, tokens // ratio)


@runtime_checkable
class MeasuresTransients(Protocol):
    """Measures its transients at several sizes; results carry the law and what it predicts."""

    def transient_law(self) -> TransientLaw | None:
        """Measure and fit; None where transients do not grow with queries x heads x keys."""
        ...


@runtime_checkable
class MeasuresPrompts(Protocol):
    """Says what scoring the end of a prompt holds; ``recall`` puts it beside the hits."""

    def prompt_transients(self, tokens: int, heads: int) -> tuple[int | None, int]:
        """Return transient bytes of scoring the last queries of a prompt of ``tokens``.

        Returns
        -------
        tuple
            Measured (None if not run at this size), and predicted by a law.
        """
        ...
