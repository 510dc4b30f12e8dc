"""Recall reads the judge's reference: one projection of each token, weights drawn once a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import create
from needlepoint.optimized.protocol.interface import (
    Candidate,
    CandidateInfo,
    LayerInputs,
    Observed,
    StageKey,
)
from needlepoint.optimized.protocol.optional import ComputesRows
from needlepoint.reference import linear, main_attention, projections
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import BF16_CONTRACT, CONTRACTS, EXACT
from needlepoint.reference.topk import visible_entries
from needlepoint.reference.weights import LayerWeights, random_layer_weights
from needlepoint.verify.base.progress import NoProgress
from needlepoint.verify.inputs.load import Inputs, load_inputs
from needlepoint.verify.inputs.recall_needles import Needle, RequestNeedle
from needlepoint.verify.numerics.limits import Limits
from needlepoint.verify.recall import queries as recall_queries
from needlepoint.verify.recall.model import NeedlePrompt, RecallModel, Setting
from needlepoint.verify.recall.queries import LayerReference, project_request
from needlepoint.verify.recall.run import Gathered, run_prompts
from needlepoint.verify.run.pipeline import verify

LENGTH = 560
K = 64
PER_TOKEN = ("index.wkv", "index.wgate", "main.wkv", "main.wgate")
QUERIES = ("wq_a", "index_wq_b", "weights_proj")


@dataclass(frozen=True)
class Whole:
    """A candidate that cannot compute some rows alone; it picks the last entries that it sees."""

    inner: Candidate

    @property
    def info(self) -> CandidateInfo:
        return self.inner.info

    def stages(self, ratio: int) -> frozenset[StageKey]:
        return self.inner.stages(ratio)

    def run(self, inputs: LayerInputs) -> Observed:
        return last_picked(self.inner.run(inputs), torch.arange(inputs.lengths[0]))


@dataclass(frozen=True)
class Rows(Whole):
    """The same candidate, which computes rows alone."""

    def run_rows(self, inputs: LayerInputs, positions: Tensor) -> Observed:
        assert isinstance(self.inner, ComputesRows)
        return last_picked(self.inner.run_rows(inputs, positions), positions)


def last_picked(found: Observed, positions: Tensor) -> Observed:
    last = ((positions + 1) // 4).unsqueeze(1) - K + torch.arange(K)
    return replace(found, topk=last.clamp(min=-1).to(torch.int32))


@pytest.fixture
def needles() -> tuple[Needle, ...]:
    """Return needles far from their queries; some of them the reference picks."""
    return tuple(Needle(28 * i, 28 * i + 4, LENGTH - 1 - 3 * i, 0.05 * i) for i in range(16))


@pytest.fixture
def model() -> RecallModel:
    inputs = load_inputs("synthetic", layers=(0,), tokens=LENGTH)
    config = replace(inputs.config, index_topk=K)
    assert config.ratio(0) == 4
    return RecallModel(config, (0,), lambda layer: random_layer_weights(config, layer, 0), 0)


@pytest.fixture
def prompt(model: RecallModel, needles: tuple[Needle, ...]) -> NeedlePrompt:
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(LENGTH, model.config.hidden_size, generator=draw).to(torch.bfloat16)
    return NeedlePrompt(Setting(LENGTH, 0, 0), needles, lambda layer: hidden)


@pytest.fixture
def projected(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the tokens that go through each weight, by the address of its bytes."""
    counts: Counter[int] = Counter()
    real = linear.project

    def counted(x: Tensor, weight: Tensor, *arguments: object, **named: object) -> Tensor:
        counts[weight.data_ptr()] += len(x)
        return real(x, weight, *arguments, **named)  # type: ignore[arg-type]

    for module in (projections, main_attention, recall_queries):
        monkeypatch.setattr(module, "project", counted)
    return counts


def named(weights: LayerWeights) -> dict[int, str]:
    found: dict[int, str] = {}
    for name, value in vars(weights).items():
        parts = {name: value} if isinstance(value, Tensor) else {}
        if name in ("index", "main"):
            parts = {f"{name}.{key}": tensor for key, tensor in value.tensors().items()}
        found |= {tensor.data_ptr(): key for key, tensor in parts.items()}
    return found


def run(
    prompts: Sequence[NeedlePrompt], model: RecallModel, candidates: Sequence[Candidate]
) -> list[Gathered]:
    makes: list[Callable[[], NeedlePrompt]] = [lambda prompt=p: prompt for p in prompts]  # type: ignore[misc]
    return run_prompts(makes, model, candidates, BF16_CONTRACT, Limits.default(), NoProgress())


