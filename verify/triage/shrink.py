"""``--shrink DIR``: the smallest input that still fails at the same stage, as a recording.

Requests go first, then whole windows by delta debugging (Zeller and Hildebrandt 2002), then heads
and picks by halves. Every trial is written and read as the recording that would replay it, so what
was tried is what is handed over.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import Candidate, StageKey
from needlepoint.reference.config import ModelConfig
from needlepoint.reference.profile import Arithmetic
from needlepoint.verify.base.progress import NoProgress, Progress
from needlepoint.verify.inputs.load import Inputs, load_inputs
from needlepoint.verify.judge.candidate_run import observe
from needlepoint.verify.judge.layer_run import LayerRun
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recording.model import config_record
from needlepoint.verify.recording.recording import Manifest, RecordingWriter, open_recording
from needlepoint.verify.run import pipeline
from needlepoint.verify.schema.result import Result, with_notes
from needlepoint.verify.schema.shrink import ShrinkResult

MAX_TRIALS = 200
"""A search that takes longer hands over the smallest input so far."""

T = TypeVar("T")
Judge = Callable[[Inputs, Candidate, frozenset[StageKey]], Result]


@dataclass(frozen=True)
class Trial:
    """One input that may fail: requests as lists of pieces, each one window or the rest behind."""

    config: ModelConfig
    requests: tuple[tuple[Tensor, ...], ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each request."""
        return tuple(sum(len(piece) for piece in request) for request in self.requests)

    @property
    def hidden(self) -> Tensor:
        """bf16 ``[tokens, hidden_size]``."""
        return torch.cat([piece for request in self.requests for piece in request])


@dataclass(frozen=True)
class Failure:
    """What has to fail again, and how to run it again."""

    # Who fails, and what it is called on the command line.
    candidate: Candidate
    name: str
    # Where.
    layer: int
    key: StageKey
    options: tuple[str, ...] = ()  # Further words of the command that replays it.
    # Whether the weights come from a file, so that the model keeps its heads.
    fixed_weights: bool = False


