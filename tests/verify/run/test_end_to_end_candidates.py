"""Third-party candidates: those that break the protocol, and those that bring only part of it."""

from __future__ import annotations

import sys
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.candidates import create
from needlepoint.optimized.interface import (
    INDEX,
    MAIN,
    QUERY,
    Candidate,
    CandidateInfo,
    LayerInputs,
    Observed,
    PagedRows,
    QueryRows,
    StageKey,
)
from needlepoint.reference.profile import CONTRACTS
from needlepoint.verify.inputs import Inputs
from needlepoint.verify.output import load_result
from needlepoint.verify.pipeline import PipelineOutput
from needlepoint.verify.progress import NoProgress
from needlepoint.verify.record import record
from needlepoint.verify.result import Result, StageResult

Cli = Callable[..., CompletedProcess[str]]
Change = Callable[[LayerInputs, Observed], Any]
Judge = Callable[..., PipelineOutput]
Load = Callable[..., Inputs]
Named = Callable[[str, Candidate], str]
Rows = TypeVar("Rows", PagedRows, QueryRows)


@dataclass(frozen=True)
class Wrapped:
    """An emulated candidate, and what is done to its results."""

    change: Change
    without: frozenset[StageKey] = frozenset()
    inner: str = "emulated:fused-fp8"
    claims: Mapping[str, str] | None = None
    adds: frozenset[StageKey] = frozenset()

    @property
    def info(self) -> CandidateInfo:
        return replace(create(self.inner).info, name="test:wrapped", **dict(self.claims or {}))

    def stages(self, ratio: int) -> frozenset[StageKey]:
        own = create(self.inner).stages(ratio)
        return (own - self.without) | (self.adds if ratio == 4 else frozenset())

    def run(self, inputs: LayerInputs) -> Observed:
        return cast(Observed, self.change(inputs, create(self.inner).run(inputs)))


def untouched(inputs: LayerInputs, observed: Observed) -> Observed:
    return observed


def late_writer(inputs: LayerInputs, observed: Observed) -> Observed:
    """Write to a given tensor after the run, as a background thread would."""

    def scores(request: int, start: int, stop: int) -> Tensor:
        inputs.main.kv[0, 0] += 1
        assert observed.scores is not None
        return observed.scores(request, start, stop)

    return replace(observed, scores=scores)


def keep(*kept: StageKey) -> Change:
    """Return only some stages."""

    def change(inputs: LayerInputs, observed: Observed) -> Observed:
        return replace(
            observed,
            dense={key: rows for key, rows in observed.dense.items() if key in kept},
            stored={
                path: rows for path, rows in observed.stored.items() if (path, "stored") in kept
            },
            query=observed.query if (QUERY, "query") in kept else None,
            scores=observed.scores if (INDEX, "scores") in kept else None,
            topk=observed.topk if (INDEX, "topk") in kept else None,
        )

    return change


def only(*kept: StageKey, then: Change = untouched) -> Wrapped:
    """Return a candidate that declares and returns only some stages."""

    def change(inputs: LayerInputs, observed: Observed) -> Observed:
        return cast(Observed, then(inputs, cast(Observed, keep(*kept)(inputs, observed))))

    everything = create("emulated:fused-fp8").stages(4)
    return Wrapped(change, everything - set(kept))


def run_options(small_model: Path) -> tuple[object, ...]:
    return ("--input", "synthetic", "--tokens", "200", "--model", small_model)


def raise_error(error: BaseException) -> Change:
    def change(inputs: LayerInputs, observed: Observed) -> Observed:
        raise error

    return change


def spoil_given(pick: Callable[[LayerInputs], Tensor]) -> Change:
    def change(inputs: LayerInputs, observed: Observed) -> Observed:
        pick(inputs)[-1] *= 2
        return observed

    return change


def forget_parameter(inputs: LayerInputs, observed: Observed) -> Observed:
    cast(dict[str, Tensor], inputs.layer_weights).pop("wkv")
    return observed


def with_dense(key: StageKey, by: Callable[[Tensor], Tensor]) -> Change:
    return lambda _, seen: replace(seen, dense={**seen.dense, key: by(seen.dense[key])})


def changed(rows: Rows, changes: Mapping[str, object]) -> Rows:
    """Return rows with other fields; a callable is given the field."""
    new = {k: v(getattr(rows, k)) if callable(v) else v for k, v in changes.items()}
    return replace(rows, **new)  # type: ignore[arg-type]


