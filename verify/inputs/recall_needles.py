"""A needle: where an answer stands in a request, and which token asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from needlepoint.verify.recording.manifest import NeedleRecord

WINDOW: Final = 128
"""Tokens of the sliding window."""


@dataclass(frozen=True)
class Needle:
    """One needle of a request."""

    # Tokens of the answer, half open.
    start: int
    stop: int
    query: int  # Position of the token that asks.
    # Where it was wanted, 0 to 1, or the part of the query's position at which it starts.
    depth: float

    @property
    def windowed(self) -> bool:
        """Whether the whole needle lies in the query's sliding window."""
        return self.start > self.query - WINDOW


@dataclass(frozen=True)
class RequestNeedle:
    """A needle and its request."""

    request: int
    needle: Needle


def kept_needles(
    records: Sequence[NeedleRecord], lengths: Sequence[int]
) -> tuple[RequestNeedle, ...]:
    """Return the needles of a manifest whose query is among the tokens that are run.

    Parameters
    ----------
    records
        As checked by the manifest: inside their requests.
    lengths
        Tokens of each request that are run.
    """
    return tuple(
        RequestNeedle(r.request, Needle(r.start, r.stop, r.query, r.start / max(r.query, 1)))
        for r in records
        if r.request < len(lengths) and r.query < lengths[r.request]
    )


def needle_records(needles: Sequence[RequestNeedle]) -> tuple[NeedleRecord, ...] | None:
    """Return needles as a manifest holds them; None where there are none."""
    return (
        tuple(
            NeedleRecord(
                request=n.request, start=n.needle.start, stop=n.needle.stop, query=n.needle.query
            )
            for n in needles
        )
        or None
    )
