"""A candidate of your own: the index keys of a ratio-4 layer as fp8 pages, in plain torch.

``MyKernel`` is all that the judge asks for. ``pool`` and ``store`` stand in for your kernel.
"""

from __future__ import annotations

import torch
from scipy.linalg import hadamard
from torch import Tensor, split
from torch.nn.functional import pad

from needlepoint import CandidateInfo, LayerInputs, Observed, PagedRows

PAGE = 64  # rows a page


class MyKernel:
    """Pools, finishes and stores index keys; it does nothing after the store."""

    info = CandidateInfo("mine", "fp8", "cpu", "needlepoint", variant="torch", source_sha256="")

    def stages(self, ratio: int) -> frozenset[tuple[str, str]]:
        """Return the stages that :meth:`run` returns for a layer of this compression ratio."""
        return frozenset({("index", "pooled"), ("index", "stored")} if ratio == 4 else ())

    def run(self, inputs: LayerInputs) -> Observed:
        """Compute one layer; every tensor holds one request after another."""
        keys, lengths = inputs.index, list(inputs.lengths)
        if keys is None:  # a layer of ratio 128 has no index keys
            return Observed()
        requests = zip(split(keys.kv, lengths), split(keys.score, lengths), strict=True)
        pooled = [pool(kv, score, keys.ape) for kv, score in requests]
        pages = [store(rows, keys.norm_weight, inputs) for rows in pooled]
        page_ids = torch.arange(sum(map(len, pages)), dtype=torch.int32)
        stored = PagedRows(
            layout="index-fp8",
            pool=torch.cat(pages),
            page_size=PAGE,
            page_table=split(page_ids, [len(own) for own in pages]),
            entries=tuple(len(rows) for rows in pooled),
        )
        return Observed(dense={("index", "pooled"): torch.cat(pooled)}, stored={"index": stored})


def pool(kv: Tensor, score: Tensor, ape: Tensor) -> Tensor:
    """Pool 8 slots: columns [0, 128) of the window before, columns [128, 256) of this one."""
    kv, score = (x[: len(x) // 4 * 4].reshape(-1, 4, 2, 128) for x in (kv, score))
    score = score + ape.reshape(4, 2, 128)
    kv = torch.cat([kv[:, :, 0].roll(1, 0), kv[:, :, 1]], 1)
    score = torch.cat([score[:, :, 0].roll(1, 0), score[:, :, 1]], 1)
    score[:1, :4] = -torch.inf  # nothing stands before the first window
    return (score.softmax(1) * kv).sum(1)


def store(x: Tensor, norm_weight: Tensor, inputs: LayerInputs) -> Tensor:
    """Norm, RoPE, Hadamard, fp8; pages hold the codes of 64 rows, then their 64 scales."""
    x = x * (x.square().mean(1, keepdim=True) + inputs.norm_eps).rsqrt() * norm_weight
    cos, sin = inputs.rope_table[::4][: len(x)].unbind(2)
    even, odd = x[:, 64::2], x[:, 65::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], 2).flatten(1)
    x = torch.cat([x[:, :64], turned], 1) @ torch.tensor(hadamard(128) * 128**-0.5).float()
    scale = x.abs().amax(1, keepdim=True).clamp(min=1e-4) / 448
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    codes, scale = (pad(y.view(torch.uint8), (0, 0, 0, -len(x) % PAGE)) for y in (codes, scale))
    return torch.cat([codes.reshape(-1, PAGE * 128), scale.reshape(-1, PAGE * 4)], 1)