def with_pool(path: str, **changes: object) -> Change:
    def change(inputs: LayerInputs, observed: Observed) -> Observed:
        if path not in observed.stored:
            return observed
        rows = observed.stored[path]
        return replace(observed, stored={**observed.stored, path: changed(rows, changes)})

    return change


def with_query(**changes: object) -> Change:
    def change(inputs: LayerInputs, observed: Observed) -> Observed:
        if observed.query is None:
            return observed
        return replace(observed, query=changed(observed.query, changes))

    return change


def with_topk(by: Callable[[Tensor], Tensor]) -> Change:
    return lambda _, seen: seen if seen.topk is None else replace(seen, topk=by(seen.topk))


def with_scores(by: Callable[[Tensor], Any]) -> Change:
    def change(inputs: LayerInputs, observed: Observed) -> Observed:
        reader = observed.scores
        if reader is None:
            return observed
        return replace(observed, scores=lambda r, a, b: by(reader(r, a, b)))

    return change


def late_failure(inputs: LayerInputs, observed: Observed) -> Observed:
    reader = observed.scores

    def read(request: int, start: int, stop: int) -> Tensor:
        if reader is None or stop > 1:
            raise RuntimeError("device lost")
        return reader(request, start, stop)

    return observed if reader is None else replace(observed, scores=read)


def table(*pages: int) -> Callable[[object], tuple[Tensor, ...]]:
    return lambda _: (torch.tensor(pages, dtype=torch.int32),)


