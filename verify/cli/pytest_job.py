"""What a judged test asks for: options of its marker and its call, checked before anything runs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from needlepoint.optimized.protocol.interface import Candidate
from needlepoint.reference.profile import CONTRACTS
from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.cli.options import parse_contract, parse_layers, parse_stages
from needlepoint.verify.inputs.load import load_inputs
from needlepoint.verify.judge.results.gates import apply_gates, parse_gate
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.run.pipeline import verify
from needlepoint.verify.schema.result import Result

_SEVERAL: Final = {"layers": int, "stages": str, "gates": str}
"""Options that may be one or several, and of what."""
_EXPECTED: Final = {
    "input": "a name or a path",
    "model": "a name or a path",
    "layers": "a number, numbers, or text such as '2,4-8'",
    "tokens": "a whole number",
    "seed": "a whole number",
    "stages": "a name such as 'index.stored', or names",
    "contract": "a name",
    "profile": "a name",
    "gates": "a gate such as 'recall.lost<=0', or gates",
    "limits": "a path",
}


@dataclass(frozen=True)
class Wishes:
    """What the command line of pytest says; it goes before what a test says.

    Attributes
    ----------
    profile, contract
        In place of the test's own.
    gates
        Besides the test's own.
    device
        ``auto``, ``cpu`` or ``cuda``.
    worker
        Number of this xdist worker, which chooses the card.
    """

    profile: str | None
    contract: str | None
    gates: tuple[str, ...]
    device: str
    worker: int


@dataclass(frozen=True)
class Job:
    """One judgement: options of ``needlepoint verify`` as a test spells them."""

    input: str = "mini"
    model: str | None = None
    layers: str | None = None
    tokens: int | None = None
    seed: int | None = None
    stages: str | None = None
    contract: str = "bf16"
    profile: str | None = None
    gates: tuple[str, ...] = ()
    limits: str | None = None


def make_job(options: Mapping[str, object], wishes: Wishes) -> Job:
    """Return the job of a test's options, with what the command line says.

    Raises
    ------
    ValueError
        For an option that there is not, or a value of the wrong type.
    """
    known = [field.name for field in fields(Job)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ValueError(f"needlepoint option {unknown[0]!r}: expected one of {', '.join(known)}")
    given: dict[str, Any] = {
        name: _checked(name, value) for name, value in options.items() if value is not None
    }
    given |= {name: ",".join(given[name]) for name in ("layers", "stages") if name in given}
    given["gates"] = (*given.get("gates", ()), *wishes.gates)
    if wishes.profile is not None:
        given["profile"] = wishes.profile
    if wishes.contract is not None:
        given["contract"] = wishes.contract
    return Job(**given)


def _checked(name: str, value: object) -> object:
    """Return an option as a job holds it; those that may be several as a tuple of texts."""
    if name in _SEVERAL:
        several = isinstance(value, Sequence | set | frozenset) and not isinstance(value, str)
        items = tuple(value) if several else (value,)  # type: ignore[arg-type]
        # The text of one may hold several: '2,4-8'.
        if isinstance(value, str) or all(_is(item, _SEVERAL[name]) for item in items):
            return tuple(map(str, items))
    elif name in ("tokens", "seed"):
        if _is(value, int):
            return value
    elif name in ("input", "model", "limits"):
        if isinstance(value, str | os.PathLike):
            return os.fspath(value)
    elif isinstance(value, str):
        return value
    raise ValueError(f"needlepoint option {name}={value!r}: expected {_EXPECTED[name]}")


def _is(value: object, kind: type) -> bool:
    """Return whether a value is of a type; True and False are no numbers."""
    return isinstance(value, kind) and not isinstance(value, bool)


def run_job(job: Job, candidate: Candidate) -> Result:
    """Judge one candidate.

    Raises
    ------
    ValueError
        If the input, a limit, a gate or the candidate cannot be used.
    """
    gates = tuple(parse_gate(text) for text in job.gates)
    output = verify(
        load_inputs(
            job.input,
            model=job.model,
            layers=parse_layers(job.layers),
            tokens=job.tokens,
            seed=job.seed,
        ),
        [candidate],
        contract=CONTRACTS[parse_contract(job.contract)],
        limits=Limits.default() if job.limits is None else Limits.load(Path(job.limits)),
        stages=parse_stages(job.stages),
        progress=NoProgress(),
    )
    return apply_gates(output.result, gates)
