"""The step-by-step protocol: a candidate that serves requests through a cache, call by call.

:class:`~needlepoint.optimized.protocol.interface.Candidate` computes whole prompts. A
:class:`StatefulCandidate` can also ``serve``: it opens a :class:`Server` with an engine-neutral
cache and is then driven like an engine. Whoever drives it is the scheduler: it hands out slots and
pages and says where every token goes; the server computes and stores. A candidate without ``serve``
does not cover scenarios.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from needlepoint.optimized.protocol.interface import CandidateInfo, QueryInputs, QueryRows, StageKey

FP32_STATE = "fp32"
BF16_STATE = "bf16"
MAX_DRAFT = 8
"""Tokens of one speculative verification at most; a state ring has room to take them back."""


class CannotServe(ValueError):
    """A candidate does not compute step by step, or not with such a cache; says why."""


@dataclass(frozen=True)
class CompressorParameters:
    """Parameters of one compressor: ``ape`` fp32 [ratio, c * d] and ``norm_weight`` fp32 [d]."""

    ape: Tensor
    norm_weight: Tensor


@dataclass(frozen=True)
class LayerParameters:
    """What a server knows of its layer; the tokens come call by call."""

    layer: int
    ratio: int  # 4 or 128
    index: CompressorParameters | None  # None for ratio 128
    main: CompressorParameters
    rope_table: Tensor  # [positions, 32, 2] fp32, cos and sin
    norm_eps: float
    topk: int
    weight_scale: float


@dataclass(frozen=True)
class CacheSpec:
    """How much a cache holds.

    Attributes
    ----------
    slots
        Requests whose state fits at once.
    pages
        Pages of each pool of each path.
    page_size
        Rows a page, a power of two.
    pools
        Pools of pages of each path, all of one size.
    state
        ``"fp32"`` or ``"bf16"``, what a state ring keeps its tokens in.
    """

    slots: int
    pages: int
    page_size: int
    pools: int
    state: str


@dataclass(frozen=True)
class Cache:
    """Everything that outlives a call, as plain buffers.

    Attributes
    ----------
    state
        By path: ``[slots, ring, 2, c * d]``, kv then score of the tokens that open windows still
        need. Which token lies in which row is the server's business.
    pools
        By path: one uint8 ``[pages, page bytes]`` a pool.
    layouts
        By path: page layout, as in :class:`~needlepoint.optimized.protocol.interface.PagedRows`.
    page_size
        Rows a page.
    """

    state: Mapping[str, Tensor]
    pools: Mapping[str, tuple[Tensor, ...]]
    layouts: Mapping[str, str]
    page_size: int


@dataclass(frozen=True)
class Place:
    """Where a request lives.

    Attributes
    ----------
    slot
        Row of the state.
    pool
        Pool of its pages.
    pages
        By path: int32 page ids, the page of entry 0 first.
    length
        Its accepted tokens.
    """

    slot: int
    pool: int
    pages: Mapping[str, Tensor]
    length: int


@dataclass(frozen=True)
class Part:
    """The tokens of one request in a call: positions ``place.length ..``.

    Attributes
    ----------
    place
        Where the request lives; its pages have room for the entries that the call completes.
    row
        Row of the first token in the tensors of the call.
    count
        Tokens, at least 1.
    draft
        Whether :meth:`Server.accept` will say how many of them stay.
    """

    place: Place
    row: int
    count: int
    draft: bool


@dataclass(frozen=True)
class TokenRows:
    """Projections of tokens for one compressor: ``[rows, c * d]`` each."""

    kv: Tensor
    score: Tensor


@dataclass(frozen=True)
class StepBatch:
    """One call.

    Attributes
    ----------
    parts
        At most one part a request. Rows that no part names are padding.
    tokens
        Projections by path, all rows of the call.
    query
        Query projections of the same rows; None for ratio 128.
    ranks
        Ranks of the context-parallel group that shares the call; 1 without one.
    layout
        ``"contiguous"`` or ``"strided"``: which of a request's tokens each rank takes.
    """

    parts: tuple[Part, ...]
    tokens: Mapping[str, TokenRows]
    query: QueryInputs | None
    ranks: int
    layout: str


@dataclass(frozen=True)
class StepOutput:
    """What a call hands back besides its pages; any of it may be absent.

    Attributes
    ----------
    query
        Stored queries and weights of all rows of the call; padding may hold anything.
    scores
        One tensor a part: ``[count, entries]``, -inf from the visible entries on, where entries are
        those complete after the part's last token.
    topk
        int32 ``[rows, k]``, request-relative entries, -1 padded.
    """

    query: QueryRows | None = None
    scores: tuple[Tensor, ...] | None = None
    topk: Tensor | None = None


class Server(Protocol):
    """One layer of a server; every method but ``cache`` may write to the cache."""

    @property
    def cache(self) -> Cache:
        """The buffers, live."""
        ...

    def step(self, batch: StepBatch) -> StepOutput:
        """Compute a call: write the entries it completes and keep the tokens it must."""
        ...

    def accept(self, place: Place, drafted: int, kept: int) -> None:
        """Keep the first ``kept`` of the tokens drafted from ``place.length`` on."""
        ...

    def fork(self, source: Place, target: Place, tail: Mapping[str, TokenRows]) -> None:
        """Let ``target`` start with the first ``target.length`` tokens of ``source``.

        Pages that both name are shared and full; the others of ``target`` take copies. ``tail``
        holds, by path, the last tokens of the prefix, as many as an open window can need.
        """
        ...

    def offload(self, place: Place) -> object:
        """Return a copy of all that is kept of a request; its place will be given away."""
        ...

    def restore(self, saved: object, place: Place) -> None:
        """Put back what :meth:`offload` returned, in another place."""
        ...

    def move(self, source: Place, target: Place) -> None:
        """Copy the pages of a request to another pool; its slot stays."""
        ...

    def release(self, place: Place) -> None:
        """Forget a request; its slot and pages will be given away as they are."""
        ...


@runtime_checkable
class StatefulCandidate(Protocol):
    """A :class:`~needlepoint.optimized.protocol.interface.Candidate` that can also serve."""

    @property
    def info(self) -> CandidateInfo:
        """Identity and profile."""
        ...

    def stages(self, ratio: int) -> frozenset[StageKey]:
        """Return the declared stages of :meth:`Candidate.run`."""
        ...

    def serve(self, parameters: LayerParameters, spec: CacheSpec) -> Server:
        """Open a server with an unwritten cache.

        Raises
        ------
        CannotServe
            If the candidate cannot; it is then listed as not covering scenarios.
        """
        ...
