"""The small languages of options: what a text on the command line stands for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import get_args

from needlepoint.optimized.protocol.stages import StageKey
from needlepoint.verify.base.stages import RATIOS, declared_stages, stage_order
from needlepoint.verify.schema.result import Contract

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

_LAYERS = re.compile(r"[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")


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
    """Return the layers of ``2,4-8`` in ascending order, or None for None.

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
