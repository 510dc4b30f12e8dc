"""Defaults of options from ``[tool.needlepoint]`` of a ``pyproject.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from needlepoint.verify.schema.result import Contract

_MAX_CONFIG_BYTES: Final = 4 << 20
_PATHS: Final = (
    *("input", "model", "checkpoint", "scenario"),
    *("json", "junitxml", "html", "markdown", "limits", "shrink", "save-failures"),
)


class Table(BaseModel):
    """``[tool.needlepoint]``: one key per option of ``needlepoint verify``, same spelling."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    input: str | None = None
    model: str | None = None
    checkpoint: str | None = None
    contract: Contract | None = None
    candidate: list[str] | None = None
    layers: str | None = None
    tokens: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=0)
    device: Literal["cpu", "cuda"] | None = None
    stages: str | None = None
    scenario: str | None = None
    seconds: int | None = Field(default=None, ge=1)
    repeat: int | None = Field(default=None, ge=1)
    swap: bool | None = None
    shrink: str | None = None
    save_failures: str | None = Field(default=None, alias="save-failures")
    limits: str | None = None
    gate: list[str] | None = None
    json_: str | None = Field(default=None, alias="json")
    junitxml: str | None = None
    html: str | None = None
    markdown: str | None = None
    force: bool | None = None
    quiet: bool | None = None
    debug: bool | None = None


@dataclass(frozen=True)
class Defaults:
    """Defaults of this folder by option, and the file they come from.

    Options are spelled as on the command line, and values are what it would hold: numbers are
    text.
    """

    values: Mapping[str, object] = field(default_factory=dict)
    source: Path | None = None

    @property
    def parameters(self) -> dict[str, object]:
        """Values by parameter of a command function."""
        return {name.replace("-", "_"): value for name, value in self.values.items()}


def load_defaults(folder: Path) -> Defaults:
    """Read ``[tool.needlepoint]`` of the nearest ``pyproject.toml`` at or above ``folder``.

    File options that contain a ``/`` or start with a dot are relative to that file.

    Raises
    ------
    ValueError
        Where the file is not TOML, or holds a key or value that is not an option; the message
        names the file and the key.
    """
    for place in (folder, *folder.parents):
        path = place / "pyproject.toml"
        if path.is_file():
            return _read(path)
    return Defaults()


def _read(path: Path) -> Defaults:
    """Read one ``pyproject.toml``."""
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"{path}: larger than {_MAX_CONFIG_BYTES} bytes; is this a TOML file?")
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: is not valid TOML ({error}); correct the file") from error
    tools = document.get("tool", {})
    table = tools.get("needlepoint") if isinstance(tools, dict) else None
    if table is None:
        return Defaults()
    try:
        values = Table.model_validate(table).model_dump(by_alias=True, exclude_none=True)
    except ValidationError as error:
        raise ValueError(_explain(path, error)) from error
    for name in ("tokens", "seed", "seconds", "repeat"):
        if name in values:
            values[name] = str(values[name])
    for name in _PATHS:
        value = values.get(name)
        if value is not None and ("/" in value or value.startswith(".")):
            values[name] = str(path.parent / value)
    return Defaults(values=values, source=path)


def _explain(path: Path, error: ValidationError) -> str:
    """Return one message for the first fault of the table."""
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = sorted(field.alias or name for name, field in Table.model_fields.items())
        near = get_close_matches(key.lower().replace("_", "-"), known, n=1)
        meant = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
        return f"{path}: unknown key {key!r} in [tool.needlepoint]; {meant}"
    if not key:
        return f"{path}: [tool.needlepoint] is {first['input']!r}; expected a table of options"
    return f"{path}: [tool.needlepoint] {key} = {first['input']!r}: {first['msg']}"
