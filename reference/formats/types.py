"""What a number format is: element, scale rule, block, floor and tie rule; the presets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from needlepoint.reference.formats.elements import ELEMENTS, Ties

_UNSCALED = ("float64", "fp32", "bf16")


class ScaleKind(Enum):
    """What a block's scale is."""

    NONE = "none"
    FP32 = "fp32"  # amax / max_value, rounded once to fp32
    UE8M0 = "ue8m0"  # the next power of two at or above amax / max_value, stored as exponent + 127


class Floor(Enum):
    """What keeps the scale of an almost empty block away from zero."""

    NONE = "none"  # amax 0 gives scale 0 and leaves the values undivided
    AMAX_1E4 = "amax-1e-4"  # max(amax, 1e-4)
    AMAX_TINY = "amax-tiny"  # max(amax, 6 * 2**-126)
    SCALE_1E4 = "scale-1e-4"  # max(amax / max_value, 1e-4), after the division


@dataclass(frozen=True)
class Format:
    """One storage format.

    Attributes
    ----------
    name
        Name in :data:`FORMATS`, results and recordings.
    element
        ``"float64"``, ``"fp32"``, ``"bf16"``, ``"e4m3"`` or ``"e2m1"``.
    scale
        Kind of scale; ``NONE`` exactly for the first three elements.
    block
        Consecutive elements of the last axis that share a scale; 0 without scales.
    floor
        Floor rule of the scale.
    ties
        Tie rule of the element.
    pre_round_bf16
        Whether values are rounded to bf16 before amax and division.
    """

    name: str
    element: str
    scale: ScaleKind = ScaleKind.NONE
    block: int = 0
    floor: Floor = Floor.NONE
    ties: Ties = Ties.EVEN
    pre_round_bf16: bool = False

    def __post_init__(self) -> None:
        scaled = self.element in ELEMENTS
        if not scaled and self.element not in _UNSCALED:
            raise ValueError(
                f"format {self.name!r}: element {self.element!r}, expected one of "
                f"{[*_UNSCALED, *ELEMENTS]}"
            )
        if scaled != (self.scale is not ScaleKind.NONE) or scaled != (self.block > 0):
            raise ValueError(
                f"format {self.name!r}: scale {self.scale.value!r} with block {self.block} for "
                f"element {self.element!r}; expected both for {list(ELEMENTS)} and neither "
                f"for {list(_UNSCALED)}"
            )
        if self.scale is ScaleKind.UE8M0 and self.floor is Floor.NONE:
            raise ValueError(
                f"format {self.name!r}: a UE8M0 scale cannot be zero; choose a floor rule"
            )

    @property
    def max_value(self) -> float:
        """Largest finite magnitude of a scaled element."""
        return ELEMENTS[self.element].max_value


FLOAT64 = Format("float64", "float64")
FP32 = Format("fp32", "fp32")
BF16 = Format("bf16", "bf16")
FP8_PLAIN = Format("fp8-plain", "e4m3", ScaleKind.FP32, 128, Floor.AMAX_1E4)
FP8_POW2 = Format("fp8-pow2", "e4m3", ScaleKind.UE8M0, 128, Floor.AMAX_1E4)
FP8_NO_FLOOR = Format("fp8-no-floor", "e4m3", ScaleKind.FP32, 128, Floor.NONE)
FP4_OFFICIAL = Format("fp4-official", "e2m1", ScaleKind.UE8M0, 32, Floor.AMAX_TINY)
FP4_SGLANG = Format("fp4-sglang", "e2m1", ScaleKind.UE8M0, 32, Floor.AMAX_1E4, Ties.ZERO)
MAIN_FP8 = Format("main-fp8", "e4m3", ScaleKind.UE8M0, 64, Floor.AMAX_1E4, pre_round_bf16=True)
MAIN_FP8_SCALE_FLOOR = Format(
    "main-fp8-scale-floor", "e4m3", ScaleKind.UE8M0, 64, Floor.SCALE_1E4, pre_round_bf16=True
)

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        FLOAT64,
        FP32,
        BF16,
        FP8_PLAIN,
        FP8_POW2,
        FP8_NO_FLOOR,
        FP4_OFFICIAL,
        FP4_SGLANG,
        MAIN_FP8,
        MAIN_FP8_SCALE_FLOOR,
    )
}


@dataclass(frozen=True)
class Encoded:
    """Stored numbers of one tensor.

    Attributes
    ----------
    codes
        ``[..., n]``: float64, float32 or bfloat16 numbers of an unscaled element, else uint8, one
        code a byte (E2M1 too; :func:`pack_e2m1` packs).
    scales
        ``[..., n / block]``: float32, or uint8 UE8M0 codes (exponent + 127); None without scales.
    """

    codes: Tensor
    scales: Tensor | None = None
