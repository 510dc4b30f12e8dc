"""Mutants of the emulation: each changes one rounding, order or constant, and must change bits.

The data is the data on which the emulation equals the scalar model of ``test_specification``, so an
emulation that computed what a mutant computes would fail there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from needlepoint.optimized.emulation import compressor, exact32, pooling, rows, specification
from needlepoint.optimized.protocol.interface import LayerInputs

F32 = npt.NDArray[np.float32]
f32 = np.float32
TOKENS, ENTRIES = (49,), range(12)
LOG2_E = specification.LOG2_E
Emulate = Callable[[LayerInputs, str, range], dict[str, npt.NDArray[np.generic]]]
Mutation = Callable[[pytest.MonkeyPatch], None]


def unfused(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> F32:
    result: F32 = np.add(np.multiply(a, b, dtype=f32), c, dtype=f32)
    return result


def sequential(x: F32) -> F32:
    total: F32 = x[0]
    for part in x[1:]:
        total = total + part
    return total


def halves(x: F32) -> F32:
    """Tree whose first stride is half of the length."""
    while x.shape[0] > 1:
        x = x[: x.shape[0] // 2] + x[x.shape[0] // 2 :]
    first: F32 = x[0]
    return first


def next_up(value: np.float32) -> np.float32:
    return np.float32(np.nextafter(value, f32(9), dtype=f32))


def late_ape(score: F32, scale: F32, ape: F32) -> F32:
    """Prescale after the addition: fl((score + ape) L), with ape already times L."""
    result: F32 = (score + ape / LOG2_E) * LOG2_E
    return result


def mul_add_norm(x: F32, w: F32, eps: np.float32) -> F32:
    mean = exact32.pair_tree(exact32.fma(x[1::2], x[1::2], x[0::2] ** 2)) / f32(x.shape[0]) + eps
    result: F32 = x * (w[:, None] * (f32(1) / np.sqrt(mean)))
    return result


def descending(x: F32) -> F32:
    stride = 64
    while stride:
        pairs = x.reshape(64 // stride, 2, stride, -1)
        x = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), axis=1).reshape(
            128, -1
        )
        stride //= 2
    return x * specification.HADAMARD_SCALE


def scale_first(x: F32) -> F32:
    return rows.hadamard(x * f32(128**-0.5)) / f32(128**-0.5)


def swapped_rope(x: F32, cos: F32, sin: F32) -> F32:
    out = x.copy()
    out[-64::2] = exact32.fma(x[-64::2], cos, -(x[-63::2] * sin))
    out[-63::2] = exact32.fma(x[-64::2], sin, x[-63::2] * cos)
    return out


def coefficient(place: int) -> Mutation:
    def apply(patch: pytest.MonkeyPatch) -> None:
        changed = list(specification.EXP2_COEFFICIENTS)
        # A step of a high coefficient is far below the last bit of the sum: take many.
        bits = changed[place].view(np.uint32) + np.uint32((1024, 64, 16, 1, 1)[place])
        changed[place] = bits.view(f32)
        patch.setattr(pooling, "EXP2_COEFFICIENTS", tuple(changed))

    return apply


def attribute(module: object, name: str, value: object) -> Mutation:
    return lambda patch: patch.setattr(module, name, value)


MUTANTS: dict[str, tuple[str, Mutation]] = {
    "prescale: multiply, then add": ("pooled", attribute(pooling, "fma", unfused)),
    "prescale: after the addition": ("pooled", attribute(pooling, "fma", late_ape)),
    "log2 e: next number": ("pooled", attribute(pooling, "LOG2_E", next_up(LOG2_E))),
    "ape scaled in float64": (
        "pooled",
        attribute(compressor, "scaled_ape", lambda a: (a * np.log2(np.e)).astype(f32)),
    ),
    **{f"polynomial C{5 - i}": ("pooled", coefficient(i)) for i in range(5)},
    "sums: multiply, then add": (
        "pooled",
        attribute(pooling, "round_sum", lambda p, c: p.astype(f32) + np.asarray(c, f32)),
    ),
    "vendor exponential": ("pooled", attribute(pooling, "exp2", np.exp2)),
    "norm: sequential sum": ("normed", attribute(rows, "pair_tree", sequential)),
    "norm: halves tree": ("normed", attribute(rows, "pair_tree", halves)),
    "norm: weight times inverse first": ("normed", attribute(compressor, "norm", mul_add_norm)),
    "rope: multiply, then add": ("roped", attribute(rows, "fma", unfused)),
    "rope: other product fused": ("roped", attribute(compressor, "rope", swapped_rope)),
    "hadamard: descending strides": ("rotated", attribute(compressor, "hadamard", descending)),
    "hadamard: scale first": ("rotated", attribute(compressor, "hadamard", scale_first)),
    "hadamard: next scale": (
        "rotated",
        attribute(rows, "HADAMARD_SCALE", next_up(specification.HADAMARD_SCALE)),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_changes_bits(
    name: str,
    make_inputs: Callable[..., LayerInputs],
    emulate: Emulate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, mutate = MUTANTS[name]
    inputs = make_inputs(4, TOKENS)
    clean = emulate(inputs, "index", ENTRIES)
    mutate(monkeypatch)
    changed = emulate(inputs, "index", ENTRIES)
    assert not np.array_equal(clean[stage], changed[stage])


@pytest.mark.parametrize("mutant", [sequential, halves])
def test_the_tree_of_128_slots_is_pinned(
    mutant: Callable[[F32], F32], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(8)
    kv, score = (rng.standard_normal((128, 6)).astype(f32) for _ in range(2))
    clean = pooling.pool(kv, score, np.zeros((128, 1), f32))
    monkeypatch.setattr(pooling, "pair_tree", mutant)
    assert not np.array_equal(clean, pooling.pool(kv, score, np.zeros((128, 1), f32)))
