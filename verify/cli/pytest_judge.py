"""What the pytest plugin's ``needlepoint_judge`` does: judge a candidate inside a test."""

from __future__ import annotations

import inspect
import json
import os
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from needlepoint import Candidate, Result, check
from needlepoint.optimized.cuda.runtime import NoDevice, require_cuda
from needlepoint.verify.cli.options import VerifyOptions
from needlepoint.verify.cli.pytest_plugin import NO_DEVICE, VERDICT
from needlepoint.verify.cli.python import Named, importable, make_candidate, read_options


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
            As for :func:`needlepoint.check`, each over the marker's.
        """
        found = self._judged(candidate, options)
        # Raised here, after the handler: pytest would print the error that it handled as well.
        if isinstance(found, NoDevice):
            self._without_device(str(found))
        if isinstance(found, ValueError):
            pytest.fail(f"cannot judge: {found}\n{self._again()}", pytrace=False)
        asked, result = found
        summary = result.summary()
        told = {"verdict": result.verdict, "headline": summary.splitlines()[0]}
        self._keep(VERDICT, json.dumps(told))
        line = {"test": self._nodeid, "result": result.model_dump(by_alias=True, mode="json")}
        self._keep("result", json.dumps(line))
        if result.verdict != "match":
            ran, replay = result.input, replay_command(candidate, asked, _first_layer(result))
            lines = [
                summary,
                f"  input {ran.name}, {ran.tokens} tokens in {ran.requests} requests, seed "
                f"{ran.seed}; contract {result.contract}",
                *([] if replay is None else [f"  replay: {replay}"]),
                self._again(),
            ]
            pytest.fail("\n".join(lines), pytrace=False)
        return result

    def _judged(
        self, candidate: Named, options: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Result] | ValueError:
        """Return what was asked for and found, or what stood in the way."""
        try:
            asked = merged({**self._marked, **options}, self._wishes)
            return asked, check(self._make(candidate), **asked)
        except ValueError as error:
            return error

    def _make(self, candidate: Named) -> Candidate:
        """Return the candidate on the card of this worker."""
        if self._wishes.device != "cpu" and torch.cuda.device_count() > 1:
            torch.cuda.set_device(self._wishes.worker % torch.cuda.device_count())
        made = make_candidate(candidate)
        if made.info.device == "cuda":
            if self._wishes.device == "cpu":
                raise NoDevice("--needlepoint-device cpu: tests that need a card are skipped")
            if not torch.cuda.is_available():
                require_cuda()
        return made

    def _without_device(self, reason: str) -> NoReturn:
        if self._wishes.device == "cuda":
            pytest.fail(f"--needlepoint-device cuda: {reason}", pytrace=False)
        self._keep(NO_DEVICE, reason)
        pytest.skip(reason)

    def _again(self) -> str:
        return f"  run again: pytest {shlex.quote(self._here)}"


def merged(options: Mapping[str, Any], wishes: Wishes) -> dict[str, Any]:
    """Return the options of a test with what the command line says.

    Raises
    ------
    ValueError
        For an option that there is not, or a value that it does not take.
    """
    asked = {name: value for name, value in options.items() if value is not None}
    own = {name: value for name, value in asked.items() if name != "profile"}
    asked["gates"] = (*read_options(VerifyOptions, own).gate, *wishes.gates)
    if wishes.profile is not None:
        asked["profile"] = wishes.profile
    if wishes.contract is not None:
        asked["contract"] = wishes.contract
    return asked


def replay_command(
    candidate: Named, options: Mapping[str, Any], layer: int | None = None
) -> str | None:
    """Return the command line that judges the same; None where no command line can.

    Parameters
    ----------
    candidate
        What the test judged: a name, or a class or function of a module.
    options
        Options that it was judged by, as :func:`merged` returns them.
    layer
        The layer that differs first: errors do not pass between layers, so it is enough.
    """
    name = candidate if isinstance(candidate, str) else importable(candidate)
    if name is None or "profile" in options:
        return None
    read = read_options(VerifyOptions, {**options, **({} if layer is None else {"layers": layer})})
    words = ["needlepoint", "verify", "--candidate", name, *read.words()]
    return _search_path(candidate) + shlex.join(words)


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
