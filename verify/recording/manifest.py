"""``needlepoint.recording/1``: the manifest of a recording directory, read as hostile input.

The manifest says which tensors the files hold (name, file, dtype, shape), which stages they make
up and how pages are laid out. It holds no digest of any stage tensor: a recording that was edited
is judged, not refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from needlepoint.reference.formats.names import RopeLayout
from needlepoint.verify.base.hostile_json import MAX_JSON_DEPTH as MAX_JSON_DEPTH
from needlepoint.verify.base.hostile_json import RecordingError as RecordingError
from needlepoint.verify.base.hostile_json import file_inside
from needlepoint.verify.base.hostile_json import first_fault as first_fault
from needlepoint.verify.base.hostile_json import parse_json as parse_json
from needlepoint.verify.base.hostile_json import read_bounded as read_bounded
from needlepoint.verify.base.stages import declared_stages

SCHEMA: Final = "needlepoint.recording/1"
MANIFEST_FILE: Final = "manifest.json"
MAX_MANIFEST_BYTES: Final = 8 << 20
"""61 layers with a dozen requests each need under 1 MiB."""


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]{1,200}$")]
# Flat names only: nothing absolute, no "..", no folder.
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 48)]
Entries = Annotated[tuple[Count, ...], Field(min_length=1, max_length=1 << 16)]
Requests = Annotated[
    tuple[Annotated[int, Field(ge=1, lt=1 << 48)], ...], Field(min_length=1, max_length=1 << 16)
]
Dtype = Literal["BF16", "F16", "F32", "F64", "U8", "I32", "I64"]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class ManifestPart(BaseModel):
    """Strict types, no unknown fields, frozen."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        serialize_by_alias=True,
        protected_namespaces=(),
    )


class TensorRecord(ManifestPart):
    """Where one tensor is and what it looks like."""

    file: FileName
    dtype: Dtype
    shape: Annotated[tuple[Count, ...], Field(max_length=8)]


class PoolRecord(ManifestPart):
    """Layout of one pool of stored rows; its bytes are the tensor ``stored.pages``."""

    layout: Annotated[str, Field(pattern=r"^[a-z0-9-]{1,40}$")]
    page_size: Annotated[int, Field(ge=1, lt=1 << 32)]
    """Rows a page."""
    entries: Entries
    """Entries of each request."""


class QueryRecord(ManifestPart):
    """How stored queries are coded."""

    format: Literal["bf16", "fp8", "fp4", "float64"]
    """``float64`` only in recordings of the reference."""
    scale_folded: bool
    """Whether the head weights already hold the query scale."""


class LayerRecord(ManifestPart):
    """One layer: its scalars and the stages it declares."""

    layer: Count
    ratio: Literal[1, 4, 128]
    stages: tuple[tuple[str, str], ...]
    """Pairs (path, stage)."""
    layouts: dict[Literal["index", "main"], PoolRecord] = {}
    query: QueryRecord | None = None
    norm_eps: Finite
    topk: Count
    weight_scale: Finite
    seed: int = 0
    peak_transient_bytes: Count = 0
    path_taken: str = ""
    index_rope: RopeLayout = RopeLayout.TRAILING_PAIRS
    """Dims that RoPE rotates in index keys and queries."""

    @model_validator(mode="after")
    def _stages_exist(self) -> LayerRecord:
        known = declared_stages(self.ratio)
        for key in self.stages:
            if key not in known:
                raise ValueError(f"a layer of ratio {self.ratio} has no stage {'.'.join(key)}")
        if len(set(self.stages)) != len(self.stages):
            raise ValueError("a stage is declared twice")
        return self


class ProfileRecord(ManifestPart):
    """The arithmetic that the candidate declares."""

    name: str
    switches: dict[str, str | bool]


class CandidateRecord(ManifestPart):
    """Identity of the recorded candidate, as in ``CandidateInfo``."""

    name: str
    format: Literal["bf16", "fp8", "fp4"]
    device: str
    profile: str
    variant: str
    source_sha256: str
    accumulator: str = "fp32"


class NeedleRecord(ManifestPart):
    """One needle: tokens ``start`` to ``stop`` of a request, asked for by the token ``query``."""

    request: Count
    start: Count
    stop: Count
    query: Count


class Manifest(ManifestPart):
    """The whole of ``manifest.json``."""

    schema_: Literal["needlepoint.recording/1"] = Field(default=SCHEMA, alias="schema")
    kind: Literal["input", "reference", "candidate"]
    model: str | dict[str, JsonValue]
    """Name of a preset, or every field of the model's shapes."""
    requests: Requests
    """Tokens of each request."""
    tensors: dict[Name, TensorRecord]
    layers: tuple[LayerRecord, ...] = ()
    candidate: CandidateRecord | None = None
    profile: ProfileRecord | None = None
    seed: int | None = None
    needles: Annotated[tuple[NeedleRecord, ...], Field(max_length=1 << 16)] | None = None
    """Where answers stand in the requests, for recall."""
    input_name: str | None = None
    input_sha256: str | None = None
    # Provenance: kept, never interpreted.
    source: JsonValue = None
    licence: JsonValue = None
    encoder: JsonValue = None
    generator: JsonValue = None
    text_sha256: JsonValue = None
    created: JsonValue = None
    versions: JsonValue = None

    @model_validator(mode="after")
    def _layers_are_distinct(self) -> Manifest:
        numbers = [layer.layer for layer in self.layers]
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"layers {numbers}: a layer is listed twice")
        if self.kind == "input" and self.layers:
            raise ValueError("kind input: a recording of input has no layers")
        return self

    @model_validator(mode="after")
    def _needles_lie_in_their_requests(self) -> Manifest:
        for place, needle in enumerate(self.needles or ()):
            if needle.request >= len(self.requests):
                raise ValueError(
                    f"needle {place}: request {needle.request}, expected one of "
                    f"{len(self.requests)}"
                )
            length = self.requests[needle.request]
            if not needle.start < needle.stop <= needle.query + 1 <= length:
                raise ValueError(
                    f"needle {place}: tokens {needle.start} to {needle.stop}, query "
                    f"{needle.query}; expected start < stop <= query + 1 <= {length}, the tokens "
                    f"of request {needle.request}"
                )
        return self


def manifest_json(manifest: Manifest) -> bytes:
    """Return the text of a manifest; empty optional fields are left out."""
    text = manifest.model_dump_json(by_alias=True, indent=1, exclude_none=True)
    return text.encode() + b"\n"


def load_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a recording directory.

    Raises
    ------
    RecordingError
        Where the directory or its manifest is missing, the manifest a link out of it, too large,
        not UTF-8, not JSON, nested too deeply, or not ``needlepoint.recording/1``; names the file
        and the first field at fault.
    """
    path = file_inside(directory, MANIFEST_FILE)
    raw = read_bounded(path, MAX_MANIFEST_BYTES)
    value = parse_json(raw, str(path))
    try:
        # Strict mode takes JSON arrays for tuples only from JSON text.
        return Manifest.model_validate_json(json.dumps(value))
    except ValidationError as error:
        raise RecordingError(
            f"{path}: {first_fault(error)} ({error.error_count()} faults in all); expected schema "
            f"{SCHEMA}"
        ) from error
