"""What is kept of a run that differs: recordings of what failed, and the smallest failing input."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from needlepoint.optimized.interface import Candidate, StageKey
from needlepoint.reference.profile import Arithmetic
from needlepoint.verify import pipeline
from needlepoint.verify.inputs import Inputs
from needlepoint.verify.limits import Limits
from needlepoint.verify.progress import NoProgress, Progress
from needlepoint.verify.record import record
from needlepoint.verify.result import DIFFER, CandidateResult, Result
from needlepoint.verify.shrink import Failure, Shrinker, load_trial


@dataclass(frozen=True)
class Failures:
    """The run whose failures are kept.

    Attributes
    ----------
    inputs, candidates, contract, limits
        Of the run.
    names
        What the candidates are called on the command line; a candidate may call itself otherwise.
    limits_file, checkpoint
        Files that a replay has to name again; None where there were none.
    force
        Whether recordings may be replaced.
    progress
        Told of long work.
    """

    inputs: Inputs
    candidates: Sequence[Candidate]
    names: Sequence[str]
    contract: Arithmetic
    limits: Limits
    limits_file: Path | None
    checkpoint: Path | None
    force: bool
    progress: Progress

    def save(self, result: Result, folder: Path) -> None:
        """Record every candidate that differs, in the layers where it does.

        Raises
        ------
        ValueError
            If a recording cannot be written.
        """
        runs = zip(self.candidates, self.names, result.candidates, strict=True)
        for candidate, name, found in runs:
            layers = tuple(layer.layer for layer in found.layers if _differs(found, layer.layer))
            if not layers:
                continue
            folder.mkdir(exist_ok=True)
            out = folder / re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
            inputs = replace(self.inputs, layers=layers)
            record(
                inputs,
                candidate,
                out,
                contract=self.contract,
                force=self.force,
                progress=self.progress,
            )

    def shrink(self, result: Result, out: Path) -> Result:
        """Write the smallest input on which the first candidate that differs still does.

        Returns
        -------
        Result
            With its ``shrink``; unchanged where no stage differs.

        Raises
        ------
        ValueError
            If the failure does not come back, or the recording cannot be written.
        """
        runs = zip(self.candidates, self.names, result.candidates, strict=True)
        for candidate, name, found in runs:
            where = found.first_divergence
            if where is None:
                continue
            options: list[str] = []
            if self.limits_file is not None:
                options += ["--limits", str(self.limits_file)]
            if self.checkpoint is not None:
                options += ["--checkpoint", str(self.checkpoint)]
            failure = Failure(
                candidate,
                name,
                where.layer,
                (where.path, where.stage),
                tuple(options),
                fixed_weights=self.checkpoint is not None,
            )
            load = partial(load_trial, checkpoint=self.checkpoint)
            shrinker = Shrinker(self.inputs, failure, self._judge, load, self.progress)
            return result.model_copy(update={"shrink": shrinker.run(out, force=self.force)})
        return result

    def _judge(self, inputs: Inputs, candidate: Candidate, stages: frozenset[StageKey]) -> Result:
        return pipeline.verify(
            inputs,
            [candidate],
            contract=self.contract,
            limits=self.limits,
            stages=stages,
            progress=NoProgress(),
        ).result


def check_failures_folder(folder: Path) -> None:
    """Refuse a folder for recordings of failures before the run, not after it.

    Raises
    ------
    ValueError
        If it is a file, or the folder it is in does not exist.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--save-failures {folder}: is a file; give the name of a folder")
    if not folder.parent.is_dir():
        raise ValueError(
            f"--save-failures {folder}: folder {folder.parent} does not exist; create it first"
        )


def _differs(found: CandidateResult, layer: int) -> bool:
    first = found.first_divergence
    return (first is not None and first.layer == layer) or any(
        stage.verdict == DIFFER
        for part in found.layers
        if part.layer == layer
        for stage in part.stages
    )
