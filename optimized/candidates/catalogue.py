"""Candidates by name: the table of our own, entry points, and ``package.module:factory``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points

from needlepoint.optimized.candidates.emulated import EmulatedCandidate, Order
from needlepoint.optimized.candidates.heads import ParallelHeads
from needlepoint.optimized.cuda.candidates import CudaCandidate, Launches
from needlepoint.optimized.engines.transformers import TransformersCandidate
from needlepoint.optimized.protocol.interface import Candidate

ENTRY_POINT_GROUP = "needlepoint.candidates"

Factory = Callable[[], Candidate]

FACTORIES: dict[str, Factory] = {
    "emulated:fused-bf16": partial(EmulatedCandidate, "bf16", Order.FUSED),
    "emulated:fused-fp8": partial(EmulatedCandidate, "fp8", Order.FUSED),
    "emulated:fused-fp4": partial(EmulatedCandidate, "fp4", Order.FUSED),
    "emulated:unfused-bf16": partial(EmulatedCandidate, "bf16", Order.UNFUSED),
    "cuda:fused-bf16": partial(CudaCandidate, "bf16", Launches.ONE),
    "cuda:fused-fp8": partial(CudaCandidate, "fp8", Launches.ONE),
    "cuda:fused-fp4": partial(CudaCandidate, "fp4", Launches.ONE),
    "cuda:unfused-bf16": partial(CudaCandidate, "bf16", Launches.SEPARATE),
    "transformers": TransformersCandidate,
    "heads:fused-bf16": partial(ParallelHeads, "bf16"),
    "heads:fused-fp8": partial(ParallelHeads, "fp8"),
    "heads:fused-fp4": partial(ParallelHeads, "fp4"),
}
"""Our own candidates. A factory raises ValueError if this machine cannot run its candidate."""


def names() -> tuple[str, ...]:
    """Return every candidate name that :func:`create` knows without a module path."""
    return (*FACTORIES, *sorted(set(_installed()) - set(FACTORIES)))


def create(name: str) -> Candidate:
    """Return the candidate of a name.

    Parameters
    ----------
    name
        A name from :func:`names`, or ``package.module:factory`` for any importable module whose
        ``factory()`` returns a :class:`~needlepoint.optimized.protocol.interface.Candidate`.

    Raises
    ------
    ValueError
        If there is no such candidate (the message lists those that exist), or if its module or
        factory fails.
    """
    if name in FACTORIES:
        return FACTORIES[name]()
    installed = _installed()
    if name in installed:
        point = installed[name]
        return _call(name, point.module, point.attr)
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(_unknown(name))
    return _call(name, module, attribute)


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _unknown(name: str) -> str:
    return (
        f"candidate {name!r}: expected one of {', '.join(names())}, or package.module:factory of "
        "an importable module"
    )


def _call(name: str, module: str, attribute: str) -> Candidate:
    try:
        found: object = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ValueError(f"{_unknown(name)} ({error})") from error
    if not callable(found):
        raise ValueError(f"candidate {name!r}: {found!r} is not callable; expected a factory")
    try:
        candidate = found()
    except (ValueError, KeyboardInterrupt):
        raise
    except BaseException as error:  # an exit in foreign code must not end the run as a success
        raise ValueError(
            f"candidate {name!r}: the factory failed: {type(error).__name__}: {error}"
        ) from error
    return require_candidate(f"candidate {name!r}: the factory returned", candidate)


def require_candidate(told: str, made: object) -> Candidate:
    """Return what is said to be a candidate, if it has the parts of one.

    Parameters
    ----------
    told
        Where it comes from; the error begins with it.
    made
        The candidate.

    Raises
    ------
    ValueError
        If a part is missing.
    """
    lacking = [part for part in ("info", "stages", "run") if not hasattr(made, part)]
    if lacking:
        raise ValueError(
            f"{told} {type(made).__name__}, which lacks {', '.join(lacking)}; expected a Candidate"
        )
    return made  # type: ignore[return-value]
