"""Faults of rows between pooling and store: norm, RoPE and Hadamard of keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from needlepoint.optimized.emulation.compressor import Compressor, EntryBlock
from needlepoint.optimized.emulation.exact32 import F32
from needlepoint.optimized.emulation.rows import hadamard, norm, rope
from needlepoint.optimized.protocol.interface import MAIN, CompressorInputs, LayerInputs
from needlepoint.verify.selftest.faults.fault import Case, Setting, fault
from needlepoint.verify.selftest.faults.ground import Ground, Steps
from needlepoint.verify.selftest.faults.plant import altered, altered_projection, stepped

f32 = np.float32

_R128 = Setting(ratio=128)
_SCALE = f32(128**-0.5)


def channels(rows: F32) -> F32:
    """Return rows ``[n, d]`` as contiguous channels ``[d, n]``, or back."""
    return np.ascontiguousarray(rows.T)


def half_split(x: F32, cos: F32, sin: F32) -> F32:
    """Rotate pairs ``(i, i + 32)`` of the last 64 dims instead of adjacent ones, ``[d, n]``."""
    out = x.copy()
    one, other = x[-64:-32], x[-32:]
    out[-64:-32] = one * cos - other * sin
    out[-32:] = other * cos + one * sin
    return out


def leading_dims(x: F32, cos: F32, sin: F32) -> F32:
    """Rotate the first 64 dims, ``[d, n]``."""
    return np.concatenate((rope(np.ascontiguousarray(x[:64]), cos, sin), x[64:]))


def _roped(how: Callable[[F32, F32, F32], F32]) -> Steps:
    """Return steps with another rotation at the right angles."""

    def step(engine: Compressor, normed: F32, block: EntryBlock) -> F32:
        positions = np.arange(block.first, block.first + block.count) * engine.ratio
        cos, sin = (channels(engine.table[positions][..., i]) for i in (0, 1))
        return channels(how(channels(normed), cos, sin))

    return Steps(rope=step)


def _normed(how: Callable[[F32, F32, f32], F32]) -> Steps:
    """Return steps with another norm, ``(x [d, n], weight [d], eps)``."""
    return Steps(
        norm=lambda engine, pooled: channels(how(channels(pooled), engine.weight, engine.eps))
    )


def _rotated(how: Callable[[F32], F32]) -> Steps:
    return Steps(rotate=lambda engine, roped: channels(how(channels(roped))))


def _shifted(by: int) -> Callable[[LayerInputs], LayerInputs]:
    """Return inputs whose table stands ``by`` positions further on."""
    return lambda given: replace(given, rope_table=given.rope_table.roll(-by, 0))


def _other_table(base: float) -> Callable[[LayerInputs], LayerInputs]:
    """Return inputs with the table of a base, without YaRN."""

    def change(given: LayerInputs) -> LayerInputs:
        pairs = torch.arange(32, dtype=torch.float64)
        angles = torch.arange(len(given.rope_table)).outer(base ** (-pairs / 32))
        table = torch.stack((angles.cos(), angles.sin()), dim=-1)
        return replace(given, rope_table=table.to(torch.float32))

    return change


def _chunk_relative(given: LayerInputs) -> LayerInputs:
    """Count positions from the start of the last chunk."""
    half = len(given.rope_table) // 8 * 4
    table = given.rope_table.clone()
    table[half:] = given.rope_table[: len(table) - half]
    return replace(given, rope_table=table)


def _no_weight(ground: Ground, part: CompressorInputs) -> CompressorInputs:
    return replace(part, norm_weight=part.norm_weight.mean().expand_as(part.norm_weight))


def _no_root(x: F32, weight: F32, eps: f32) -> F32:
    result: F32 = x / (np.mean(x * x, axis=0, dtype=f32) + eps) * weight[:, None]
    return result


def _half_mean(x: F32, weight: F32, eps: f32) -> F32:
    """Take the mean square over the first half of the dims alone."""
    half = x[: len(x) // 2]
    root: F32 = np.sqrt(np.mean(half * half, axis=0, dtype=f32) + eps).astype(f32)
    result: F32 = x / root * weight[:, None]
    return result


def _bf16_rounded(x: F32, weight: F32, eps: f32) -> F32:
    rows = torch.from_numpy(norm(x, weight, eps))
    rounded: F32 = rows.to(torch.bfloat16).to(torch.float32).numpy()
    return rounded


def _butterfly(x: F32, width: int) -> F32:
    stride = 1
    while stride < width:
        pairs = x.reshape(len(x) // (2 * stride), 2, stride, -1)
        x = np.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), 1).reshape(x.shape)
        stride *= 2
    return x


def _rotated_in_bf16(x: F32) -> F32:
    rounded: F32 = torch.from_numpy(hadamard(x)).to(torch.bfloat16).to(torch.float32).numpy()
    return rounded


def _unscaled(x: F32) -> F32:
    result: F32 = hadamard(x) / _SCALE
    return result


FAULTS: tuple[Case, ...] = (
    fault("norm-weight-missing", "G", "norm weight of index keys replaced by its mean",
          altered_projection(_no_weight), "index.normed"),
    fault("norm-weight-missing-main", "G", "norm weight of main rows replaced by its mean",
          altered_projection(_no_weight, MAIN), "main.normed"),
    fault("norm-without-root", "G", "division by the mean square instead of its root",
          stepped(_normed(_no_root)), "index.normed"),
    fault("norm-of-another-eps", "G", "epsilon 1e-5 for 1e-6",
          stepped(_normed(lambda x, weight, eps: norm(x, weight, f32(1e-5)))), "index.normed",
          on=Setting(kind="small")),
    fault("norm-over-half-the-dims", "O", "mean square over half of the dims",
          stepped(_normed(_half_mean), MAIN), "main.normed", log="O05"),
    fault("layer-norm-for-rms", "G", "the mean subtracted before the norm",
          stepped(_normed(lambda x, weight, eps: norm(x - x.mean(axis=0, dtype=f32), weight, eps))),
          "index.normed"),
    fault("normed-in-bf16", "F", "normed rows rounded to bf16 where fp32 is meant",
          stepped(_normed(_bf16_rounded)), "index.normed"),
    fault("rope-half-split", "F", "pairs (i, i + 32) instead of adjacent dims",
          stepped(_roped(half_split)), "index.roped", log="F01 F03 F04 F05 F07"),
    fault("rope-half-split-main", "F", "pairs (i, i + 32) in main rows",
          stepped(_roped(half_split), MAIN), "main.roped", log="F03 F05"),
    fault("rope-first-64-dims", "F", "the first 64 dims rotated instead of the last",
          stepped(_roped(leading_dims)), "index.roped"),
    fault("rope-backwards", "F", "angles negated",
          stepped(_roped(lambda x, cos, sin: rope(x, cos, -sin))), "index.roped"),
    fault("rope-missing", "F", "main rows not rotated",
          stepped(_roped(lambda x, cos, sin: x), MAIN), "main.roped"),
    fault("rope-one-position-late", "F", "angles of the position behind the window's first",
          altered(_shifted(1)), "index.roped"),
    fault("rope-at-the-last-token", "F", "angles of the window's last token", altered(_shifted(3)),
          "index.roped"),
    fault("rope-at-the-last-token-128", "F", "angles of the last of 128 tokens",
          altered(_shifted(127), MAIN), "main.roped", on=_R128, needs=1),
    fault("rope-positions-of-the-chunk", "F", "positions counted from the start of the last chunk",
          altered(_chunk_relative, MAIN), "main.roped", log="L05 L08 L09"),
    fault("rope-base-10000", "F", "base of the layers without compression, no YaRN",
          altered(_other_table(10000.0)), "index.roped", log="J04"),
    fault("rope-without-yarn", "F", "right base, frequencies not scaled",
          altered(_other_table(160000.0)), "index.roped"),
    fault("rope-table-in-bf16", "F", "cos and sin rounded to bf16",
          altered(lambda given:
                  replace(given, rope_table=given.rope_table.to(torch.bfloat16).to(torch.float32))),
          "index.roped"),
    fault("hadamard-missing-on-keys", "G", "keys not rotated, queries rotated",
          stepped(_rotated(lambda x: x)), "index.rotated", log="G03 G04"),
    fault("hadamard-not-scaled", "G", "keys times the square root of 128 too large",
          stepped(_rotated(_unscaled)), "index.rotated"),
    fault("rotated-in-bf16", "F", "rotated keys rounded to bf16 where fp32 is meant",
          stepped(_rotated(_rotated_in_bf16)), "index.rotated", log="F10"),
    fault("hadamard-over-halves", "G", "two transforms of 64 dims instead of one of 128",
          stepped(_rotated(lambda x: _butterfly(x, 64) * f32(64**-0.5))), "index.rotated"),
)  # fmt: skip
