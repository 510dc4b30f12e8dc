"""Every rounding point, one at a time: a mutant without it changes its stage and none before.

The arithmetic of a contract or profile is replaced in one field, and the stages of the same request
are compared byte by byte with those of the original.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.formats import BF16, FLOAT64, FP32
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import (
    BF16_CONTRACT,
    EXACT,
    OFFICIAL,
    Accumulator,
    ApePlacement,
    Arithmetic,
    Precision,
    needlepoint_profile,
)
from needlepoint.reference.weights import random_layer_weights

BF = Precision.BF16
Hidden = Callable[[int, int], Tensor]
Key = tuple[str, str]

BASES: dict[str, Arithmetic] = {
    "bf16": BF16_CONTRACT,
    "official": OFFICIAL,
    "fused-bf16": needlepoint_profile("bf16"),
    "fused-fp8": needlepoint_profile("fp8"),
    "fused-fp4": needlepoint_profile("fp4"),
}

# Where a field acts first. What lies behind these stages may change, nothing else may.
ACTS_AT: dict[str, tuple[Key, ...]] = {
    "projected": (("index", "projected"), ("main", "projected"), ("query", "projected")),
    "latent": (("query", "projected"),),
    "pooled": (("index", "pooled"), ("main", "pooled")),
    "normed": (("index", "normed"), ("main", "normed")),
    "roped": (("index", "roped"), ("main", "roped"), ("query", "rotated")),
    "rope_table": (("index", "roped"), ("main", "roped"), ("query", "rotated")),
    "rotated": (("index", "rotated"), ("query", "rotated")),
    "hadamard": (("index", "rotated"), ("query", "rotated")),
    "index_key": (("index", "stored"),),
    "index_query": (("query", "query"),),
    "main_nope": (("main", "stored"),),
    "main_rope": (("main", "stored"),),
    "weights": (("query", "weights"),),
    "dot": (("index", "scores"),),
    "weighted": (("index", "scores"),),
    "head_sum": (("index", "scores"),),
    "probabilities": (("main", "attention"),),
    "state": (("index", "pooled"), ("main", "pooled")),
    "ape": (("index", "pooled"), ("main", "pooled")),
    "key_input": (("index", "pooled"), ("main", "pooled")),
    "pool_weights": (("index", "pooled"), ("main", "pooled")),
    "pool_terms": (("index", "pooled"), ("main", "pooled")),
    "query_input": (("query", "rotated"), ("query", "weights")),
    "query_roped": (("query", "rotated"),),
    "query_rotated": (("query", "rotated"),),
    "accumulator": (),  # what the judge allows for, no rounding point
}
FEEDS: dict[Key, tuple[Key, ...]] = {
    ("index", "projected"): (("index", "pooled"),),
    ("index", "pooled"): (("index", "normed"),),
    ("index", "normed"): (("index", "roped"),),
    ("index", "roped"): (("index", "rotated"),),
    ("index", "rotated"): (("index", "stored"),),
    ("index", "stored"): (("index", "scores"),),
    ("query", "projected"): (("query", "rotated"), ("query", "weights")),
    ("query", "rotated"): (("query", "query"),),
    ("query", "query"): (("index", "scores"),),
    ("query", "weights"): (("index", "scores"),),
    ("index", "scores"): (("index", "topk"),),
    ("index", "topk"): (("main", "attention"),),
    ("main", "projected"): (("main", "pooled"),),
    ("main", "pooled"): (("main", "normed"),),
    ("main", "normed"): (("main", "roped"),),
    ("main", "roped"): (("main", "stored"),),
    ("main", "stored"): (("main", "attention"),),
    ("main", "attention"): (),
}
READS_LATENT = {"latent", "normed", "roped", "rope_table", "main_nope", "main_rope", "projected"}
"""Fields that main queries or window rows pass through on their own way to the attention."""

# A bf16 number rounded to bf16 again: the point is there and cannot show.
REDUNDANT = {
    ("bf16", "index_key"),
    ("bf16", "index_query"),
    ("bf16", "main_nope"),
    ("bf16", "main_rope"),
    ("official", "main_rope"),
}
# Changes of one fp32 step that a following bf16 rounding hides in a request as short as this, and
# dots of FP4 numbers, which fp32 holds exactly. Other bases show these fields.
HIDDEN = {
    ("bf16", "rope_table"),
    ("bf16", "ape"),
    ("official", "rope_table"),
    ("official", "ape"),
    ("fused-fp4", "dot"),
}


def mutate(arithmetic: Arithmetic, field: str) -> Arithmetic:
    """Return the arithmetic without the rounding of one field."""
    value: Any = getattr(arithmetic, field)
    changes: dict[str, Any] = {
        "hadamard": not arithmetic.hadamard,
        "ape": ApePlacement.WRITE,
        "state": Precision.BF16,
        "accumulator": Accumulator.SM90_FP8,
        **dict.fromkeys(("key_input", "query_input", "pool_weights", "pool_terms"), BF),
        "query_roped": Precision.FLOAT64 if arithmetic.roped is BF else BF,
        "query_rotated": Precision.FLOAT64 if arithmetic.rotated is BF else BF,
    }
    removed: Any = Precision.FLOAT64 if isinstance(value, Precision) else FLOAT64
    return replace(arithmetic, **{field: changes.get(field, removed)})


def stages(arithmetic: Arithmetic, model: ModelConfig, hidden: Tensor) -> dict[Key, Tensor]:
    """Run a request in two calls that split a window, so that the state takes part."""
    layer = ReferenceLayer(model, 0, random_layer_weights(model, 0, 3), arithmetic)
    state = layer.new_request()
    parts = []
    for part in (hidden[:38], hidden[38:]):
        call = layer.forward(part, state, keep_scores=True)
        assert call.query is not None
        parts.append(call.tensors() | {("query", "rotated"): call.query.rotated})
    found = {}
    for key in parts[0]:
        first, second = parts[0][key], parts[1][key]
        if key == ("index", "scores"):
            first = torch.nn.functional.pad(first, (0, second.shape[1] - first.shape[1]))
        found[key] = torch.cat((first, second))
    return found


def may_change(field: str) -> set[Key]:
    reached: set[Key] = set()
    open_keys = list(ACTS_AT[field])
    if field == "projected":
        open_keys.append(("query", "weights"))
    if field in READS_LATENT:
        open_keys.append(("main", "attention"))
    while open_keys:
        key = open_keys.pop()
        if key not in reached:
            reached.add(key)
            open_keys.extend(FEEDS[key])
    return reached


@pytest.mark.parametrize(
    ("base", "field"), [(b, f) for b in BASES for f in ACTS_AT if (b, f) not in HIDDEN]
)
def test_mutant_of_one_field(
    small_model: ModelConfig, hidden_states: Hidden, base: str, field: str
) -> None:
    hidden = hidden_states(90, 11)
    original = stages(BASES[base], small_model, hidden)
    mutant = stages(mutate(BASES[base], field), small_model, hidden)
    changed = {key for key in original if not torch.equal(original[key], mutant[key])}
    if (base, field) in REDUNDANT:
        assert changed == set()
        return
    assert set(ACTS_AT[field]) <= changed
    assert changed <= may_change(field)


def test_every_field_is_covered() -> None:
    names = {f.name for f in fields(Arithmetic)} - {"name"}
    assert names == set(ACTS_AT)
    silent = REDUNDANT | HIDDEN
    assert all(any((base, name) not in silent for base in BASES) for name in names)


@pytest.mark.parametrize(
    "field",
    sorted(
        ACTS_AT.keys() - {"hadamard", "ape", "index_key", "index_query", "main_nope", "accumulator"}
    ),
)
def test_each_point_alone(small_model: ModelConfig, hidden_states: Hidden, field: str) -> None:
    """From the other side: the exact contract with one rounding to bf16 added."""
    hidden = hidden_states(90, 12)
    original = stages(EXACT, small_model, hidden)
    rounded = stages(replace(EXACT, **{field: Precision.BF16}), small_model, hidden)  # type: ignore[arg-type]
    changed = {key for key in original if not torch.equal(original[key], rounded[key])}
    assert set(ACTS_AT[field]) <= changed <= may_change(field)


@pytest.mark.parametrize("field", ["index_key", "index_query", "main_nope"])
@pytest.mark.parametrize("fmt", [FP32, BF16], ids=lambda f: f.name)
def test_each_format_alone(
    small_model: ModelConfig, hidden_states: Hidden, field: str, fmt: object
) -> None:
    hidden = hidden_states(90, 12)
    original = stages(EXACT, small_model, hidden)
    rounded = stages(replace(EXACT, **{field: fmt}), small_model, hidden)  # type: ignore[arg-type]
    changed = {key for key in original if not torch.equal(original[key], rounded[key])}
    assert set(ACTS_AT[field]) <= changed <= may_change(field)


@pytest.mark.parametrize(
    ("key", "field"),
    [
        (("index", "projected"), "projected"),
        (("index", "pooled"), "pooled"),
        (("main", "pooled"), "pooled"),
        (("index", "normed"), "normed"),
        (("main", "normed"), "normed"),
        (("index", "roped"), "roped"),
        (("main", "roped"), "roped"),
        (("index", "rotated"), "rotated"),
        (("query", "weights"), "weights"),
        (("index", "scores"), "head_sum"),
    ],
)
@pytest.mark.parametrize("base", BASES)
def test_a_stage_holds_numbers_of_its_precision(
    small_model: ModelConfig, hidden_states: Hidden, base: str, key: Key, field: str
) -> None:
    dtype = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}
    tensor = stages(BASES[base], small_model, hidden_states(40, 13))[key]
    kept = dtype[getattr(BASES[base], field)]
    assert torch.equal(tensor.to(kept).double(), tensor)
