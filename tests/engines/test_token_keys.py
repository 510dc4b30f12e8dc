"""Layers of one index key a token (DeepSeek-V3.2, GLM-5): sound candidates match, faults show."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import (
    INDEX,
    CandidateInfo,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.reference.config import MODELS
from needlepoint.reference.formats.names import RopeLayout
from needlepoint.reference.profile import EXACT
from needlepoint.reference.token_keys import token_keys
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.schema.result import CandidateResult

Judge = Callable[..., PipelineOutput]
Cli = Callable[..., CompletedProcess[str]]

MODEL_NAMES = ("v3.2", "glm")
STAGES = {
    *(f"index.{stage}" for stage in ("normed", "roped", "rotated", "stored", "scores", "topk")),
    *("query.query", "query.weights"),
}
Load = Callable[..., Inputs]


def stages(result: CandidateResult, verdict: str) -> list[str]:
    return [
        f"{stage.path}.{stage.stage}"
        for layer in result.layers
        for stage in layer.stages
        if stage.verdict == verdict
    ]


@pytest.mark.parametrize("model", MODEL_NAMES)
@pytest.mark.parametrize("kind", ["gaussian", "outlier", "small", "ties", "pow2", "bits"])
def test_emulated_candidates_match(judge: Judge, token_inputs: Load, model: str, kind: str) -> None:
    names = ("emulated:fused-bf16", "emulated:fused-fp8", "emulated:unfused-bf16")

    result = judge(token_inputs(model, kind), *(create(name) for name in names)).result

    assert result.verdict == "match"
    for candidate in result.candidates:
        assert set(stages(candidate, "match")) == STAGES
    assert result.candidates[1].format_cost.cache_bytes_per_token == 132


SOUND = create("emulated:fused-fp8")


@dataclass(frozen=True)
class Faulty:
    """The emulation of a layer that was read wrongly, or whose results were changed."""

    given: Callable[[LayerInputs], LayerInputs]
    observed: Callable[[Observed], Observed]

    @property
    def info(self) -> CandidateInfo:
        return replace(SOUND.info, name="test:faulty")

    def stages(self, ratio: int) -> frozenset[StageKey]:
        return SOUND.stages(ratio)

    def run(self, inputs: LayerInputs) -> Observed:
        return self.observed(SOUND.run(self.given(inputs)))


def same(observed: Observed) -> Observed:
    return observed


def read_as(layout: RopeLayout) -> Callable[[LayerInputs], LayerInputs]:
    return lambda given: replace(given, index_rope=layout)


def with_index(**change: Callable[[Tensor], Tensor]) -> Callable[[LayerInputs], LayerInputs]:
    def read(given: LayerInputs) -> LayerInputs:
        assert given.index is not None
        parts = given.index.tensors()
        return replace(
            given, index=replace(given.index, **{n: f(parts[n]) for n, f in change.items()})
        )

    return read


def one_late(given: LayerInputs) -> LayerInputs:
    return replace(given, rope_table=given.rope_table.roll(1, 0))


def unscaled(given: LayerInputs) -> LayerInputs:
    return replace(given, weight_scale=given.weight_scale * 128**0.5)


def uncentred(observed: Observed) -> Observed:
    """Give an RMS norm's rows, all later stages as they were."""
    rows = observed.dense[INDEX, "normed"] + 0.05
    return replace(observed, dense={**observed.dense, (INDEX, "normed"): rows})


def interleaved(observed: Observed) -> Observed:
    """Write each row's scale behind its values instead of behind those of the whole page."""
    paged = observed.stored[INDEX]
    pool = paged.pool.clone()
    values = paged.pool[:, : 64 * 128].view(-1, 64, 128)
    scales = paged.pool[:, 64 * 128 :].view(-1, 64, 4)
    pool.view(-1, 64, 132)[:] = torch.cat((values, scales), 2)
    return replace(observed, stored={INDEX: replace(paged, pool=pool)})


def unrotated_keys(observed: Observed) -> Observed:
    rows = observed.dense[INDEX, "roped"]
    return replace(observed, dense={**observed.dense, (INDEX, "rotated"): rows})


def past_only(observed: Observed) -> Observed:
    """Hide every query's own token, as where a position counts the keys before it."""
    read = observed.scores
    assert read is not None

    def scores(request: int, start: int, stop: int) -> Tensor:
        found = read(request, start, stop).clone()
        entries = torch.arange(found.shape[1])
        return found.masked_fill(entries >= torch.arange(start, stop)[:, None], -torch.inf)

    return replace(observed, scores=scores)


def first_keys(observed: Observed) -> Observed:
    assert observed.topk is not None
    k = observed.topk.shape[1]
    picks = torch.where(observed.topk < 0, observed.topk, torch.arange(k, dtype=torch.int32))
    return replace(observed, topk=picks)


def negated_queries(observed: Observed) -> Observed:
    assert observed.query is not None
    codes = observed.query.codes ^ 0x80
    return replace(observed, query=replace(observed.query, codes=codes))


def as_given(given: LayerInputs) -> LayerInputs:
    return given


