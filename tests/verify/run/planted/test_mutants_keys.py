"""Faults planted in the key side: compressor, store and pages; see the ``catch`` fixture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from needlepoint.optimized import compressor, emulated, narrow, query
from needlepoint.optimized.compressor import Compressor, EntryBlock
from needlepoint.optimized.interface import INDEX, MAIN, LayerInputs, Observed, PagedRows, StageKey
from needlepoint.optimized.pooling import exp2, pool, scaled_ape, softmax_weights
from needlepoint.optimized.rows import hadamard, norm, rope
from needlepoint.verify.result import Result

Mask = npt.NDArray[np.bool_] | None
Positions = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]
f32 = np.float32
Plant = Callable[[pytest.MonkeyPatch], None]
Change = Callable[[LayerInputs, Observed], Observed]

PAGE = 64
Fault = dict[str, object]


def fault(stage: str, plant: Plant | None = None, **more: object) -> Fault:
    """Return the arguments of the ``catch`` fixture."""
    return {"stage": stage, "plant": plant, **more}


def code(module: object, name: str, value: object) -> Plant:
    return lambda patch: patch.setattr(module, name, value)


def pooled_without_overlap(kv: F32, score: F32, ape: F32, masked: Mask = None) -> F32:
    if kv.shape[0] != 8:
        return pool(kv, score, ape, masked)
    hidden = np.zeros((8, kv.shape[1], 1), np.bool_)
    hidden[:4] = True
    return pool(kv, score, ape, hidden)


def pooled_with_late_overlap(kv: F32, score: F32, ape: F32, masked: Mask = None) -> F32:
    """Overlap with the window before the last one."""
    if kv.shape[0] != 8:
        return pool(kv, score, ape, masked)
    kv, score = kv.copy(), score.copy()
    kv[:4, 1:], score[:4, 1:] = kv[:4, :-1].copy(), score[:4, :-1].copy()
    return pool(kv, score, ape, masked)


def pooled_over_channels(kv: F32, score: F32, ape: F32, masked: Mask = None) -> F32:
    e = softmax_weights(score, ape, masked)
    total = np.maximum(e.sum(axis=-1, keepdims=True), f32(1e-30))
    result: F32 = (kv * (e / total)).sum(axis=0, dtype=f32)
    return result


def pooled_with_natural_base(kv: F32, score: F32, ape: F32, masked: Mask = None) -> F32:
    """Take exp in base 2 of scores that were not scaled by log2 e."""
    z = score + ape
    z = z if masked is None else np.where(masked, f32(-100.0), z)
    e = exp2(np.maximum(z - z.max(axis=0), f32(-126.0)))
    result: F32 = (kv * e).sum(axis=0, dtype=f32) / e.sum(axis=0, dtype=f32)
    return result


TOKENS_OF_REQUEST_0 = 137  # of 390 synthetic ones


def stale_state(self: Compressor, token: int, entries: range, columns: slice) -> F32:
    """Let entry 0 of request 1 overlap with the last tokens of request 0."""
    if self.ratio != 4 or entries.start or token != TOKENS_OF_REQUEST_0:
        return whole_part(self, token, entries, columns)
    first = whole_part(self, token - 4, range(1, 2), columns)
    rest = whole_part(self, token, range(1, entries.stop), columns)
    return np.concatenate((first, rest)) if len(entries) > 1 else first


whole_part = Compressor._pool_part


def norm_of_ones(x: F32, weight: F32, eps: np.float32) -> F32:
    return norm(x, np.ones_like(weight), eps)


def norm_without_root(x: F32, weight: F32, eps: np.float32) -> F32:
    result: F32 = x / (np.mean(x * x, axis=0, dtype=f32) + eps) * weight[:, None]
    return result


def norm_with_other_eps(x: F32, weight: F32, eps: np.float32) -> F32:
    return norm(x, weight, f32(1e-5))


def half_split(x: F32, cos: F32, sin: F32) -> F32:
    """Pairs (i, i + 32) instead of adjacent dims."""
    out = x.copy()
    one, other = x[-64:-32], x[-32:]
    out[-64:-32] = one * cos - other * sin
    out[-32:] = other * cos + one * sin
    return out


def leading_dims(x: F32, cos: F32, sin: F32) -> F32:
    return np.concatenate((rope(x[:64], cos, sin), x[64:]))


def backwards(x: F32, cos: F32, sin: F32) -> F32:
    return rope(x, cos, -sin)


def rope_method(
    angles: Callable[[Compressor, Positions], F32],
) -> Callable[[Compressor, F32, EntryBlock], F32]:
    """Return a :meth:`Compressor.rope` with other table rows ``[n, 32, 2]``."""

    def rotate(self: Compressor, normed: F32, block: EntryBlock) -> F32:
        positions = np.arange(block.first, block.first + block.count) * self.ratio
        table = angles(self, positions)
        cos, sin = (np.ascontiguousarray(table[..., i].T) for i in (0, 1))
        return np.ascontiguousarray(rope(np.ascontiguousarray(normed.T), cos, sin).T)

    return rotate


def next_position(self: Compressor, positions: Positions) -> F32:
    return self.table[positions + 1]


def last_position(self: Compressor, positions: Positions) -> F32:
    return self.table[positions + self.ratio - 1]


def plain_base(self: Compressor, positions: Positions) -> F32:
    """Return the table of the layers without compression: base 10,000, no YaRN."""
    angles = positions[:, None] * 10000.0 ** (-np.arange(32) / 32)
    return np.stack((np.cos(angles), np.sin(angles)), axis=-1).astype(f32)


def index_store(change: Callable[[F32], narrow.StoredRows], key_format: str = "fp8") -> Plant:
    """Change the store of index keys and leave that of queries."""
    return code(emulated, "STORES", {**query.STORES, key_format: change})


def neighbour_scales(y: F32) -> narrow.StoredRows:
    stored = narrow.store_fp8(y)
    return narrow.StoredRows(stored.values, np.roll(stored.scales, 1, axis=0))


def scale_of_power_of_two(y: F32) -> narrow.StoredRows:
    amax = np.maximum(np.abs(y).max(axis=0), f32(1e-4))
    scale = np.exp2(np.ceil(np.log2(amax / f32(448.0)))).astype(f32)
    codes = narrow.to_e4m3(y / scale)
    return narrow.StoredRows(np.ascontiguousarray(codes.T), scale.view(np.uint8).reshape(-1, 4))


def no_floor(y: F32) -> narrow.StoredRows:
    scale = (np.maximum(np.abs(y).max(axis=0), f32(1e-30)) / f32(448.0)).astype(f32)
    codes = narrow.to_e4m3(y / scale)
    return narrow.StoredRows(np.ascontiguousarray(codes.T), scale.view(np.uint8).reshape(-1, 4))


def truncated_bf16(x: F32) -> npt.NDArray[np.uint16]:
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def half_away_bf16(x: F32) -> npt.NDArray[np.uint16]:
    return ((x.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


to_e4m3 = narrow.to_e4m3


def truncated_e4m3(x: F32) -> npt.NDArray[np.uint8]:
    codes = to_e4m3(x)
    value = torch.from_numpy(codes).view(torch.float8_e4m3fn).to(torch.float32).numpy()
    # One code towards zero where rounding went away from it.
    away = (np.abs(value) > np.abs(x)).astype(np.uint8)
    towards: npt.NDArray[np.uint8] = np.subtract(codes, away, dtype=np.uint8)
    return towards


to_e2m1 = narrow.to_e2m1


def truncated_e2m1(x: F32) -> npt.NDArray[np.uint8]:
    steps = np.floor(np.minimum(np.abs(x), f32(6)) * f32(2)).astype(f32)
    return to_e2m1(np.copysign(steps * f32(0.5), x))


def floored_exponent(g: F32) -> npt.NDArray[np.uint32]:
    return np.right_shift(g.view(np.uint32), 23, dtype=np.uint32)


def swapped_nibbles(y: F32) -> narrow.StoredRows:
    stored = narrow.store_fp4(y)
    values = (stored.values >> 4) | (stored.values << 4)
    return narrow.StoredRows(values.astype(np.uint8), stored.scales)


def rope_dims_in_fp8(y: F32) -> narrow.StoredRows:
    """RoPE dims of a 584-byte row through E4M3 under the last scale, as the others."""
    stored = narrow.store_main_fp8(y)
    step = np.exp2(stored.scales[:, 6].astype(np.float64) - 127).astype(f32)
    codes = torch.from_numpy(narrow.to_e4m3((y[-64:] / step).astype(f32)))
    back = codes.view(torch.float8_e4m3fn).to(torch.float32).numpy() * step
    values = stored.values.copy()
    values[:, 448:] = np.ascontiguousarray(narrow.to_bf16(back.astype(f32)).T).view(np.uint8)
    return narrow.StoredRows(values, stored.scales)


def pages(path: str, change: Callable[[Tensor, PagedRows], None]) -> Change:
    """Change the bytes of a pool after the run."""

    def apply(inputs: LayerInputs, observed: Observed) -> Observed:
        rows = observed.stored[path]
        pool_ = rows.pool.clone()
        change(pool_, rows)
        return replace(observed, stored={**observed.stored, path: replace(rows, pool=pool_)})

    return apply


def token_bytes(rows: PagedRows, request: int, entry: int) -> tuple[int, list[slice]]:
    """Return the page of an entry, and its values and scale in an index-fp8 page."""
    slot = entry % PAGE
    page = int(rows.page_table[request][entry // PAGE])
    scales = PAGE * 128 + 4 * slot
    return page, [slice(128 * slot, 128 * slot + 128), slice(scales, scales + 4)]


def filled(value: int | None, request: int, entry: int) -> Change:
    """Fill the bytes of one index row, with noise where no value is given."""

    def change(pool_: Tensor, rows: PagedRows) -> None:
        page, parts = token_bytes(rows, request, entry)
        noise = torch.Generator().manual_seed(5)
        for part in parts:
            if value is not None:
                pool_[page, part] = value
            elif part.stop - part.start > 4:  # codes alone: a random scale shows by itself
                pool_[page, part] = torch.randint(0, 120, (128,), generator=noise).to(torch.uint8)

    return pages(INDEX, change)


def moved(*moves: tuple[int, int]) -> Change:
    """Copy index rows of request 0: (from, to) with what was there before."""

    def change(pool_: Tensor, rows: PagedRows) -> None:
        before = pool_.clone()
        for source, target in moves:
            page, here = token_bytes(rows, 0, source)
            other, there = token_bytes(rows, 0, target)
            for one, two in zip(here, there, strict=True):
                pool_[other, two] = before[page, one]

    return pages(INDEX, change)


def interleaved(pool_: Tensor, rows: PagedRows) -> None:
    values = pool_[:, : PAGE * 128].view(-1, PAGE, 128)
    scales = pool_[:, PAGE * 128 :].view(-1, PAGE, 4)
    pool_.copy_(torch.cat((values, scales), dim=2).flatten(1))


def two_pages_of_32(pool_: Tensor, rows: PagedRows) -> None:
    values, scales = pool_[:, : PAGE * 128], pool_[:, PAGE * 128 :]
    first, second = (
        torch.cat((v, s), dim=1)
        for v, s in zip(values.chunk(2, 1), scales.chunk(2, 1), strict=True)
    )
    pool_.copy_(torch.cat((first, second), dim=1))


def without_tail(pool_: Tensor, rows: PagedRows) -> None:
    """Leave a last page that is not full unwritten."""
    for table, count in zip(rows.page_table, rows.entries, strict=True):
        if count % PAGE and count > PAGE:
            pool_[int(table[count // PAGE])] = 0xFF


def dense(key: StageKey, change: Callable[[Tensor], None]) -> Change:
    def apply(inputs: LayerInputs, observed: Observed) -> Observed:
        rows = observed.dense[key].clone()
        change(rows)
        return replace(observed, dense={**observed.dense, key: rows})

    return apply


def gain(rows: slice | int, factor: float) -> Callable[[Tensor], None]:
    def change(values: Tensor) -> None:
        values[rows] *= factor

    return change


def nan_at(row: int) -> Callable[[Tensor], None]:
    def change(values: Tensor) -> None:
        values[row, 5] = torch.nan

    return change


FAULTS: dict[str, Fault] = {
    "ape missing": fault("index.pooled", code(compressor, "scaled_ape", lambda a: a * f32(0))),
    "ape one row late": fault(
        "index.pooled", code(compressor, "scaled_ape", lambda a: np.roll(scaled_ape(a), 1, axis=0))
    ),
    "ape one row late, ratio 128": fault(
        "main.pooled",
        code(compressor, "scaled_ape", lambda a: np.roll(scaled_ape(a), 1, axis=0)),
        layer=1,
    ),
    "overlap missing": fault("index.pooled", code(compressor, "pool", pooled_without_overlap)),
    "overlap of the wrong window": fault(
        "index.pooled", code(compressor, "pool", pooled_with_late_overlap)
    ),
    "softmax over channels": fault("index.pooled", code(compressor, "pool", pooled_over_channels)),
    "scores not in base 2": fault(
        "index.pooled", code(compressor, "pool", pooled_with_natural_base)
    ),
    "state of another request": fault(
        "index.pooled", code(Compressor, "_pool_part", stale_state), token=(1, 3, 0), tokens=390
    ),
    "pooled row, gain 0.4 %": fault(
        "index.pooled", change=dense((INDEX, "pooled"), gain(7, 1.004)), token=(0, 31, 7)
    ),
    "pooled row, NaN": fault(
        "main.pooled", change=dense((MAIN, "pooled"), nan_at(32)), token=(0, 131, 32)
    ),
    "norm weight missing": fault(
        "index.normed",
        code(compressor, "norm", norm_of_ones),
        hit=("main.normed",),
        clear=("index.pooled", "index.roped", "index.scores", "index.topk"),
    ),
    "norm without root": fault("index.normed", code(compressor, "norm", norm_without_root)),
    "norm of another eps": fault(
        "index.normed", code(compressor, "norm", norm_with_other_eps), kind="small"
    ),
    "rope over half-split pairs": fault("index.roped", code(compressor, "rope", half_split)),
    "rope over the first 64 dims": fault("index.roped", code(compressor, "rope", leading_dims)),
    "rope backwards": fault("index.roped", code(compressor, "rope", backwards)),
    "rope one position late": fault(
        "index.roped", code(Compressor, "rope", rope_method(next_position))
    ),
    "rope at the last token": fault(
        "index.roped", code(Compressor, "rope", rope_method(last_position))
    ),
    "rope at the last token, ratio 128": fault(
        "main.roped", code(Compressor, "rope", rope_method(last_position)), layer=1
    ),
    "rope of the plain base": fault(
        "index.roped", code(Compressor, "rope", rope_method(plain_base))
    ),
    "hadamard missing on keys": fault("index.rotated", code(compressor, "hadamard", lambda x: x)),
    "hadamard not scaled": fault(
        "index.rotated", code(compressor, "hadamard", lambda x: hadamard(x) * f32(128**0.5))
    ),
    "store, gain 0.4 %": fault(
        "index.stored", index_store(lambda y: narrow.store_fp8(y * f32(1.004)))
    ),
    "store, bf16 before fp8": fault(
        "index.stored",
        index_store(lambda y: narrow.store_fp8(narrow.widen_bf16(narrow.to_bf16(y)))),
    ),
    "store, scale of the neighbour": fault("index.stored", index_store(neighbour_scales)),
    "store, power-of-two scale": fault("index.stored", index_store(scale_of_power_of_two)),
    "store, no floor": fault("index.stored", index_store(no_floor), kind="zeros"),
    "bf16 truncated": fault(
        "index.stored",
        code(narrow, "to_bf16", truncated_bf16),
        hit=("main.stored", "query.query"),
        clear=("index.rotated", "index.scores"),
        key_format="bf16",
    ),
    # One number of 32,000 is a tie: dim 209 of one row.
    "bf16 ties away from zero": fault(
        "main.stored",
        code(narrow, "to_bf16", half_away_bf16),
        token=(0, 139, 34),
        key_format="bf16",
        kind="outlier",
        tokens=140,
    ),
    "fp8 truncated": fault("index.stored", code(narrow, "to_e4m3", truncated_e4m3)),
    "fp4 truncated": fault(
        "index.stored", code(narrow, "to_e2m1", truncated_e2m1), key_format="fp4"
    ),
    "fp4 scale floored": fault(
        "index.stored", code(narrow, "ceil_exponent", floored_exponent), key_format="fp4"
    ),
    "fp4 nibbles swapped": fault(
        "index.stored", index_store(swapped_nibbles, "fp4"), key_format="fp4"
    ),
    "584 rope dims in fp8": fault(
        "main.stored", code(emulated, "store_main_fp8", rope_dims_in_fp8)
    ),
    "584 scale floored": fault(
        "main.stored",
        code(narrow, "ceil_exponent", floored_exponent),
        clear=("index.stored", "main.roped", "index.topk"),
    ),
    "token dropped": fault(
        "index.stored",
        change=filled(0, 0, 9),
        token=(0, 39, 9),
        # The scores were made from the token that is missing now.
        hit=("index.scores",),
        clear=("index.rotated", "main.stored", "query.query", "index.topk"),
    ),
    "token never written": fault("index.stored", change=filled(0xFF, 0, 32), token=(0, 131, 32)),
    "token of garbage": fault("index.stored", change=filled(None, 0, 0), token=(0, 3, 0)),
    "token stale": fault("index.stored", change=moved((20, 21)), token=(0, 87, 21)),
    "tokens swapped": fault("index.stored", change=moved((20, 21), (21, 20))),
    "page interleaved": fault("index.stored", change=pages(INDEX, interleaved)),
    "pages of 32 rows": fault("index.stored", change=pages(INDEX, two_pages_of_32)),
    "tail of the last page lost": fault(
        "index.stored", change=pages(INDEX, without_tail), token=(0, 259, 64), tokens=553
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_where_it_was_born(name: str, catch: Callable[..., Result]) -> None:
    catch(**FAULTS[name])


def test_swapped_tokens_are_both_named(catch: Callable[..., Result]) -> None:
    result = catch(**FAULTS["tokens swapped"])

    (stored,) = [
        s for s in result.candidates[0].layers[0].stages if (s.path, s.stage) == (INDEX, "stored")
    ]
    assert stored.local is not None
    assert stored.local.rows_failed == 2
    assert {(row.position, row.entry) for row in stored.worst[:2]} == {(83, 20), (87, 21)}
