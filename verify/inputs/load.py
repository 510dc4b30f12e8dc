"""Inputs: recordings, the shipped one or synthetic kinds, with the weights to run them through.

Whatever the source, an :class:`Inputs` is checked once, here: finite bf16 hidden states of the
model's width, layers that exist, and at least one complete window for every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.config_file import load_config
from needlepoint.reference.weights import LayerWeights, random_layer_weights
from needlepoint.verify.inputs.checkpoint import Checkpoint
from needlepoint.verify.inputs.checkpoint_files import inside
from needlepoint.verify.inputs.checks import check_hidden, choose_layers, tensor_digest
from needlepoint.verify.inputs.recall_needles import RequestNeedle, kept_needles
from needlepoint.verify.inputs.synthetic import (
    DEFAULT_LENGTHS,
    KINDS,
    declares_constant,
    synthetic_hidden,
    synthetic_kind,
    synthetic_weights,
)
from needlepoint.verify.recording.model import recorded_config
from needlepoint.verify.recording.recording import open_recording

CONFIG_FILE = "config.json"
MINI = "mini"
SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class Inputs:
    """What a run is given."""

    name: str  # As the user named it, for example ``mini`` or ``synthetic:ties``.
    # Of the bytes of the hidden states, in layer order; states that layers share count once.
    sha256: str
    config: ModelConfig  # Model shapes.
    requests: tuple[int, ...]  # Tokens of each request.
    layers: tuple[int, ...]  # Layers to run, ascending.
    seed: int  # Of the random weights, synthetic states and page permutations.
    states: Mapping[int, Tensor]  # Hidden states by layer: bf16 ``[tokens, hidden_size]``.
    weights_of: Callable[[int], LayerWeights]  # Makes the weights of a layer.
    # Where answers stand, for recall; empty where the input marks none.
    needles: tuple[RequestNeedle, ...] = ()
    # Whether the input is meant to be the same in every row, so that stages may be.
    constant: bool = False
    # Folder that the weights are read from, as the user named it; None where they are drawn.
    checkpoint: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens over all requests."""
        return sum(self.requests)

    def hidden(self, layer: int) -> Tensor:
        """Return the hidden states of a layer: bf16 ``[tokens, hidden_size]``.

        Raises
        ------
        ValueError
            Where the layer is not one of this input's.
        """
        self._check(layer)
        return self.states[layer]

    def weights(self, layer: int) -> LayerWeights:
        """Return the weights of a layer: the same on every call.

        Raises
        ------
        ValueError
            Where the layer is not one of this input's.
        """
        self._check(layer)
        return self.weights_of(layer)

    def _check(self, layer: int) -> None:
        if layer not in self.states:
            raise ValueError(f"layer {layer}: this input has layers {list(self.layers)}")


def load_inputs(
    source: str,
    *,
    model: str | None = None,
    layers: tuple[int, ...] | None = None,
    tokens: int | None = None,
    seed: int | None = None,
    checkpoint: Path | None = None,
) -> Inputs:
    """Load an input and check it.

    Parameters
    ----------
    source
        ``mini`` (the shipped recording), ``synthetic`` or ``synthetic:KIND``, or the path of a
        recording directory.
    model
        Preset or path of a ``config.json``. By default the recording's own, or ``mini``.
    layers
        Layers to run. By default the first layer of each ratio that has a compressor.
    tokens
        Of a recording: keep the first so many tokens, over requests in order. Of a synthetic
        input: how many to draw.
    seed
        Of random weights and synthetic states; by default that of the recording, or 0.
    checkpoint
        Folder whose tensors are the weights, as they are; by default they are drawn. Its
        ``config.json`` gives the shapes unless ``model`` does.

    Raises
    ------
    ValueError
        Where the source, kind, model or a layer is unknown, the recording is not usable, hidden
        states are not finite or have another width than the model, the number of tokens is not
        positive or more than there are, or a layer has no complete window in any request. The
        message names what came and what to do.
    """
    if tokens is not None and tokens < 1:
        raise ValueError(f"tokens {tokens}: expected at least 1")
    if seed is not None and not 0 <= seed < 1 << 63:
        raise ValueError(f"seed {seed}: expected 0 to 2**63 - 1")
    kind, _, rest = source.partition(":")
    if model is None and checkpoint is not None and (checkpoint / CONFIG_FILE).is_file():
        model = str(inside(checkpoint, CONFIG_FILE))
    if kind == SYNTHETIC:
        drawn = _synthetic(source, rest or "gaussian", model, layers, tokens, seed or 0)
    else:
        drawn = _recorded(source, model, layers, tokens, seed)
    if checkpoint is None:
        return drawn
    weights = Checkpoint(checkpoint, drawn.config, drawn.layers).weights
    return replace(drawn, weights_of=weights, checkpoint=str(checkpoint))


