"""SGLang's candidates with stand-ins for their kernels (order, slots, layouts), and the kernels."""

from __future__ import annotations

import importlib
import importlib.metadata
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.candidates.catalogue import ENTRY_POINT_GROUP
from needlepoint.optimized.protocol.interface import INDEX, MAIN, Candidate, LayerInputs, Observed
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.verify.engines import deepgemm as engine_deepgemm
from needlepoint.verify.engines import sglang as engine_sglang
from needlepoint.verify.engines.plan import completed, entry_slots, switches
from needlepoint.verify.engines.sglang import Kernels, SglangCandidate, select
from needlepoint.verify.inputs.layer_inputs import given_layer
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.schema.result import CandidateResult

ROOT = Path(__file__).parents[2]
Codes: TypeAlias = Any
Plan: TypeAlias = Any
Engine = Callable[..., Candidate]
Judge = Callable[..., PipelineOutput]
Load = Callable[..., Inputs]


def failed(result: CandidateResult) -> set[str]:
    return {
        f"{s.path}.{s.stage}" for la in result.layers for s in la.stages if s.verdict == "differ"
    }


@dataclass
class FakeSglang:
    """Their functions over what the engine under test made of the same layer."""

    given: dict[int, LayerInputs]
    made: dict[int, Observed]
    ratio: int = 0
    bug: str = ""

    def path(self, width: int) -> str:
        return INDEX if width == 128 else MAIN

    def generate_legacy(
        self, ratio: int, requests: Tensor, lengths: Tensor, extend: Tensor, n: int, device: object
    ) -> tuple[int, Tensor, Tensor]:
        """Plan rows in an order of their own, empty ones behind."""
        self.ratio = ratio
        rows, first = [], 0
        for length in lengths.tolist():
            ends = range(ratio, length + 1, ratio)
            rows += [(end, first + end - 1) for end in ends]
            first += length
        order = torch.randperm(len(rows), generator=torch.manual_seed(1)).tolist()
        plan = torch.full((len(rows) + 3, 16), 255, dtype=torch.uint8)
        for at, row in enumerate(order):
            end, token = rows[row]
            raw = end.to_bytes(4, "little") + token.to_bytes(2, "little") + b"\0" * 10
            plan[at] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        return ratio, plan, torch.empty(0)

    def rows_of(self, plan: Tensor) -> Tensor:
        given = self.given[self.ratio]
        tokens, entries = completed(plan, given)
        assert len(tokens) == sum(n // self.ratio for n in given.lengths)
        return entries

    def compress_forward(
        self,
        state: Tensor,
        rows: Tensor,
        ape: Tensor,
        plan: Plan,
        *,
        head_dim: int,
        compress_ratio: int,
        out: Tensor,
    ) -> None:
        given = self.given[compress_ratio]
        part = given.index if head_dim == 128 else given.main
        assert part is not None
        width = part.kv.shape[1]
        assert torch.equal(rows[:, :width], part.kv)
        assert torch.equal(rows[:, width:], part.score)
        if compress_ratio == 4:
            assert ape.shape == (8, head_dim)
            assert torch.equal(ape[:4], part.ape[:, :head_dim])
        entries = self.rows_of(plan[1])
        out[: len(entries)] = self.made[compress_ratio].dense[self.path(head_dim), "pooled"][
            entries
        ]

    def compress_norm_rope_store(
        self,
        pooled: Tensor,
        plan: Plan,
        *,
        norm_weight: Tensor,
        norm_eps: float,
        freq_cis: Tensor,
        out_loc: Tensor,
        kvcache: Tensor,
        page_size: int,
        use_fp4: bool,
    ) -> None:
        ratio, path = plan[0], self.path(pooled.shape[1])
        assert freq_cis.is_complex()
        made = self.made[ratio].stored[path]
        assert use_fp4 == (made.layout == "index-fp4")
        assert page_size == made.page_size
        theirs, first = entry_slots(made), 0
        tokens, entries = completed(plan[1], self.given[ratio])
        place = out_loc[tokens]
        if self.bug == "slot":
            place = place.roll(1)
        planes = {"index-fp8": (128, 4), "index-fp4": (64, 4), "main-584": (576, 8)}[made.layout]
        for size in planes:
            block = slice(first, first + size * page_size)
            own = made.pool[:, block].reshape(-1, page_size, size)
            out = kvcache[:, block].reshape(-1, page_size, size)
            old = theirs[entries]
            out[place // page_size, place % page_size] = own[old // page_size, old % page_size]
            kvcache[:, block] = out.reshape(len(kvcache), -1)
            first += size * page_size

    def query(self, q: Tensor, w: Tensor, scale: float, table: Tensor, place: Tensor) -> Codes:
        assert (q.dtype, w.dtype, place.dtype) == (torch.bfloat16, torch.bfloat16, torch.int32)
        made = self.made[4].query
        assert made is not None
        if made.format == "fp4":
            assert made.scales is not None
            scales = made.scales.contiguous().view(torch.int32).squeeze(-1)
            return (made.codes.view(torch.int8), scales), made.weights.unsqueeze(-1)
        weights = made.scales if scale == 1.0 else made.weights
        assert weights is not None
        return made.codes.view(torch.float8_e4m3fn), weights.unsqueeze(-1)

    def plan_topk_v2(self, lengths: Tensor) -> Tensor:
        assert int(lengths.min()) >= 0
        return torch.zeros(1)

    def topk(
        self, scores: Tensor, lengths: Tensor, table: None, out: Tensor, size: int, plan: Tensor
    ) -> None:
        assert scores.shape[1] % 4 == 0
        for row, (score, seen) in enumerate(zip(scores, lengths.tolist(), strict=True)):
            best = score[:seen].sort(descending=self.bug != "topk").indices[: out.shape[1]]
            out[row, : len(best)] = best.to(torch.int32).flip(0)  # in an order of their own

    def topk_v1(
        self, scores: Tensor, lengths: Tensor, table: Tensor, out: Tensor, size: int
    ) -> None:
        self.topk(scores, lengths, None, out, size, torch.zeros(1))
        place = out.clamp(min=0).to(torch.int64)
        slots = table.gather(1, place // size) * size + place % size
        slots = slots + 10**6 if self.bug == "page" else slots
        out[:] = torch.where(out < 0, -1, slots)

    def kernels(self) -> Kernels:
        compress = SimpleNamespace(
            CompressorPrefillPlan=SimpleNamespace(generate_legacy=self.generate_legacy),
            compress_forward=self.compress_forward,
            compress_norm_rope_store=self.compress_norm_rope_store,
        )
        norm_rope = SimpleNamespace(
            fused_q_indexer_rope_hadamard_quant=self.query,
            fused_q_indexer_rope_hadamard_fp4_quant=self.query,
        )
        topk = SimpleNamespace(
            plan_topk_v2=self.plan_topk_v2,
            topk_transform_paged_v2=self.topk,
            topk_transform_paged=self.topk_v1,
        )
        return Kernels(compress, norm_rope, topk, "0.5.23", "ab" * 32, "cpu")


@pytest.fixture
def fake(small_inputs: Load, engine: Engine) -> Callable[[str], tuple[Inputs, FakeSglang]]:
    def make(fmt: str) -> tuple[Inputs, FakeSglang]:
        inputs = small_inputs(tokens=300, layers=(0, 1))
        given = {}
        for layer, ratio in ((0, 4), (1, 128)):
            reference = ReferenceLayer(inputs.config, layer, inputs.weights(layer), BF16_CONTRACT)
            given[ratio] = given_layer(inputs, layer, reference).inputs
        return inputs, FakeSglang(
            given, {r: engine("sglang", fmt).run(g) for r, g in given.items()}
        )

    return make


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_sglang_rows_queries_and_picks_come_back_in_order(
    judge: Judge, fake: Callable[..., Any], fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DSV4_COMPRESS_STATE_DTYPE", "bf16")
    inputs, kernels = fake(fmt)

    result = judge(inputs, SglangCandidate(fmt, kernels.kernels)).result

    assert result.verdict == "match"
    assert result.counts.compared == 9
    kernel = result.candidates[0].kernel
    assert kernel.variant.startswith("sglang 0.5.23, compress v2")
    assert "environment SGLANG_DSV4_COMPRESS_STATE_DTYPE=bf16" in kernel.path_taken
    assert "top-k v2 over fp32 scores" in kernel.path_taken


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_top_k_v1_is_a_candidate_of_its_own(
    judge: Judge, fake: Callable[..., Any], fmt: str
) -> None:
    inputs, kernels = fake(fmt)

    result = judge(inputs, SglangCandidate(fmt, kernels.kernels, "v1")).result

    assert result.verdict == "match"
    (candidate,) = result.candidates
    assert candidate.name == f"sglang:{fmt}-topk-v1"
    assert candidate.kernel.variant.endswith("top-k v1")
    assert "top-k v1 over fp32 scores" in candidate.kernel.path_taken


@pytest.mark.parametrize("bug", ["topk", "page"])
def test_a_fault_of_top_k_v1_is_found(judge: Judge, fake: Callable[..., Any], bug: str) -> None:
    inputs, kernels = fake("fp8")
    kernels.bug = bug

    (result,) = judge(inputs, SglangCandidate("fp8", kernels.kernels, "v1")).result.candidates

    assert failed(result) == {"index.topk"}


def test_top_k_v1_refuses_what_it_cannot_pick() -> None:
    scores, visible = torch.zeros(2, 4096), torch.full((2,), 4096)
    with pytest.raises(ValueError, match="takes at most 1024"):
        select(SimpleNamespace(), "v1", scores, visible, 2048)


@pytest.mark.parametrize("topk", ["v1", "v2"])
@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_both_top_k_kernels_have_a_name(
    fmt: str, topk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"sglang:{fmt}" + ("-topk-v1" if topk == "v1" else "")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    module, _, factory = declared[ENTRY_POINT_GROUP][name].partition(":")
    made: list[tuple[str, str]] = []
    monkeypatch.setattr(
        engine_sglang, "SglangCandidate", lambda key, topk="v2": made.append((key, topk))
    )

    getattr(importlib.import_module(module), factory)()

    assert made == [(fmt, topk)]


@pytest.mark.parametrize(
    ("bug", "stages"), [("slot", {"index.stored", "main.stored"}), ("topk", {"index.topk"})]
)
def test_a_fault_of_their_kernels_is_found(
    judge: Judge, fake: Callable[..., Any], bug: str, stages: set[str]
) -> None:
    inputs, kernels = fake("fp8")
    kernels.bug = bug

    (result,) = judge(inputs, SglangCandidate("fp8", kernels.kernels)).result.candidates

    assert stages <= failed(result)
    assert "index.pooled" not in failed(result)


def test_more_tokens_than_a_plan_numbers(
    fake: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, kernels = fake("fp8")
    monkeypatch.setattr(engine_sglang, "_MAX_TOKENS", 100)
    with pytest.raises(ValueError, match="SGLang's plans number at most 100"):
        SglangCandidate("fp8", kernels.kernels).run(kernels.given[4])


def test_holes_in_a_plan_are_refused(fake: Callable[..., Any]) -> None:
    _, kernels = fake("fp8")
    plan = torch.full((2, 16), 255, dtype=torch.uint8)
    plan[1] = 0
    with pytest.raises(ValueError, match="rows behind its end"):
        completed(plan, kernels.given[4])


@pytest.mark.parametrize("load", [engine_sglang.load_kernels, engine_deepgemm.load_deepgemm])
def test_without_a_card_they_say_so(load: Callable[[], object]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ValueError, match="needs a CUDA device, and torch finds none"):
        load()


def test_switches_that_could_change_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DG_JIT_CACHE_DIR", raising=False)
    assert switches("DG_NONE_") == "no DG_NONE_* set"
    monkeypatch.setenv("DG_JIT_CACHE_DIR", "/x")
    assert switches("DG_") == "environment DG_JIT_CACHE_DIR=/x"


def test_they_are_known_by_entry_point() -> None:
    points = {p.name: p.value for p in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    assert points["sglang:fp4"] == "needlepoint.verify.engines.sglang:fp4"
    assert points["deepgemm:fp8"] == "needlepoint.verify.engines.deepgemm:ragged"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "name",
    [
        "sglang:fp8",
        "sglang:fp4",
        "needlepoint.verify.engines.sglang:fp8_topk_v1",
        "needlepoint.verify.engines.sglang:fp4_topk_v1",
        "deepgemm:fp8",
        "deepgemm:fp8-paged",
    ],
)
def test_the_kernels_themselves(judge: Judge, name: str) -> None:
    from needlepoint.optimized.candidates.catalogue import create
    from needlepoint.verify.inputs.load import load_inputs

    inputs = load_inputs("synthetic", model="v4-flash", tokens=4400, layers=(2, 3))
    judged = judge(replace(inputs, name=name), create(name), device="cuda")
    assert judged.result.verdict == "match"
