"""Defaults of options from ``[tool.needlepoint]`` of a ``pyproject.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from pydantic.fields import FieldInfo

from needlepoint.verify.cli.options import VerifyOptions, is_place

_MAX_CONFIG_BYTES: Final = 4 << 20


@dataclass(frozen=True)
class Defaults:
    """Defaults of this folder by option, spelled as on the command line, and their file."""

    values: Mapping[str, object] = field(default_factory=dict)
    source: Path | None = None


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
    if not isinstance(table, dict):
        raise ValueError(f"{path}: [tool.needlepoint] is {table!r}; expected a table of options")
    known = VerifyOptions.options()
    for key in table:
        if key not in known:
            near = get_close_matches(key.lower().replace("_", "-"), known, n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"expected one of {_listed(known)}"
            raise ValueError(f"{path}: unknown key {key!r} in [tool.needlepoint]; {meant}")
    VerifyOptions.read(table, "table", lambda k, v: f"{path}: [tool.needlepoint] {k} = {v!r}")
    return Defaults({key: _placed(known[key], table[key], path) for key in table}, path)


def _placed(option: FieldInfo, value: object, file: Path) -> object:
    """Return a value of a table; what is a path there is relative to the file."""
    if is_place(option) and isinstance(value, str) and ("/" in value or value.startswith(".")):
        return str(file.parent / value)
    return tuple(value) if isinstance(value, list) else value


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
