"""Index keys of layers without a compressor: one for every token (DeepSeek-V3.2, GLM-5).

A key is projected, normalised by a LayerNorm with bias, rotated by RoPE at its own position, by the
Hadamard transform where the profile has one, and stored. Nothing is pooled and nothing is kept
between calls.
"""

from __future__ import annotations

from torch import Tensor

from needlepoint.reference.compressor import compressor_inputs
from needlepoint.reference.formats import decode, encode
from needlepoint.reference.formats.names import RopeLayout
from needlepoint.reference.indexer import rotate_index
from needlepoint.reference.norm import layer_norm
from needlepoint.reference.profile import Arithmetic
from needlepoint.reference.rope import apply_rope
from needlepoint.reference.rounding import round_to
from needlepoint.reference.stages import CompressedRows, StoredRows
from needlepoint.reference.weights import CompressorWeights


def token_keys(
    projected: Tensor,
    weights: CompressorWeights,
    eps: float,
    rope: Tensor,
    layout: RopeLayout,
    arithmetic: Arithmetic,
    first_position: int,
) -> CompressedRows:
    """Return the index keys of consecutive tokens of one request.

    Parameters
    ----------
    projected
        float64 ``[n, 128]``.
    weights
        ``norm`` and ``norm_bias`` are read.
    eps
        Epsilon of the norm.
    rope
        float64 ``[n, pairs, 2]`` at the tokens' positions.
    layout
        Dims that RoPE rotates.
    arithmetic
        ``key_input``, ``normed``, ``roped``, ``rotated``, ``hadamard`` and ``index_key`` apply.
    first_position
        Position of the first token.

    Returns
    -------
    CompressedRows
        One row a token. ``pooled`` holds what the norm reads.

    Raises
    ------
    ValueError
        If the weights have no bias.
    """
    if weights.norm_bias is None:
        raise ValueError("index keys of single tokens need norm_bias, and the weights have none")
    read, _ = compressor_inputs(projected, projected[:, :0], arithmetic)
    normed = round_to(layer_norm(read, weights.norm, weights.norm_bias, eps), arithmetic.normed)
    roped = round_to(apply_rope(normed, rope, layout), arithmetic.roped)
    rotated = rotate_index(roped, arithmetic)
    encoded = encode(rotated, arithmetic.index_key)
    stored = StoredRows(encoded, None, decode(encoded, arithmetic.index_key))
    return CompressedRows(first_position, read, normed, roped, rotated, stored)
