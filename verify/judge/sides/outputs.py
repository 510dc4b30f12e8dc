"""Judge what one layer returned by its profile, without a model: error bounds and picks only.

Everything the reference needs is in the given tensors. A recording is judged this way; a run with a
model adds contracts and attention around the same pieces (``layer_run.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from needlepoint.optimized.protocol.interface import INDEX, LayerInputs, Observed, StageKey
from needlepoint.reference.profile import Arithmetic
from needlepoint.verify.base.memory import trim_malloc
from needlepoint.verify.base.rows import Rows
from needlepoint.verify.base.stage_blocks import query_blocks
from needlepoint.verify.judge.layer_outcome import LayerOutcome
from needlepoint.verify.judge.sides.key_side import KeyReference, compare_key_stages, key_reference
from needlepoint.verify.judge.sides.query_reference import QueryReference, RotatedQueries
from needlepoint.verify.judge.sides.query_side import QueryJudge
from needlepoint.verify.layout.stored_rows import StoredRows, read_stored
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.numerics.row_errors import StageErrors


def judge_observed(
    given: LayerInputs, observed: Observed, arithmetic: Arithmetic, limits: Limits
) -> LayerOutcome:
    """Judge one layer against the reference run from its given tensors.

    Raises
    ------
    ValueError
        If pages, queries or scores cannot be read as what they are declared to be.
    """
    stored = read_layer_rows(given, observed)
    errors: dict[StageKey, StageErrors] = {}
    keys: KeyReference | None = None
    for path in key_paths(given):  # one after the other: a reference is as large as its path
        found = key_reference(path, given, arithmetic)
        trim_malloc()
        errors |= judge_keys(observed, stored, {path: found})
        keys = found if path == INDEX else keys
        del found
        trim_malloc()
    if keys is None or given.query is None or not has_query_side(observed):
        return LayerOutcome.of(given, observed, errors, None)
    reference = QueryReference(given, arithmetic, keys, RotatedQueries(given))
    judge = QueryJudge(given, observed, reference, stored.get(INDEX), limits)
    width = given.query.q.shape[1] * given.query.q.shape[2]
    for block in query_blocks(given.lengths, given.ratio, width):
        judge.judge(block, reference.block(block))
    return LayerOutcome.of(given, observed, errors | judge.errors, judge.picks)


def key_paths(given: LayerInputs) -> tuple[str, ...]:
    """Return the key-side paths of a layer."""
    return tuple(given.paths)


def read_layer_rows(given: LayerInputs, observed: Observed) -> dict[str, StoredRows]:
    """Read the stored rows of every path.

    Raises
    ------
    ValueError
        If a pool does not hold the entries that the requests have, or cannot be read.
    """
    wanted = Rows(given.lengths, given.ratio).counts
    found: dict[str, StoredRows] = {}
    for path, paged in observed.stored.items():
        if paged.entries != wanted:
            raise ValueError(
                f"layer {given.layer} {path}.stored: {list(paged.entries)} entries a request, "
                f"expected {list(wanted)}"
            )
        found[path] = read_stored(paged, 128 if path == INDEX else given.main.norm_weight.numel())
    return found


def judge_keys(
    observed: Observed,
    stored: Mapping[str, StoredRows],
    references: Mapping[str, KeyReference],
) -> dict[StageKey, StageErrors]:
    """Compare every observed key-side stage."""
    errors: dict[StageKey, StageErrors] = {}
    for path, reference in references.items():
        dense: dict[str, Tensor] = {s: x for (p, s), x in observed.dense.items() if p == path}
        found = compare_key_stages(reference, dense, stored.get(path))
        errors |= {part.key: part for part in found}
    return errors


def has_query_side(observed: Observed) -> bool:
    """Return whether anything of the query side was observed."""
    parts = (observed.query, observed.scores, observed.topk)
    return any(part is not None for part in parts)
