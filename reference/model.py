"""One attention layer, plainly: read this first.

A request's hidden states go in, every stage of the layer comes out. Numbers are float64 and nothing
is rounded (the ``exact`` contract), the whole request is one call, and there are no options. The
staged reference (``layer``) adds the rounding points of kernels, calls of any size and the sizes of
real models; a test holds it to this file.

The formulas are those of DeepSeek's published ``inference/model.py`` and ``inference/kernel.py`` of
V4-Flash and V4-Pro. What a query reads beside its sliding window depends on the layer's ratio:

* ratio 4: rows that stand for 4 tokens each, of which an indexer picks the best ``index_topk``;
* ratio 128: rows that stand for 128 tokens each, all of them;
* ratio 0: nothing.

Layers with one index key a token (ratio 1, DeepSeek-V3.2) have another attention: ``token_keys``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.weights import CompressorWeights, LayerWeights

Stages = dict[tuple[str, str], Tensor]
"""Stages by (path, stage), for example ``("index", "pooled")``."""


def layer_stages(config: ModelConfig, layer: int, weights: LayerWeights, hidden: Tensor) -> Stages:
    """Return every stage of a layer of ratio 0, 4 or 128 over one request.

    Parameters
    ----------
    config
        Model shapes and constants.
    layer
        Number of the layer, which fixes its ratio.
    weights
        The layer's tensors.
    hidden
        ``[tokens, hidden_size]``, normalised input of the attention block.

    Returns
    -------
    Stages
        float64; ``topk`` is int32. Stages of compressed rows have ``tokens // ratio`` rows, the
        others one a token.

    Raises
    ------
    ValueError
        If the layer has another ratio, or weights of another ratio.
    """
    ratio, eps = config.ratio(layer), config.norm_eps
    if ratio not in (0, 4, 128):
        raise ValueError(f"layer {layer} has ratio {ratio}, expected 0, 4 or 128")
    frequencies = rope_frequencies(config, compressed=ratio > 0)  # [rope_head_dim / 2]
    x = hidden.double()  # [tokens, hidden_size]
    positions = torch.arange(len(x))
    latent = rms_norm(linear(x, weights.wq_a), weights.q_norm, eps)  # [tokens, q_lora_rank]
    stages: Stages = {}

    # Compressed rows. A query may read an entry from the token on that completes it.
    rows = x.new_empty(0, config.head_dim)  # [entries, head_dim]
    reads = torch.empty(len(x), 0, dtype=torch.bool)  # [tokens, entries]
    if weights.main is not None:
        main = compress(x, weights.main, ratio, eps, frequencies)
        stages |= {("main", stage): tensor for stage, tensor in main.items()}
        rows = stages["main", "stored"] = main["roped"]
        reads = torch.arange(len(rows)) < ((positions + 1) // ratio).unsqueeze(1)
    if ratio == 4:
        stages |= index_stages(config, weights, x, latent, reads, frequencies)
        picks = stages["index", "topk"]
        reads = torch.stack([torch.isin(torch.arange(len(rows)), row) for row in picks])

    # The main attention. Its queries are divided by their root mean square, without a weight.
    q = linear(latent, weights.wq_b).view(len(x), config.n_heads, config.head_dim)
    q = rope(rms_norm(q, None, eps), positions, frequencies)  # [tokens, n_heads, head_dim]
    window = rms_norm(linear(x, weights.wkv), weights.kv_norm, eps)  # [tokens, head_dim]
    window = rope(window, positions, frequencies)
    out = attention(q, window, rows, reads, weights.attn_sink.double(), config.window_size)
    stages["main", "attention"] = rope(out, -positions, frequencies)  # turned back
    return stages


def compress(
    x: Tensor, weights: CompressorWeights, ratio: int, eps: float, frequencies: Tensor
) -> dict[str, Tensor]:
    """Pool windows of ``ratio`` tokens into one row each, then norm and rope (``Compressor``).

    At ratio 4 windows overlap: columns ``[d, 2d)`` of a token are for its own window, ``[0, d)``
    for the next one, so a row pools 8 tokens (the first row 4). Each channel has its own softmax.
    """
    d = len(weights.norm)
    kv = linear(x, weights.wkv)  # [tokens, c * d], c = 2 at ratio 4 and 1 at ratio 128
    places = torch.arange(len(x)) % ratio
    score = linear(x, weights.wgate) + weights.ape.double()[places]  # [tokens, c * d]
    pooled = x.new_empty(len(x) // ratio, d)
    for entry in range(len(pooled)):
        own = slice(entry * ratio, (entry + 1) * ratio)
        values, logits = kv[own, -d:], score[own, -d:]  # [ratio, d]
        if ratio == 4 and entry > 0:
            before = slice((entry - 1) * ratio, entry * ratio)
            values = torch.cat((kv[before, :d], values))  # [2 * ratio, d]
            logits = torch.cat((score[before, :d], logits))
        pooled[entry] = (logits.softmax(dim=0) * values).sum(dim=0)
    normed = rms_norm(pooled, weights.norm, eps)
    starts = torch.arange(len(pooled)) * ratio  # a row stands where its window begins
    roped = rope(normed, starts, frequencies)
    return {"projected": kv, "pooled": pooled, "normed": normed, "roped": roped}


def index_stages(
    config: ModelConfig,
    weights: LayerWeights,
    x: Tensor,
    latent: Tensor,
    visible: Tensor,
    frequencies: Tensor,
) -> Stages:
    """Score every entry for every token and pick the best ones (``Indexer``).

    Keys have a compressor of their own, queries no norm. The Hadamard rotation of both leaves their
    products unchanged and spreads outliers, so that few bits store them. ``visible`` is bool
    ``[tokens, entries]``.
    """
    if weights.index is None or weights.index_wq_b is None or weights.weights_proj is None:
        raise ValueError("weights of a layer without an indexer; expected those of ratio 4")
    keys = compress(x, weights.index, 4, config.norm_eps, frequencies)
    rotated = keys["roped"] @ hadamard_matrix()  # [entries, 128]
    projected = linear(latent, weights.index_wq_b).view(len(x), config.index_n_heads, 128)
    roped = rope(projected, torch.arange(len(x)), frequencies)
    query = roped @ hadamard_matrix()  # [tokens, index_n_heads, 128]
    scale = 128**-0.5 * config.index_n_heads**-0.5
    head_weights = linear(x, weights.weights_proj) * scale  # [tokens, index_n_heads]
    dots = torch.einsum("thd,ed->the", query, rotated)  # [tokens, index_n_heads, entries]
    scores = torch.einsum("the,th->te", dots.relu(), head_weights)
    scores = scores.masked_fill(~visible, -torch.inf)  # [tokens, entries]
    return {
        **{("index", stage): tensor for stage, tensor in keys.items()},
        ("index", "rotated"): rotated,
        ("index", "stored"): rotated,
        ("query", "projected"): projected,
        ("query", "query"): query,
        ("query", "weights"): head_weights,
        ("index", "scores"): scores,
        ("index", "topk"): pick(scores, config.index_topk),
    }


def pick(scores: Tensor, k: int) -> Tensor:
    """Return the ``k`` best entries of each row, ascending: int32 ``[tokens, k]``, -1 padded.

    Of equal scores the lower entry wins; masked entries are never picked.
    """
    picks = torch.full((len(scores), k), -1, dtype=torch.int32)
    for row, listed in zip(scores, picks, strict=True):
        best = row.argsort(descending=True, stable=True)[:k]
        best = best[row[best] > -torch.inf].sort().values
        listed[: len(best)] = best
    return picks


def attention(
    q: Tensor, window: Tensor, rows: Tensor, reads: Tensor, sink: Tensor, window_size: int
) -> Tensor:
    """Attend over the sliding window and the compressed rows that are read (``sparse_attn``).

    Key and value are the same row. A sink is a logit of its head that takes probability away and
    has no value. Returns ``[tokens, heads, head_dim]``.
    """
    ages = torch.arange(len(q)).unsqueeze(1) - torch.arange(len(q))  # [tokens, tokens]
    near = (ages >= 0) & (ages < window_size)  # the query's own token is one of the window
    kv = torch.cat((window, rows))  # [tokens + entries, head_dim]
    logits = torch.einsum("thd,rd->thr", q, kv) * q.shape[2] ** -0.5
    logits = logits.masked_fill(~torch.cat((near, reads), dim=1).unsqueeze(1), -torch.inf)
    with_sink = torch.cat((logits, sink.expand(len(q), -1).unsqueeze(2)), dim=2)
    return torch.einsum("thr,rd->thd", with_sink.softmax(dim=2)[..., :-1], kv)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T``; no projection has a bias."""
    return x @ weight.double().T


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return ``x / sqrt(mean(x**2) + eps)`` over the last axis, times the weight if any."""
    normed = x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * weight.double()


def hadamard_matrix() -> Tensor:
    """Return the orthonormal 128-point Hadamard matrix in Sylvester's order; it is symmetric."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) * 0.5**0.5
    matrix: Tensor = two
    for _ in range(6):
        matrix = torch.kron(matrix, two)
    return matrix


