"""Parameters of one compressor as its CUDA kernels read them, checked once for all launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from needlepoint.optimized.build.variants import store_name
from needlepoint.optimized.cuda.checks import require_tensor
from needlepoint.optimized.emulation.specification import (
    EPS_LIMIT,
    LOG2_E,
    LOWEST_EXPONENT,
    ROPE_DIMS,
    SCORE_LIMIT,
    TABLE_LIMIT,
    VALUE_LIMIT,
)


@dataclass(frozen=True)
class StoreWeights:
    """Parameters of one compressor in the form its kernels read them.

    Attributes
    ----------
    ratio
        4 or 128.
    head_dim
        128 (index) or 512 (main).
    ape
        fp32 ``[ratio, c * head_dim]``, already multiplied by log2 e (A of S1).
    norm_weight
        fp32 ``[head_dim]``.
    rope_table
        fp32 ``[positions, 32, 2]``, cos and sin.
    norm_eps
        Epsilon of the norm.
    score_small
        Magnitude below which a score, wherever it stands, keeps the precondition and no weight
        reaches S2's clamp; windows with a larger one are looked at exactly.
    """

    ratio: int
    head_dim: int
    ape: Tensor
    norm_weight: Tensor
    rope_table: Tensor
    norm_eps: float
    score_small: float

    @classmethod
    def prepare(
        cls, ratio: int, ape: Tensor, norm_weight: Tensor, rope_table: Tensor, norm_eps: float
    ) -> StoreWeights:
        """Return the parameters with the position embedding prescaled, once for all calls.

        Their values are checked here, so that a launch need not: this waits for the device.

        Parameters
        ----------
        ratio
            4 or 128.
        ape
            fp32 ``[ratio, c * head_dim]`` as in the checkpoint.
        norm_weight, rope_table, norm_eps
            As in the attributes.

        Raises
        ------
        ValueError
            If a shape, dtype or ``norm_eps`` is wrong, or a value lies outside the preconditions.
        """
        head_dim = norm_weight.shape[0] if norm_weight.ndim == 1 else -1
        store_name("prefill", ratio, head_dim, "fp32", "bf16")
        width = head_dim * (2 if ratio == 4 else 1)
        require_tensor("ape", ape, (ratio, width), (torch.float32,))
        require_tensor("norm_weight", norm_weight, (head_dim,), (torch.float32,))
        require_tensor("rope_table", rope_table, (None, ROPE_DIMS // 2, 2), (torch.float32,))
        if not EPS_LIMIT <= norm_eps < float("inf"):
            raise ValueError(f"norm_eps {norm_eps!r}: expected finite and at least 2**-126")
        prescaled = ape * float(LOG2_E)
        for name, tensor, limit in (
            ("norm_weight", norm_weight, VALUE_LIMIT),
            ("rope_table", rope_table, TABLE_LIMIT),
            ("ape", prescaled, SCORE_LIMIT),
        ):
            if not _largest(tensor) < limit:
                raise ValueError(
                    f"{name}: a magnitude of {_largest(tensor)!r}, expected finite numbers below "
                    f"{limit!r}"
                )
        # |score| * L + |A| stays below half the clamp by more than every rounding on the way costs.
        room = -float(LOWEST_EXPONENT) / 2 * (1 - 2.0**-20) - _largest(prescaled)
        small = max(room / float(LOG2_E) * (1 - 2.0**-20), 0.0)
        return cls(ratio, head_dim, prescaled, norm_weight, rope_table, norm_eps, small)


def _largest(tensor: Tensor) -> float:
    """Return the largest magnitude; NaN if there is one."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0
