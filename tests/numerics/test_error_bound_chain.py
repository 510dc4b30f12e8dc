"""A whole key row in plain fp32 stays in the chain, from the taps or from any observed stage."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from needlepoint.reference.compressor import Taps
from needlepoint.reference.profile import (
    BF16_CONTRACT,
    Arithmetic,
    Precision,
    needlepoint_profile,
)
from needlepoint.verify.numerics.error_bound import (
    ErrorBound,
    KeyPath,
    exact,
    key_chain,
    precision_of,
    rounding,
)
from needlepoint.verify.numerics.error_bound_pooled import pooled

ROWS = 48
EPS = 1e-6
FP32 = needlepoint_profile("fp8")


def hadamard(x: Tensor) -> Tensor:
    for stride in (1, 2, 4, 8, 16, 32, 64):
        pairs = x.reshape(len(x), -1, 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), -2).flatten(-3)
    return x * torch.tensor(128**-0.5, dtype=torch.float32)


class Plain:
    """The key path as one would write it in torch, in fp32, rounding where the profile says."""

    def __init__(self, width: int, arithmetic: Arithmetic, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.kv = torch.randn(ROWS, 8, width, generator=g)
        self.score = 2 * torch.randn(ROWS, 8, width, generator=g)
        self.ape = 0.5 * torch.randn(8, width, generator=g)
        self.norm = 1 + 0.1 * torch.randn(width, generator=g)
        angle = 100 * torch.rand(ROWS, 32, generator=g)
        self.table = torch.stack((angle.cos(), angle.sin()), -1)
        self.arithmetic = arithmetic
        self.rotate = width == 128

    def path(self) -> KeyPath:
        table = self.table.to(torch.float64)
        return KeyPath(self.norm, EPS, table, self.arithmetic, self.rotate)

    def taps(self) -> Taps:
        return Taps(self.kv.to(torch.float64), self.score.to(torch.float64) + self.ape)

    def _round(self, stage: str, x: Tensor) -> Tensor:
        if precision_of(stage, self.arithmetic) is Precision.BF16:
            return x.bfloat16().float()
        return x

    def run(self) -> dict[str, Tensor]:
        z = self.score + self.ape
        e = torch.exp(z - z.amax(1, keepdim=True))
        x = self._round("pooled", (e * self.kv).sum(1) / e.sum(1))
        out = {"pooled": x}
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.norm
        x = out["normed"] = self._round("normed", x)
        cos, sin = self.table.unbind(-1)
        a, b = x[..., -64:].reshape(ROWS, 32, 2).unbind(-1)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
        x = out["roped"] = self._round("roped", torch.cat((x[..., :-64], turned), -1))
        if self.rotate:
            out["rotated"] = self._round("rotated", hadamard(x))
        return out


def admissible(found: Tensor, error_bound: ErrorBound, precision: Precision) -> Tensor:
    """Return whether each number is one that something in the interval rounds to."""
    if precision is not Precision.BF16:
        return (found.to(torch.float64) - error_bound.value).abs() <= error_bound.delta
    after = rounding(error_bound, precision)
    return (found.to(torch.float64) - after.value).abs() <= after.delta


@pytest.mark.parametrize("arithmetic", [FP32, BF16_CONTRACT], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", [128, 512])
def test_every_stage_is_admissible_from_the_taps_and_from_each_observed_stage(
    width: int, arithmetic: Arithmetic
) -> None:
    plain = Plain(width, arithmetic, seed=1)
    found = plain.run()
    chains = [key_chain("pooled", pooled(plain.taps(), plain.ape), plain.path())]
    chains += [key_chain(stage, exact(x), plain.path()) for stage, x in found.items()]

    assert list(chains[0]) == list(found)
    for chain in chains:
        for stage, error_bound in chain.items():
            fits = admissible(found[stage], error_bound, precision_of(stage, arithmetic))
            assert bool(fits.all()), stage


@pytest.mark.parametrize("arithmetic", [FP32, BF16_CONTRACT], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fault", ["gain 0.4 %", "two rows swapped", "one row zero"])
def test_a_fault_born_at_pooled_still_shows_behind_the_rotation(
    fault: str, arithmetic: Arithmetic
) -> None:
    plain = Plain(128, arithmetic, seed=2)
    wrong = Plain(128, arithmetic, seed=2)
    rows = slice(0, ROWS)
    if fault == "gain 0.4 %":
        wrong.norm = wrong.norm * 1.004
    elif fault == "two rows swapped":
        rows = slice(5, 7)
        wrong.kv[[5, 6]] = wrong.kv[[6, 5]]
    else:
        rows = slice(9, 10)
        wrong.kv[9] = 0

    chain = key_chain("pooled", pooled(plain.taps(), plain.ape), plain.path())
    fits = admissible(wrong.run()["rotated"], chain["rotated"], arithmetic.rotated)

    bad = ~fits.all(1)
    assert bool(bad[rows].all())
    assert int(bad.sum()) == len(range(ROWS)[rows])


def test_a_local_chain_starts_with_no_radius_and_an_accumulated_one_with_more() -> None:
    plain = Plain(128, FP32, seed=3)
    found = plain.run()

    accumulated = key_chain("pooled", pooled(plain.taps(), plain.ape), plain.path())
    local = key_chain("roped", exact(found["roped"]), plain.path())

    assert list(local) == ["roped", "rotated"]
    assert not bool(local["roped"].delta.any())
    assert bool((local["rotated"].delta > 0).all())
    assert bool((local["rotated"].delta < accumulated["rotated"].delta).all())


def test_an_unknown_start_is_refused() -> None:
    plain = Plain(512, FP32, seed=3)

    with pytest.raises(ValueError, match="no stage 'rotated', expected one of pooled, normed"):
        key_chain("rotated", exact(torch.zeros(ROWS, 512)), plain.path())


def test_only_dense_stages_have_a_rounding_point() -> None:
    with pytest.raises(ValueError, match="stage 'stored' has no rounding point"):
        precision_of("stored", FP32)
