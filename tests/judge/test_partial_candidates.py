"""Third-party candidates that bring only some of the stages."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import TypeVar

import pytest
import torch
from support.wrapped import Change, keep, planted, sound, then

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    QUERY,
    Candidate,
    LayerInputs,
    Observed,
    PagedRows,
    QueryRows,
    StageKey,
)
from needlepoint.verify.cli.options import parse_stages
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.recording.results import load_result
from needlepoint.verify.schema.result import Result, StageResult

Cli = Callable[..., CompletedProcess[str]]
Judge = Callable[..., PipelineOutput]
Load = Callable[..., Inputs]
Named = Callable[[str, Candidate], str]
Rows = TypeVar("Rows", PagedRows, QueryRows)
Wrapped = Callable[..., Candidate]
Only = Callable[..., Candidate]
Options = tuple[object, ...]


@pytest.fixture
def only(wrapped: Wrapped) -> Only:
    """Return a function that makes a candidate which declares and returns only some stages."""

    def make(*kept: StageKey, first: Change = sound) -> Candidate:
        return wrapped(
            then(first, keep(*kept)),
            create("emulated:fused-fp8").stages(4) - set(kept),
        )

    return make


FORGOTTEN: dict[str, StageKey] = {
    "dense": (INDEX, "rotated"),
    "pages": (MAIN, "stored"),
    "picks": (INDEX, "topk"),
    "scores": (INDEX, "scores"),
    "query": (QUERY, "query"),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_a_declared_stage_that_does_not_come_is_skipped_and_named(
    what: str, cli: Cli, candidate_named: Named, run_options: Options, wrapped: Wrapped
) -> None:
    key = FORGOTTEN[what]
    kept = create("emulated:fused-fp8").stages(4) - {key}
    name = candidate_named("test:wrapped", wrapped(keep(*kept)))
    options = (*run_options, "--candidate", name, "--layers", "0")

    done = cli("verify", *options, "--json", "r.json")

    assert done.returncode == 2
    assert done.stdout.startswith("cannot-judge: ")
    missing = [key] if key[0] != QUERY else [key, (QUERY, "weights")]
    counts = load_result(Path("r.json")).counts
    assert [(s.path, s.stage) for s in counts.skipped] == missing
    assert counts.compared == counts.expected - len(missing)
    assert f"test:wrapped layer 0 {'.'.join(key)} (declared, but not returned)" in done.stdout

    done = cli("record", *options, "--out", "out")
    assert done.returncode == 2
    assert ".".join(key) in done.stderr
    assert not Path("out").exists()


def with_history(inputs: LayerInputs, observed: Observed) -> Observed:
    """Return what comes of weights that are parameters: autograd keeps how it was made."""
    reader, query = observed.scores, observed.query
    assert reader is not None
    assert query is not None
    return replace(
        observed,
        dense={key: rows.detach().requires_grad_() for key, rows in observed.dense.items()},
        query=replace(
            query,
            weights=query.weights.detach().requires_grad_(),
            scales=None if query.scales is None else query.scales.detach().requires_grad_(),
        ),
        scores=lambda r, a, b: reader(r, a, b).requires_grad_(),
        attention=torch.zeros(sum(inputs.lengths), 1, 512, requires_grad=True),
    )


def test_results_of_parameters_are_judged(
    cli: Cli, candidate_named: Named, run_options: Options, wrapped: Wrapped
) -> None:
    changed = wrapped(with_history, adds=frozenset({(MAIN, "attention")}))
    name = candidate_named("test:wrapped", changed)
    options = (*run_options, "--layers", "0", "--candidate", name)

    done = cli("verify", *options, "--json", "r.json", "--repeat", "2", "--swap", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert cli("record", *options, "--out", "out", "--quiet").returncode == 0


def layer_stage(result: Result, path: str, stage: str) -> StageResult:
    (found,) = [
        s for s in result.candidates[0].layers[0].stages if (s.path, s.stage) == (path, stage)
    ]
    return found


@pytest.mark.parametrize(
    "kept",
    [
        ((INDEX, "stored"),),
        ((MAIN, "pooled"),),
        ((INDEX, "scores"),),
        ((INDEX, "topk"),),
        ((QUERY, "query"), (QUERY, "weights")),
        ((INDEX, "stored"), (INDEX, "topk")),
        ((INDEX, "pooled"), (INDEX, "rotated"), (INDEX, "scores")),
        ((MAIN, "stored"), (INDEX, "topk")),
    ],
)
def test_any_subset_of_stages_is_judged(
    kept: tuple[StageKey, ...], judge: Judge, small_inputs: Load, only: Only
) -> None:
    output = judge(small_inputs(layers=(0,)), only(*kept))

    result = output.result
    assert result.verdict == "match"
    assert (result.counts.expected, result.counts.compared) == (len(kept), len(kept))
    compared = {(s.path, s.stage) for s in result.candidates[0].layers[0].stages if s.verdict}
    assert compared == set(kept)
    uncovered = {(s.path, s.stage) for s in result.counts.not_covered}
    assert not uncovered & set(kept)
    # Attention needs rows and picks.
    attention = layer_stage(result, MAIN, "attention")
    whole = {(MAIN, "stored"), (INDEX, "topk")} <= set(kept)
    assert attention.kind == ("consequence" if whole else "not covered")
    names = {name.split("/", 2)[2] for name in output.rows}
    assert names == {
        f"{path}/{stage}/{what}"
        for path, stage in kept
        for what in ("local", "accumulated", "relative")
    }


TRADED: dict[str, tuple[tuple[StageKey, ...], str]] = {
    "nothing to justify it": (((INDEX, "topk"),), "unknown"),
    "keys without queries": (((INDEX, "stored"), (INDEX, "topk")), "unknown"),
    "queries without keys": (((QUERY, "query"), (QUERY, "weights"), (INDEX, "topk")), "unknown"),
    "own scores": (((INDEX, "scores"), (INDEX, "topk")), "selector"),
    "keys and queries": (
        ((INDEX, "stored"), (QUERY, "query"), (QUERY, "weights"), (INDEX, "topk")),
        "selector",
    ),
}


@pytest.mark.parametrize("case", TRADED)
def test_a_wrong_pick_is_classed_by_what_could_justify_it(
    case: str, judge: Judge, small_inputs: Load, only: Only
) -> None:
    kept, kind = TRADED[case]

    result = judge(
        small_inputs(layers=(0,)), only(*kept, first=planted("needle-of-one-query-lost"))
    ).result

    assert result.verdict == "differ"
    first = result.candidates[0].first_divergence
    assert first is not None
    assert (first.stage, first.request, first.position) == ("topk", 0, 199)
    topk = result.candidates[0].layers[0].topk
    assert topk is not None
    swaps = topk.swaps.model_dump()
    assert {name for name, count in swaps.items() if count} == {kind}
    assert swaps[kind] == 1
    assert topk.invalid == 0
    # Overlap and score lost do not need keys to be reported.
    cost = result.candidates[0].format_cost.bf16
    assert cost is not None
    assert cost.overlap_mean is not None
    assert cost.overlap_mean < 1


def test_an_unreturned_query_does_not_hide_wrong_scores(
    judge: Judge, small_inputs: Load, only: Only
) -> None:
    result = judge(
        small_inputs(layers=(0,)), only((INDEX, "scores"), first=planted("scores-gain-0.4%"))
    ).result

    scores = layer_stage(result, INDEX, "scores")
    assert scores.verdict == "differ"
    assert scores.local == scores.accumulated


def test_a_candidate_s_own_attention_is_reported_and_not_judged(
    judge: Judge, small_inputs: Load, wrapped: Wrapped
) -> None:
    inputs = small_inputs(layers=(0,))
    whole = judge(inputs, create("emulated:fused-fp8")).result

    def half(given: LayerInputs, observed: Observed) -> Observed:
        attention = torch.zeros(200, 1, 512)
        attention[3] = torch.nan
        return replace(observed, attention=attention)

    own = wrapped(half, adds=frozenset({(MAIN, "attention")}))
    result = judge(inputs, own).result

    assert result.verdict == "match"
    assert result.counts.expected == whole.counts.expected
    mine, theirs = (layer_stage(r, MAIN, "attention") for r in (result, whole))
    assert (mine.kind, mine.verdict, mine.rows_compared) == ("consequence", None, 200)
    assert mine.accumulated is not None
    assert theirs.accumulated is not None
    # All zeros are 100 % off; NaN is not a number that could be lower.
    assert mine.accumulated.error.p99 == 1.0
    assert mine.accumulated.rows_not_finite == 1
    assert theirs.accumulated.error.max is not None
    assert theirs.accumulated.error.max < 1e-3


@pytest.mark.parametrize(
    ("asked", "lacks"),
    [
        ("index.pooled", "index.pooled"),
        ("stored,pooled", "index.pooled"),
        ("main.stored", "main.stored"),
    ],
)
def test_stages_that_a_candidate_does_not_declare_are_named(
    asked: str, lacks: str, judge: Judge, small_inputs: Load, only: Only
) -> None:
    inputs = small_inputs(tokens=136, layers=(0,))
    part = only((INDEX, "stored"), (INDEX, "topk"))
    whole = create("emulated:fused-fp4")
    says = (
        f"--stages {lacks}: not among the stages that candidate {part.info.name} declares in these "
        "layers: index.stored, index.topk"
    )

    with pytest.raises(ValueError, match=re.escape(says)):
        judge(inputs, whole, part, stages=parse_stages(asked))
    # On several paths asked for by one name: where the candidate has it.
    assert judge(inputs, part, stages=parse_stages("stored,topk")).result.verdict == "match"


PARTS: dict[str, tuple[StageKey, ...]] = {
    "picks alone": ((INDEX, "topk"),),
    "scores alone": ((INDEX, "scores"),),
    "scores and picks": ((INDEX, "scores"), (INDEX, "topk")),
    "keys and picks": ((INDEX, "stored"), (INDEX, "topk")),
    "no picks": ((INDEX, "stored"), (QUERY, "query"), (QUERY, "weights"), (INDEX, "scores")),
    "no keys": ((QUERY, "query"), (QUERY, "weights"), (INDEX, "scores"), (INDEX, "topk")),
}


@pytest.mark.parametrize("part", PARTS)
def test_recordings_of_a_part_are_compared(
    part: str, cli: Cli, candidate_named: Named, run_options: Options, only: Only
) -> None:
    """Equal recordings match even where nothing says what a score may be."""
    odd = then(planted("scores-gain-0.4%"), planted("needle-of-one-query-lost"))
    kept = PARTS[part]
    names = {
        "sound": candidate_named("test:sound", only(*kept)),
        "odd": candidate_named("test:odd", only(*kept, first=odd)),
    }
    for out in ("sound", "odd", "again"):
        name = names.get(out, names["odd"])
        options = (*run_options, "--candidate", name, "--layers", "0", "--out", out)
        assert cli("record", *options).returncode == 0

    assert cli("diff", "sound", "sound").returncode == 0
    assert cli("diff", "odd", "again", "--json", "r.json").returncode == 0
    counts = load_result(Path("r.json")).counts
    assert counts.compared == counts.expected == 4 + len(kept)
    done = cli("diff", "sound", "odd", "--json", "s.json")
    assert done.returncode == 1
    first = load_result(Path("s.json")).candidates[0].first_divergence
    assert first is not None
    assert first.stage == ("scores" if (INDEX, "scores") in kept else "topk")


def test_no_complete_window_is_no_comparison(judge: Judge, small_inputs: Load) -> None:
    inputs = small_inputs(layers=(0,))
    short = replace(inputs, requests=(3, 2), states={0: inputs.hidden(0)[:5]})

    result = judge(
        short, create("emulated:fused-fp8"), stages=frozenset({(INDEX, "stored")})
    ).result

    assert result.verdict == "cannot-judge"
    stored = layer_stage(result, INDEX, "stored")
    assert (stored.kind, stored.detail) == ("not covered", "no request completes a window")
