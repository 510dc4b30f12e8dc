from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from needlepoint.reference.norm import layer_norm, rms_norm, tree_sum


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 96, 128, 1536])
def test_tree_sum_is_the_tree_of_adjacent_pairs(width: int) -> None:
    g = torch.Generator().manual_seed(width)
    x = torch.randn(3, width, generator=g, dtype=torch.float64) * 10.0 ** torch.arange(3)[:, None]

    def tree(values: list[float]) -> float:
        while len(values) > 1:
            values += [0.0] * (len(values) % 2)
            values = [a + b for a, b in zip(values[::2], values[1::2], strict=True)]
        return values[0]

    assert tree_sum(x).tolist() == [tree(row) for row in x.tolist()]


def test_sum_does_not_depend_on_the_other_rows() -> None:
    x = torch.randn(70, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = tree_sum(x * x)
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        assert torch.equal(tree_sum(x * x), whole)
        for row in (0, 7, 69):
            assert torch.equal(tree_sum(x[row] * x[row]), whole[row])


def test_norm_is_the_formula() -> None:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(4, 128, generator=g, dtype=torch.float64)
    weight = torch.rand(128, generator=g)
    for row, found in zip(x.tolist(), rms_norm(x, weight, 1e-6), strict=True):
        mean = sum(Fraction(v) ** 2 for v in row) / 128
        scale = float(mean + Fraction(1, 10**6)) ** -0.5
        wanted = [v * scale * w for v, w in zip(row, weight.tolist(), strict=True)]
        assert found.tolist() == pytest.approx(wanted, rel=1e-14)


def test_eps_carries_zero_rows() -> None:
    zero = torch.zeros(1, 128, dtype=torch.float64)
    assert torch.equal(rms_norm(zero, torch.ones(128), 1e-6), zero)
    small = torch.full((1, 128), 1e-3, dtype=torch.float64)
    assert rms_norm(small, None, 1e-6)[0, 0].item() == pytest.approx(2**-0.5)


def test_weight_is_optional() -> None:
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.equal(rms_norm(x, None, 1e-6), rms_norm(x, torch.ones(16), 1e-6))


@pytest.mark.parametrize(
    ("x", "weight"),
    [(torch.zeros(1, 8), torch.ones(8)), (torch.zeros(1, 8).double(), torch.ones(4))],
)
def test_wrong_input(x: torch.Tensor, weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="rms_norm"):
        rms_norm(x, weight, 1e-6)


def test_layer_norm_is_that_of_torch_in_float64() -> None:
    g = torch.Generator().manual_seed(5)
    x = 3 + torch.randn(40, 128, generator=g, dtype=torch.float64)
    weight, bias = torch.randn(2, 128, generator=g)

    meant = torch.nn.functional.layer_norm(x, (128,), weight.double(), bias.double(), 1e-6)

    assert torch.allclose(layer_norm(x, weight, bias, 1e-6), meant, rtol=1e-14, atol=1e-14)


def test_layer_norm_needs_a_bias_of_its_width() -> None:
    x = torch.ones(2, 128, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"bias \(64,\) for rows of 128"):
        layer_norm(x, torch.ones(128), torch.ones(64), 1e-6)
