"""What the pytest plugin's ``needlepoint_judge`` does: judge a candidate inside a test."""

from __future__ import annotations

import inspect
import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from needlepoint.optimized.candidates.catalogue import create, require_candidate
from needlepoint.optimized.cuda.runtime import NoDevice, require_cuda
from needlepoint.optimized.protocol.interface import (
    Candidate,
    CandidateInfo,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.verify.cli.pytest_job import Job, Wishes, make_job, run_job
from needlepoint.verify.cli.pytest_plugin import NO_DEVICE, VERDICT
from needlepoint.verify.report.summary import details, headline
from needlepoint.verify.schema.result import MATCH, Result

Named = str | Candidate | Callable[[], Candidate]
"""A candidate, something that makes one, or the name of one."""


class Judge:
    """Judges candidates for one test; what the fixture ``needlepoint_judge`` is."""

    def __init__(
        self,
        nodeid: str,
        here: str,
        marked: Mapping[str, Any],
        wishes: Wishes,
        keep: Callable[[str, str], None],
    ) -> None:
        self._nodeid = nodeid
        self._here = here  # the same as seen from the folder pytest was started in
        self._marked = marked
        self._wishes = wishes
        self._keep = keep

    def __call__(self, candidate: Named, **options: Any) -> Result:  # noqa: ANN401
        """Judge a candidate; return the result of a match and fail the test otherwise.

        Parameters
        ----------
        candidate
            A candidate, its class or another factory without arguments, or a name as for
            ``needlepoint verify --candidate``.
        **options
            ``input``, ``model``, ``layers``, ``tokens``, ``seed``, ``stages``, ``contract``,
            ``profile``, ``gates`` and ``limits``, each over the marker's.
        """
        found = self._judged(candidate, options)
        # Raised here, after the handler: pytest would print the error that it handled as well.
        if isinstance(found, NoDevice):
            self._without_device(str(found))
        if isinstance(found, ValueError):
            pytest.fail(f"cannot judge: {found}\n{self._again()}", pytrace=False)
        job, result = found
        told = {"verdict": result.verdict, "headline": headline(result)}
        self._keep(VERDICT, json.dumps(told))
        line = {"test": self._nodeid, "result": result.model_dump(by_alias=True, mode="json")}
        self._keep("result", json.dumps(line))
        if result.verdict != MATCH:
            pytest.fail(self._message(result, candidate, job), pytrace=False)
        return result

    def _judged(
        self, candidate: Named, options: Mapping[str, Any]
    ) -> tuple[Job, Result] | ValueError:
        """Return what was judged and found, or what stood in the way."""
        try:
            job = make_job({**self._marked, **options}, self._wishes)
            return job, run_job(job, self._make(candidate, job))
        except ValueError as error:
            return error

    def _make(self, candidate: Named, job: Job) -> Candidate:
        """Return the candidate on the card of this worker, under the profile of the job."""
        if self._wishes.device != "cpu" and torch.cuda.device_count() > 1:
            torch.cuda.set_device(self._wishes.worker % torch.cuda.device_count())
        made = _made(candidate)
        if made.info.device == "cuda":
            if self._wishes.device == "cpu":
                raise NoDevice("--needlepoint-device cpu: tests that need a card are skipped")
            if not torch.cuda.is_available():
                require_cuda()
        return made if job.profile is None else _Reprofiled(made, job.profile)

    def _without_device(self, reason: str) -> NoReturn:
        if self._wishes.device == "cuda":
            pytest.fail(f"--needlepoint-device cuda: {reason}", pytrace=False)
        self._keep(NO_DEVICE, reason)
        pytest.skip(reason)

    def _message(self, result: Result, candidate: Named, job: Job) -> str:
        """Return verdict, stage and token, values, what it ran over, and how to see it again."""
        given = result.input
        lines = [headline(result), *(f"  {line}" for line in details(result))]
        lines.append(
            f"  input {given.name}, {given.tokens} tokens in {given.requests} requests, seed "
            f"{given.seed}; contract {result.contract}"
        )
        replay = replay_command(candidate, job, _first_layer(result))
        if replay is not None:
            lines.append(f"  replay: {replay}")
        return "\n".join([*lines, self._again()])

    def _again(self) -> str:
        return f"  run again: pytest {shlex.quote(self._here)}"


def _made(candidate: object) -> Candidate:
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


def replay_command(candidate: Named, job: Job, layer: int | None) -> str | None:
    """Return the command line that judges the same; None where no command line can.

    Parameters
    ----------
    candidate
        What the test judged: a name, or a class or function of a module.
    job
        What it was judged over.
    layer
        The layer that differs first: errors do not pass between layers, so it is enough.
    """
    name = candidate if isinstance(candidate, str) else _importable(candidate)
    if name is None or job.profile is not None:
        return None
    words = ["needlepoint", "verify", "--candidate", name, "--input", job.input]
    layers = job.layers if layer is None else str(layer)
    for option, value in (
        ("--model", job.model),
        ("--layers", layers),
        ("--tokens", job.tokens),
        ("--seed", job.seed),
        ("--stages", job.stages),
        ("--limits", job.limits),
    ):
        words += [] if value is None else [option, str(value)]
    words += ["--contract", job.contract]
    for gate in job.gates:
        words += ["--gate", gate]
    return _search_path(candidate) + shlex.join(words)


def _importable(candidate: Any) -> str | None:  # noqa: ANN401
    """Return ``module:name`` of a class or function that a command line can import."""
    module, name = getattr(candidate, "__module__", None), getattr(candidate, "__qualname__", None)
    if not (inspect.isclass(candidate) or inspect.isfunction(candidate)):
        return None
    if module is None or name is None or "<" in name or module == "__main__":
        return None
    return f"{module}:{name}"


def _search_path(candidate: Any) -> str:  # noqa: ANN401
    """Return the ``PYTHONPATH`` that finds a module which is not installed."""
    if isinstance(candidate, str):
        return ""
    file = Path(inspect.getfile(candidate)).resolve()
    depth = candidate.__module__.count(".")
    folder = file.parents[depth]
    if "site-packages" in folder.parts:
        return ""
    return f"PYTHONPATH={shlex.quote(os.path.relpath(folder))} "


def _first_layer(result: Result) -> int | None:
    layers: Iterable[int] = (
        candidate.first_divergence.layer
        for candidate in result.candidates
        if candidate.first_divergence is not None
    )
    return next(iter(layers), None)


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
