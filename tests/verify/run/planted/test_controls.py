"""Sound candidates that do not do what the emulation does: none of them may be flagged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from needlepoint.optimized import compressor, emulated, keyside, narrow, query, scoring
from needlepoint.optimized.candidates import create
from needlepoint.optimized.interface import (
    INDEX,
    MAIN,
    Candidate,
    LayerInputs,
    Observed,
    PagedRows,
)
from needlepoint.optimized.pages import allocate
from needlepoint.optimized.scoring import unfused_scores
from needlepoint.reference.profile import needlepoint_profile
from needlepoint.verify.inputs import Inputs
from needlepoint.verify.pipeline import PipelineOutput
from needlepoint.verify.result import Result

F32 = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_] | None
f32 = np.float32
Plant = Callable[[pytest.MonkeyPatch], None]
Control = dict[str, object]


def code(module: object, name: str, value: object) -> Plant:
    return lambda patch: patch.setattr(module, name, value)


def together(*plants: Plant) -> Plant:
    def apply(patch: pytest.MonkeyPatch) -> None:
        for plant in plants:
            plant(patch)

    return apply


# --- arithmetic: another order of sums, another exponential, another division -----------------


def pooled_in_base_e(kv: F32, score: F32, ape: F32, masked: Mask = None) -> F32:
    """Textbook softmax in fp32, slots in reverse; ``ape`` arrives times log2 e."""
    z = score + ape / f32(np.log2(np.e))
    z = z if masked is None else np.where(masked, f32(-np.inf), z)
    e = np.exp(z - z.max(axis=0))
    p = e / e.sum(axis=0, dtype=f32)
    total: F32 = np.zeros_like(kv[0])
    for slot in reversed(range(len(kv))):
        total = total + np.broadcast_to(p, kv.shape)[slot] * kv[slot]
    return total


def plain_norm(x: F32, weight: F32, eps: np.float32) -> F32:
    mean = np.add.accumulate(x * x, axis=0, dtype=f32)[-1] / f32(len(x))
    result: F32 = x * (weight[:, None] * (f32(1) / np.sqrt(mean + eps)))
    return result


def plain_rope(x: F32, cos: F32, sin: F32) -> F32:
    out = x.copy()
    out[-64::2] = x[-64::2] * cos - x[-63::2] * sin
    out[-63::2] = x[-64::2] * sin + x[-63::2] * cos
    return out


def matrix_hadamard(x: F32) -> F32:
    matrix = np.ones((1, 1), f32)
    for _ in range(7):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]).astype(f32)
    flat = matrix @ x.reshape(128, -1) * f32(128**-0.5)
    return flat.reshape(x.shape).astype(f32)


def reciprocal_scale(y: F32) -> narrow.StoredRows:
    """Take the scale by a product with 1/448, the codes by a division."""
    scale = (np.maximum(np.abs(y).max(axis=0), f32(1e-4)) * (f32(1) / f32(448))).astype(f32)
    codes = narrow.to_e4m3(y / scale)
    return narrow.StoredRows(np.ascontiguousarray(codes.T), scale.view(np.uint8).reshape(-1, 4))


def heads_in_reverse(queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
    unfused_scores(queries.flip(1), weights.flip(1), keys, out)


def halves_of_dims(queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
    """Dots in two partial sums, as a kernel that splits the dims."""
    parts = [
        torch.einsum("shd,td->sht", queries[..., h], keys[:, h])
        for h in (slice(0, 64), slice(64, 128))
    ]
    torch.bmm(weights[:, None], (parts[0] + parts[1]).relu(), out=out[:, None])


# --- pages: where rows lie is nobody's business -----------------------------------------------


def other_permutation(layout: str, page_size: int, entries: list[int], seed: int) -> PagedRows:
    return allocate(layout, page_size, entries, seed + 1)


def small_pages(layout: str, page_size: int, entries: list[int], seed: int) -> PagedRows:
    return allocate(layout, 8, entries, seed)


def noisy_pages(layout: str, page_size: int, entries: list[int], seed: int) -> PagedRows:
    """Pages that were in use before: what nobody owns holds anything."""
    found = allocate(layout, page_size, entries, seed)
    noise = torch.Generator().manual_seed(seed)
    found.pool.copy_(torch.randint(0, 256, found.pool.shape, generator=noise).to(torch.uint8))
    return found


def longer_tables(inputs: LayerInputs, observed: Observed) -> Observed:
    """Tables as wide as the longest request's, filled up with -1, and a larger pool."""
    stored = {}
    for path, paged in observed.stored.items():
        tables = tuple(
            torch.cat((table, torch.full((5,), -1, dtype=torch.int32)))
            for table in paged.page_table
        )
        pool = torch.cat((paged.pool, torch.zeros_like(paged.pool)))
        stored[path] = replace(paged, page_table=tables, pool=pool)
    return replace(observed, stored=stored)


