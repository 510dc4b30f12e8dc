"""From the profile name that a candidate declares to the arithmetic it is judged by."""

from __future__ import annotations

from dataclasses import replace

from needlepoint.optimized.protocol.interface import CandidateInfo
from needlepoint.reference.profile import (
    CONTRACTS,
    Accumulator,
    Arithmetic,
    needlepoint_profile,
)
from needlepoint.reference.profile_engines import ENGINES, TOKEN_ENGINES, engine_profile

NEEDLEPOINT = "needlepoint"


def profile_of(info: CandidateInfo) -> Arithmetic:
    """Return the arithmetic of a candidate's profile.

    ``needlepoint`` is the specification in the candidate's key format, its scores summed in what
    the candidate names. The name of a contract is a profile too, for a candidate that computes
    exactly that. The name of an engine is the arithmetic of that engine for keys of the candidate's
    format.

    Raises
    ------
    ValueError
        For an unknown profile or accumulator, or a key format that the engine does not store.
    """
    if info.profile == NEEDLEPOINT:
        units = {unit.value: unit for unit in Accumulator}
        if info.accumulator not in units:
            raise ValueError(
                f"candidate {info.name}: accumulator {info.accumulator!r}, expected one of "
                f"{', '.join(units)}"
            )
        return replace(needlepoint_profile(info.format), accumulator=units[info.accumulator])
    if info.profile in CONTRACTS:
        return CONTRACTS[info.profile]
    engines = ENGINES | TOKEN_ENGINES
    if info.profile in engines:
        try:
            return engine_profile(info.profile, info.format)
        except ValueError as error:
            raise ValueError(f"candidate {info.name}: {error}") from error
    known = ", ".join([NEEDLEPOINT, *CONTRACTS, *engines])
    raise ValueError(f"candidate {info.name}: profile {info.profile!r}, expected one of {known}")
