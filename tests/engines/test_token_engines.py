"""Profiles of one index key a token, and the indexers of transformers beside the reference."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import Candidate
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import EXACT
from needlepoint.reference.rope import in_pairs
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.schema.result import CandidateResult

Engine = Callable[..., Candidate]
Judge = Callable[..., PipelineOutput]
Load = Callable[..., Inputs]
Modules: TypeAlias = Any

MODEL_NAMES = ("v3.2", "glm")
STAGES = {
    *(f"index.{stage}" for stage in ("normed", "roped", "rotated", "stored", "scores", "topk")),
    *("query.query", "query.weights"),
}


def stages(result: CandidateResult, verdict: str) -> list[str]:
    return [
        f"{stage.path}.{stage.stage}"
        for layer in result.layers
        for stage in layer.stages
        if stage.verdict == verdict
    ]


@pytest.mark.parametrize("model", MODEL_NAMES)
@pytest.mark.parametrize(
    ("profile", "fmt"),
    [("deepseek-v3.2", "fp8"), ("sglang-v3.2", "fp8"), ("transformers", "bf16")],
)
def test_engines_match_their_profiles(
    judge: Judge,
    token_inputs: Load,
    token_engine: Engine,
    model: str,
    profile: str,
    fmt: str,
) -> None:
    result = judge(token_inputs(model), token_engine(profile, fmt)).result

    (candidate,) = result.candidates
    own = STAGES if profile == "deepseek-v3.2" else STAGES - {"index.rotated"}
    assert set(stages(candidate, "match")) == own, stages(candidate, "differ")


@pytest.mark.parametrize(
    ("declared", "does", "stage"),
    [
        ("deepseek-v3.2", "sglang-v3.2", "index.stored"),
        ("sglang-v3.2", "deepseek-v3.2", "index.normed"),
    ],
)
def test_an_engine_of_another_profile_is_found(
    judge: Judge,
    token_inputs: Load,
    token_engine: Engine,
    declared: str,
    does: str,
    stage: str,
) -> None:
    (result,) = judge(token_inputs(), token_engine(declared, "fp8", does=does)).result.candidates

    assert stage in stages(result, "differ")


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="the package transformers (extra `engines`) is not installed",
)
@pytest.mark.parametrize("model", MODEL_NAMES)
def test_modules_of_transformers_in_fp32_agree_with_exact(token_inputs: Load, model: str) -> None:
    inputs = token_inputs(model)
    layout = inputs.config.index_rope
    weights, hidden = inputs.weights(0), inputs.hidden(0)[:90]
    layer = ReferenceLayer(inputs.config, 0, weights, replace(EXACT, hadamard=False))
    meant = layer.forward(hidden, layer.new_request(), keep_scores=True)
    assert meant.index is not None
    assert meant.scores is not None
    assert meant.topk is not None

    found = indexer(model, inputs, hidden, meant.projected.latent, layer)

    assert torch.allclose(found.normed.double(), meant.index.normed, atol=2e-6, rtol=1e-6)
    roped = in_pairs(meant.index.roped, layout, 32)
    roped = torch.cat((roped[:, 64::2], roped[:, 65::2], roped[:, :64]), 1)  # halves, as theirs
    assert torch.allclose(found.roped.double(), roped, atol=2e-6, rtol=1e-6)
    ranked = meant.scores.sort(1, descending=True).values
    clear = ranked[:, 23] - ranked[:, 24] > 1e-6 * ranked[:, 0].abs()
    clear[:24] = False  # they list masked keys where fewer are visible
    assert int(clear.sum()) > 50
    assert torch.equal(found.picks.sort(1).values[clear].int(), meant.topk[clear])


@dataclass(frozen=True)
class Theirs:
    normed: Tensor
    roped: Tensor
    picks: Tensor


def indexer(
    model: str, inputs: Inputs, hidden: Tensor, latent: Tensor, layer: ReferenceLayer
) -> Theirs:
    """Run the indexer of transformers in fp32 with our weights."""
    names = {"v3.2": ("deepseek_v32", "DeepseekV32"), "glm": ("glm_moe_dsa", "GlmMoeDsa")}
    folder, prefix = names[model]
    base = f"transformers.models.{folder}"
    settings: Modules = importlib.import_module(f"{base}.configuration_{folder}")
    modules: Modules = importlib.import_module(f"{base}.modeling_{folder}")
    own = json.loads(Path(inputs.config.name).read_text())
    shapes = {k: v for k, v in own.items() if k not in ("model_type", "rope_scaling")}
    config = getattr(settings, f"{prefix}Config")(**shapes)
    module = getattr(modules, f"{prefix}Indexer")(config, 0).float()
    weights = inputs.weights(0)
    assert weights.index is not None
    assert weights.index.norm_bias is not None
    assert weights.index_wq_b is not None
    assert weights.weights_proj is not None
    module.load_state_dict(
        {
            "wq_b.weight": weights.index_wq_b.float(),
            "wk.weight": weights.index.wkv.float(),
            "k_norm.weight": weights.index.norm,
            "k_norm.bias": weights.index.norm_bias,
            "weights_proj.weight": weights.weights_proj.float(),
        }
    )
    kept: dict[str, Tensor] = {}

    class Cache:
        def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
            kept["roped"] = keys[0]
            return keys

    module.k_norm.register_forward_hook(lambda *call: kept.__setitem__("normed", call[2][0]))
    table = layer.rope(0, len(hidden)).float()
    cos, sin = (torch.cat((x, x), -1)[None] for x in table.unbind(-1))
    mask = torch.full((len(hidden), len(hidden)), -torch.inf).triu(1)[None]
    positions = torch.arange(len(hidden))[None]
    picks = module(
        hidden.float()[None], latent.float()[None], (cos, sin), mask, positions, cache=Cache()
    )
    return Theirs(kept["normed"], kept["roped"], picks[0])