FAULTS: dict[str, tuple[Faulty, str]] = {
    "pairs for halves": (Faulty(read_as(RopeLayout.LEADING_PAIRS), same), "index.roped"),
    "trailing dims": (Faulty(read_as(RopeLayout.TRAILING_PAIRS), same), "index.roped"),
    "position one late": (Faulty(one_late, same), "index.roped"),
    "bias left out": (Faulty(with_index(norm_bias=torch.zeros_like), same), "index.normed"),
    "weight left out": (Faulty(with_index(norm_weight=torch.ones_like), same), "index.normed"),
    "mean kept": (Faulty(as_given, uncentred), "index.normed"),
    "key not rotated": (Faulty(as_given, unrotated_keys), "index.rotated"),
    "scales interleaved": (Faulty(as_given, interleaved), "index.stored"),
    "head size left out": (Faulty(unscaled, same), "query.weights"),
    "sign of the query": (Faulty(as_given, negated_queries), "query.query"),
    "own token hidden": (Faulty(as_given, past_only), "index.scores"),
    "first keys picked": (Faulty(as_given, first_keys), "index.topk"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_at_its_stage(judge: Judge, token_inputs: Load, fault: str) -> None:
    candidate, stage = FAULTS[fault]

    (result,) = judge(token_inputs(), candidate).result.candidates

    assert result.verdict == "differ"
    assert result.first_divergence is not None
    assert f"{result.first_divergence.path}.{result.first_divergence.stage}" == stage


def test_a_layer_that_reuses_picks_is_listed(judge: Judge, token_inputs: Load) -> None:
    (result,) = judge(token_inputs("glm", layers=(0, 1)), SOUND).result.candidates

    assert [(layer.layer, layer.ratio) for layer in result.layers] == [(0, 1), (1, 0)]
    assert result.verdict == "match"


def test_glm_read_as_v32_is_found_and_the_reverse(judge: Judge, token_inputs: Load) -> None:
    for model, other in (("glm", RopeLayout.LEADING_HALVES), ("v3.2", RopeLayout.LEADING_PAIRS)):
        (result,) = judge(token_inputs(model), Faulty(read_as(other), same)).result.candidates

        assert set(stages(result, "differ")) >= {"index.roped", "query.query"}


def test_recordings_of_both_sides_are_compared(cli: Cli, token_models: dict[str, Path]) -> None:
    model = token_models["v3.2"]
    words = ("--input", "synthetic", "--model", model, "--tokens", 150, "--layers", 0, "--quiet")
    for name, who in (("reference", ()), ("fp8", ("--candidate", "emulated:fused-fp8"))):
        assert cli("record", "--out", name, *words, *who).returncode == 0

    found = cli("diff", "reference", "fp8", "--json", "out.json")

    assert found.returncode == 0, found.stderr
    result = json.loads(Path("out.json").read_text())
    assert result["verdict"] == "match"
    assert result["counts"]["compared"] == 11


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--tokens", 600, "--swap", "--candidate", "emulated:fused-fp8"), "--swap"),
        (("--tokens", 128, "--candidate", "emulated:fused-fp8"), "no smaller than the pool"),
    ],
)
def test_what_cannot_be_asked_is_refused(cli: Cli, more: tuple[object, ...], told: str) -> None:
    found = cli("verify", "--model", "mini-v3.2", "--input", "synthetic", "--layers", 0, *more)

    assert found.returncode == 2
    assert told in found.stderr


@pytest.mark.parametrize("declared", [frozenset(), frozenset({("index", "pooled")})])
def test_a_candidate_that_does_not_know_such_layers_is_refused(
    judge: Judge, token_inputs: Load, declared: frozenset[StageKey]
) -> None:
    class Other(Faulty):
        def stages(self, ratio: int) -> frozenset[StageKey]:
            return declared

    with pytest.raises(ValueError, match="one index key a token"):
        judge(token_inputs(), Other(as_given, same))


@pytest.mark.parametrize("part", ["kv", "norm_bias"])
def test_the_emulation_refuses_numbers_that_are_none(
    judge: Judge, token_inputs: Load, part: str
) -> None:
    broken = Faulty(with_index(**{part: lambda x: torch.full_like(x, torch.nan)}), same)

    with pytest.raises(ValueError, match=f"index.{part}: nan at"):
        judge(token_inputs(), broken)


def test_the_reference_needs_the_bias(token_inputs: Load) -> None:
    inputs = token_inputs()
    weights = inputs.weights(0).index
    assert weights is not None
    bare = replace(weights, norm_bias=None)
    rows = torch.zeros(2, 128, dtype=torch.float64)
    with pytest.raises(ValueError, match="need norm_bias"):
        token_keys(rows, bare, 1e-6, torch.zeros(2, 32, 2), inputs.config.index_rope, EXACT, 0)


def test_the_emulation_needs_the_bias(judge: Judge, token_inputs: Load) -> None:
    def without(given: LayerInputs) -> LayerInputs:
        assert given.index is not None
        return replace(given, index=replace(given.index, norm_bias=None))

    with pytest.raises(ValueError, match="the bias of its norm"):
        judge(token_inputs(), Faulty(without, same))


def test_presets_have_the_published_shapes() -> None:
    v32, glm = MODELS["v3.2"], MODELS["glm-5.2"]
    assert (v32.index_topk, glm.index_topk) == (2048, 2048)
    assert (v32.index_rope, glm.index_rope) == (
        RopeLayout.LEADING_HALVES,
        RopeLayout.LEADING_PAIRS,
    )
    own = [layer for layer, ratio in enumerate(glm.compress_ratios) if ratio]
    assert own == [0, 1, 2, *range(6, 78, 4)]
