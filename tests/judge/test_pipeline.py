"""The main job as a whole: counts, verdicts, layers, what is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import jsonschema
import pytest
import torch
from safetensors import safe_open

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import (
    INDEX,
    MAIN,
    QUERY,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.recording.results import load_result, shipped_schema
from needlepoint.verify.schema.result import LayerResult, Result, StageResult

Cli = Callable[..., CompletedProcess[str]]
Judge = Callable[..., PipelineOutput]
Load = Callable[..., Inputs]

FP8 = "emulated:fused-fp8"


def stages(layer: LayerResult, kind: str) -> set[StageKey]:
    return {(s.path, s.stage) for s in layer.stages if s.kind == kind}


def test_every_stage_of_every_layer_is_listed_once_and_counted(
    judge: Judge, small_inputs: Load
) -> None:
    inputs = small_inputs(tokens=400, layers=(0, 1, 2, 3))
    assert inputs.requests == (147, 130, 123)

    result = judge(inputs, create(FP8), create("emulated:fused-bf16")).result

    assert result.verdict == "match"
    assert (result.counts.expected, result.counts.compared) == (2 * 30, 2 * 30)
    assert result.counts.skipped == ()
    assert (result.input.tokens, result.input.requests) == (400, 3)
    for candidate in result.candidates:
        assert [(e.layer, e.ratio) for e in candidate.layers] == [(0, 4), (1, 128), (2, 0), (3, 4)]
        for layer in candidate.layers:
            keys = [(s.path, s.stage) for s in layer.stages]
            assert len(keys) == len(set(keys)) == {4: 18, 128: 7, 0: 2}[layer.ratio]
            assert (layer.topk is not None) == (layer.ratio == 4)
        given = {(MAIN, "input"), (MAIN, "projected")}
        four, many, none, _ = candidate.layers
        assert stages(four, "given") == given | {(INDEX, "projected"), (QUERY, "projected")}
        assert stages(many, "given") == given
        assert stages(none, "given") == {(MAIN, "input")}
        assert stages(four, "consequence") == stages(many, "consequence") == {(MAIN, "attention")}
        assert stages(none, "not covered") == {(MAIN, "attention")}


def test_rows_are_those_of_the_requests(judge: Judge, small_inputs: Load) -> None:
    result = judge(small_inputs(tokens=400), create(FP8)).result

    four, many = result.candidates[0].layers
    for layer, entries in ((four, 36 + 32 + 30), (many, 1 + 1 + 0)):
        for stage in layer.stages:
            key_side = stage.stage in ("pooled", "normed", "roped", "rotated", "stored")
            assert stage.rows_expected == (entries if key_side else 400)
            if stage.kind in ("compared", "consequence"):
                assert stage.rows_compared == stage.rows_expected
    # The last request has no window of 128: nothing of it is among the worst rows.
    assert {row.request for s in many.stages for row in s.worst} == {0, 1}
    assert four.topk is not None
    assert (four.topk.k, four.topk.rows, four.topk.invalid) == (8, 400, 0)
    visible = [(p + 1) // 4 for n in (147, 130, 123) for p in range(n)]
    discarded = [1 - min(8, v) / v if v else 0 for v in visible]
    assert four.topk.discarded_mean == pytest.approx(sum(discarded) / 400)


def test_requests_without_an_entry_are_queries_that_see_nothing(
    judge: Judge, small_inputs: Load
) -> None:
    inputs = small_inputs(layers=(0,))
    short = replace(inputs, requests=(3, 1, 190, 2, 4))

    result = judge(short, create(FP8), create("emulated:unfused-bf16")).result

    assert result.verdict == "match"
    for candidate in result.candidates:
        layer = candidate.layers[0]
        rows = {f"{s.path}.{s.stage}": s.rows_compared for s in layer.stages}
        assert rows["index.pooled"] == rows["main.stored"] == 47 + 1
        assert rows["index.scores"] == rows["index.topk"] == rows["query.query"] == 200


def test_a_chosen_stage_is_the_only_one_that_counts(judge: Judge, small_inputs: Load) -> None:
    wanted = frozenset({(INDEX, "stored"), (INDEX, "scores")})

    output = judge(small_inputs(tokens=400), create(FP8), stages=wanted)

    result = output.result
    assert result.verdict == "match"
    assert (result.counts.expected, result.counts.compared) == (2, 2)
    four, many = result.candidates[0].layers
    assert stages(four, "compared") == wanted
    assert stages(many, "compared") == set()
    reasons = {s.reason for s in result.counts.not_covered if s.layer == 0}
    assert reasons == {"not asked for"}
    assert {name.split("/")[3] for name in output.rows} == {"stored", "scores"}


def test_stages_that_nobody_declares_are_no_match(judge: Judge, small_inputs: Load) -> None:
    says = r"--stages index\.stored: not among the stages that candidate .* declares in these"
    with pytest.raises(ValueError, match=says):
        judge(small_inputs(layers=(1,)), create(FP8), stages=frozenset({(INDEX, "stored")}))


class Spoiled:
    """The fp8 candidate with one row of some dense stages negated, by layer."""

    def __init__(self, rows: dict[int, dict[StageKey, int]]) -> None:
        self._rows = rows
        self.info = replace(create(FP8).info, name="test:spoiled")

    def stages(self, ratio: int) -> frozenset[StageKey]:
        return create(FP8).stages(ratio)

    def run(self, inputs: LayerInputs) -> Observed:
        observed = create(FP8).run(inputs)
        dense = dict(observed.dense)
        for key, row in self._rows.get(inputs.layer, {}).items():
            dense[key] = dense[key].clone()
            dense[key][row] *= -1
        return replace(observed, dense=dense)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # The earlier layer, then the earlier stage, then index before main.
        ({3: {(INDEX, "pooled"): 1}, 1: {(MAIN, "roped"): 0}}, (1, MAIN, "roped", 0)),
        ({0: {(MAIN, "pooled"): 5, (INDEX, "rotated"): 2}}, (0, MAIN, "pooled", 5)),
        ({0: {(MAIN, "normed"): 9, (INDEX, "normed"): 7}}, (0, INDEX, "normed", 7)),
        ({3: {(INDEX, "rotated"): 49}}, (3, INDEX, "rotated", 49)),
    ],
)
def test_the_first_divergence_is_first_by_layer_stage_and_path(
    rows: dict[int, dict[StageKey, int]],
    expected: tuple[int, str, str, int],
    judge: Judge,
    small_inputs: Load,
) -> None:
    inputs = small_inputs(layers=(0, 1, 3))

    result = judge(inputs, Spoiled(rows)).result

    assert result.verdict == result.candidates[0].verdict == "differ"
    first = result.candidates[0].first_divergence
    assert first is not None
    assert (first.layer, first.path, first.stage, first.entry) == expected
    ratio = 128 if expected[0] == 1 else 4
    assert first.position == (expected[3] + 1) * ratio - 1
    assert first.detail.startswith("1 of ")


def test_one_candidate_that_differs_is_enough(judge: Judge, small_inputs: Load) -> None:
    candidates = [create(FP8), Spoiled({0: {(MAIN, "pooled"): 5}})]

    result = judge(small_inputs(layers=(0,)), *candidates).result

    assert result.verdict == "differ"
    assert [c.verdict for c in result.candidates] == ["match", "differ"]
    assert result.candidates[0].first_divergence is None


def test_a_shortfall_outweighs_a_difference(judge: Judge, small_inputs: Load) -> None:
    class Forgetful(Spoiled):
        def run(self, inputs: LayerInputs) -> Observed:
            return replace(super().run(inputs), topk=None)

    candidate = Forgetful({0: {(MAIN, "pooled"): 5}})

    result = judge(small_inputs(layers=(0,)), candidate).result

    assert result.verdict == result.candidates[0].verdict == "cannot-judge"
    first = result.candidates[0].first_divergence
    assert first is not None
    assert first.stage == "pooled"
    assert result.counts.expected - result.counts.compared == 1


def options(small_model: Path) -> tuple[object, ...]:
    return ("--input", "synthetic", "--tokens", "400", "--model", small_model)


def test_the_written_result_is_valid_and_its_rows_are_beside_it(
    cli: Cli, small_model: Path
) -> None:
    names = (FP8, "emulated:unfused-bf16")
    chosen = [word for name in names for word in ("--candidate", name)]

    done = cli("verify", *options(small_model), *chosen, "--json", "r.json", "--junitxml", "r.xml")

    assert done.returncode == 0
    assert {p.name for p in Path().iterdir()} - {"pyproject.toml"} == {
        "r.json",
        "r.rows.safetensors",
        "r.xml",
    }
    document = json.loads(Path("r.json").read_text())
    jsonschema.Draft202012Validator(json.loads(shipped_schema())).validate(document)
    result = load_result(Path("r.json"))
    with safe_open("r.rows.safetensors", framework="pt") as file:
        rows = {name: file.get_tensor(name) for name in file.keys()}
    expected = {
        f"{c.name}/layer{e.layer}/{s.path}/{s.stage}/{what}": (s, what)
        for c in result.candidates
        for e in c.layers
        for s in e.stages
        if s.kind == "compared"
        for what in ("local", "accumulated", "relative")
    }
    assert rows.keys() == expected.keys()
    for name, (stage, what) in expected.items():
        assert rows[name].dtype == torch.float32
        assert len(rows[name]) == stage.rows_compared
        assert largest(stage, what) == pytest.approx(rows[name].max().item(), rel=1e-6, abs=1e-30)
    law = result.candidates[1].memory.law
    assert law is not None
    assert result.candidates[0].memory.law is None
    assert law.predicted_bytes == pytest.approx(8.25 * 2**30, rel=1e-3)


def largest(stage: StageResult, what: str) -> float | None:
    if what == "relative":
        if stage.accumulated is None or stage.accumulated.relative is None:
            return 0.0  # picks have no relative error
        return stage.accumulated.relative.max
    stats = stage.local if what == "local" else stage.accumulated
    return None if stats is None else stats.error.max


def test_a_result_with_a_shortfall_is_written_whole(
    cli: Cli, small_model: Path, candidate_named: Callable[..., str]
) -> None:
    class Forgetful(Spoiled):
        def run(self, inputs: LayerInputs) -> Observed:
            return replace(super().run(inputs), topk=None)

    candidate_named("test:forgetful", Forgetful({}))

    done = cli("verify", *options(small_model), "--candidate", "test:forgetful", "--json", "r.json")

    assert done.returncode == 2
    jsonschema.Draft202012Validator(json.loads(shipped_schema())).validate(
        json.loads(Path("r.json").read_text())
    )
    assert load_result(Path("r.json")).verdict == "cannot-judge"


def test_the_same_run_gives_the_same_result(judge: Judge, small_inputs: Load) -> None:
    one, other = (judge(small_inputs(), create("emulated:fused-fp4")) for _ in range(2))

    assert one.result == other.result
    assert one.rows.keys() == other.rows.keys()
    for name, errors in one.rows.items():
        assert torch.equal(errors, other.rows[name])


def test_the_contract_changes_cost_and_no_verdict(cli: Cli, small_model: Path) -> None:
    command = ("verify", *options(small_model), "--layers", "0", "--candidate", FP8, "--quiet")
    results = {}
    for contract in ("exact", "bf16", "official"):
        file = f"{contract}.json"
        assert cli(*command, "--contract", contract, "--json", file).returncode == 0
        results[contract] = load_result(Path(file))

    usual = results["bf16"].candidates[0]
    for contract, result in results.items():
        found = result.candidates[0]
        assert result.contract == contract
        topk, cost = found.layers[0].topk, getattr(found.format_cost, contract)
        assert topk is not None
        assert (topk.overlap_mean, topk.score_lost_max) == (cost.overlap_mean, cost.score_lost_max)
        assert 0 < cost.rel_mean < cost.rel_max < 0.2
        assert found.format_cost == usual.format_cost
        assert found.layers[0].stages == usual.layers[0].stages


def test_progress_is_told_of_every_layer(judge: Judge, small_inputs: Load) -> None:
    started: list[str] = []

    class Heard(NoProgress):
        def start(self, what: str, total: int) -> None:
            started.append(what)
            assert total > 0

    judge(small_inputs(layers=(0, 1)), create(FP8), progress=Heard())

    assert [any(f"layer {layer}" in text for text in started) for layer in (0, 1)] == [True, True]


def test_a_gate_on_overlap_is_applied_to_the_result(cli: Cli, small_model: Path) -> None:
    command = (
        "verify",
        *options(small_model),
        "--layers",
        "0",
        "--candidate",
        FP8,
        "--json",
        "r.json",
    )

    done = cli(*command, "--gate", "layers.topk.overlap_min>=1")

    result: Result = load_result(Path("r.json"))
    assert done.returncode == 1
    assert result.verdict == "differ"
    assert result.candidates[0].verdict == "match"
