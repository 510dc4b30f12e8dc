"""Rotary position embedding: frequencies with YaRN per layer type, tables, rotation.

DeepSeek-V4 rotates the LAST ``rope_head_dim`` dims of a vector, as adjacent pairs ``(2i, 2i + 1)``
(:class:`RopeLayout` names those of other models),
and uses one table for everything in a layer: main and index queries, window rows and compressed
rows. Layers with a compressor use base 160000 and YaRN, ratio-0 layers base 10000 without. A
compressed row stands at the position of its window's first token. There is no attention factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.formats.names import RopeLayout
from needlepoint.reference.profile import Precision
from needlepoint.reference.rounding import round_to


def rope_frequencies(config: ModelConfig, compressed: bool) -> Tensor:
    """Return the angle per token of each pair, fp32 ``[rope_head_dim / 2]``.

    ``f_i = theta**(-2i / dim)``. YaRN divides slow pairs by ``factor``, keeps fast ones and blends
    in between: ``f_i / factor * (1 - s_i) + f_i * s_i`` with ``s_i`` falling from 1 to 0 over the
    correction range (DeepSeek-V4 ``precompute_freqs_cis``, fp32 throughout). The power is taken in
    float64 and rounded, which is the same fp32 number on every machine.

    Parameters
    ----------
    config
        Model constants.
    compressed
        Whether the layer has an indexer or a compressor: any ratio but 0.
    """
    rope = config.rope(compressed)
    pairs = torch.arange(rope.dim // 2, device="cpu")  # a card may divide and contract otherwise
    power = [rope.theta ** (2 * i / rope.dim) for i in range(rope.dim // 2)]
    frequencies = 1.0 / torch.tensor(power, dtype=torch.float32, device="cpu")
    if rope.original_length:
        low, high = rope.correction_range()
        ramp = ((pairs.to(torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
        keep = 1 - ramp
        frequencies = frequencies / rope.factor * (1 - keep) + frequencies * keep
    return frequencies.to(torch.get_default_device())


def rope_rows(frequencies: Tensor, positions: Tensor, precision: Precision) -> Tensor:
    """Return cos and sin at given positions.

    The angle is the fp32 product of position and frequency, as the model computes it: at a million
    tokens its step is 0.06 rad, so another way to form it is another embedding. Cosine and sine of
    that number are taken in float64.

    Parameters
    ----------
    frequencies
        fp32 ``[pairs]`` of :func:`rope_frequencies`.
    positions
        Integers ``[n]``, below 2**24 (exact in fp32).
    precision
        ``FLOAT64`` keeps cos and sin, ``FP32`` rounds them; ``BF16`` rounds the fp32 numbers once
        more, as transformers does.

    Returns
    -------
    Tensor
        float64 ``[n, pairs, 2]``.

    Raises
    ------
    ValueError
        If a position is negative or not exact in fp32, or frequencies are not fp32.
    """
    if frequencies.dtype != torch.float32:
        raise ValueError(f"rope_rows: frequencies are {frequencies.dtype}, expected torch.float32")
    if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < 1 << 24:
        raise ValueError(
            f"rope_rows: positions {int(positions.min())} to {int(positions.max())}, expected 0 "
            f"to {(1 << 24) - 1}"
        )
    angles = torch.outer(positions.to(torch.float32), frequencies).to(torch.float64)
    return table_as(torch.stack((angles.cos(), angles.sin()), dim=-1), precision)


def table_as(table: Tensor, precision: Precision) -> Tensor:
    """Return float64 cos and sin in a precision; bf16 is reached through fp32."""
    if precision is Precision.BF16:
        table = round_to(table, Precision.FP32)
    return round_to(table, precision)


def rope_table(frequencies: Tensor, length: int, precision: Precision) -> Tensor:
    """Return :func:`rope_rows` of positions ``0 .. length - 1``: float64 ``[length, pairs, 2]``."""
    return rope_rows(frequencies, torch.arange(length), precision)


def apply_rope(x: Tensor, rows: Tensor, layout: RopeLayout = RopeLayout.TRAILING_PAIRS) -> Tensor:
    """Rotate ``2 * pairs`` dims of each vector; the other dims pass through.

    ``(a, b) -> (a cos - b sin, a sin + b cos)`` for each pair, unrounded.

    Parameters
    ----------
    x
        float64 ``[..., d]``.
    rows
        float64 ``[..., pairs, 2]`` of :func:`rope_rows`, broadcast against ``x`` (unsqueeze the
        head axis of a query).
    layout
        Which dims are rotated, and which two are a pair.

    Returns
    -------
    Tensor
        float64 ``[..., d]``.

    Raises
    ------
    ValueError
        If a dtype is not float64 or ``d`` is too small.
    """
    width = 2 * rows.shape[-2]
    if x.dtype != torch.float64 or rows.dtype != torch.float64 or x.shape[-1] < width:
        raise ValueError(
            f"apply_rope: vectors {x.dtype} {tuple(x.shape)}, table {rows.dtype} "
            f"{tuple(rows.shape)}; expected float64 and at least {width} dims"
        )
    x = in_pairs(x, layout, width // 2)
    cos, sin = rows[..., 0], rows[..., 1]
    pairs = x[..., -width:].reshape(*x.shape[:-1], width // 2, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return from_pairs(torch.cat((x[..., :-width], rotated), dim=-1), layout, width // 2)


def invert_rope(x: Tensor, rows: Tensor) -> Tensor:
    """Rotate back (the conjugate): attention outputs leave the rotated frame at the query."""
    return apply_rope(x, rows * rows.new_tensor((1.0, -1.0)))


def in_pairs(x: Tensor, layout: RopeLayout, pairs: int) -> Tensor:
    """Return rows with their rotated dims brought to the end, as adjacent pairs.

    Every layout is a permutation away from DeepSeek-V4's, so there is one rotation.
    """
    order = _order(layout, x.shape[-1], pairs)
    return x if order is None else x[..., order]


def from_pairs(x: Tensor, layout: RopeLayout, pairs: int) -> Tensor:
    """Undo :func:`in_pairs`."""
    order = _order(layout, x.shape[-1], pairs)
    return x if order is None else x[..., order.argsort()]


def _order(layout: RopeLayout, width: int, pairs: int) -> Tensor | None:
    """Return the dim that stands at each place then, int64 ``[width]``; None if nothing moves."""
    if layout is RopeLayout.TRAILING_PAIRS:
        return None
    rotated = torch.arange(2 * pairs)
    if layout is RopeLayout.LEADING_HALVES:
        rotated = rotated.view(2, pairs).t().flatten()
    return torch.cat((torch.arange(2 * pairs, width), rotated))
