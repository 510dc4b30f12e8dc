"""The whole layer against a second, naive implementation of the exact contract.

Written from the mechanism's definition: loops over tokens and entries, matrices instead of
butterflies, complex numbers instead of pairs. It shares no code with the reference but the rotary
frequencies, which have a golden test of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from scipy.linalg import hadamard as sylvester
from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.main_attention import MainAttention
from needlepoint.reference.profile import BF16_CONTRACT, EXACT, Precision
from needlepoint.reference.rope import rope_frequencies
from needlepoint.reference.rounding import round_to
from needlepoint.reference.weights import (
    CompressorWeights,
    LayerWeights,
    random_layer_weights,
)

Hidden = Callable[[int, int], Tensor]
Stages = dict[tuple[str, str], Tensor]
EPS = 1e-6


def rms(x: Tensor, weight: Tensor | float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def turn(x: Tensor, position: int, frequencies: Tensor, sign: float = 1.0) -> Tensor:
    angles = (torch.tensor(float(position)) * frequencies).double() * sign
    pairs = torch.view_as_complex(x[..., -64:].reshape(*x.shape[:-1], 32, 2).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones(32).double(), angles))
    return torch.cat((x[..., :-64], turned.flatten(-2)), dim=-1)


def compress(x: Tensor, w: CompressorWeights, ratio: int, f: Tensor) -> dict[str, Tensor]:
    kv, score = x @ w.wkv.double().t(), x @ w.wgate.double().t()
    d = len(w.norm)
    pooled, roped = [], []
    for entry in range(len(x) // ratio):
        values, logits = [], []
        for p in range((entry - (ratio == 4)) * ratio, (entry + 1) * ratio):
            if p >= 0:
                own = ratio == 4 and p >= entry * ratio
                columns = slice(d, 2 * d) if own else slice(0, d)
                values.append(kv[p, columns])
                logits.append(score[p, columns] + w.ape[p % ratio, columns].double())
        share = torch.stack(logits).softmax(dim=0)
        pooled.append((share * torch.stack(values)).sum(dim=0))
        roped.append(turn(rms(pooled[-1], w.norm.double()), entry * ratio, f))
    return {"pooled": torch.stack(pooled), "roped": torch.stack(roped)}


def naive_layer(model: ModelConfig, number: int, w: LayerWeights, hidden: Tensor) -> Stages:
    ratio, x = model.ratio(number), hidden.double()
    f = rope_frequencies(model, compressed=ratio > 0)
    latent = rms(x @ w.wq_a.double().t(), w.q_norm.double())
    found: Stages = {}
    rows: list[list[int]] = [[] for _ in x]
    main = x.new_zeros(0, model.head_dim)
    if w.main is not None:
        stages = compress(x, w.main, ratio, f)
        main = found["main", "roped"] = stages["roped"]
        found["main", "pooled"] = stages["pooled"]
        rows = [list(range((p + 1) // ratio)) for p in range(len(x))]
    if w.index is not None and w.index_wq_b is not None and w.weights_proj is not None:
        matrix = torch.from_numpy(sylvester(128)).double() / 128**0.5
        keys = found["index", "stored"] = compress(x, w.index, ratio, f)["roped"] @ matrix
        q = (latent @ w.index_wq_b.double().t()).view(len(x), -1, 128)
        q = torch.stack([turn(row, p, f) for p, row in enumerate(q)]) @ matrix
        heads = x @ w.weights_proj.double().t() * (128 * q.shape[1]) ** -0.5
        found["query", "query"], found["query", "weights"] = q, heads
        scores = torch.einsum("sht,sh->st", torch.einsum("shd,td->sht", q, keys).relu(), heads)
        for p, visible in enumerate(rows):
            scores[p, len(visible) :] = -torch.inf
            best = sorted(visible, key=lambda e, p=p: -float(scores[p, e]))  # type: ignore[misc]
            rows[p] = best[: model.index_topk]
        found["index", "scores"] = scores
    found["main", "attention"] = attend(model, w, x, latent, f, main, rows)
    return found


def attend(
    model: ModelConfig,
    w: LayerWeights,
    x: Tensor,
    latent: Tensor,
    f: Tensor,
    main: Tensor,
    rows: list[list[int]],
) -> Tensor:
    window = rms(x @ w.wkv.double().t(), w.kv_norm.double())
    window = torch.stack([turn(row, p, f) for p, row in enumerate(window)])
    out = []
    for p in range(len(x)):
        q = rms((latent[p] @ w.wq_b.double().t()).view(model.n_heads, -1), 1.0)
        read = torch.cat((window[max(0, p - model.window_size + 1) : p + 1], main[rows[p]]))
        logits = turn(q, p, f) @ read.t() / model.head_dim**0.5
        with_sink = torch.cat((logits, w.attn_sink.double().unsqueeze(1)), dim=1).softmax(dim=1)
        out.append(turn(with_sink[:, :-1] @ read, p, f, sign=-1.0))
    return torch.stack(out)


@pytest.mark.parametrize(("number", "tokens"), [(0, 61), (1, 270), (2, 30)])
def test_layer_follows_the_definition(
    small_model: ModelConfig, hidden_states: Hidden, number: int, tokens: int
) -> None:
    weights = random_layer_weights(small_model, number, 1)
    hidden = hidden_states(tokens, 20)
    layer = ReferenceLayer(small_model, number, weights, EXACT)
    stages = layer.forward(hidden, layer.new_request(), keep_scores=True).tensors()
    for key, wanted in naive_layer(small_model, number, weights, hidden).items():
        torch.testing.assert_close(stages[key], wanted, rtol=1e-9, atol=1e-11, msg=str(key))


def test_main_queries_are_normed_and_roped_with_a_rounding_after_each(
    small_model: ModelConfig, hidden_states: Hidden
) -> None:
    weights = random_layer_weights(small_model, 0, 1)
    layer = ReferenceLayer(small_model, 0, weights, BF16_CONTRACT)
    attention: MainAttention = layer.attention
    projected = layer.project_inputs(hidden_states(40, 21))
    found = attention.queries(projected.latent, layer.rope(0, 40), 0)
    q = (projected.latent @ weights.wq_b.double().t()).float().double().view(40, 2, 128)
    normed = round_to(rms(q, 1.0), Precision.BF16)
    f = rope_frequencies(small_model, compressed=True)
    roped = round_to(torch.stack([turn(r, p, f) for p, r in enumerate(normed)]), Precision.BF16)
    same = (found == roped).double().mean().item()
    assert same > 0.999  # the table is fp32 there and float64 here
    assert torch.equal(found, round_to(found, Precision.BF16))
    once = round_to(torch.stack([turn(r, p, f) for p, r in enumerate(rms(q, 1.0))]), Precision.BF16)
    assert (found == once).double().mean().item() < 0.9


def test_window_rows_are_made_like_main_rows(
    small_model: ModelConfig, hidden_states: Hidden
) -> None:
    weights = random_layer_weights(small_model, 0, 1)
    layer = ReferenceLayer(small_model, 0, weights, EXACT)
    projected = layer.project_inputs(hidden_states(20, 22))
    rows = layer.attention.window(projected, layer.rope(0, 20), layer.new_request().window)
    f = rope_frequencies(small_model, compressed=True)
    normed = rms(projected.window, weights.kv_norm.double())
    wanted = torch.stack([turn(r, p, f) for p, r in enumerate(normed)])
    torch.testing.assert_close(rows, wanted, rtol=1e-12, atol=1e-12)
