"""The failure of a run, handed to the search for the smallest input that still shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from needlepoint.optimized.protocol.interface import Candidate, StageKey
from needlepoint.reference.profile import Arithmetic
from needlepoint.verify.base.progress import NoProgress, Progress
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.run import pipeline
from needlepoint.verify.schema.result import Result, with_notes
from needlepoint.verify.triage.shrink import Failure, Shrinker, load_trial


@dataclass(frozen=True)
class Failures:
    """The run whose failure is made small.

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

    def shrink(self, result: Result, out: Path) -> Result:
        """Write the smallest input on which the first candidate that differs still does.

        Returns
        -------
        Result
            With its ``shrink``. Where there is none, because no stage differs, the failure does not
            come back or the recording cannot be written, a note says so: the run keeps its result.
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
            try:
                return result.model_copy(update={"shrink": shrinker.run(out, force=self.force)})
            except (ValueError, OSError) as error:
                return with_notes(result, f"shrink: {error}")
        return with_notes(result, "shrink: no stage of any candidate differs, nothing to shrink")

    def _judge(self, inputs: Inputs, candidate: Candidate, stages: frozenset[StageKey]) -> Result:
        return pipeline.verify(
            inputs,
            [candidate],
            contract=self.contract,
            limits=self.limits,
            stages=stages,
            progress=NoProgress(),
        ).result
