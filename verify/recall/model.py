"""What recall runs: prompts with needles, and the layers that they go through.

Layers are those of an input, or of the shipped mini indexer with its trained weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import Field, JsonValue, ValidationError
from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.weights import CompressorWeights, LayerWeights, check_layer_weights
from needlepoint.verify.inputs.recall_needles import Needle
from needlepoint.verify.recall.pool import shipped_folder
from needlepoint.verify.recording.file import read_header, read_tensor
from needlepoint.verify.recording.manifest import (
    FileName,
    ManifestPart,
    RecordingError,
    first_fault,
    parse_json,
    read_bounded,
)
from needlepoint.verify.recording.model import recorded_config

LABEL: Final = (
    "mini indexer (64 heads of 128, ratio 4, k = 512) trained on synthetic facts in real text; "
    "says nothing about the recall of a full model"
)
MAX_BYTES: Final = 1 << 20


class IndexerManifest(ManifestPart):
    """``indexer.json``."""

    schema_: Literal["needlepoint.indexer/1"] = Field(alias="schema")
    config: dict[str, JsonValue]
    file: FileName
    held_out: JsonValue = None
    """Accuracy on facts whose persons and things training never saw."""
    steps: JsonValue = None
    command: JsonValue = None
    data: JsonValue = None
    generator: JsonValue = None
    created: JsonValue = None
    versions: JsonValue = None
    licence: JsonValue = None


@dataclass(frozen=True)
class Setting:
    """What a prompt was made for: length, distractors, and its number (the cluster)."""

    length: int
    distractors: int
    cluster: int


@dataclass(frozen=True)
class NeedlePrompt:
    """One request and its needles, one query each.

    ``hidden`` returns the hidden states of a layer, bf16 ``[length, hidden_size]``.
    """

    setting: Setting
    needles: tuple[Needle, ...]
    hidden: Callable[[int], Tensor]


MakePrompt = Callable[[], NeedlePrompt]


@dataclass(frozen=True)
class RecallModel:
    """The layers of ratio 4 that prompts go through; ``seed`` is that of page permutations."""

    config: ModelConfig
    layers: tuple[int, ...]
    weights: Callable[[int], LayerWeights]
    seed: int


def load_trained(layers: Sequence[int] | None = None, seed: int = 0) -> RecallModel:
    """Load the shipped mini indexer.

    Parameters
    ----------
    layers
        Layers to run; the first by default.
    seed
        Of page permutations.

    Raises
    ------
    ValueError
        Where a file is missing, a tensor has another shape than the shapes ask for, or there is no
        such layer.
    """
    folder = shipped_folder()
    path = folder / "indexer.json"
    value = parse_json(read_bounded(path, MAX_BYTES), str(path))
    try:
        manifest = IndexerManifest.model_validate_json(json.dumps(value))
    except ValidationError as error:
        raise RecordingError(f"{path}: {first_fault(error)}") from error
    config = recorded_config(manifest.config)
    file = folder / manifest.file
    tensors = {name: read_tensor(file, name) for name in read_header(file)}
    weights = []
    for layer in range(len(config.compress_ratios)):
        found = _layer({k.removeprefix(f"layer{layer}."): t for k, t in tensors.items()}, file)
        check_layer_weights(found, config, layer)
        weights.append(found)
    chosen = (0,) if layers is None else tuple(layers)
    for layer in chosen:
        config.ratio(layer)
    return RecallModel(config, chosen, weights.__getitem__, seed)


def _layer(tensors: dict[str, Tensor], file: object) -> LayerWeights:
    def compressor(path: str) -> CompressorWeights:
        return CompressorWeights(*(tensors[f"{path}.{p}"] for p in ("wkv", "wgate", "ape", "norm")))

    names = ("index_wq_b", "weights_proj", "wq_a", "q_norm", "wq_b", "wkv", "kv_norm", "attn_sink")
    try:
        return LayerWeights(
            compressor("main"), compressor("index"), *(tensors[name] for name in names)
        )
    except KeyError as error:
        raise RecordingError(f"{file}: tensor {error} of a layer is missing") from error