# --- values: what is equal is equal -----------------------------------------------------------


def zeros_of_the_other_sign(inputs: LayerInputs, observed: Observed) -> Observed:
    """Turn +0 into -0 and back in fp4 rows, two codes a byte."""
    paged = observed.stored[INDEX]
    pool = paged.pool.clone()
    codes = pool[:, : 64 * 64]
    low, high = ((codes & mask) == 0 for mask in (0x07, 0x70))
    codes ^= (low * 0x08 + high * 0x80).to(torch.uint8)
    return replace(observed, stored={**observed.stored, INDEX: replace(paged, pool=pool)})


def picks_in_any_order(inputs: LayerInputs, observed: Observed) -> Observed:
    """Return picks in any order instead of ascending, and rows wider than k."""
    assert observed.topk is not None
    given = observed.topk >= 0
    place = torch.rand(given.shape, generator=torch.Generator().manual_seed(3))
    order = torch.where(given, place, 2.0).argsort(1)
    shuffled = observed.topk.gather(1, order)
    padding = torch.full((len(shuffled), 3), -1, dtype=torch.int32)
    return replace(observed, topk=torch.cat((shuffled, padding), dim=1))


def higher_entry_wins(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Exact selection, equal scores to the higher entry."""
    entries = scores.shape[1]
    order = scores.flip(1).sort(dim=1, descending=True, stable=True).indices
    chosen = entries - 1 - order[:, :k]
    chosen = torch.where(chosen < visible[:, None], chosen, entries).sort(dim=1).values
    picks = torch.full((len(scores), k), -1, dtype=torch.int32)
    picks[:, : chosen.shape[1]] = torch.where(chosen < entries, chosen, -1)
    return picks


def unfolded_weights(inputs: LayerInputs, observed: Observed) -> Observed:
    held = observed.query
    assert held is not None
    assert held.scales is not None
    plain = replace(held, weights=held.weights / held.scales, scale_folded=False)
    return replace(observed, query=plain)


CONTROLS: dict[str, Control] = {
    "softmax in base e, slots in reverse": {"plant": code(compressor, "pool", pooled_in_base_e)},
    "softmax in base e, ratio 128": {
        "plant": code(compressor, "pool", pooled_in_base_e),
        "layer": 1,
    },
    "norm by a running sum": {"plant": code(compressor, "norm", plain_norm)},
    "rope without fma": {
        "plant": together(code(compressor, "rope", plain_rope), code(query, "rope", plain_rope)),
    },
    "hadamard as a matrix product": {
        "plant": together(
            code(compressor, "hadamard", matrix_hadamard), code(query, "hadamard", matrix_hadamard)
        ),
    },
    "all of these": {
        "plant": together(
            code(compressor, "pool", pooled_in_base_e),
            code(compressor, "norm", plain_norm),
            code(compressor, "rope", plain_rope),
            code(query, "rope", plain_rope),
            code(compressor, "hadamard", matrix_hadamard),
            code(query, "hadamard", matrix_hadamard),
            code(scoring, "fused_scores", heads_in_reverse),
        ),
        "key_format": "fp4",
    },
    "scale by a reciprocal": {
        "plant": code(emulated, "STORES", {**query.STORES, "fp8": reciprocal_scale})
    },
    "heads in reverse": {"plant": code(scoring, "fused_scores", heads_in_reverse)},
    "dots in two halves": {
        "plant": code(scoring, "fused_scores", halves_of_dims),
        "key_format": "bf16",
    },
    "another permutation of pages": {"plant": code(keyside, "allocate", other_permutation)},
    "pages of eight rows": {"plant": code(keyside, "allocate", small_pages)},
    "pages in use before": {"plant": code(keyside, "allocate", noisy_pages)},
    "tables longer than needed": {"change": longer_tables},
    "zeros of the other sign": {"change": zeros_of_the_other_sign, "key_format": "fp4"},
    "picks in another order": {"change": picks_in_any_order},
    "weights without the query scale": {"change": unfolded_weights},
    "ties to the higher entry": {
        "plant": code(scoring, "select_topk", higher_entry_wins),
        "kind": "ties",
        "tokens": 780,
    },
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_sound_candidate_is_not_flagged(name: str, altered: Callable[..., Result]) -> None:
    result = altered(**CONTROLS[name])

    assert result.verdict == "match"
    assert result.candidates[0].first_divergence is None
    assert result.counts.compared == result.counts.expected
    if name == "ties to the higher entry":
        topk = result.candidates[0].layers[0].topk
        assert topk is not None
        swaps = topk.swaps.model_dump()
        assert swaps.pop("tie") > 0
        assert not any(swaps.values())


def test_blocks_of_other_sizes_change_no_verdict(
    small_inputs: Callable[..., Inputs],
    judge: Callable[..., PipelineOutput],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Entries and queries in small blocks: the stored bytes cannot depend on it."""
    inputs = small_inputs(layers=(0,))
    names = ("emulated:fused-fp8", "emulated:unfused-bf16")
    before = judge(inputs, *map(create, names))
    monkeypatch.setattr(compressor, "BLOCK", 5)
    monkeypatch.setattr(scoring, "FUSED_ROWS", 32)
    monkeypatch.setattr(scoring, "UNFUSED_BYTES", 4 * 4 * 50 * 7)

    after = judge(inputs, *map(create, names))

    assert after.result.verdict == "match"
    for name, errors in after.rows.items():
        if "/scores/" not in name:
            assert torch.equal(errors, before.rows[name])


def test_the_order_of_requests_moves_no_error(
    small_inputs: Callable[..., Inputs], judge: Callable[..., PipelineOutput]
) -> None:
    """Every token keeps its errors when the requests of a batch change places."""
    inputs = small_inputs(tokens=400)
    order = (2, 0, 1)
    lengths = tuple(inputs.requests[r] for r in order)
    states = {}
    for layer, hidden in inputs.states.items():
        parts = torch.split(hidden, list(inputs.requests))
        states[layer] = torch.cat([parts[r] for r in order])
    moved = replace(inputs, requests=lengths, states=states)
    candidate = create("emulated:fused-fp8")

    before, after = judge(inputs, candidate), judge(moved, candidate)

    assert after.result.verdict == "match"
    assert before.rows.keys() == after.rows.keys()
    for name, errors in before.rows.items():
        _, layer_name, _, stage, _ = name.split("/")
        key_side = stage in ("pooled", "normed", "roped", "rotated", "stored")
        ratio = {"layer0": 4, "layer1": 128}[layer_name] if key_side else 1
        rows_of = torch.split(errors, [n // ratio for n in inputs.requests])
        assert torch.equal(after.rows[name], torch.cat([rows_of[r] for r in order])), name


@pytest.mark.parametrize("kind", ["gaussian", "small", "outlier", "bits"])
def test_a_candidate_better_than_fp32_matches(
    kind: str,
    small_inputs: Callable[..., Inputs],
    judge: Callable[..., PipelineOutput],
    as_candidate: Callable[..., Candidate],
) -> None:
    inputs = small_inputs(kind, 400)

    result = judge(inputs, as_candidate(inputs, needlepoint_profile("bf16"))).result

    assert result.verdict == "match"
    main = {s.stage: s for s in result.candidates[0].layers[0].stages if s.path == MAIN}
    pooled = main["pooled"].local
    assert pooled is not None
    assert pooled.error.max is not None
    assert pooled.error.max < 0.2


@pytest.mark.parametrize(
    "kind", ["gaussian", "outlier", "anisotropic", "small", "ties", "pow2", "integer", "bits"]
)
def test_the_four_candidates_match_on_every_kind(
    kind: str, small_inputs: Callable[..., Inputs], judge: Callable[..., PipelineOutput]
) -> None:
    names = [
        f"emulated:{name}" for name in ("fused-bf16", "fused-fp8", "fused-fp4", "unfused-bf16")
    ]

    result = judge(small_inputs(kind, 136), *map(create, names)).result

    assert result.verdict == "match"
    assert result.counts.compared == 4 * 17
    for candidate in result.candidates:
        assert candidate.first_divergence is None
        stored = [s for e in candidate.layers for s in e.stages if s.stage == "stored"]
        assert {s.local.error.max for s in stored if s.local} == {0.0}
