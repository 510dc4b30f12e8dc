"""What a planted run returned otherwise than the sound one, stage by stage."""

from __future__ import annotations

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import Observed


def parts_of(observed: Observed) -> dict[str, tuple[Tensor, ...]]:
    """Return every tensor of a run by stage, scores left out: they are read, not held."""
    found: dict[str, tuple[Tensor, ...]] = {
        ".".join(key): (rows,) for key, rows in observed.dense.items()
    }
    for path, rows in observed.stored.items():
        found[f"{path}.stored"] = (rows.pool, *rows.page_table)
    if observed.query is not None:
        scales = observed.query.scales
        found["query.query"] = (observed.query.codes, *(() if scales is None else (scales,)))
        found["query.weights"] = (observed.query.weights,)
    if observed.topk is not None:
        found["index.topk"] = (observed.topk,)
    return found


def read_scores(observed: Observed, lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Return the scores of every request; none without a reader."""
    if observed.scores is None:
        return ()
    return tuple(observed.scores(request, 0, length) for request, length in enumerate(lengths))


def changed_parts(sound: Observed, observed: Observed, lengths: tuple[int, ...]) -> frozenset[str]:
    """Return the stages of which a byte is not the sound run's."""
    before, after = parts_of(sound), parts_of(observed)
    before["index.scores"] = read_scores(sound, lengths)
    after["index.scores"] = read_scores(observed, lengths)
    return frozenset(
        name
        for name in before.keys() | after.keys()
        if not _same(before.get(name, ()), after.get(name, ()))
    )


def _same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return len(one) == len(other) and all(
        a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b)))
        for a, b in zip(one, other, strict=True)
    )


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.flatten().clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
