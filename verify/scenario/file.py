"""Scenarios as TOML files: read, checked and written; what is written reads back equal."""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Final

from needlepoint.verify.scenario.events import KINDS, Event, Request, Scenario, kind_of

SCHEMA: Final = "needlepoint.scenario/1"
MAX_BYTES: Final = 1 << 20
MAX_EVENTS: Final = 10_000

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")
_LINE = re.compile(r"[^\x00-\x1f\x7f\"\\]{1,200}")
_TOP = tuple(f.name for f in fields(Scenario) if f.name not in ("requests", "events"))


def load_scenario(path: Path) -> Scenario:
    """Read a scenario.

    Raises
    ------
    ValueError
        If the file cannot be read, is too large, is not TOML or has a field of another name or
        type than the schema; the message names the file and the place. Whether the events are
        possible is for :func:`needlepoint.verify.scenario.rules.check`.
    """
    try:
        if path.exists() and not path.is_file():  # a device or a pipe has no end
            raise ValueError(f"scenario {path}: is no file; expected a scenario in TOML")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"scenario {path}: {size} bytes, expected at most {MAX_BYTES}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"scenario {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"scenario {path}: is not UTF-8; expected TOML") from error
    try:
        return parse_scenario(text)
    except ValueError as error:
        raise ValueError(f"scenario {path}: {error}") from error


def parse_scenario(text: str) -> Scenario:
    """Read a scenario from text.

    Raises
    ------
    ValueError
        As :func:`load_scenario`, without a file to name.
    """
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"not valid TOML ({error})") from error
    schema = document.pop("schema", None)
    if schema != SCHEMA:
        raise ValueError(f"schema {schema!r}, expected {SCHEMA!r}")
    requests = _tables(document, "request")
    events = _tables(document, "event")
    given = _known("the scenario", document, _TOP)
    values: dict[str, object] = {}
    for field in fields(Scenario):
        if field.name in given:
            kind = str if field.name in ("name", "state") else int
            values[field.name] = _typed(field.name, given[field.name], kind)
    if "name" not in values:
        raise ValueError("name is missing")
    name = str(values["name"])
    if not (_LINE.fullmatch(name) and name.isprintable()):
        raise ValueError(f"name {name!r}: expected one printable line without quotes")
    return Scenario(
        requests=tuple(_request(i, table) for i, table in enumerate(requests)),
        events=tuple(_event(i, table) for i, table in enumerate(events)),
        **values,  # type: ignore[arg-type]
    )


def dump_scenario(scenario: Scenario) -> str:
    """Return a scenario as TOML; fields at their defaults are left out."""
    lines = [f'schema = "{SCHEMA}"']
    for field in fields(Scenario):
        value = getattr(scenario, field.name)
        if field.name in _TOP and (field.default is MISSING or value != field.default):
            lines.append(f"{field.name} = {_text(value)}")
    for request in scenario.requests:
        lines += ["", "[[request]]", f"name = {_text(request.name)}", f"text = {request.text}"]
    for event in scenario.events:
        lines += ["", "[[event]]", f'kind = "{kind_of(event)}"']
        lines += [f"{f.name} = {_text(getattr(event, f.name))}" for f in fields(event)]
    return "\n".join(lines) + "\n"


def scenario_digest(scenario: Scenario) -> str:
    """Return the SHA-256 of what a scenario does, its name left out."""
    unnamed = {f.name: getattr(scenario, f.name) for f in fields(Scenario)} | {"name": "-"}
    return hashlib.sha256(dump_scenario(Scenario(**unnamed)).encode()).hexdigest()


def _tables(document: dict[str, object], key: str) -> list[dict[str, object]]:
    found = document.pop(key, [])
    if not isinstance(found, list) or not all(isinstance(table, dict) for table in found):
        raise ValueError(f"{key}: expected tables [[{key}]]")
    if not found or len(found) > MAX_EVENTS:
        raise ValueError(f"{len(found)} tables [[{key}]], expected 1 to {MAX_EVENTS}")
    return found


def _request(index: int, table: dict[str, object]) -> Request:
    where = f"request {index}"
    given = _known(where, table, ("name", "text"))
    name, text = (given.get(key) for key in ("name", "text"))
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{where}: name {name!r}, expected letters, digits, '_', '.' or '-'")
    return Request(name, _typed(f"{where}: text", text, int))  # type: ignore[arg-type]


def _event(index: int, table: dict[str, object]) -> Event:
    where = f"event {index}"
    kind = table.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"{where}: kind {kind!r}, expected one of {', '.join(KINDS)}")
    event = KINDS[kind]
    names = tuple(f.name for f in fields(event))
    given = _known(f"{where} ({kind})", table, names)
    values: dict[str, object] = {}
    for name in names:
        if name not in given:
            raise ValueError(f"{where} ({kind}): {name} is missing")
        values[name] = _typed(f"{where} ({kind}): {name}", given[name], _TYPES[name])
    return event(**values)


_TYPES: Final[dict[str, type | tuple[type]]] = {
    "requests": (str,),
    "tokens": (int,),
    "keep": (int,),
    "request": str,
    "source": str,
    "side": str,
    "layout": str,
    "prefix": int,
    "pool": int,
    "rows": int,
    "ranks": int,
}
"""Type of every field of an event; a list of one type where it is in parentheses."""


def _typed(where: str, value: object, kind: type | tuple[type]) -> object:
    item = kind[0] if isinstance(kind, tuple) else kind
    values = value if isinstance(kind, tuple) else [value]
    if not isinstance(values, list) or not all(type(v) is item for v in values):
        wanted = {str: "text", int: "a whole number"}[item]
        if isinstance(kind, tuple):
            wanted = f"a list of {'texts' if item is str else 'whole numbers'}"
        raise ValueError(f"{where} is {value!r}, expected {wanted}")
    return tuple(values) if isinstance(kind, tuple) else value


def _known(where: str, table: dict[str, object], names: tuple[str, ...]) -> dict[str, object]:
    unknown = sorted(set(table) - set(names))
    if unknown:
        raise ValueError(f"{where}: unknown field {unknown[0]!r}, expected {', '.join(names)}")
    return table


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)
