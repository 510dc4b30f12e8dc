"""Options of the commands: defaults from ``[tool.needlepoint]`` and the small option languages."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from needlepoint.optimized.interface import StageKey
from needlepoint.verify.result import Contract
from needlepoint.verify.stages import RATIOS, declared_stages, stage_order

DEFAULT_CANDIDATES = (
    "emulated:fused-bf16",
    "emulated:fused-fp8",
    "emulated:fused-fp4",
    "emulated:unfused-bf16",
)
DEVICES = ("cpu", "cuda")
CONTRACTS: tuple[Contract, ...] = get_args(Contract)
MAX_LAYER = 9999
REPEAT_GATE = "repeat.changed<=0"
"""What ``--repeat`` sets: no stage may change from run to run."""

_MAX_CONFIG_BYTES = 4 << 20
_PATHS = (
    *("input", "model", "checkpoint", "scenario"),
    *("json", "junitxml", "html", "markdown", "limits", "shrink", "save_failures"),
)
_LAYERS = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")


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
    save_failures: str | None = None
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

    Values are what the command line would hold: numbers are text.
    """

    values: dict[str, object]
    source: Path | None


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
    return Defaults(values={}, source=None)


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
        return Defaults(values={}, source=None)
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
    key = ".".join(str(part) for part in first["loc"]) or "[tool.needlepoint]"
    if first["type"] == "extra_forbidden":
        known = sorted(field.alias or name for name, field in Table.model_fields.items())
        return f"{path}: unknown key {key!r} in [tool.needlepoint]; expected one of {known}"
    return f"{path}: [tool.needlepoint] {key} = {first['input']!r}: {first['msg']}"


def parse_contract(text: str) -> Contract:
    """Return the contract of this name.

    Raises
    ------
    ValueError
        Where there is none.
    """
    for contract in CONTRACTS:
        if text == contract:
            return contract
    raise ValueError(f"--contract {text!r}: expected one of {', '.join(CONTRACTS)}")


def on_device(names: Sequence[str], device: str) -> tuple[str, ...]:
    """Return default candidates on a device: the ``cuda:`` ones have the names of the emulated.

    Raises
    ------
    ValueError
        For a device that is neither ``cpu`` nor ``cuda``.
    """
    check_device(device)
    prefix = "emulated:" if device == "cpu" else "cuda:"
    return tuple(name.replace("emulated:", prefix) for name in names)


def check_device(text: str) -> None:
    """Refuse what is no device.

    Raises
    ------
    ValueError
        For anything but ``cpu`` and ``cuda``.
    """
    if text not in DEVICES:
        raise ValueError(f"--device {text!r}: expected {' or '.join(DEVICES)}")


def parse_number(option: str, text: str, least: int) -> int:
    """Return a whole number of at least ``least``.

    Raises
    ------
    ValueError
        Where the text is not such a number; ``option`` is named.
    """
    if re.fullmatch(r"[0-9]{1,18}", text) is None or int(text) < least:
        raise ValueError(f"{option} {text!r}: expected a whole number of at least {least}")
    return int(text)


def parse_layers(text: str | None) -> tuple[int, ...] | None:
    """Return the layers of ``2,4-8`` in ascending order, or None (all layers) for None.

    Raises
    ------
    ValueError
        Where the text has another form, or a range runs backwards.
    """
    if text is None:
        return None
    compact = text.replace(" ", "")
    if _LAYERS.fullmatch(compact) is None:
        raise ValueError(
            f"--layers {text!r}: expected numbers up to {MAX_LAYER} and ranges, for example 2,4-8"
        )
    layers: set[int] = set()
    for part in compact.split(","):
        first, _, last = part.partition("-")
        start, stop = int(first), int(last or first)
        if stop < start:
            raise ValueError(f"--layers {text!r}: {part} runs backwards; write {last}-{first}")
        layers.update(range(start, stop + 1))
    return tuple(sorted(layers))


def parse_stages(text: str | None) -> frozenset[StageKey] | None:
    """Return the stages of ``pooled,index.stored``, or None (every declared stage) for None.

    A bare stage name stands for the stage on every path that has it.

    Raises
    ------
    ValueError
        Where a name is not a stage.
    """
    if text is None:
        return None
    known = sorted({key for ratio in RATIOS for key in declared_stages(ratio)}, key=stage_order)
    chosen: set[StageKey] = set()
    for name in (part.strip() for part in text.split(",")):
        found = {key for key in known if name in (key[1], ".".join(key))}
        if not found:
            raise ValueError(
                f"--stages {text!r}: {name!r} is not a stage; expected names such as stored or "
                f"index.stored from {', '.join('.'.join(key) for key in known)}"
            )
        chosen |= found
    return frozenset(chosen)


def parse_candidates(names: Sequence[str], device: str = "cpu") -> tuple[str, ...]:
    """Return the candidates to judge; where none is named, the four built-in ones of the device.

    Raises
    ------
    ValueError
        Where a name is empty or comes twice, or for an unknown device.
    """
    chosen = tuple(names) or on_device(DEFAULT_CANDIDATES, device)
    for name in chosen:
        if not name.strip():
            raise ValueError("--candidate '': expected a name such as emulated:fused-fp8")
        if chosen.count(name) > 1:
            raise ValueError(f"--candidate {name}: given twice; name every candidate once")
    return chosen


def parse_recorded(
    names: Sequence[str], *, contract_asked: bool, device: str = "cpu"
) -> str | None:
    """Return the candidate to record, None for the reference.

    Parameters
    ----------
    names
        What ``--candidate`` was given.
    contract_asked
        Whether a contract was named on the command line.
    device
        What ``--device`` says; the reference runs on the CPU.

    Raises
    ------
    ValueError
        For more than one candidate, a candidate with a contract (its arithmetic is its own), or
        another device without a candidate.
    """
    if not names and device != "cpu":
        raise ValueError(
            f"--device {device} without --candidate: the reference runs on the CPU; name a "
            "candidate such as cuda:fused-bf16"
        )
    if not names:
        return None
    if len(names) > 1:
        raise ValueError(
            f"--candidate {', '.join(names)}: a recording holds one candidate; record each to a "
            "folder of its own"
        )
    if contract_asked:
        raise ValueError(
            f"--contract with --candidate {names[0]}: a contract is the arithmetic of the "
            "reference; leave one of the two away"
        )
    return parse_candidates(names)[0]
