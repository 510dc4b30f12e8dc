"""What usual comparisons say of a candidate: assert_close, calc_diff, cosine, plain overlap.

They are asked about the tensor in which a fault is born, against the same reference that the judge
uses, so that a candidate's number format costs them nothing beyond its rounding ties.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import INDEX, LayerInputs, Observed
from needlepoint.reference.profile import Arithmetic
from needlepoint.verify.judge.sides.key_side import KeyReference, reference_rows
from needlepoint.verify.judge.sides.query_reference import ReferenceBlock
from needlepoint.verify.layout.stored_rows import decoded_queries, read_stored, unfolded_weights
from needlepoint.verify.schema.base import DIFFER, MATCH, Verdict
from needlepoint.verify.schema.selftest_result import Others

CALC_DIFF: Final = 1e-3
"""DeepGEMM's tests, and the default of SGLang's comparator."""
COSINE: Final = 0.999
OVERLAP: Final = 0.99

Pair = tuple[Tensor, Tensor]
"""What was found and what is expected, of one shape where the candidate kept to it."""


def assert_close(found: Tensor, expected: Tensor) -> bool:
    """Return whether ``torch.testing.assert_close`` passes with its defaults."""
    try:
        torch.testing.assert_close(found, expected)
    except AssertionError:
        return False
    return True


def calc_diff(found: Tensor, expected: Tensor) -> float:
    """Return ``1 - 2<x,y> / (<x,x> + <y,y>)`` in float64, as DeepGEMM's tests define it."""
    x, y = found.to(torch.float64), expected.to(torch.float64)
    total = (x * x + y * y).sum()
    return float(1 - 2 * (x * y).sum() / total) if total else 0.0


def cosine(found: Tensor, expected: Tensor) -> float:
    """Return the cosine of two flattened tensors in float64; 1 for two that are zero."""
    x, y = found.to(torch.float64).flatten(), expected.to(torch.float64).flatten()
    size = torch.linalg.vector_norm(x) * torch.linalg.vector_norm(y)
    return float(x @ y / size) if size or not torch.equal(x, y) else 1.0


def overlap(found: Tensor, expected: Tensor) -> float:
    """Return the mean share of the expected picks of a row that were found; -1 counts as none."""
    shared = (found[:, :, None] == expected[:, None, :]) & (expected >= 0)[:, None, :]
    size = (expected >= 0).sum(1)
    rows = size > 0
    return float((shared.any(1).sum(1)[rows] / size[rows]).mean()) if rows.any() else 1.0


def ask(pairs: Mapping[str, Pair], picks: Pair | None) -> Others:
    """Return what each comparison says of some tensors, and of picks."""
    tensors = list(pairs.values())
    same_shape = all(found.shape == expected.shape for found, expected in tensors)
    blank = [(_finite(f, e), _finite(e, f)) for f, e in tensors] if same_shape else []

    def say(passes: bool) -> Verdict:
        return MATCH if same_shape and passes else DIFFER

    if not tensors:
        close = diff = alike = None
    else:
        close = say(all(assert_close(f, e) for f, e in tensors))
        diff = say(all(calc_diff(f, e) < CALC_DIFF for f, e in blank))
        alike = say(all(cosine(f, e) > COSINE for f, e in blank))
    shared: Verdict | None = None
    if picks is not None:
        same_rows = len(picks[0]) == len(picks[1])
        shared = MATCH if same_rows and overlap(*picks) >= OVERLAP else DIFFER
    return Others(assert_close=close, calc_diff=diff, cosine=alike, overlap=shared)


def pair_of(
    name: str,
    observed: Observed,
    given: LayerInputs,
    keys: Mapping[str, KeyReference],
    blocks: list[ReferenceBlock],
    arithmetic: Arithmetic,
) -> Pair | None:
    """Return a stage as such a comparison sees it, and its reference; None if not observed.

    Computed stages are fp32; stored rows and queries are dequantised and held in bf16.
    """
    path, stage = name.split(".")
    if (path, stage) in observed.dense:
        return observed.dense[path, stage], keys[path].stages[stage].value.to(torch.float32)
    if stage == "stored" and path in observed.stored:
        width = 128 if path == INDEX else given.main.norm_weight.numel()
        found = read_stored(observed.stored[path], width).values
        return found.to(torch.bfloat16), reference_rows(keys[path]).to(torch.bfloat16)
    if name == "query.query" and observed.query is not None:
        found = decoded_queries(observed.query, arithmetic.index_query).to(torch.bfloat16)
        return found, torch.cat([b.stored.value for b in blocks]).to(torch.bfloat16)
    if name == "query.weights" and observed.query is not None:
        expected = torch.cat([b.weights.value for b in blocks]).to(torch.float32)
        return unfolded_weights(observed.query).to(torch.float32), expected
    if name == "index.scores" and observed.scores is not None:
        return _scores(observed, given, blocks)
    return None


def _scores(observed: Observed, given: LayerInputs, blocks: list[ReferenceBlock]) -> Pair | None:
    """Return scores of all requests in one row; None where a request has several blocks."""
    if observed.scores is None or len(blocks) != len(given.lengths):
        return None
    found, expected = [], []
    for request, (length, block) in enumerate(zip(given.lengths, blocks, strict=True)):
        columns = block.scores.shape[1]
        found.append(observed.scores(request, 0, length)[:, :columns].flatten())
        expected.append(block.scores.to(torch.float32).flatten())
    return torch.cat(found), torch.cat(expected)


def _finite(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a tensor with 0 where both sides are masked."""
    return tensor.masked_fill(torch.isneginf(tensor) & torch.isneginf(other), 0.0)