BROKEN: dict[str, tuple[Change | Wrapped, str]] = {
    "raises": (raise_error(RuntimeError("boom")), "layer 0 failed: RuntimeError: boom"),
    "raises a message": (raise_error(ValueError("k too small")), "layer 0: k too small"),
    "returns nothing": (lambda _, seen: None, "run returned NoneType, expected Observed"),
    "changes kv": (spoil_given(lambda i: i.main.kv), "layer 0: changed its inputs main.kv"),
    "changes hidden": (spoil_given(lambda i: i.hidden), "changed its inputs hidden;"),
    "changes the table": (spoil_given(lambda i: i.rope_table), "changed its inputs rope_table;"),
    "changes a weight": (
        spoil_given(lambda i: i.layer_weights["index_wq_b"]),
        "changed its inputs index_wq_b;",
    ),
    "removes a weight": (forget_parameter, "changed its inputs wkv;"),
    "short rows": (
        with_dense((MAIN, "pooled"), lambda x: x[:-1]),
        "layer0.main.pooled: shape [49, 512], expected [50, 512]",
    ),
    "narrow rows": (
        with_dense((MAIN, "normed"), lambda x: x[:, :128]),
        "layer0.main.normed: shape [50, 128], expected [50, 512]",
    ),
    "integer rows": (
        with_dense((MAIN, "roped"), lambda x: x.to(torch.int32)),
        "layer0.main.roped: dtype I32, expected BF16 or F16 or F32 or F64",
    ),
    "complex rows": (
        with_dense((MAIN, "roped"), lambda x: x.to(torch.complex64)),
        "torch.complex64",
    ),
    "a stage that no layer has": (
        lambda _, seen: replace(
            seen, dense={**seen.dense, (MAIN, "rotated"): torch.zeros(50, 512)}
        ),
        "no stage main.rotated",
    ),
    "negative page": (with_pool(INDEX, page_table=table(-1)), "page id -1 at position 0"),
    "page past the pool": (with_pool(MAIN, page_table=table(7)), "page id 7 at position 0"),
    "no page": (with_pool(MAIN, page_table=table()), "0 pages for 50 entries"),
    "no table": (with_pool(MAIN, page_table=()), "main.stored.page_table.0 is missing"),
    "wide table": (
        with_pool(MAIN, page_table=lambda t: (t[0].to(torch.int64),)),
        "main.stored.page_table.0: dtype I64, expected I32",
    ),
    "entries": (with_pool(MAIN, entries=(49,)), "main.stored has entries [49], expected [50]"),
    "float pool": (
        with_pool(MAIN, pool=lambda p: p.to(torch.float32)),
        "main.stored.pages: dtype F32, expected U8",
    ),
    "page size 32 for 64": (
        with_pool(MAIN, page_size=32),
        "pages of 37440 bytes (page size 64), expected 19008 bytes for page size 32",
    ),
    "stride": (with_pool(MAIN, pool=lambda p: p[:, :-1]), "pages of 37439 bytes"),
    "layout": (with_pool(MAIN, layout="main-fp6"), "'main-fp6'"),
    "layout of another profile": (
        Wrapped(untouched, claims={"format": "bf16"}),
        "layout index-fp8 stores e4m3, the profile stores bf16",
    ),
    "query format": (with_query(format="int8"), "'int8'"),
    "query of another profile": (
        with_query(format="bf16", codes=lambda c: c.to(torch.bfloat16), scales=None),
        "query format 'bf16', the profile stores e4m3",
    ),
    "query shape": (
        with_query(codes=lambda c: c[:, :3]),
        "query.query.codes: shape [200, 3, 128], expected [200, 4, 128]",
    ),
    "query without scales": (with_query(scales=None), "query.query.scales is missing"),
    "float picks": (with_topk(lambda t: t.to(torch.float32)), "index.topk: dtype F32"),
    "picks of some": (with_topk(lambda t: t[:100]), "index.topk: shape [100, 8], expected [200"),
    "scores of another shape": (with_scores(lambda s: s[:, :-1]), "scores of request 0"),
    "scores of no tensor": (with_scores(lambda s: s.tolist()), "AttributeError"),
    "fails while scores are read": (late_failure, "layer 0 failed: RuntimeError: device lost"),
    "undeclared stage": (
        Wrapped(untouched, without=frozenset({(INDEX, "scores")})),
        "returned stage index.scores, which is not declared",
    ),
    "attention of another shape": (
        Wrapped(
            lambda _, seen: replace(seen, attention=torch.zeros(200, 2, 512)),
            adds=frozenset({(MAIN, "attention")}),
        ),
        "attention: shape (200, 2, 512), expected (200, 1, 512)",
    ),
    "unknown profile": (
        Wrapped(untouched, claims={"profile": "vllm-next"}),
        "profile 'vllm-next', expected one of needlepoint",
    ),
    "unknown format": (
        Wrapped(untouched, claims={"format": "int8"}),
        "key format 'int8', expected one of bf16, fp8, fp4",
    ),
    "a declared stage that no layer has": (
        Wrapped(untouched, adds=frozenset({(INDEX, "foo")})),
        "stages() names index.foo",
    ),
    "attention declared and not returned": (
        Wrapped(untouched, adds=frozenset({(MAIN, "attention")})),
        "stages() names main.attention and run did not return it",
    ),
    "a cancelled run": (Wrapped(raise_error(CancelledError())), "failed: CancelledError"),
    "a skipped run": (Wrapped(raise_error(pytest.skip.Exception("later"))), "failed: Skipped"),
    "inputs changed by the score reader": (
        Wrapped(late_writer),
        "main.kv changed while they were judged",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_candidate_that_breaks_the_protocol_is_no_verdict(
    case: str, cli: Cli, small_model: Path, candidate_named: Named
) -> None:
    change, message = BROKEN[case]
    candidate = change if isinstance(change, Wrapped) else Wrapped(change)
    name = candidate_named("test:wrapped", candidate)

    done = cli(
        "verify",
        *run_options(small_model),
        "--candidate",
        name,
        *("--layers", "0", "--json", "r.json", "--junitxml", "r.xml"),
    )

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "candidate test:wrapped" in done.stderr
    assert message in done.stderr
    assert [path.name for path in Path().iterdir()] == ["pyproject.toml"]


def test_a_candidate_that_ends_the_process_is_no_verdict(
    cli: Cli, small_model: Path, candidate_named: Named
) -> None:
    name = candidate_named("test:wrapped", Wrapped(raise_error(SystemExit(0))))

    done = cli("verify", *run_options(small_model), "--candidate", name, "--json", "r.json")

    assert done.returncode == 2
    assert "candidate test:wrapped, layer 0 failed: SystemExit: 0" in done.stderr
    assert not Path("r.json").exists()


def test_an_interrupted_recording_leaves_nothing(
    cli: Cli, small_model: Path, candidate_named: Named
) -> None:
    def in_second_layer(inputs: LayerInputs, observed: Observed) -> Observed:
        if inputs.layer == 1:
            raise KeyboardInterrupt
        return observed

    name = candidate_named("test:wrapped", Wrapped(in_second_layer))

    done = cli("record", *run_options(small_model), "--candidate", name, "--out", "out")

    assert done.returncode == 130
    assert [path.name for path in Path().iterdir()] == ["pyproject.toml"]


@pytest.mark.parametrize("case", ["raises", "short rows", "scores of another shape"])
def test_a_recording_of_a_broken_candidate_leaves_nothing(
    case: str, cli: Cli, small_model: Path, candidate_named: Named
) -> None:
    change, message = BROKEN[case]
    assert not isinstance(change, Wrapped)
    name = candidate_named("test:wrapped", Wrapped(change))

    done = cli("record", *run_options(small_model), "--candidate", name, "--out", "out")

    assert done.returncode == 2
    assert message in done.stderr
    assert [path.name for path in Path().iterdir()] == ["pyproject.toml"]


FORGOTTEN: dict[str, StageKey] = {
    "dense": (INDEX, "rotated"),
    "pages": (MAIN, "stored"),
    "picks": (INDEX, "topk"),
    "scores": (INDEX, "scores"),
    "query": (QUERY, "query"),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_a_declared_stage_that_does_not_come_is_skipped_and_named(
    what: str, cli: Cli, small_model: Path, candidate_named: Named
) -> None:
    key = FORGOTTEN[what]
    kept = create("emulated:fused-fp8").stages(4) - {key}
    name = candidate_named("test:wrapped", Wrapped(keep(*kept)))
    options = (*run_options(small_model), "--candidate", name, "--layers", "0")

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


def test_a_module_outside_of_the_package_can_be_judged(
    cli: Cli, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside.py").write_text(
        "from needlepoint.optimized.candidates import create\n"
        "def fused(): return create('emulated:fused-fp4')\n"
        "def broken(): raise ImportError('no kernel for this machine')\n"
        "def leaves(): raise SystemExit(0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "outside", raising=False)

    options = (*run_options(small_model), "--layers", "0")
    assert cli("verify", *options, "--candidate", "outside:fused").returncode == 0
    done = cli("verify", *options, "--candidate", "outside:broken")
    assert done.returncode == 2
    assert "no kernel for this machine" in done.stderr
    assert done.stderr.count("\n") == 1
    done = cli("verify", *options, "--candidate", "outside:leaves")
    assert done.returncode == 2
    assert "outside:leaves" in done.stderr


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
    kept: tuple[StageKey, ...], judge: Judge, small_inputs: Load
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


def trade_last(inputs: LayerInputs, observed: Observed) -> Observed:
    """Trade a pick of the last query for an entry that it does not pick."""
    assert observed.topk is not None
    picks = observed.topk.clone()
    picks[-1, 0] = next(entry for entry in range(50) if entry not in picks[-1])
    return replace(observed, topk=picks)


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
    case: str, judge: Judge, small_inputs: Load
) -> None:
    kept, kind = TRADED[case]

    result = judge(small_inputs(layers=(0,)), only(*kept, then=trade_last)).result

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


def test_an_unreturned_query_does_not_hide_wrong_scores(judge: Judge, small_inputs: Load) -> None:
    def louder(inputs: LayerInputs, observed: Observed) -> Observed:
        return cast(Observed, with_scores(lambda s: s * 1.004)(inputs, observed))

    result = judge(small_inputs(layers=(0,)), only((INDEX, "scores"), then=louder)).result

    scores = layer_stage(result, INDEX, "scores")
    assert scores.verdict == "differ"
    assert scores.local == scores.accumulated


def test_a_candidate_s_own_attention_is_reported_and_not_judged(
    judge: Judge, small_inputs: Load
) -> None:
    inputs = small_inputs(layers=(0,))
    whole = judge(inputs, create("emulated:fused-fp8")).result

    def half(given: LayerInputs, observed: Observed) -> Observed:
        attention = torch.zeros(200, 1, 512)
        attention[3] = torch.nan
        return replace(observed, attention=attention)

    own = Wrapped(half, adds=frozenset({(MAIN, "attention")}))
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


@pytest.mark.parametrize("contract", ["bf16", "exact"])
def test_a_contract_is_a_profile_too(
    contract: str, judge: Judge, small_inputs: Load, as_candidate: Callable[..., Candidate]
) -> None:
    inputs = small_inputs(tokens=400)
    candidate = as_candidate(inputs, CONTRACTS[contract])

    result = judge(inputs, candidate).result

    assert result.verdict == "match"
    assert result.counts.compared == 17
    assert result.candidates[0].profile.name == contract
    cost = getattr(result.candidates[0].format_cost, contract)
    assert cost.rel_max < 1e-5
    # `exact` has a query latent that is not rounded to bf16, unlike the given queries.
    assert cost.overlap_mean > 0.99


@pytest.mark.parametrize(
    ("contract", "change"),
    [
        # Not a bf16 number, although as close to the reference as fp32 gets.
        ("bf16", lambda x: x * (1 + 2.0**-12)),
        ("exact", lambda x: x * (1 + 2.0**-12)),
        ("exact", lambda x: x.to(torch.bfloat16).to(torch.float64)),
    ],
)
def test_a_contract_as_profile_is_judged_by_its_own_roundings(
    contract: str,
    change: Callable[[Tensor], Tensor],
    judge: Judge,
    small_inputs: Load,
    as_candidate: Callable[..., Candidate],
) -> None:
    inputs = small_inputs(layers=(0,))

    result = judge(inputs, as_candidate(inputs, CONTRACTS[contract], change)).result

    first = result.candidates[0].first_divergence
    assert first is not None
    assert (first.layer, first.path, first.stage) == (0, MAIN, "normed")


def test_candidates_of_several_profiles_are_judged_side_by_side(
    judge: Judge, small_inputs: Load, as_candidate: Callable[..., Candidate]
) -> None:
    inputs = small_inputs(layers=(0,))
    names = ("emulated:fused-bf16", "emulated:fused-fp8", "emulated:fused-fp4")
    others = [as_candidate(inputs, CONTRACTS[name]) for name in ("bf16", "exact")]
    candidates = [*(create(name) for name in names), *others]

    together = judge(inputs, *candidates).result
    alone = [judge(inputs, candidate).result.candidates[0] for candidate in candidates]

    assert together.verdict == "match"
    assert list(together.candidates) == alone


def test_every_candidate_is_named_once(judge: Judge, small_inputs: Load) -> None:
    twice = [create("emulated:fused-fp8")] * 2
    with pytest.raises(ValueError, match="fused-fp8 is named twice"):
        judge(small_inputs(), *twice)
    with pytest.raises(ValueError, match="no candidate"):
        judge(small_inputs())


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
    part: str, cli: Cli, small_model: Path, candidate_named: Named
) -> None:
    """Equal recordings match even where nothing says what a score may be."""

    def odd(inputs: LayerInputs, observed: Observed) -> Observed:
        found = observed if observed.topk is None else trade_last(inputs, observed)
        return cast(Observed, with_scores(lambda s: s * 1.004)(inputs, found))

    kept = PARTS[part]
    names = {
        "sound": candidate_named("test:sound", only(*kept)),
        "odd": candidate_named("test:odd", only(*kept, then=odd)),
    }
    for out in ("sound", "odd", "again"):
        name = names.get(out, names["odd"])
        options = (*run_options(small_model), "--candidate", name, "--layers", "0", "--out", out)
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


def test_nothing_is_recorded_of_layers_without_a_compressor(
    small_inputs: Load, tmp_path: Path
) -> None:
    inputs = replace(small_inputs(layers=(0, 2)), layers=(2,))

    with pytest.raises(ValueError, match=r"layers \[2\] have ratio 0"):
        record(
            inputs,
            None,
            tmp_path / "out",
            contract=CONTRACTS["bf16"],
            force=False,
            progress=NoProgress(),
        )
    assert not list(tmp_path.iterdir())


def test_the_shipped_recording_matches(cli: Cli) -> None:
    options = ("--tokens", "600", "--candidate", "emulated:fused-fp4", "--json", "r.json")

    assert cli("verify", *options).returncode == 0

    result = load_result(Path("r.json"))
    assert (result.input.name, result.input.model) == ("mini", "mini")
    assert (result.counts.expected, result.counts.compared) == (17, 17)


class Forger(Wrapped):
    """A name that would print a verdict of its own."""

    @property
    def info(self) -> CandidateInfo:
        return replace(create(self.inner).info, name="a\nmatch: 1 of 1")


def test_a_name_on_two_lines_is_refused(judge: Judge, small_inputs: Load) -> None:
    with pytest.raises(ValueError, match="printable text on one line"):
        judge(small_inputs(), Forger(untouched))
