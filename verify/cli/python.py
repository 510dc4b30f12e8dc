"""What ``import needlepoint`` runs: the commands as functions that return results."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from needlepoint.optimized.candidates.catalogue import create, require_candidate
from needlepoint.optimized.protocol.interface import (
    Candidate,
    CandidateInfo,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.cli.commands import run_diff, run_verify
from needlepoint.verify.cli.options import DiffOptions, Options, VerifyOptions
from needlepoint.verify.cli.outputs import Outputs
from needlepoint.verify.judge.results.gates import apply_gates
from needlepoint.verify.recording import results
from needlepoint.verify.report.summary import details, headline
from needlepoint.verify.schema import result as schema

Named = str | Candidate | Callable[[], Candidate]
"""A candidate, a class or function that makes one, or a name as ``--candidate`` takes it."""

_Read = TypeVar("_Read", bound=Options)
_TERMINAL = frozenset({"quiet", "debug"})
"""Options that say what a terminal shows: a function prints nothing."""
_SPELLINGS = {"gates": "gate", "save_failures": "save-failures"}
"""Options by their Python spelling where it is not that of the command line."""


class Result(schema.Result):
    """A result (``needlepoint.result/1``) that can also say itself in words."""

    def summary(self) -> str:
        """Return the verdict, the first divergence of each candidate, its token and its values.

        The first line is that of the command; it ends where ``verdict`` is ``match``.
        """
        return "\n".join([headline(self), *(f"  {line}" for line in details(self))])


def check(candidate: Named, /, *, profile: str | None = None, **options: Any) -> Result:  # noqa: ANN401
    """Judge one candidate against the reference; nothing is raised where it differs.

    Parameters
    ----------
    candidate
        A :class:`needlepoint.Candidate`, its class or another function without arguments that makes
        one, or a name such as ``emulated:fused-fp8`` or ``package.module:factory``.
    profile
        Judge by this profile in place of the one that the candidate declares.
    **options
        Options of ``needlepoint verify`` with its defaults: ``tokens=600``, ``layers=[0, 2]`` or
        ``"0,2-4"``, ``stages=["index.stored"]``, ``input="synthetic:gaussian"``,
        ``gates="recall.lost<=0"``, ``json="result.json"`` and so on. ``None`` leaves the default.

    Returns
    -------
    Result
        ``verdict`` is ``match``, ``differ`` or ``cannot-judge``; ``summary()`` says it in words.
        Per-row errors, float32 [rows] each, are written beside ``json``.

    Raises
    ------
    ValueError
        Where nothing can be judged: an unknown option or value, an input that cannot be read, a
        candidate that cannot be made, raises or breaks the protocol, a missing device. The message
        names the value, what was expected and what to do.

    Examples
    --------
    >>> import needlepoint
    >>> result = needlepoint.check("emulated:fused-fp8", tokens=600)
    >>> assert result.verdict == "match", result.summary()
    """
    return _judged(read_options(VerifyOptions, options), {_called(candidate): candidate}, profile)


def verify(candidates: Iterable[Named] | None = None, **options: Any) -> Result:  # noqa: ANN401
    """Run reference and candidates over an input and judge every stage of every layer.

    Parameters
    ----------
    candidates
        What to judge, each as in :func:`check`; by default the four that ``needlepoint verify``
        judges on the device.
    **options
        Options of ``needlepoint verify``, as in :func:`check`.

    Returns
    -------
    Result
        One entry of ``candidates`` for each, in order.

    Raises
    ------
    ValueError
        As :func:`check`, and where a candidate is given twice.

    Examples
    --------
    >>> import needlepoint
    >>> result = needlepoint.verify(["emulated:fused-fp8", MyKernel()], layers=0, tokens=600)
    >>> [candidate.verdict for candidate in result.candidates]
    ['match', 'match']
    """
    read = read_options(VerifyOptions, options)
    chosen = read.candidates() if candidates is None else tuple(candidates)
    named = {_called(candidate): candidate for candidate in chosen}
    if not named or len(named) < len(chosen):
        raise ValueError(
            f"candidates {', '.join(map(_called, chosen)) or '()'}: expected at least one, and "
            "every one once"
        )
    return _judged(read, named)


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str], **options: Any) -> Result:  # noqa: ANN401
    """Judge recording ``b`` against recording ``a``; either may be the dump of an engine.

    Parameters
    ----------
    a, b
        Folders, as ``needlepoint record --out`` or an engine's hooks wrote them.
    **options
        Options of ``needlepoint diff`` with its defaults: ``layers``, ``stages``, ``contract``,
        ``limits``, ``gates``, ``json`` and so on.

    Returns
    -------
    Result
        As :func:`check`; its one candidate is ``b``.

    Raises
    ------
    ValueError
        For an unknown option or value, a folder that is no recording, or two that do not belong
        together.

    Examples
    --------
    >>> import needlepoint
    >>> print(needlepoint.diff("before", "after", stages="index.stored").summary())
    """
    read = read_options(DiffOptions, {**options, "a": a, "b": b})
    outputs = Outputs.create(read)
    output = run_diff(read, NoProgress())
    return _saying(outputs.write(output.result, output.rows))


def load_result(path: str | os.PathLike[str]) -> Result:
    """Read a result that ``--json``, or ``json=`` of a function here, wrote.

    Parameters
    ----------
    path
        File of ``needlepoint.result/1``, of this version or an earlier one.

    Raises
    ------
    ValueError
        If the file cannot be read or is no such result; the message names the field.

    Examples
    --------
    >>> import needlepoint
    >>> needlepoint.load_result("result.json").verdict
    'match'
    """
    return _saying(results.load_result(Path(path)))


def read_options(model: type[_Read], options: Mapping[str, object]) -> _Read:
    """Return options of a command, given as Python objects; None stands for the default.

    Raises
    ------
    ValueError
        For an option that there is not, or a value that it does not take.
    """
    given = {_SPELLINGS.get(name, name): value for name, value in options.items()}
    known = [name for name in model.options() if name not in _TERMINAL | {"candidate"}]
    spelled = {shown: name for name, shown in _SPELLINGS.items()}
    for name in given:
        if name not in known:
            expected = ", ".join(spelled.get(name, name) for name in known)
            raise ValueError(f"needlepoint option {name!r}: expected one of {expected}")
    return model.read(
        {name: value for name, value in given.items() if value is not None},
        "python",
        lambda name, value: f"needlepoint option {spelled.get(name, name)}={value!r}",
    )


def make_candidate(candidate: object) -> Candidate:
    """Return a candidate of what :func:`check` takes.

    Raises
    ------
    ValueError
        If it is none and makes none.
    """
    if isinstance(candidate, str):
        return create(candidate)
    if inspect.isclass(candidate) or not hasattr(candidate, "run"):
        if not callable(candidate):
            raise ValueError(
                f"candidate {candidate!r}: expected a candidate, a class or function that makes "
                "one, or a name"
            )
        return require_candidate(f"candidate {candidate!r}: it made", candidate())
    return require_candidate("candidate: found", candidate)


def importable(candidate: object) -> str | None:
    """Return ``module:name`` of a class or function that a command line can import."""
    module, name = getattr(candidate, "__module__", None), getattr(candidate, "__qualname__", None)
    if not (inspect.isclass(candidate) or inspect.isfunction(candidate)):
        return None
    if module is None or name is None or "<" in name or module == "__main__":
        return None
    return f"{module}:{name}"


def _called(candidate: Named) -> str:
    """Return what a command line calls a candidate, or as near as can be."""
    if isinstance(candidate, str):
        return candidate
    info = getattr(candidate, "info", None)
    return importable(candidate) or str(getattr(info, "name", candidate))


def _judged(
    options: VerifyOptions, named: Mapping[str, Named], profile: str | None = None
) -> Result:
    if profile is not None and not isinstance(profile, str):
        raise ValueError(f"needlepoint option profile={profile!r}: expected a name")
    outputs = Outputs.create(options)
    made = {name: make_candidate(candidate) for name, candidate in named.items()}
    if profile is not None:
        made = {name: _Reprofiled(candidate, profile) for name, candidate in made.items()}
    output = run_verify(options, NoProgress(), made)
    # Under torchrun one rank writes for all; every rank has the result.
    rows, result = output.rows, output.result
    if not output.reports:
        return _saying(apply_gates(result, outputs.gates))
    return _saying(outputs.write(result, rows))


def _saying(result: schema.Result) -> Result:
    """Return a result with its summary; its parts are the same objects."""
    fields = schema.Result.model_fields
    return Result.model_validate({f.alias or n: getattr(result, n) for n, f in fields.items()})


@dataclass(frozen=True)
class _Reprofiled:
    """A candidate under another profile than the one that it declares."""

    candidate: Candidate
    profile: str

    @property
    def info(self) -> CandidateInfo:
        return replace(self.candidate.info, profile=self.profile)

    def stages(self, ratio: int) -> frozenset[StageKey]:
        return self.candidate.stages(ratio)

    def run(self, inputs: LayerInputs) -> Observed:
        return self.candidate.run(inputs)