def mini_directory() -> Path:
    """Return the shipped recording's directory.

    Raises
    ------
    ValueError
        Where the package was installed without it.
    """
    path = Path(str(files("needlepoint.fixtures").joinpath(MINI)))
    if not path.is_dir():
        raise ValueError(f"input mini: {path} is missing; install the package again")
    return path


def _synthetic(
    name: str,
    kind: str,
    model: str | None,
    layers: tuple[int, ...] | None,
    tokens: int | None,
    seed: int,
) -> Inputs:
    synthetic_kind(kind)
    config = load_config(model or MINI)
    lengths = _default_lengths(config) if tokens is None else _synthetic_lengths(tokens)
    chosen = choose_layers(config, layers, lengths)
    hidden = synthetic_hidden(kind, lengths, config.hidden_size, seed)

    def weights(layer: int) -> LayerWeights:
        return synthetic_weights(kind, random_layer_weights(config, layer, seed), seed)

    states = dict.fromkeys(chosen, hidden)
    return Inputs(
        name if ":" in name else f"{name}:{kind}",
        tensor_digest([hidden]),
        config,
        lengths,
        chosen,
        seed,
        states,
        weights,
        constant=declares_constant(kind),
    )


def _default_lengths(config: ModelConfig) -> tuple[int, ...]:
    """Return lengths at which the selection discards half of what its last query sees."""
    long = 2 * 4 * config.index_topk + 3
    return (max(DEFAULT_LENGTHS[0], long), *DEFAULT_LENGTHS[1:])


def _synthetic_lengths(tokens: int) -> tuple[int, ...]:
    """Split tokens into one long and two short requests as the default does, where that fits."""
    long = tokens - sum(DEFAULT_LENGTHS[1:])
    return (long, *DEFAULT_LENGTHS[1:]) if long >= DEFAULT_LENGTHS[1] else (tokens,)


def _recorded(
    source: str,
    model: str | None,
    layers: tuple[int, ...] | None,
    tokens: int | None,
    seed: int | None,
) -> Inputs:
    directory = mini_directory() if source == MINI else Path(source)
    if not directory.is_dir():
        kinds = ", ".join(f"{SYNTHETIC}:{kind}" for kind in KINDS)
        raise ValueError(
            f"input {source!r}: neither {MINI}, one of {kinds}, nor a recording directory"
        )
    recording = open_recording(directory)
    config = load_config(model) if model is not None else recorded_config(recording.manifest.model)
    lengths = _keep(recording.manifest.requests, tokens)
    wanted = recording.layers or None if layers is None else layers
    chosen = choose_layers(config, wanted, lengths)
    states: dict[int, Tensor] = {}
    loaded: dict[str, Tensor] = {}
    for layer in chosen:
        name = recording.input_name(layer)
        if name not in loaded:
            loaded[name] = recording.rows(name, slice(0, sum(lengths)))
            check_hidden(f"{directory}: tensor {name}", loaded[name], config, lengths)
        states[layer] = loaded[name]
    own = (recording.manifest.seed or 0) if seed is None else seed
    kind = (recording.manifest.input_name or "").removeprefix(f"{SYNTHETIC}:")

    def weights(layer: int) -> LayerWeights:
        drawn = random_layer_weights(config, layer, own)
        return synthetic_weights(kind, drawn, own) if kind in KINDS else drawn

    return Inputs(
        source,
        tensor_digest(loaded.values()),
        config,
        lengths,
        chosen,
        own,
        states,
        weights,
        kept_needles(recording.manifest.needles or (), lengths),
        declares_constant(kind),
    )


def _keep(requests: tuple[int, ...], tokens: int | None) -> tuple[int, ...]:
    """Return the lengths that are left of the first ``tokens`` tokens."""
    if tokens is None:
        return requests
    if tokens > sum(requests):
        raise ValueError(f"tokens {tokens}: the recording has {sum(requests)}; ask for fewer")
    kept: list[int] = []
    for length in requests:
        kept.append(min(length, tokens - sum(kept)))
        if sum(kept) == tokens:
            break
    return tuple(kept)
