"""From the profile name that a candidate declares to the arithmetic it is judged by."""

from __future__ import annotations

from needlepoint.optimized.interface import CandidateInfo
from needlepoint.reference.profile import CONTRACTS, Arithmetic, needlepoint_profile

NEEDLEPOINT = "needlepoint"


def profile_of(info: CandidateInfo) -> Arithmetic:
    """Return the arithmetic of a candidate's profile.

    ``needlepoint`` is the specification in the candidate's key format. The name of a contract is a
    profile too: it says that the candidate means to compute exactly that.

    Raises
    ------
    ValueError
        For an unknown profile.
    """
    if info.profile == NEEDLEPOINT:
        return needlepoint_profile(info.format)
    if info.profile in CONTRACTS:
        return CONTRACTS[info.profile]
    known = ", ".join([NEEDLEPOINT, *CONTRACTS])
    raise ValueError(f"candidate {info.name}: profile {info.profile!r}, expected one of {known}")
