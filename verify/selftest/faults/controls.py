"""Controls: what a sound kernel may do otherwise than the emulation. None may set off a gate."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import numpy as np
import torch
from torch import Tensor

from needlepoint.optimized.emulation import narrow
from needlepoint.optimized.emulation.compressor import Compressor, EntryBlock
from needlepoint.optimized.emulation.exact32 import F32
from needlepoint.optimized.emulation.narrow import StoredRows
from needlepoint.optimized.emulation.scoring import unfused_scores
from needlepoint.optimized.protocol.interface import INDEX, MAIN, Observed
from needlepoint.reference.compressor import CompressorState, Taps, gather_taps, pool
from needlepoint.reference.profile import needlepoint_profile
from needlepoint.verify.selftest.faults.fault import Case, Plant, Setting, control
from needlepoint.verify.selftest.faults.ground import (
    Ground,
    Keys,
    Steps,
    compress,
    query_of,
    with_keys,
    with_pool,
)
from needlepoint.verify.selftest.faults.picks import by_selector, on_picks
from needlepoint.verify.selftest.faults.plant import repooled, stepped, stored
from needlepoint.verify.selftest.faults.rows import channels
from needlepoint.verify.selftest.faults.scores import by_kernel

f32 = np.float32
_R128, _FP4, _BF16 = Setting(ratio=128), Setting("fp4"), Setting("bf16")
_TIES = Setting(kind="ties")
_CHUNKS = (5, 16, 1, 1, 3, 18, 2, 9, 64)
_PROFILE = needlepoint_profile("fp8")


def _base_e(taps: Taps) -> Tensor:
    """Textbook softmax in fp32, slots in reverse."""
    logits, kv = taps.logits.to(torch.float32), taps.kv.to(torch.float32)
    weights = (logits - logits.amax(1, keepdim=True)).exp()
    weights = weights / weights.sum(1, keepdim=True)
    total = torch.zeros_like(kv[:, 0])
    for slot in reversed(range(kv.shape[1])):
        total = total + weights[:, slot] * kv[:, slot]
    return total.to(torch.float64)


def _chunked(ground: Ground) -> Observed:
    """Pool the index keys of each request in chunks of many sizes, through the state."""
    given = ground.given
    part = given.index
    if part is None:
        raise ValueError(f"layer {given.layer} of ratio {given.ratio} has no index path")
    pooled, first = [], 0
    for length in given.lengths:
        state = CompressorState(given.ratio, part.kv.shape[1], _PROFILE)
        start, sizes = 0, cycle(_CHUNKS)
        while start < length:
            stop = min(start + next(sizes), length)
            kv, score = (x[first + start : first + stop] for x in (part.kv, part.score))
            taps = gather_taps(kv, score, part.ape, given.ratio, _PROFILE, state)
            state.append(kv, score, part.ape)
            pooled.append(pool(taps))
            start = stop
        first += length
    rows = torch.cat(pooled).to(torch.float32).numpy()
    return stepped(Steps(pool=lambda engine, block: rows[block.rows]))(ground)


def _running_norm(engine: Compressor, pooled: F32) -> F32:
    x = channels(pooled)
    mean = np.add.accumulate(x * x, axis=0, dtype=f32)[-1] / f32(len(x))
    normed: F32 = x * (engine.weight[:, None] * (f32(1) / np.sqrt(mean + engine.eps)))
    return channels(normed)


def _plain_rope(engine: Compressor, normed: F32, block: EntryBlock) -> F32:
    positions = np.arange(block.first, block.first + block.count) * engine.ratio
    cos, sin = (engine.table[positions][..., i] for i in (0, 1))
    out = normed.copy()
    out[:, -64::2] = normed[:, -64::2] * cos - normed[:, -63::2] * sin
    out[:, -63::2] = normed[:, -64::2] * sin + normed[:, -63::2] * cos
    return out


def _matrix_hadamard(engine: Compressor, roped: F32) -> F32:
    matrix = np.ones((1, 1), f32)
    for _ in range(7):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]]).astype(f32)
    rotated: F32 = (roped @ matrix.T * f32(128**-0.5)).astype(f32)
    return rotated


def _reciprocal_scale(y: F32) -> StoredRows:
    """Take the scale by a product with 1/448, the codes by a division."""
    scale = (np.maximum(np.abs(y).max(axis=0), f32(1e-4)) * (f32(1) / f32(448))).astype(f32)
    codes = narrow.to_e4m3((y / scale).astype(f32))
    return StoredRows(np.ascontiguousarray(codes.T), scale.view(np.uint8).reshape(-1, 4))


def _heads_in_reverse(queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
    unfused_scores(queries.flip(1), weights.flip(1), keys, out)


def _halves_of_dims(queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
    """Sum the dims in two parts, as a kernel that splits them."""
    parts = [
        torch.einsum("shd,td->sht", queries[..., half], keys[:, half])
        for half in (slice(0, 64), slice(64, 128))
    ]
    torch.bmm(weights[:, None], (parts[0] + parts[1]).relu(), out=out[:, None])


def _all_keys(ground: Ground, steps: Steps) -> Observed:
    """Run both paths with other steps."""
    whole = replace(ground, observed=with_keys(ground, MAIN, compress(ground, MAIN, steps)))
    return with_keys(whole, INDEX, compress(whole, INDEX, steps))


def both(steps: Steps) -> Plant:
    """Return a plant that runs both paths with other steps."""
    return lambda ground: _all_keys(ground, steps)


_OTHER_ORDER = Steps(norm=_running_norm, rope=_plain_rope, rotate=_matrix_hadamard)


def _everything(ground: Ground) -> Observed:
    """Change norm, RoPE, Hadamard and the order of heads at once."""
    return by_kernel(_heads_in_reverse)(replace(ground, observed=_all_keys(ground, _OTHER_ORDER)))


def _in_use_before(ground: Ground) -> Observed:
    """Store into a pool whose pages held other rows before: what nobody owns holds anything.

    Another permutation of pages comes with it, as with any other allocator.
    """
    keys = compress(ground, INDEX, Steps(page_seed=1))
    noise = torch.Generator().manual_seed(ground.given.seed)
    held = torch.randint(0, 256, keys.paged.pool.shape, generator=noise).to(torch.uint8)
    size = keys.paged.page_size
    values = 128 * size
    for table, count in zip(keys.paged.page_table, keys.paged.entries, strict=True):
        for entry in range(count):
            page, slot = int(table[entry // size]), entry % size
            for start, width in ((128 * slot, 128), (values + 4 * slot, 4)):
                held[page, start : start + width] = keys.paged.pool[page, start : start + width]
    return with_keys(ground, INDEX, Keys(keys.dense, replace(keys.paged, pool=held)))


def _longer_tables(ground: Ground) -> Observed:
    """Fill page tables up with -1 and make the pools larger."""
    found = {}
    for path, rows in ground.observed.stored.items():
        filler = torch.full((5,), -1, dtype=torch.int32)
        tables = tuple(torch.cat((table, filler)) for table in rows.page_table)
        larger = torch.cat((rows.pool, torch.zeros_like(rows.pool)))
        found[path] = replace(rows, page_table=tables, pool=larger)
    return replace(ground.observed, stored=found)


def _other_zeros(ground: Ground) -> Observed:
    """Turn +0 into -0 and back in fp4 rows, two codes a byte."""
    rows = ground.observed.stored[INDEX]
    held = rows.pool.clone()
    codes = held[:, : rows.page_size * 64]
    low, high = ((codes & mask) == 0 for mask in (0x07, 0x70))
    for table, count in zip(rows.page_table, rows.entries, strict=True):
        pages = -(-count // rows.page_size)
        for place, page in enumerate(table[:pages].tolist()):
            used = min(rows.page_size, count - place * rows.page_size) * 64
            flip = low[page, :used] * 0x08 + high[page, :used] * 0x80
            codes[page, :used] ^= flip.to(torch.uint8)
    return with_pool(ground, INDEX, held)


def _unfolded(ground: Ground) -> Observed:
    query = query_of(ground)
    if query.scales is None:
        raise ValueError(f"{ground.key_format} queries have no scale to leave to the kernel")
    plain = replace(query, weights=query.weights / query.scales, scale_folded=False)
    return replace(ground.observed, query=plain)


def _any_order(ground: Ground, picks: Tensor) -> Tensor:
    """Return picks in any order instead of ascending, and rows wider than k."""
    place = torch.rand(picks.shape, generator=torch.Generator().manual_seed(3))
    order = torch.where(picks >= 0, place, 2.0).argsort(1)
    padding = torch.full((len(picks), 3), -1, dtype=torch.int32)
    return torch.cat((picks.gather(1, order), padding), dim=1)


def higher_entry_wins(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Select exactly, equal scores to the higher entry."""
    entries = scores.shape[1]
    order = scores.flip(1).sort(dim=1, descending=True, stable=True).indices
    chosen = entries - 1 - order[:, :k]
    chosen = torch.where(chosen < visible[:, None], chosen, entries).sort(dim=1).values
    picks = torch.full((len(scores), k), -1, dtype=torch.int32)
    picks[:, : chosen.shape[1]] = torch.where(chosen < entries, chosen, -1)
    return picks


