"""Repeated runs: what changed, what moved first, and the gate that says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import CompletedProcess

import torch

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import (
    INDEX,
    Candidate,
    CandidateInfo,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.recording.results import load_result
from needlepoint.verify.schema.repeat import RepeatResult

Change = Callable[[LayerInputs, Observed], Observed]


@dataclass
class Unsteady:
    """The sound candidate, whose later runs are changed."""

    change: Change
    runs: int = 0
    inner: Candidate = field(default_factory=lambda: create("emulated:fused-fp8"))

    @property
    def info(self) -> CandidateInfo:
        return self.inner.info

    def stages(self, ratio: int) -> frozenset[StageKey]:
        return self.inner.stages(ratio)

    def run(self, inputs: LayerInputs) -> Observed:
        observed = self.inner.run(inputs)
        self.runs += 1
        return observed if self.runs == 1 else self.change(inputs, observed)


def other_tie(inputs: LayerInputs, observed: Observed) -> Observed:
    """Let another member of a tie in, as whoever arrives first."""
    assert observed.topk is not None
    assert observed.scores is not None
    picks, scores = observed.topk.clone(), observed.scores(0, 0, inputs.lengths[0])
    for query in range(inputs.lengths[0]):
        row, own = scores[query], picks[query].tolist()
        for column, entry in enumerate(own):
            twins = (row == row[entry]).nonzero()[:, 0].tolist() if entry >= 0 else []
            free = [e for e in twins if e not in own and e < (query + 1) // 4]
            if free:
                picks[query, column] = free[0]
                return replace(observed, topk=picks)
    raise AssertionError("no tie to choose from")


def rows_change_places(inputs: LayerInputs, observed: Observed) -> Observed:
    """Swap two rows: a hash that forgets positions would not see it."""
    rows = observed.dense[INDEX, "normed"].clone()
    rows[[3, 4]] = rows[[4, 3]]
    return replace(observed, dense={**observed.dense, (INDEX, "normed"): rows})


def last_bit_of_scores(inputs: LayerInputs, observed: Observed) -> Observed:
    assert observed.scores is not None
    reader = observed.scores

    def nudged(request: int, start: int, stop: int) -> torch.Tensor:
        scores = reader(request, start, stop).clone()
        scores[-1, 0] = torch.nextafter(scores[-1, 0], torch.tensor(torch.inf))
        return scores

    return replace(observed, scores=nudged)


def other_order(inputs: LayerInputs, observed: Observed) -> Observed:
    """Give the same answer with picks in another order and pages in another place."""
    if observed.topk is None:
        return observed
    picks = observed.topk.clone()
    picks[-1] = picks[-1].flip(0)
    paged = observed.stored[INDEX]
    turned = replace(
        paged,
        pool=paged.pool.flip(0),
        page_table=tuple(len(paged.pool) - 1 - table for table in paged.page_table),
    )
    return replace(observed, topk=picks, stored={**observed.stored, INDEX: turned})


def repeats(
    judge: Callable[..., PipelineOutput], inputs: Inputs, change: Change, runs: int = 3
) -> RepeatResult:
    candidate = Unsteady(change)
    result = judge(inputs, candidate, repeat=runs).result
    assert result.verdict == "match"
    assert candidate.runs == runs * len(inputs.layers)
    found = result.candidates[0].repeat
    assert found is not None
    assert found.runs == runs
    return found


def test_ties_by_arrival_pass_in_one_run_and_move_the_selection_in_the_next(
    judge: Callable[..., PipelineOutput], small_inputs: Callable[..., Inputs]
) -> None:
    found = repeats(judge, small_inputs("ties", 440, layers=(0,)), other_tie)

    assert found.changed == 1
    assert found.moved_first is not None
    assert (found.moved_first.what, found.moved_first.stage) == ("selection", "topk")
    assert (found.rows_changed, found.picks_changed) == (1, 2)  # one pick in each of two runs


def test_rows_that_change_places_move_first(
    judge: Callable[..., PipelineOutput], small_inputs: Callable[..., Inputs]
) -> None:
    found = repeats(judge, small_inputs(tokens=136, layers=(0,)), rows_change_places)

    assert found.moved_first is not None
    assert found.moved_first.model_dump() == {
        "layer": 0,
        "stage": "normed",
        "path": "index",
        "what": "before scores",
    }
    assert [s.stage for s in found.stages if s.distinct > 1] == ["normed"]
    assert found.picks_changed == 0


def test_one_bit_of_one_score_is_seen(
    judge: Callable[..., PipelineOutput], small_inputs: Callable[..., Inputs]
) -> None:
    found = repeats(judge, small_inputs(tokens=136, layers=(0,)), last_bit_of_scores)

    assert found.moved_first is not None
    assert found.moved_first.what == "scores"
    assert found.changed == 1


def test_order_of_picks_and_places_of_pages_are_no_change(
    judge: Callable[..., PipelineOutput], small_inputs: Callable[..., Inputs]
) -> None:
    found = repeats(judge, small_inputs(tokens=136), other_order)

    assert found.changed == 0
    assert found.moved_first is None
    assert len(found.stages) == 13 + 4
    assert {stage.layer for stage in found.stages} == {0, 1}


def test_the_gate_of_repeats_decides_the_exit_code(
    cli: Callable[..., CompletedProcess[str]],
    candidate_named: Callable[[str, Candidate], str],
    small_model: Path,
) -> None:
    words = ["verify", "--input", "synthetic", "--model", small_model, "--tokens", "136"]
    words += ["--layers", "0", "--repeat", "2", "--json", "r.json", "--force", "--candidate"]
    steady = cli(*words, "emulated:fused-fp8")
    assert steady.returncode == 0
    assert "13 of 13 stages equal in 2 runs" in steady.stdout

    unsteady = cli(*words, candidate_named("test:unsteady", Unsteady(last_bit_of_scores)))

    assert unsteady.returncode == 1
    assert "gate repeat.changed<=0 exceeded, found 1" in unsteady.stdout
    words_of = " ".join(unsteady.stdout.split())
    assert "first to move: scores, layer 0 index.scores" in words_of
    result = load_result(Path("r.json"))
    assert result.candidates[0].verdict == "match"
    assert [gate.path for gate in result.gates] == ["repeat.changed"]

    assert "--repeat" in cli(*words[:-1], "--repeat", "0").stderr
