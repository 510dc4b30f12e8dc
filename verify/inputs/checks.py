"""Checks that every input passes, whatever it was made from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.verify.base.rows import Rows

_CHECK_ROWS = 1 << 12  # rows looked at at once


def default_layers(config: ModelConfig) -> tuple[int, ...]:
    """Return the first layer of each ratio that has a compressor.

    Raises
    ------
    ValueError
        Where the model has no such layer.
    """
    first: dict[int, int] = {}
    for layer, ratio in enumerate(config.compress_ratios):
        if ratio:
            first.setdefault(ratio, layer)
    if not first:
        raise ValueError(f"model {config.name!r}: no layer has a compressor; nothing to compare")
    return tuple(sorted(first.values()))


def choose_layers(
    config: ModelConfig, layers: Iterable[int] | None, lengths: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the layers to run, ascending: those asked for, or :func:`default_layers`.

    Raises
    ------
    ValueError
        Where a layer does not exist, a layer with a compressor has no complete window in any
        request, or no layer has a compressor: nothing could be compared.
    """
    chosen = default_layers(config) if layers is None else tuple(sorted(set(layers)))
    longest = max(lengths)
    for layer in chosen:
        ratio = config.ratio(layer)
        if longest < ratio:
            raise ValueError(
                f"layer {layer}: ratio {ratio} needs a request of at least {ratio} tokens and the "
                f"longest has {longest}; give more tokens or leave the layer out with --layers"
            )
    if not any(config.ratio(layer) for layer in chosen):
        raise ValueError(
            f"layers {list(chosen)}: none has a compressor, so there is nothing to compare; "
            f"layers {list(default_layers(config))} have"
        )
    return chosen


def check_hidden(where: str, hidden: Tensor, config: ModelConfig, lengths: tuple[int, ...]) -> None:
    """Check the width of hidden states ``[tokens, hidden_size]`` and that they are finite.

    Raises
    ------
    ValueError
        Naming ``where`` and the first value at fault by request, position and dim.
    """
    if hidden.shape[1] != config.hidden_size:
        raise ValueError(
            f"{where}: hidden states are {hidden.shape[1]} wide, model {config.name!r} expects "
            f"{config.hidden_size}; name the model they come from with --model"
        )
    for start in range(0, len(hidden), _CHECK_ROWS):
        finite = torch.isfinite(hidden[start : start + _CHECK_ROWS])
        if bool(finite.all()):
            continue
        row, dim = (int(index) for index in (~finite).nonzero()[0])
        token = Rows(lengths).token(start + row)
        raise ValueError(
            f"{where}: {float(hidden[start + row, dim])} at request {token.request}, position "
            f"{token.position}, dim {dim}; expected finite values"
        )


def tensor_digest(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 of the tensors' bytes, one after another."""
    digest = hashlib.sha256()
    for tensor in tensors:
        for start in range(0, len(tensor), _CHECK_ROWS):
            rows = tensor[start : start + _CHECK_ROWS].contiguous()
            digest.update(rows.view(torch.uint8).numpy().data)
    return digest.hexdigest()
