"""transformers' DeepSeek-V4 modules: they match their profile, and faults in them are found."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from subprocess import CompletedProcess
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.engines import transformers as engine_transformers
from needlepoint.reference.config import MODELS
from needlepoint.reference.hadamard import hadamard
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import EXACT
from needlepoint.reference.rope import rope_frequencies
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.schema.result import CandidateResult

Cli = Callable[..., CompletedProcess[str]]
Judge = Callable[..., PipelineOutput]
Load = Callable[..., Inputs]
Modules: TypeAlias = Any

installed = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="the package transformers (extra `engines`) is not installed",
)


@pytest.fixture(scope="module")
def modules() -> Modules:
    return engine_transformers.load_modules()


def failed(result: CandidateResult) -> set[tuple[str, str]]:
    return {
        (stage.path, stage.stage)
        for layer in result.layers
        for stage in layer.stages
        if stage.verdict == "differ"
    }


@installed
def test_every_stage_that_they_have_matches(judge: Judge, small_inputs: Load) -> None:
    inputs = small_inputs(tokens=150, layers=(0, 1))

    result = judge(inputs, create("transformers")).result

    assert result.verdict == "match"
    assert (result.counts.expected, result.counts.skipped) == (16, ())
    (candidate,) = result.candidates
    compared = {
        (s.path, s.stage)
        for layer in candidate.layers
        for s in layer.stages
        if s.kind == "compared"
    }
    assert {stage for _, stage in compared} == {
        *("pooled", "normed", "roped", "stored", "query", "weights", "scores", "topk")
    }
    assert {(s.path, s.stage) for s in result.counts.not_covered} == {("index", "rotated")}
    assert "5." in candidate.kernel.variant


def half_split(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """RoPE over halves instead of adjacent pairs, a mistake that reads well and recalls badly."""
    cos, sin = (t.unsqueeze(unsqueeze_dim) for t in (cos, sin))
    width = 2 * cos.shape[-1]
    a, b = x[..., -width:].float().chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.cat((x[..., :-width], turned.to(x.dtype)), dim=-1)


@installed
def test_another_rope_layout_is_found_where_it_acts(
    judge: Judge, small_inputs: Load, modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "apply_rotary_pos_emb", half_split)

    (result,) = judge(
        small_inputs(tokens=64, layers=(0,)), create("transformers")
    ).result.candidates

    assert {("index", "roped"), ("main", "roped"), ("query", "query")} <= failed(result)
    assert not failed(result) & {("index", "pooled"), ("index", "normed"), ("index", "scores")}


@installed
def test_a_scorer_without_relu_is_found_in_the_scores(
    judge: Judge, small_inputs: Load, modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules.F, "relu", lambda x: x)

    (result,) = judge(
        small_inputs(tokens=64, layers=(0,)), create("transformers")
    ).result.candidates

    assert failed(result) == {("index", "scores")}


@installed
def test_in_fp32_their_structure_is_the_exact_contract_without_rotation(
    modules: Modules, small_inputs: Load
) -> None:
    """Whole layer from the hidden states, weights by their names: no code and no table of ours."""
    inputs = small_inputs(tokens=200, layers=(0,))
    weights, config = inputs.weights(0), inputs.config
    assert weights.main is not None
    assert weights.index is not None
    theirs = modules.DeepseekV4CSACompressor(
        modules.DeepseekV4Config(
            num_hidden_layers=1,
            hidden_size=config.hidden_size,
            q_lora_rank=config.q_lora_rank,
            index_n_heads=config.index_n_heads,
            index_topk=config.index_topk,
            layer_types=["compressed_sparse_attention"],
            rope_parameters={
                "rope_type": "yarn",
                "factor": config.rope_factor,
                "original_max_position_embeddings": config.original_length,
                "beta_fast": config.beta_fast,
                "beta_slow": config.beta_slow,
            },
        )
    ).float()
    named: dict[str, Tensor | None] = {
        "q_b_proj.weight": weights.index_wq_b,
        "scorer.weights_proj.weight": weights.weights_proj,
    }
    for prefix, part in (("", weights.main), ("indexer.", weights.index)):
        named_part = {
            "kv_proj.weight": part.wkv,
            "gate_proj.weight": part.wgate,
            "position_bias": part.ape,
            "kv_norm.weight": part.norm,
        }
        for name, tensor in named_part.items():
            theirs.get_parameter(prefix + name).data.copy_(tensor)
    for name, parameter in named.items():
        assert parameter is not None
        theirs.get_parameter(f"indexer.{name}").data.copy_(parameter)
    seen: dict[str, Tensor] = {}
    theirs.indexer.scorer.register_forward_hook(
        lambda _, taken, scores: seen.update(keys=taken[1][0], scores=scores[0])
    )

    first = inputs.requests[0]
    hidden = inputs.hidden(0)[:first]
    layer = ReferenceLayer(config, 0, weights, EXACT)
    ours = layer.forward(hidden, layer.new_request(), keep_scores=True).tensors()
    latent = layer.project_inputs(hidden).latent
    with torch.no_grad():
        rows, _ = theirs(
            hidden.float()[None], latent.float()[None], torch.arange(first)[None], None, 0
        )

    def apart(one: Tensor, other: Tensor) -> float:
        return float((one.double() - other).norm() / other.norm())

    visible = ours["index", "scores"] > -torch.inf
    assert apart(rows[0, 0], ours["main", "stored"]) < 1e-6
    assert apart(hadamard(seen["keys"].double()), ours["index", "stored"]) < 1e-6
    assert apart(seen["scores"][visible], ours["index", "scores"][visible]) < 1e-6


@installed
@pytest.mark.parametrize("model", ["v4-flash", "mini"])
def test_their_yarn_frequencies_are_ours(modules: Modules, model: str) -> None:
    config = MODELS[model]
    theirs = modules.DeepseekV4RotaryEmbedding(
        modules.DeepseekV4Config(
            rope_parameters={
                "rope_type": "yarn",
                "factor": config.rope_factor,
                "original_max_position_embeddings": config.original_length,
                "beta_fast": config.beta_fast,
                "beta_slow": config.beta_slow,
            }
        )
    )

    for label, compressed in (("compress", True), ("main", False)):
        found = getattr(theirs, f"{label}_inv_freq")
        # One fp32 step: they take the power in fp32, we in float64.
        torch.testing.assert_close(found, rope_frequencies(config, compressed), rtol=2e-7, atol=0)
        assert getattr(theirs, f"{label}_attention_scaling") == 1.0


def test_without_the_package_nothing_is_judged(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def absent(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "transformers" else real(name, package)

    engine_transformers.load_modules.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", absent)

    done = cli("verify", "--candidate", "transformers")

    assert done.returncode == 2
    assert "the package transformers is not installed; `pip install" in done.stderr
    assert done.stdout == ""


@installed
def test_a_version_without_the_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_transformers.load_modules.cache_clear()
    monkeypatch.setattr(engine_transformers, "MODULE", "transformers.models.deepseek_v9")

    with pytest.raises(ValueError, match=r"transformers 5\.\S+ has no .*deepseek_v9"):
        create("transformers")


@installed
def test_a_score_tensor_beyond_the_budget_is_refused(
    judge: Judge, small_inputs: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_transformers, "SCORE_BYTES", 1 << 10)

    with pytest.raises(ValueError, match="candidate transformers, layer 0: their scorer needs"):
        judge(small_inputs(tokens=64, layers=(0,)), create("transformers"))