CONTROLS: tuple[Case, ...] = (
    control("softmax-in-base-e", "I", "softmax in base e, slots in reverse",
          repooled(pooling=_base_e)),
    control("softmax-in-base-e-128", "I", "the same over windows of 128",
          repooled(path=MAIN, pooling=_base_e), on=_R128),
    control("chunked-prefill", "I", "windows pooled in chunks of many sizes", _chunked, log="I03"),
    control("norm-by-a-running-sum", "G", "mean square summed in sequence",
          stepped(Steps(norm=_running_norm))),
    control("rope-without-fma", "F", "RoPE without fused multiply-add",
          stepped(Steps(rope=_plain_rope), MAIN), log="F10"),
    control("hadamard-as-a-matrix", "G", "Hadamard as a matrix product",
          stepped(Steps(rotate=_matrix_hadamard))),
    control("rope-and-hadamard-otherwise", "F", "both at once in both paths", both(_OTHER_ORDER),
          on=_BF16),
    control("everything-otherwise", "G", "norm, RoPE, Hadamard and heads in another order",
          _everything, on=_FP4, log="H08"),
    control("scale-by-a-reciprocal", "H", "scale by a product with 1/448",
          stored(_reciprocal_scale)),
    control("heads-in-reverse", "G", "heads summed from the last to the first",
          by_kernel(_heads_in_reverse)),
    control("dots-in-two-halves", "G", "dims summed in two parts", by_kernel(_halves_of_dims),
          on=_BF16),
    control("pages-of-another-order", "D", "another permutation of pages",
          stepped(Steps(page_seed=1))),
    control("pages-of-eight-rows", "D", "pages of 8 rows", stepped(Steps(page_size=8)), log="D10"),
    control("pages-in-use-before", "C", "noise in what nobody owns", _in_use_before),
    control("tables-longer-than-needed", "D", "page tables filled up with -1, larger pools",
          _longer_tables),
    control("zeros-of-the-other-sign", "H", "-0 for +0", _other_zeros, on=_FP4),
    control("picks-in-another-order", "A", "picks unsorted, rows wider than k",
          on_picks(_any_order)),
    control("ties-to-the-higher-entry", "N", "equal scores to the higher entry",
          by_selector(higher_entry_wins), log="N04 B10", on=_TIES),
    control("weights-without-the-query-scale", "G", "the query scale left to the kernel",
          _unfolded),
)  # fmt: skip
