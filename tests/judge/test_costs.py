"""Contracts beside the candidates, and what is reported of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from needlepoint.optimized.protocol.interface import CandidateInfo
from needlepoint.reference.hadamard import hadamard
from needlepoint.reference.layer import ReferenceLayer
from needlepoint.reference.profile import (
    BF16_CONTRACT,
    CONTRACTS,
    EXACT,
    OFFICIAL,
    needlepoint_profile,
)
from needlepoint.verify.inputs.layer_inputs import given_layer
from needlepoint.verify.inputs.load import Inputs
from needlepoint.verify.judge.contracts import ContractBlock, Contracts, compute_type
from needlepoint.verify.judge.cost import CostTally, cache_bytes_per_token, contract_cost, key_error
from needlepoint.verify.judge.profiles import profile_of

NAMES = ("exact", "bf16", "official")


def test_contracts_fed_in_blocks_are_the_reference_over_whole_requests(
    small_inputs: Callable[..., Inputs],
) -> None:
    inputs = small_inputs(tokens=600, layers=(0,))
    weights = inputs.weights(0)
    reference = ReferenceLayer(inputs.config, 0, weights, BF16_CONTRACT)
    given = given_layer(inputs, 0, reference)
    contracts = Contracts(inputs.config, 0, weights, NAMES, 1 << 28)
    assert contracts.names == NAMES
    offset = 0
    keys: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
    for request, length in enumerate(inputs.requests):
        contracts.start_request()
        hidden = inputs.hidden(0)[offset : offset + length]
        blocks: dict[str, list[ContractBlock]] = {name: [] for name in NAMES}
        for start in range(0, length, 128):
            stop = min(start + 128, length)
            for name in NAMES:
                found = contracts.feed(
                    name, hidden[start:stop], given.projected(request, start, stop)
                )
                assert found is not None
                assert found.scores.shape == (stop - start, stop // 4)
                blocks[name].append(found)
        for name in NAMES:
            whole = ReferenceLayer(
                inputs.config, 0, weights, CONTRACTS[name], compute=compute_type(CONTRACTS[name])
            ).forward(hidden, reference.new_request(), keep_scores=True, attend=False)
            assert whole.index is not None
            assert whole.topk is not None
            keys[name].append(whole.index.stored.values)
            assert torch.equal(torch.cat([b.picks for b in blocks[name]]), whole.topk)
        offset += length
    for name, rows in contracts.keys().items():
        assert torch.equal(rows, torch.cat(keys[name]))


def test_only_exact_is_evaluated_in_float64() -> None:
    assert compute_type(EXACT) == torch.float64
    assert compute_type(BF16_CONTRACT) == compute_type(OFFICIAL) == torch.float32


def test_a_key_without_rotation_is_rotated_before_it_is_compared() -> None:
    keys = torch.randn(5, 128, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    contract = hadamard(keys)

    assert key_error(keys, False, contract).max() < 1e-12
    assert key_error(keys, True, contract).min() > 0.5
    assert torch.allclose(key_error(1.25 * contract, True, contract), torch.tensor(0.25).double())
    # A contract's key of zero does not divide by zero.
    assert torch.isfinite(
        key_error(torch.zeros(1, 128).double(), True, torch.zeros(1, 128).double())
    ).all()


def block(scores: list[list[float]], picks: list[list[int]]) -> ContractBlock:
    return ContractBlock(torch.tensor(scores), torch.tensor(picks, dtype=torch.int32))


def test_overlap_and_score_lost_are_gathered_over_blocks() -> None:
    tally = CostTally()
    nothing = ContractBlock(torch.empty(2, 0), torch.full((2, 2), -1, dtype=torch.int32))
    tally.add_picks(torch.full((2, 2), -1), nothing, torch.zeros(2, dtype=torch.int64), 2)
    contract = block([[3.0, 4.0, 0.0]], [[0, 1]])
    tally.add_picks(torch.tensor([[1, 2]]), contract, torch.tensor([3]), 2)

    assert tally.overlap_rows.tolist() == [1.0, 1.0, 0.5]
    # Lost is 3 of a row whose scores have an RMS of sqrt(25 / 3).
    assert tally.lost_rows.tolist() == [0.0, 0.0, pytest.approx(3 / (25 / 3) ** 0.5)]


def test_what_was_not_tallied_is_null() -> None:
    picks = CostTally()
    picks.add_picks(torch.tensor([[0, 1]]), block([[3.0, 4.0]], [[0, 1]]), torch.tensor([2]), 2)
    keys = CostTally(relative=torch.tensor([0.1, 0.3], dtype=torch.float64))

    assert contract_cost([]) is None
    assert contract_cost([CostTally()]) is None
    alone = contract_cost([picks])
    assert alone is not None
    assert (alone.rel_mean, alone.rel_max) == (None, None)
    assert (alone.overlap_mean, alone.score_lost_max) == (1.0, 0.0)
    stored = contract_cost([keys, CostTally()])
    assert stored is not None
    assert stored.rel_mean == pytest.approx(0.2)
    assert stored.rel_max == pytest.approx(0.3)
    assert (stored.overlap_mean, stored.score_lost_max) == (None, None)


def test_bytes_a_token_are_entries_over_ratios() -> None:
    # One layer of 132 and 584 bytes at ratio 4, two of 584 bytes at ratio 128.
    assert cache_bytes_per_token({4: 716.0, 128: 1168.0}) == 716 / 4 + 1168 / 128
    assert cache_bytes_per_token({}) is None


@pytest.mark.parametrize("key_format", ["bf16", "fp8", "fp4"])
def test_profiles_by_name(key_format: str) -> None:
    def info(profile: str) -> CandidateInfo:
        return CandidateInfo("x:y", key_format, "cpu", profile, "v", "0" * 64)

    assert profile_of(info("needlepoint")) == needlepoint_profile(key_format)
    for name in NAMES:
        assert profile_of(info(name)) is CONTRACTS[name]
    with pytest.raises(ValueError, match="candidate x:y: profile 'vlm', expected one of"):
        profile_of(info("vlm"))
