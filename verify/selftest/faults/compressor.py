"""Faults of the compressor: windows, position embedding, overlap, state, softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import INDEX, MAIN, CompressorInputs
from needlepoint.reference.compressor import Taps, pool
from needlepoint.verify.selftest.faults.fault import Case, Setting, fault
from needlepoint.verify.selftest.faults.ground import Ground
from needlepoint.verify.selftest.faults.plant import Pooling, altered_projection, edited, repooled

_R128 = Setting(ratio=128)
_POOLED, _MAIN_POOLED = "index.pooled", "main.pooled"
_LOG2_E = 1.4426950408889634


def _rows(ground: Ground, request: int) -> slice:
    first = sum(ground.given.lengths[:request])
    return slice(first, first + ground.given.lengths[request])


def _boundary(ground: Ground, residue: int) -> int:
    """Return a position near the middle of the longest request with this residue mod 4."""
    return ground.entries // 2 * ground.given.ratio + residue


def _late_ape(ground: Ground, part: CompressorInputs) -> CompressorInputs:
    return replace(part, ape=part.ape.roll(1, 0))


def _chunk_bias(ground: Ground, part: CompressorInputs) -> CompressorInputs:
    """Count the slots of the position embedding from the start of an unaligned chunk."""
    start, score = _boundary(ground, 3), part.score.clone()
    first = ground.token_row(start)
    count = ground.given.lengths[ground.longest] - start
    place = torch.arange(count)
    ratio = ground.given.ratio
    score[first : first + count] += part.ape[place % ratio] - part.ape[(start + place) % ratio]
    return replace(part, score=score)


def _chunk_tail(ground: Ground, part: CompressorInputs) -> CompressorInputs:
    """Forget the three tokens of an unfinished window at the end of a chunk."""
    last = ground.token_row(_boundary(ground, 3))
    kv, score = part.kv.clone(), part.score.clone()
    kv[last - 3 : last], score[last - 3 : last] = 0.0, 0.0
    return replace(part, kv=kv, score=score)


def _left_padded(ground: Ground, part: CompressorInputs) -> CompressorInputs:
    """Pool one padding token at the front of every request."""
    kv, score = part.kv.clone(), part.score.clone()
    for request in range(len(ground.given.lengths)):
        rows = _rows(ground, request)
        kv[rows], score[rows] = kv[rows].roll(1, 0), score[rows].roll(1, 0)
        kv[rows.start], score[rows.start] = 0.0, 0.0
    return replace(part, kv=kv, score=score)


def _junk_drafts(ground: Ground, part: CompressorInputs) -> CompressorInputs:
    """Keep two rejected draft tokens in the window of the tokens that were accepted."""
    at = ground.token_row(_boundary(ground, 1))
    kv, score = part.kv.clone(), part.score.clone()
    kv[at : at + 2], score[at : at + 2] = part.kv[:2], part.score[:2]
    return replace(part, kv=kv, score=score)


def _rolled_back(ground: Ground, part: CompressorInputs) -> CompressorInputs:
    """After a rollback, leave the token that was taken back: all later ones stand one late."""
    first = ground.token_row(_boundary(ground, 2))
    stop = _rows(ground, ground.longest).stop
    kv, score = part.kv.clone(), part.score.clone()
    kv[first + 1 : stop], score[first + 1 : stop] = (
        part.kv[first : stop - 1],
        part.score[first : stop - 1],
    )
    return replace(part, kv=kv, score=score)


def _stale_ring(ground: Ground, part: CompressorInputs) -> CompressorInputs:
    """Resume behind a cached prefix with the window ring of another request."""
    at = ground.token_row(_boundary(ground, 0))
    kv, score = part.kv.clone(), part.score.clone()
    kv[at - 4 : at], score[at - 4 : at] = part.kv[-4:], part.score[-4:]
    return replace(part, kv=kv, score=score)


def _lost_last_channel(ground: Ground, part: CompressorInputs) -> CompressorInputs:
    kv = part.kv.clone()
    kv[:, -1] = 0.0
    return replace(part, kv=kv)


def _uneven_columns(ground: Ground, part: CompressorInputs) -> CompressorInputs:
    """Read the two column halves of a token in the other order."""
    half = part.kv.shape[1] // 2
    return replace(part, kv=part.kv.roll(half, 1), score=part.score.roll(half, 1))


def _bf16_state(ground: Ground, part: CompressorInputs) -> CompressorInputs:
    kv, score = (x.to(torch.bfloat16).to(torch.float32) for x in (part.kv, part.score))
    return replace(part, kv=kv, score=score)


def _no_overlap(ground: Ground, request: int, taps: Taps) -> Taps:
    logits = taps.logits.clone()
    logits[:, :4] = -torch.inf
    return Taps(taps.kv, logits)


def _late_overlap(ground: Ground, request: int, taps: Taps) -> Taps:
    """Overlap with the window before the last one."""
    kv, logits = taps.kv.clone(), taps.logits.clone()
    kv[1:, :4], logits[1:, :4] = taps.kv[:-1, :4], taps.logits[:-1, :4]
    return Taps(kv, logits)


def _chunk_without_overlap(ground: Ground, request: int, taps: Taps) -> Taps:
    """Start one chunk, at a window's edge, without the window before it."""
    if request != ground.longest:
        return taps
    logits = taps.logits.clone()
    logits[ground.entries // 2, :4] = -torch.inf
    return Taps(taps.kv, logits)


def _stale_first(ground: Ground, request: int, taps: Taps) -> Taps:
    """Let entry 0 of a request overlap with the last window of the request before it."""
    if request == 0 or not len(taps.kv):
        return taps
    part = ground.given.index
    if part is None:
        return taps
    rows, d = _rows(ground, request), taps.kv.shape[2]
    kv, logits = taps.kv.clone(), taps.logits.clone()
    kv[0, :4] = part.kv[rows.start - 4 : rows.start, :d]
    logits[0, :4] = part.score[rows.start - 4 : rows.start, :d] + part.ape[:, :d]
    return Taps(kv, logits)


def _over_channels(taps: Taps) -> Tensor:
    weights = taps.logits.nan_to_num(neginf=-100.0).softmax(2)
    return (weights * taps.kv).sum(1)


def _sigmoid(taps: Taps) -> Tensor:
    weights = taps.logits.sigmoid()
    return (weights * taps.kv).sum(1) / weights.sum(1)


def _mean(taps: Taps) -> Tensor:
    counted = ~torch.isneginf(taps.logits)
    return (counted * taps.kv).sum(1) / counted.sum(1)


def _not_rescaled(taps: Taps) -> Tensor:
    """Online softmax that keeps its sums unscaled when a larger score arrives."""
    highest = taps.logits.cummax(1).values
    weights = (taps.logits - highest).exp()
    return (weights * taps.kv).sum(1) / weights.sum(1)


def _undivided(taps: Taps) -> Tensor:
    weights = (taps.logits - taps.logits.amax(1, keepdim=True)).exp()
    return (weights * taps.kv).sum(1)


def _gain(factor: float) -> Pooling:
    return lambda taps: pool(taps) * factor


def _truncated(taps: Taps) -> Tensor:
    """Drop the bits of a bf16 pooled row instead of keeping fp32."""
    bits = pool(taps).to(torch.float32).view(torch.int32) & -0x10000
    return bits.view(torch.float32).to(torch.float64)


def _scaled_row(factor: float) -> Callable[[Ground, Tensor], None]:
    def change(ground: Ground, rows: Tensor) -> None:
        rows[ground.key_row(ground.entries // 3)] *= factor

    return change


def _nan(ground: Ground, rows: Tensor) -> None:
    rows[ground.key_row(ground.entries - 1), 5] = torch.nan


def _aliased(ground: Ground, rows: Tensor) -> None:
    """Save a tensor that the next step then overwrites."""
    rows.copy_(ground.observed.dense[INDEX, "normed"])


def _unwritten_entry(ground: Ground, rows: Tensor) -> None:
    rows[ground.key_row(ground.entries // 2)] = 0.0


FAULTS: tuple[Case, ...] = (
    fault("ape-missing", "I", "position embedding not added to the pooling scores",
          altered_projection(lambda g, part: replace(part, ape=torch.zeros_like(part.ape))),
          _POOLED, log="I06"),
    fault("ape-one-row-late", "I", "position embedding of the slot before",
          altered_projection(_late_ape), _POOLED, log="I04"),
    fault("ape-one-row-late-128", "I", "position embedding of the slot before, windows of 128",
          altered_projection(_late_ape, MAIN), _MAIN_POOLED, on=_R128, needs=1),
    fault("ape-halves-swapped", "I",
          "position embedding of the overlap half on the window's own half and back",
          altered_projection(lambda g, part:
                             replace(part, ape=part.ape.roll(part.ape.shape[1] // 2, 1))),
          _POOLED),
    fault("slot-bias-from-chunk-start", "I",
          "slots of the position embedding counted from the start of an unaligned chunk",
          altered_projection(_chunk_bias), _POOLED, log="I04 I06 I07"),
    fault("chunk-tail-forgotten", "I",
          "three tokens of an unfinished window lost between two chunks",
          altered_projection(_chunk_tail, MAIN), _MAIN_POOLED, log="I03 I04 I09"),
    fault("padding-pooled", "I", "a padding token at the front of a request goes into the windows",
          altered_projection(_left_padded), _POOLED, log="I05 G10 B07"),
    fault("window-of-128-one-late", "I", "a window of 128 starts one token late",
          altered_projection(lambda g, part: replace(part, kv=part.kv.roll(-1, 0),
                                                       score=part.score.roll(-1, 0)), MAIN),
          _MAIN_POOLED, log="I10", on=_R128, needs=1),
    fault("last-channel-lost", "I", "the last channel of every projected row is zero",
          altered_projection(_lost_last_channel), _POOLED, log="I02"),
    fault("overlap-missing", "I", "windows pooled from their own 4 tokens, without the 4 before",
          repooled(_no_overlap), _POOLED, log="I01"),
    fault("overlap-of-the-wrong-window", "I", "overlap with the window before the last one",
          repooled(_late_overlap, MAIN), _MAIN_POOLED),
    fault("overlap-lost-at-a-chunk", "I", "the first window of one aligned chunk has no overlap",
          repooled(_chunk_without_overlap), _POOLED, log="I01 I03 K08 P02"),
    fault("columns-in-the-other-order", "I", "the two halves of a token's columns exchanged",
          altered_projection(_uneven_columns), _POOLED),
    fault("first-window-not-masked", "I", "slots before position 0 counted as zeros",
          repooled(lambda g, r, taps: Taps(taps.kv, taps.logits.nan_to_num(neginf=0.0))), _POOLED),
    fault("softmax-over-channels", "I", "pooling softmax over channels instead of slots",
          repooled(pooling=_over_channels), _POOLED),
    fault("softmax-in-base-2", "I", "exponentials in base 2 of scores in base e",
          altered_projection(lambda g, part: replace(part, score=part.score / _LOG2_E,
                                                       ape=part.ape / _LOG2_E)),
          _POOLED),
    fault("sigmoid-for-softmax", "G", "pooling weights by a sigmoid", repooled(pooling=_sigmoid),
          _POOLED, log="G05"),
    fault("mean-for-softmax", "G", "plain mean over the slots", repooled(pooling=_mean), _POOLED,
          log="G05"),
    fault("online-softmax-not-rescaled", "I",
          "running sums kept as they are when a larger score arrives, windows of 128",
          repooled(path=MAIN, pooling=_not_rescaled), _MAIN_POOLED, log="I10", on=_R128, needs=1),
    fault("pooled-not-divided", "I", "weighted sum without the sum of weights below it",
          repooled(pooling=_undivided), _POOLED),
    fault("state-in-bf16", "H", "compressor state held in bf16 over a window of 128",
          altered_projection(_bf16_state, MAIN), _MAIN_POOLED, log="H09", on=_R128, needs=1),
    fault("pooled-gain-0.4%", "H", "every pooled row 0.4 % too large",
          repooled(pooling=_gain(1.004)), _POOLED),
    fault("pooled-gain-2%", "H", "every main pooled row 2 % too large",
          repooled(path=MAIN, pooling=_gain(1.02)), _MAIN_POOLED),
    fault("pooled-truncated", "H", "pooled rows cut to bf16 where fp32 is meant",
          repooled(pooling=_truncated), _POOLED, log="G08"),
    fault("pooled-row-gain-0.4%", "H", "one pooled row 0.4 % too large",
          edited((INDEX, "pooled"), _scaled_row(1.004)), _POOLED),
    fault("pooled-nan", "C", "one NaN in the last pooled row", edited((MAIN, "pooled"), _nan),
          _MAIN_POOLED, log="C11 I02 K10"),
    fault("pooled-row-unwritten", "C", "one pooled row never written",
          edited((INDEX, "pooled"), _unwritten_entry), _POOLED, log="L06"),
    fault("capture-overwritten", "M",
          "the saved pooled rows are those that the norm wrote into the same buffer",
          edited((INDEX, "pooled"), _aliased), _POOLED, log="M02 M03"),
    fault("state-of-another-request", "K",
          "entry 0 overlaps with the last window of the request before it", repooled(_stale_first),
          _POOLED, log="K01 K06", requests=2),
    fault("ring-of-another-request", "K",
          "behind a cached prefix, the window ring of another request",
          altered_projection(_stale_ring), _POOLED, log="K01 K02 K05 K11 J05"),
    fault("rejected-drafts-kept", "J", "two rejected draft tokens stay in a window",
          altered_projection(_junk_drafts), _POOLED, log="J03"),
    fault("rollback-not-trimmed", "J",
          "a token that was taken back stays: the later ones stand one late",
          altered_projection(_rolled_back, MAIN), _MAIN_POOLED, log="K04"),
)  # fmt: skip
