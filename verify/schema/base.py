"""Base class, words and number types of every record in ``needlepoint.result/1``."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from needlepoint.optimized.protocol.stages import STAGES, stage_named

Verdict = Literal["match", "differ", "cannot-judge"]
MATCH: Final = "match"
DIFFER: Final = "differ"
CANNOT_JUDGE: Final = "cannot-judge"

Contract = Literal["exact", "bf16", "official"]
Path = Literal["index", "main", "query"]
StageName = Annotated[
    str,
    AfterValidator(lambda name: stage_named(name).name),
    WithJsonSchema({"type": "string", "enum": list(STAGES)}),
]
"""A stage of the registry."""
Kind = Literal["given", "compared", "consequence", "not covered", "skipped"]
KeyFormat = Literal["bf16", "fp8", "fp4"]

Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Interval = tuple[Number, Number]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Record(BaseModel):
    """Part of a result: strict types, no unknown fields, frozen, numbers finite or null."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_serialization_defaults_required=True,
        serialize_by_alias=True,
        protected_namespaces=(),
    )