def rope(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Turn the last dims of each vector, as adjacent pairs, by its position (``apply_rotary_emb``).

    The angle is a product in fp32, as the model makes it: at a million tokens its step is 0.06 rad.
    """
    count = len(frequencies)
    angles = torch.outer(positions.float(), frequencies).double()  # [n, pairs]
    turns = torch.polar(torch.ones_like(angles), angles)
    turns = turns.view(len(x), *(1,) * (x.dim() - 2), count)  # the same for each head
    still, turned = x[..., : -2 * count], x[..., -2 * count :]
    pairs = torch.view_as_complex(turned.reshape(*x.shape[:-1], count, 2))
    return torch.cat((still, torch.view_as_real(pairs * turns).flatten(-2)), dim=-1)


def rope_frequencies(config: ModelConfig, *, compressed: bool) -> Tensor:
    """Return the angle a token of each pair, fp32 ``[pairs]`` (``precompute_freqs_cis``).

    Layers that compress have a base of their own and YaRN: fast pairs keep their frequency, slow
    ones are divided by ``rope_factor``, those between blend the two.
    """
    dim = config.rope_head_dim
    theta = config.compress_rope_theta if compressed else config.rope_theta
    powers = [theta ** (2 * i / dim) for i in range(dim // 2)]
    frequencies = 1.0 / torch.tensor(powers, dtype=torch.float32)
    if not compressed or config.original_length == 0:
        return frequencies

    def pair(turns: float) -> float:  # the pair that turns so often over the original context
        wavelength = config.original_length / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(pair(config.beta_fast)), 0)
    high = min(math.ceil(pair(config.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return frequencies / config.rope_factor * (1 - keep) + frequencies * keep
