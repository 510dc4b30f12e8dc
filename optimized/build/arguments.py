"""What each kind of launch is given: the one list that Python and C++ share.

A launch in Python makes one of these by name. The generated module declares a C++ struct of the
same name and fields, and a kernel's header reads the fields by name: a field that it does not find
stops the compiler, a name that Python does not know is a TypeError. The order means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, get_type_hints

from torch import Tensor

_CPP_TYPES = {Tensor: "TensorView", int: "int64_t", float: "double", bool: "bool"}


class StoreArguments(NamedTuple):
    """Of a one-launch store, and of the pooling step."""

    kv: Tensor  # [tokens, c * head_dim], rows may be strided
    score: Tensor  # as kv
    ape: Tensor  # [ratio, c * head_dim]
    norm_weight: Tensor  # [head_dim]
    rope: Tensor  # [positions, 32, 2]
    segments: Tensor  # int32 [segments, 8], the struct Segment
    slots: Tensor  # int64 [windows], negative: not stored
    writes: Tensor  # int32 [writes, 2], the struct WriteEntry
    state: Tensor  # [requests, ring, 2, c * head_dim]
    pool: Tensor  # uint8 [pages, page bytes]
    page_shift: int  # log2 of the rows of a page
    faults: Tensor  # int32 [2]
    workspace: Tensor  # int32, pooled rows at ratio 128
    eps: float
    score_small: float
    overlap: bool


class StepArguments(NamedTuple):
    """Of one separate step after pooling."""

    rows: Tensor  # fp32 [n, head_dim]
    norm_weight: Tensor
    rope: Tensor
    positions: Tensor  # int32 [n]
    slots: Tensor  # int64 [n], negative: padding
    pool: Tensor
    page_shift: int
    eps: float


class QueryArguments(NamedTuple):
    """Of the query path."""

    q: Tensor  # [tokens, heads, 128], tokens may be strided
    weights: Tensor  # [tokens, heads], tokens may be strided
    positions: Tensor  # int32 [tokens]
    rope: Tensor
    codes: Tensor  # uint8 [tokens, heads, bytes of a row], written
    scales: Tensor  # [tokens, heads, ..], written but for bf16
    folded: Tensor  # fp32 [tokens, heads], written
    weight_scale: float
    faults: Tensor  # int32 [2]
    overlap: bool


class ScoreArguments(NamedTuple):
    """Of the scores of all rows and columns."""

    queries: Tensor  # uint8 [rows, heads, bytes of a row]
    query_scales: Tensor  # fp4: uint8 [rows, heads, 4]; else empty
    weights: Tensor  # fp32 [rows, heads]
    context_lens: Tensor  # int32 [rows]: a row sees keys [0, context_len) of its request
    groups: Tensor  # int32 [groups, 4], the struct ScoreGroup
    keys: Tensor  # uint8 pages, or rows if the table is empty
    key_scales: Tensor  # uint8, the first scale of page 0; bf16: unused
    table: Tensor  # int32 [requests, pages], or empty
    starts: Tensor  # int64 [requests], of keys in rows
    page_shift: int
    columns: int
    span: int  # keys of a block
    out: Tensor  # fp32 [rows, columns], written
    overlap: bool


class ScoreTopkArguments(NamedTuple):
    """Of scores of which only the best of every span are written; else as ScoreArguments."""

    queries: Tensor
    query_scales: Tensor
    weights: Tensor
    context_lens: Tensor
    groups: Tensor
    keys: Tensor
    key_scales: Tensor
    table: Tensor
    starts: Tensor
    page_shift: int
    columns: int
    span: int
    list_scores: Tensor  # fp32 [rows, spans * slots], written
    list_columns: Tensor  # int32, as list_scores
    slots: int  # of a span
    overlap: bool


class TopkArguments(NamedTuple):
    """Of a selection."""

    scores: Tensor  # fp32 [rows, ..]
    context_lens: Tensor  # int32 [rows]: columns [0, context_len) count
    list: Tensor  # int32 as scores, the columns that they are of; empty: their own places
    requests: Tensor  # int32 [rows], rows of the table; empty: the row itself
    table: Tensor  # int32 [requests, pages] to translate picks with; empty: none
    topk_indices: Tensor  # int32 [rows, k], written
    columns: int
    page_shift: int
    span: int  # columns that a list's slots are of; 0: no list
    slots: int
    overlap: bool


Arguments = (
    StoreArguments
    | StepArguments
    | QueryArguments
    | ScoreArguments
    | ScoreTopkArguments
    | TopkArguments
)


def cpp_fields(kind: type[Arguments]) -> Iterator[tuple[str, str]]:
    """Yield the C++ type and the name of every field."""
    for name, annotation in get_type_hints(kind).items():
        yield _CPP_TYPES[annotation], name
