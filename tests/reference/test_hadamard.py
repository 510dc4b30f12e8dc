from __future__ import annotations

import pytest
import torch
from scipy.linalg import hadamard as sylvester

from needlepoint.reference.formats import to_bf16
from needlepoint.reference.hadamard import SCALE_EXACT, SCALE_FP32, hadamard


def bits(x: float) -> int:
    return int(torch.tensor(x, dtype=torch.float32).view(torch.int32))


def test_scale_is_the_fp32_constant() -> None:
    assert bits(SCALE_FP32) == 0x3DB504F3
    assert torch.tensor(SCALE_EXACT).to(torch.float32).item() == SCALE_FP32
    assert SCALE_EXACT != SCALE_FP32


def test_equals_sylvester_matrix() -> None:
    matrix = torch.from_numpy(sylvester(128)).to(torch.float64)
    assert torch.equal(hadamard(torch.eye(128, dtype=torch.float64), 1.0), matrix)


def test_golden_unit_vector() -> None:
    x = torch.zeros(128, dtype=torch.float64)
    x[1] = 1.0
    y = to_bf16(hadamard(x))
    assert y[0].item() == 0.08837890625
    assert torch.equal(y.view(torch.int16)[0::2], torch.full((64,), 0x3DB5, dtype=torch.int16))
    assert torch.equal(
        y, to_bf16(torch.tensor(SCALE_FP32).double() * (1 - 2.0 * (torch.arange(128) % 2)))
    )


def test_stages_run_in_ascending_strides() -> None:
    """2**53 + 1 - 2**53 survives only where the large terms cancel before they meet the 1."""
    x = torch.zeros(128, dtype=torch.float64)
    x[0], x[1], x[2] = 2.0**53, -(2.0**53), 1.0
    assert hadamard(x, 1.0)[0].item() == 1.0
    x[1], x[2] = 1.0, -(2.0**53)
    assert hadamard(x, 1.0)[0].item() == 0.0


def test_is_its_own_inverse_and_keeps_products() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 5, 128, generator=g, dtype=torch.float64)
    torch.testing.assert_close(hadamard(hadamard(q, SCALE_EXACT), SCALE_EXACT), q)
    both = (hadamard(q, SCALE_EXACT) * hadamard(k, SCALE_EXACT)).sum(-1)
    torch.testing.assert_close(both, (q * k).sum(-1))
    one_sided = (hadamard(q, SCALE_EXACT) * k).sum(-1)
    assert not torch.allclose(one_sided, (q * k).sum(-1), rtol=0.1)


def test_no_rows() -> None:
    assert hadamard(torch.zeros(0, 128, dtype=torch.float64)).shape == (0, 128)


@pytest.mark.parametrize(
    "x", [torch.zeros(128), torch.zeros(64).double(), torch.zeros(()).double()]
)
def test_wrong_input(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="hadamard: got"):
        hadamard(x)
