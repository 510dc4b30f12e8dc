"""Model shapes in a manifest: the name of a preset, or every field."""

from __future__ import annotations

import json
from dataclasses import asdict, fields

from pydantic import JsonValue, TypeAdapter, ValidationError

from needlepoint.reference.config import MODELS, ModelConfig
from needlepoint.verify.recording.manifest import RecordingError, first_fault


def config_record(config: ModelConfig) -> str | dict[str, JsonValue]:
    """Return a configuration as a manifest holds it."""
    if MODELS.get(config.name) == config:
        return config.name
    # The name may be the path of a file on this machine.
    return {
        **asdict(config),
        "name": "recorded",
        "compress_ratios": [*config.compress_ratios],
        "index_rope": config.index_rope.value,
    }


def recorded_config(model: str | dict[str, JsonValue]) -> ModelConfig:
    """Return the configuration that a manifest holds.

    Unlike on the command line, a name is never taken for a path: a recording may come from anyone.

    Raises
    ------
    RecordingError
        For an unknown name, an unknown or missing field, or a value of the wrong type or range.
    """
    if isinstance(model, str):
        if model not in MODELS:
            raise RecordingError(
                f"manifest: model {model[:80]!r}, expected one of {', '.join(MODELS)} or all fields"
            )
        return MODELS[model]
    known = {field.name for field in fields(ModelConfig)}
    wrong = sorted((set(model) ^ known) - (_LATER - set(model)))
    if wrong:
        raise RecordingError(f"manifest: model fields {wrong} are missing or unknown")
    try:
        return _ADAPTER.validate_json(json.dumps(model), strict=True)
    except ValidationError as error:
        raise RecordingError(f"manifest: model: {first_fault(error)}") from error


_LATER = {"index_norm_eps", "index_rope"}
"""Fields that older recordings lack: of a kind of layer that they could not hold."""

_ADAPTER = TypeAdapter(ModelConfig)
