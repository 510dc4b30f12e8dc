"""The shipped mini indexer: shapes and trained weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import Field, JsonValue, ValidationError
from torch import Tensor

from needlepoint.reference.config import ModelConfig
from needlepoint.reference.weights import CompressorWeights, LayerWeights, check_layer_weights
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
class TrainedModel:
    """Shapes and weights of the mini indexer, one set a layer."""

    config: ModelConfig
    layers: tuple[LayerWeights, ...]

    def weights(self, layer: int) -> LayerWeights:
        """Return the weights of a layer; ``ValueError`` if there is none."""
        self.config.ratio(layer)
        return self.layers[layer]


def load_trained() -> TrainedModel:
    """Load the shipped mini indexer.

    Raises
    ------
    ValueError
        Where a file is missing or a tensor has another shape than the shapes ask for.
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
    layers = []
    for layer in range(len(config.compress_ratios)):
        weights = _layer({k.removeprefix(f"layer{layer}."): t for k, t in tensors.items()}, file)
        check_layer_weights(weights, config, layer)
        layers.append(weights)
    return TrainedModel(config, tuple(layers))


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