@pytest.mark.parametrize("whole", [False, True])
def test_every_token_is_projected_once_by_each_weight(
    prompt: NeedlePrompt, model: RecallModel, projected: Counter[int], whole: bool
) -> None:
    weights = model.weights(0)
    fixed = replace(model, weights=lambda layer: weights)
    candidates = [create(f"emulated:fused-{name}") for name in ("bf16", "fp8", "fp4")]
    found = run([prompt], fixed, [Whole(c) if whole else Rows(c) for c in candidates])
    priced = {m.outcome.needle for g in found for m in g.misses if m.price is not None}
    assert len(priced) > 1, "a miss that is priced reads main rows and windows"

    names = named(weights)
    tokens = {names[address]: count for address, count in projected.items()}
    rows = LENGTH if whole else len(prompt.needles)
    assert {name: tokens[name] for name in PER_TOKEN} == dict.fromkeys(PER_TOKEN, LENGTH)
    assert {name: tokens[name] for name in QUERIES} == dict.fromkeys(QUERIES, rows)
    assert tokens["wkv"] <= LENGTH
    assert whole or tokens["wkv"] < 200, "the windows of the needles' queries, no more"


def test_weights_are_drawn_once_a_layer(prompt: NeedlePrompt, model: RecallModel) -> None:
    drawn: list[int] = []

    def draw(layer: int) -> LayerWeights:
        drawn.append(layer)
        return random_layer_weights(model.config, layer, 0)

    candidates = [create("emulated:fused-fp8"), Whole(create("emulated:fused-fp4"))]
    run([prompt, prompt], replace(model, weights=draw), candidates)
    assert drawn == [0]


def test_verify_projects_and_draws_nothing_again_for_needles(
    model: RecallModel, needles: tuple[Needle, ...], projected: Counter[int]
) -> None:
    drawn_inputs = load_inputs("synthetic", layers=(0,), tokens=2 * LENGTH)
    plain = replace(drawn_inputs, config=model.config)
    drawn: list[int] = []
    weights = plain.weights(0)

    def draw(layer: int) -> LayerWeights:
        drawn.append(layer)
        return weights

    def counted(inputs: Inputs) -> dict[int, int]:
        drawn.clear()
        projected.clear()
        output = verify(
            replace(inputs, weights_of=draw),
            [create("emulated:fused-fp8")],
            contract=BF16_CONTRACT,
            limits=Limits.default(),
            stages=None,
            progress=NoProgress(),
        )
        asked = output.result.candidates[0].recall
        assert (asked is not None) == bool(inputs.needles)
        assert asked is None or asked.rows
        assert drawn == [0]
        return {address: projected[address] for address in projected}

    marked = tuple(
        RequestNeedle(0, replace(needle, query=plain.requests[0] - 1)) for needle in needles
    )
    before, after = counted(plain), counted(replace(plain, needles=marked))
    keys = {a for a, name in named(weights).items() if name in (*PER_TOKEN, *QUERIES, "wkv")}
    assert {a: before[a] for a in keys} == {a: after[a] for a in keys}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("contract", CONTRACTS)
def test_scores_and_attention_are_those_of_the_staged_reference(
    prompt: NeedlePrompt, model: RecallModel, contract: str, whole: bool
) -> None:
    weights, arithmetic = model.weights(0), CONTRACTS[contract]
    reference = LayerReference(model.config, 0, weights, arithmetic)
    queries = project_request(prompt, reference, 0, whole=whole)
    layer = ReferenceLayer(model.config, 0, weights, arithmetic, compute=reference.contract.compute)
    hidden = prompt.hidden(0)
    state = layer.new_request()
    stages = layer.forward(hidden, state, keep_scores=True)
    assert stages.scores is not None
    assert stages.main is not None
    entries = visible_entries(queries.positions, 4)
    assert torch.equal(queries.visible, entries)
    limit = 1e-9 if arithmetic is EXACT else 1e-5
    expected = stages.scores[queries.positions]
    seen = torch.isfinite(expected)
    assert torch.equal(seen, torch.isfinite(queries.scores))
    torch.testing.assert_close(
        queries.scores[seen], expected[seen].to(queries.scores.dtype), rtol=limit, atol=limit
    )
    torch.testing.assert_close(queries.main_rows, stages.main.stored.values, rtol=limit, atol=limit)
    row = 3
    position = int(queries.positions[row])
    read = queries.attention_inputs(row)
    first = position - model.config.window_size + 1
    window = layer.key_side.window_rows(
        stages.projected.window[first : position + 1],
        weights.kv_norm,
        layer.rope(first, position + 1 - first),
    )
    torch.testing.assert_close(read.window, window, rtol=limit, atol=limit)
    latent = stages.projected.latent[position : position + 1]
    q = layer.attention.queries(latent, layer.rope(position, 1), position)
    torch.testing.assert_close(read.q, q, rtol=limit, atol=limit)
