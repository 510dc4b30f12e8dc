"""DeepGEMM's candidates with stand-ins for their kernels: layouts, columns, paging."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from needlepoint.optimized.protocol.interface import INDEX
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import BF16_CONTRACT
from needlepoint.verify.engines import deepgemm as engine_deepgemm
from needlepoint.verify.engines.deepgemm import DeepGemm, DeepGemmCandidate
from needlepoint.verify.inputs.layer_inputs import given_layer
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.results.output import PipelineOutput
from needlepoint.verify.layout.stored_rows import read_stored

Judge = Callable[..., PipelineOutput]
Load = Callable[..., Inputs]


def scored(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    dots = torch.einsum("shd,td->sht", q.float(), keys)
    return (dots.relu() * weights.unsqueeze(-1)).sum(1)


@dataclass
class FakeDeepGemm:
    """Their signatures; columns out of range hold what was there before."""

    factor: float = 1.0

    def fp8_mqa_logits(
        self, q: Tensor, keys: tuple[Tensor, Tensor], weights: Tensor, ks: Tensor, ke: Tensor
    ) -> Tensor:
        assert (q.dtype, keys[0].dtype, weights.dtype) == (
            torch.float8_e4m3fn,
            torch.float8_e4m3fn,
            torch.float32,
        )
        found = scored(q, keys[0].float() * keys[1].unsqueeze(1), weights) * self.factor
        return found.masked_fill(torch.arange(found.shape[1]) >= ke.unsqueeze(1), torch.nan)

    def get_paged_mqa_logits_metadata(self, lengths: Tensor, page: int, sms: int) -> Tensor:
        assert int(lengths.min()) > 0
        assert (lengths.dim(), page) == (2, 64)
        return torch.zeros(1)

    def fp8_paged_mqa_logits(
        self,
        q: Tensor,
        pool: Tensor,
        weights: Tensor,
        lengths: Tensor,
        table: Tensor,
        plan: Tensor,
        longest: int,
    ) -> Tensor:
        assert pool.shape[1:] == (64, 1, 132)
        raw = pool.reshape(len(pool), -1)[table[0].long()]
        codes = raw[:, : 64 * 128].reshape(-1, 128).view(torch.float8_e4m3fn).float()
        scales = raw[:, 64 * 128 :].contiguous().view(torch.float32).reshape(-1, 1)
        return scored(q[:, 0], codes * scales, weights)[:, :longest] * self.factor

    def load(self) -> DeepGemm:
        return DeepGemm(self, "0.1.5", "cd" * 32, "cpu")


@pytest.mark.parametrize("paged", [False, True])
def test_deepgemm_scores_ragged_and_paged(judge: Judge, small_inputs: Load, paged: bool) -> None:
    inputs = small_inputs(tokens=300, layers=(0, 1))

    result = judge(inputs, DeepGemmCandidate(paged=paged, load=FakeDeepGemm().load)).result

    assert result.verdict == "match"
    scores = next(s for s in result.candidates[0].layers[0].stages if s.stage == "scores")
    assert scores.rows_compared == 300
    assert result.candidates[0].profile.switches["accumulator"] == "sm90-fp8"


def test_a_gain_of_one_percent_in_the_scores_is_found(judge: Judge, small_inputs: Load) -> None:
    """The short accumulator of Hopper widens the bound to 2^-13 of the terms, not to this."""
    inputs = small_inputs(tokens=64, layers=(0,))

    (result,) = judge(
        inputs, DeepGemmCandidate(paged=False, load=FakeDeepGemm(1.01).load)
    ).result.candidates

    assert {
        f"{s.path}.{s.stage}" for la in result.layers for s in la.stages if s.verdict == "differ"
    } == {"index.scores"}


def test_deepgemm_missing_or_too_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ValueError, match="deep_gemm is not installed"):
        engine_deepgemm.load_deepgemm()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("importlib.import_module", lambda name: SimpleNamespace(__file__="x"))
    with pytest.raises(ValueError, match="this version has no fp8_mqa_logits"):
        engine_deepgemm.load_deepgemm()


def test_an_index_without_entries(small_inputs: Load) -> None:
    inputs = small_inputs(tokens=130, layers=(0,))
    layer = ReferenceLayer(inputs.config, 0, inputs.weights(0), BF16_CONTRACT)
    given = given_layer(inputs, 0, layer).inputs
    short = replace(given, lengths=(128, 2))
    observed = DeepGemmCandidate(paged=True, load=FakeDeepGemm().load).run(short)
    assert observed.scores is not None
    assert observed.scores(1, 0, 2).shape == (2, 0)
    assert read_stored(observed.stored[INDEX]).values.shape[0] == 32
