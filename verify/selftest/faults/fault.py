"""The faults and controls of the self-test: what each plants, where, and which gate is to fire.

A fault is planted on a sound run (``ground.py``). It must change what the candidate
returned, must be caught by the gates it names, and must leave the gates alone that it clears. A
control changes what a sound kernel may change and must set off none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from needlepoint.optimized.protocol.interface import Observed
from needlepoint.verify.selftest.faults.ground import Ground

Plant = Callable[[Ground], Observed]

OWN = "own"
"""Kind of input of most cases: the self-test's own, or the user's recording."""


@dataclass(frozen=True)
class Setting:
    """What a case runs on."""

    key_format: str = "fp8"  # ``"bf16"``, ``"fp8"`` or ``"fp4"``.
    ratio: int = 4  # Compression ratio of the layer.
    kind: str = OWN  # ``own`` or a synthetic kind.


OWN_FP8 = Setting()


@dataclass(frozen=True)
class Case:
    """One fault or control."""

    id: str  # Name that stays the same.
    letter: str  # Class of the fault log, ``A`` to ``Q``.
    text: str  # What is planted, one sentence.
    plant: Plant  # From a sound run to what the faulty candidate returns.
    gates: tuple[str, ...] = ()  # Gates that must fire; none for a control.
    log: tuple[str, ...] = ()  # Rows of docs/fault_log.md whose mechanism this is.
    clear: tuple[str, ...] = ()  # Gates that must not fire, by name or by the part before the dot.
    setting: Setting = OWN_FP8  # What it runs on.
    needs: int = 16  # Entries of the longest request from which the fault can show.
    requests: int = 1  # Requests with an entry that the fault needs.
    # What a second run returns, for faults that show between runs; None for ``plant``.
    again: Plant | None = None
    declares: tuple[str, ...] = ()  # Stages that the candidate declares; none for all.

    @property
    def control(self) -> bool:
        """Whether this is a control: nothing may fire."""
        return not self.gates


def fault(
    id: str,
    letter: str,
    text: str,
    plant: Plant,
    gates: str,
    *,
    log: str = "",
    clear: str = "",
    on: Setting = OWN_FP8,
    needs: int = 16,
    requests: int = 1,
) -> Case:
    """Return a fault; gates, log and clear are words, the rest as in :class:`Case`."""
    fire, rows, stay = (tuple(words.split()) for words in (gates, log, clear))
    return Case(id, letter, text, plant, fire, rows, stay, on, needs, requests)


def control(
    id: str, letter: str, text: str, plant: Plant, *, log: str = "", on: Setting = OWN_FP8
) -> Case:
    """Return a control."""
    return Case(id, letter, text, plant, log=tuple(log.split()), setting=on, needs=1)


def rerun(case: Case, again: Plant) -> Case:
    """Return a fault of which a second run returns something else."""
    return replace(case, again=again)
