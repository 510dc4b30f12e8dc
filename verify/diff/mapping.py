"""``needlepoint.dump/1``: what the tensors of a dump are, in TOML beside the dump.

See docs/engines.md for an example of every key.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError, field_validator

from needlepoint.optimized.protocol.stages import REGISTRY
from needlepoint.verify.diff.files import DumpError
from needlepoint.verify.layout.geometry import LAYOUTS
from needlepoint.verify.recording.manifest import ManifestPart, Requests, first_fault, read_bounded

MAPPING_FILE: Final = "needlepoint-dump.toml"
MAX_BYTES: Final = 1 << 20

ROWS: Final = tuple(
    dict.fromkeys(
        ".".join(part for part in (path, stage.name, tensor.dumped_part) if part)
        for stage in REGISTRY
        for path in stage.paths
        for tensor in stage.tensors_of(path)
        if tensor.dumped
    )
)
"""Tensors that have a row for each token or entry."""

Template = Annotated[str, Field(min_length=1, max_length=500)]


class Source(ManifestPart):
    """Where a tensor is, and how ranks share it."""

    tensor: Template
    """Name or tags; ``{layer}``, ``{step}`` and ``{rank}`` are filled in."""
    shard: Literal["heads", "sum"] | None = None
    """``heads``: ranks hold consecutive heads. ``sum``: ranks hold partial sums."""


class Tokens(ManifestPart):
    """Which token each row of a step is."""

    positions: Template
    """Positions within the request, integers; negative rows are padding."""
    requests: Template | None = None
    """Request of each row, integers."""
    lengths: Template | None = None
    """Instead of ``requests``: rows of each request, in order."""


class Pages(ManifestPart):
    """Stored rows of one path: bytes, page table, layout."""

    tensor: Template
    table: Template
    """Integers ``[requests, pages]``, one row a request; entries past the last needed one are free.
    """
    layout: str
    page_size: Annotated[int, Field(ge=1, le=1 << 20)]

    @field_validator("layout")
    @classmethod
    def _known(cls, layout: str) -> str:
        if layout not in LAYOUTS:
            raise ValueError(f"expected one of {', '.join(LAYOUTS)}")
        return layout


class Mapping(ManifestPart):
    """The whole of a mapping file."""

    schema_: Literal["needlepoint.dump/1"] = Field(alias="schema")
    name: Annotated[str, Field(pattern=r"^[ -~]{1,100}$")]
    """Whose dump it is, as results name it."""
    format: Literal["bf16", "fp8", "fp4"]
    profile: str
    requests: Requests
    """Tokens of each request."""
    layers: Annotated[tuple[Annotated[int, Field(ge=0, le=9999)], ...], Field(min_length=1)]
    steps: tuple[int, ...] = ()
    """Forward passes in order; none: every tensor holds whole requests one after another."""
    ranks: Annotated[int, Field(ge=1, le=1024)] = 1
    directory: str = "."
    """Folder of the dump, from the mapping file."""
    tokens: Tokens | None = None
    rows: dict[str, Template | Source] = Field(default_factory=dict)
    pages: dict[Literal["index", "main"], Pages] = Field(default_factory=dict)
    scale_folded: bool = False
    """Whether ``query.weights`` already hold the query scale."""
    picks: Literal["entries", "slots"] = "entries"
    """``slots``: picks are page times page size plus slot and go back through the page table."""

    @field_validator("rows")
    @classmethod
    def _rows_exist(cls, rows: dict[str, Template | Source]) -> dict[str, Template | Source]:
        unknown = sorted(set(rows) - set(ROWS))
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no tensor of a layer; expected {', '.join(ROWS)}")
        return rows


def load_mapping(path: Path) -> Mapping:
    """Read and check a mapping file.

    Raises
    ------
    DumpError
        Where it cannot be read, is not TOML, or holds an unknown key or a value of a wrong type;
        names the file and the first field at fault.
    """
    raw = read_bounded(path, MAX_BYTES)
    try:
        value = tomllib.loads(raw.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DumpError(f"{path}: is not valid TOML ({error})") from error
    try:
        found = Mapping.model_validate(_tuples(value))
    except ValidationError as error:
        raise DumpError(f"{path}: {first_fault(error)}") from error
    if bool(found.steps) != (found.tokens is not None):
        raise DumpError(
            f"{path}: steps and [tokens] go together: steps say which forward passes were dumped, "
            "[tokens] which token each of their rows is"
        )
    if found.tokens and (found.tokens.requests is None) == (found.tokens.lengths is None):
        raise DumpError(f"{path}: [tokens] needs exactly one of requests and lengths")
    if not found.rows and not found.pages:
        raise DumpError(f"{path}: neither [rows] nor [pages]; nothing could be compared")
    return found


def _tuples(value: object) -> object:
    """Return TOML arrays as tuples, which is what strict models hold."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value
