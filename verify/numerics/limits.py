"""The one table of limits: how far a stage may go, in which unit, and why.

Every compared stage is judged in units of its own a-priori radius or bound, so the limit is 1
everywhere and says the same thing everywhere: no admissible fp32 evaluation of the profile leaves
it. A limits file loosens or tightens the table without touching the analysis behind it.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from needlepoint.optimized.protocol.stages import REGISTRY, STAGES

_MAX_BYTES = 64 * 1024

RELATIVE_FLOOR = 2.0**-126
"""Norm below which relative row errors are taken against the floor (smallest normal fp32)."""


@dataclass(frozen=True)
class Limit:
    """Limit of one stage."""

    value: float  # Largest row error that passes, in ``unit``.
    unit: str  # What the row error is measured in.
    derivation: str  # Where the unit comes from, one sentence.
    # Norm that replaces a smaller reference norm in the relative row error.
    floor: float = RELATIVE_FLOOR

    def passes(self, ratio: float) -> bool:
        """Return whether a row error is within the limit; NaN never is."""
        return ratio <= self.value


_TABLE: Mapping[str, Limit] = {
    stage.name: Limit(1.0, stage.limit_unit, stage.derivation) for stage in REGISTRY
}


@dataclass(frozen=True)
class Limits(Mapping[str, Limit]):
    """Limits by stage name."""

    entries: Mapping[str, Limit]

    def __getitem__(self, stage: str) -> Limit:
        return self.entries[stage]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @classmethod
    def default(cls) -> Limits:
        """Return the table as shipped."""
        return cls(MappingProxyType(_TABLE))

    @classmethod
    def load(cls, path: Path | None) -> Limits:
        """Return the table with the changes of a TOML file; as shipped without one.

        ``scale = X`` multiplies every stage; ``[stage]`` with ``value = Y`` sets one stage, which
        ``scale`` then leaves alone.

        Parameters
        ----------
        path
            TOML file of at most 64 KiB.

        Raises
        ------
        ValueError
            If the file cannot be read or parsed, for an unknown stage or key, and for a value that
            is not a positive finite number; the message names the file and the entry.
        """
        return cls.default() if path is None else cls(MappingProxyType(_apply(_read(path), path)))


def _apply(data: Mapping[str, object], path: Path) -> dict[str, Limit]:
    unknown = sorted(set(data) - {"scale", *STAGES})
    if unknown:
        raise ValueError(
            f"{path}: unknown entry {unknown[0]!r}, expected 'scale' or a stage of "
            f"{', '.join(STAGES)}"
        )
    scale = _positive(data.get("scale", 1.0), path, "scale")
    entries = {}
    for stage in STAGES:
        limit = _TABLE[stage]
        if stage not in data:
            entries[stage] = replace(limit, value=limit.value * scale)
            continue
        section = data[stage]
        if not isinstance(section, dict) or set(section) != {"value"}:
            raise ValueError(
                f"{path}: entry [{stage}] holds {section!r}, expected exactly one key: value = Y"
            )
        entries[stage] = replace(limit, value=_positive(section["value"], path, f"{stage}.value"))
    return entries


def _positive(value: object, path: Path, name: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        # Comparing before converting keeps an integer of a thousand digits from overflowing.
        if 0 < value <= sys.float_info.max:
            return float(value)
    raise ValueError(f"{path}: {name} = {value!r}, expected a positive finite number")


def _read(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        if len(raw) > _MAX_BYTES:
            raise ValueError(f"{path}: more than {_MAX_BYTES} bytes, expected a short limits file")
        return tomllib.loads(raw.decode("utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot read the limits file ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid TOML ({error})") from error