class Shrinker:
    """Finds the smallest failing input.

    Parameters
    ----------
    inputs
        The input that fails.
    failure
        What has to fail again.
    judge
        Judges one input at some stages.
    load
        Reads a recording as the command line would: directory and layer.
    progress
        Told of every trial.
    """

    def __init__(
        self,
        inputs: Inputs,
        failure: Failure,
        judge: Judge,
        load: Callable[[Path, int], Inputs],
        progress: Progress,
    ) -> None:
        self._inputs = inputs
        self._failure = failure
        self._judge = judge
        self._load = load
        self._progress = progress
        self.trials = 0

    def run(self, out: Path, *, force: bool) -> ShrinkResult:
        """Write the smallest failing input and return what it is.

        Raises
        ------
        ValueError
            If the failure does not come back on a copy of the input, or ``out`` cannot be written.
        """
        self._progress.start(f"shrinking to {out.name}", MAX_TRIALS)
        best = self._whole()
        if not self._fails(best):
            raise ValueError(
                f"candidate {self._failure.candidate.info.name} does not fail again at layer "
                f"{self._failure.layer} {'.'.join(self._failure.key)} on a copy of the input, so "
                "nothing was written; run --repeat 5 to see whether it gives the same numbers "
                "every time"
            )
        best = self._fewer_requests(best)
        while True:
            best = self._fewer_windows(best)
            smaller = self._smaller_model(best)
            if smaller is best:
                break
            best = smaller
        self._write(best, out, force=force)
        return self._result(best, out)

    def _whole(self) -> Trial:
        ratio = self._inputs.config.ratio(self._failure.layer)
        hidden = self._inputs.hidden(self._failure.layer)
        parts = torch.split(hidden, list(self._inputs.requests))
        return Trial(self._inputs.config, tuple(torch.split(part, ratio) for part in parts))

    def _fewer_requests(self, best: Trial) -> Trial:
        if len(best.requests) == 1:
            return best
        for request in best.requests:
            alone = replace(best, requests=(request,))
            if self._fails(alone):
                return alone
        kept = self._minimal(best.requests, lambda r: replace(best, requests=tuple(r)))
        return replace(best, requests=tuple(kept))

    def _fewer_windows(self, best: Trial) -> Trial:
        pieces = [(r, piece) for r, request in enumerate(best.requests) for piece in request]

        def built(some: Sequence[tuple[int, Tensor]]) -> Trial:
            requests = [
                tuple(piece for r, piece in some if r == number)
                for number in range(len(best.requests))
            ]
            # A rest must stay last: before a whole window it would move every window behind it.
            full = [tuple(sorted(r, key=lambda piece: -len(piece))) for r in requests if r]
            return replace(best, requests=tuple(full))

        return built(self._minimal(pieces, built))

    def _smaller_model(self, best: Trial) -> Trial:
        if self._failure.fixed_weights or self._inputs.config.ratio(self._failure.layer) != 4:
            return best
        for field in ("index_n_heads", "index_topk"):
            while (size := getattr(best.config, field)) > 1:
                config = replace(best.config, **{field: size // 2})
                if not self._fails(replace(best, config=config)):
                    break
                best = replace(best, config=config)
        return best

    def _minimal(self, items: Sequence[T], built: Callable[[Sequence[T]], Trial]) -> list[T]:
        """Return items of which none can go alone (ddmin over complements)."""
        kept, parts = list(items), 2
        while len(kept) > 1 and self.trials < MAX_TRIALS:
            size = -(-len(kept) // parts)
            for start in range(0, len(kept), size):
                fewer = kept[:start] + kept[start + size :]
                if fewer and self._fails(built(fewer)):
                    kept, parts = fewer, max(2, parts - 1)
                    break
            else:
                if size == 1:
                    break
                parts = min(len(kept), 2 * parts)
        return kept

    def _fails(self, trial: Trial) -> bool:
        """Return whether an input fails at the same stage; one that cannot be judged does not."""
        if self.trials >= MAX_TRIALS:
            return False
        self.trials += 1
        self._progress.advance()
        with tempfile.TemporaryDirectory(prefix="needlepoint-shrink-") as folder:
            place = Path(folder) / "trial"
            try:
                self._write(trial, place, force=False)
                inputs = self._load(place, self._failure.layer)
                result = self._judge(
                    inputs, self._failure.candidate, frozenset({self._failure.key})
                )
            except ValueError:
                return False
        first = result.candidates[0].first_divergence
        return first is not None and (first.path, first.stage) == self._failure.key

    def _write(self, trial: Trial, out: Path, *, force: bool) -> None:
        head = Manifest.model_validate(
            {
                "schema": "needlepoint.recording/1",
                "kind": "input",
                "model": config_record(trial.config),
                "requests": trial.lengths,
                "tensors": {},
                "seed": self._inputs.seed,
                "input_name": _origin(self._inputs),
            }
        )
        with RecordingWriter(out, head, trial.hidden, force=force):
            pass

    def _result(self, best: Trial, out: Path) -> ShrinkResult:
        failure = self._failure
        inputs = self._load(out, failure.layer)
        given = LayerRun(inputs, failure.layer, Limits.default()).given
        stored = observe(failure.candidate, given).stored.values()
        words = ["needlepoint", "verify", "--input", str(out), "--layers", str(failure.layer)]
        words += ["--candidate", failure.name, "--stages", ".".join(failure.key)]
        return ShrinkResult.model_validate(
            {
                "candidate": failure.candidate.info.name,
                "layer": failure.layer,
                "stage": failure.key[1],
                "path": failure.key[0],
                "tokens": sum(best.lengths),
                "requests": len(best.lengths),
                "windows": sum(length // given.ratio for length in best.lengths),
                "heads": best.config.index_n_heads,
                "topk": best.config.index_topk,
                "pages": sum(-(-n // p.page_size) for p in stored for n in p.entries),
                "trials": self.trials,
                "complete": self.trials < MAX_TRIALS,
                "command": shlex.join([*words, *failure.options]),
            }
        )


def load_trial(directory: Path, layer: int, checkpoint: Path | None) -> Inputs:
    """Read the recording of a trial as the command line does."""
    return load_inputs(str(directory), layers=(layer,), checkpoint=checkpoint)


def _origin(inputs: Inputs) -> str:
    """Return the name that decides how weights are drawn: that of the recorded input, if any."""
    place = Path(inputs.name)
    if not place.is_dir():
        return inputs.name
    return open_recording(place).manifest.input_name or inputs.name


@dataclass(frozen=True)
class Failures:
    """The run whose failure is made small."""

    # Of the run.
    inputs: Inputs
    candidates: Sequence[Candidate]
    # What the candidates are called on the command line; a candidate may call itself otherwise.
    names: Sequence[str]
    contract: Arithmetic
    limits: Limits
    # Files that a replay has to name again; None where there were none.
    limits_file: Path | None
    checkpoint: Path | None
    force: bool  # Whether recordings may be replaced.
    progress: Progress  # Told of long work.

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
