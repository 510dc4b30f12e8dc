"""Element codecs: bf16, E4M3 and E2M1, from the definition of their bits.

Rounding to a small float is done on an integer grid: a magnitude in the binade ``2**e`` is a
multiple of ``2**(e - mantissa_bits)`` after rounding, scaling by a power of two is exact, and the
rounded multiple added to the binade's offset *is* the code. Every function here performs exactly
one rounding, whatever the precision of its input.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

_CHUNK = 1 << 16  # elements; keeps the temporaries of one step in the cache
_CARD_CHUNK = 1 << 25  # the same on a card, where steps should be few


class Ties(Enum):
    """Where a value exactly between two codes goes."""

    EVEN = "even"  # to the code with an even mantissa (IEEE, cvt.rn)
    ZERO = "zero"  # to the smaller magnitude (a quantiser that counts thresholds with `>`)


@dataclass(frozen=True)
class Element:
    """A float of at most 8 bits: sign, exponent, mantissa, no infinity.

    Attributes
    ----------
    name
        ``"e4m3"`` or ``"e2m1"``.
    bits
        Width of a code, sign included.
    mantissa_bits
        Explicit mantissa bits.
    min_exponent
        Binary exponent of the smallest normal number; smaller magnitudes are subnormal.
    max_value
        Largest finite magnitude; encoding saturates there.
    """

    name: str
    bits: int
    mantissa_bits: int
    min_exponent: int
    max_value: float

    @property
    def sign_bit(self) -> int:
        """Mask of the sign bit of a code."""
        return 1 << (self.bits - 1)

    def magnitude(self, code: int) -> float:
        """Return the magnitude of a non-negative code by the definition of the format."""
        exponent, mantissa = divmod(code, 1 << self.mantissa_bits)
        if exponent == 0:
            return mantissa * 2.0 ** (self.min_exponent - self.mantissa_bits)
        significand = 1 + mantissa / (1 << self.mantissa_bits)
        return float(significand * 2.0 ** (self.min_exponent + exponent - 1))


E4M3 = Element("e4m3", bits=8, mantissa_bits=3, min_exponent=-6, max_value=448.0)
E2M1 = Element("e2m1", bits=4, mantissa_bits=1, min_exponent=0, max_value=6.0)
ELEMENTS: dict[str, Element] = {e.name: e for e in (E4M3, E2M1)}


def _value_table(element: Element) -> Tensor:
    half = element.sign_bit
    positive = [element.magnitude(code) for code in range(half)]
    if element is E4M3:
        positive[half - 1] = float("nan")  # 0x7F and 0xFF
    return torch.tensor(positive + [-v for v in positive], dtype=torch.float64)


_TABLES = {e.name: _value_table(e) for e in ELEMENTS.values()}


def require_float(x: Tensor, what: str) -> None:
    """Raise ``ValueError`` unless ``x`` is float32 or float64."""
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"{what}: got dtype {x.dtype}, expected torch.float32 or torch.float64; convert first"
        )


def first_index(mask: Tensor) -> tuple[int, ...]:
    """Return the index of the first true element of a mask that has one."""
    return tuple(int(i) for i in mask.nonzero()[0])


def round_to_bf16(x: Tensor) -> Tensor:
    """Round to the nearest bf16 number, ties to even, in one rounding.

    ``float64 -> bfloat16`` in torch goes through fp32 and rounds twice: ``1 + 2**-8 + 2**-40``
    becomes the tie ``1 + 2**-8`` first and then 1. Here an fp32 value that only *became* a tie is
    moved one fp32 step back towards the original before the second step.

    Parameters
    ----------
    x
        float32 or float64, any shape. Infinities and NaN are kept; magnitudes from
        ``(2 - 2**-8) * 2**127`` become infinite.

    Returns
    -------
    Tensor
        Values of ``x``'s shape and dtype, each a bf16 number.

    Raises
    ------
    ValueError
        For any other dtype.
    """
    require_float(x, "round_to_bf16")
    return _nearest_bf16(x).to(x.dtype)


def to_bf16(x: Tensor) -> Tensor:
    """Return :func:`round_to_bf16` as a ``torch.bfloat16`` tensor."""
    require_float(x, "to_bf16")
    return _nearest_bf16(x)


def _nearest_bf16(x: Tensor) -> Tensor:
    narrow = x.to(torch.float32, memory_format=torch.contiguous_format)
    if x.dtype == torch.float64:
        bits = narrow.view(torch.int32).flatten()
        ties = ((bits & 0xFFFF) == 0x8000).nonzero().squeeze(1)
        # About one number in 65,536: only they are looked at again.
        before, after = x.flatten()[ties].abs(), narrow.flatten()[ties].to(torch.float64).abs()
        # Sign and magnitude: adding one moves away from zero for either sign.
        bits[ties] += (before > after).to(torch.int32) - (before < after).to(torch.int32)
        narrow = bits.view(torch.float32).view(narrow.shape)
    return narrow.to(torch.bfloat16)


def e4m3_encode(x: Tensor, ties: Ties = Ties.EVEN) -> Tensor:
    """Round to E4M3 (FN: no infinity) and return the codes; magnitudes above 448 saturate.

    Parameters
    ----------
    x
        float32 or float64, any shape: values already divided by their scale.
    ties
        Tie rule; the sign of a value that rounds to zero is kept.

    Returns
    -------
    Tensor
        uint8 of ``x``'s shape: ``s eeee mmm``.

    Raises
    ------
    ValueError
        For another dtype or a NaN, naming where it stands.
    """
    return _encode(x, E4M3, ties)


def e4m3_decode(codes: Tensor) -> Tensor:
    """Return the float64 values of E4M3 codes (uint8); 0x7F and 0xFF are NaN."""
    return _decode(codes, E4M3)


def e2m1_encode(x: Tensor, ties: Ties = Ties.EVEN) -> Tensor:
    """Round to E2M1 and return one code per byte; magnitudes above 6 saturate.

    Parameters
    ----------
    x
        float32 or float64, any shape: values already divided by their scale.
    ties
        ``EVEN`` keeps the sign of zero (code 8). ``ZERO`` is the threshold quantiser of SGLang's
        V4 kernels, which writes +0 for every value that rounds to zero.

    Returns
    -------
    Tensor
        uint8 of ``x``'s shape, 0 .. 15: ``s ee m``.

    Raises
    ------
    ValueError
        For another dtype or a NaN, naming where it stands.
    """
    codes = _encode(x, E2M1, ties)
    return codes.masked_fill_(codes == E2M1.sign_bit, 0) if ties is Ties.ZERO else codes


def e2m1_decode(codes: Tensor) -> Tensor:
    """Return the float64 values of E2M1 codes (uint8, one a byte, 0 .. 15)."""
    return _decode(codes, E2M1)


def pack_e2m1(codes: Tensor) -> Tensor:
    """Pack E2M1 codes two a byte along the last axis: the even dim in the low nibble.

    Parameters
    ----------
    codes
        uint8 ``[..., n]`` with values 0 .. 15 and even ``n``.

    Returns
    -------
    Tensor
        uint8 ``[..., n / 2]``.

    Raises
    ------
    ValueError
        For another dtype, an odd ``n`` or a code above 15.
    """
    require_codes(codes, E2M1)
    if codes.shape[-1] % 2:
        raise ValueError(
            f"pack_e2m1: last axis has {codes.shape[-1]} codes, expected an even number"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Undo :func:`pack_e2m1`: uint8 ``[..., n]`` to uint8 codes ``[..., 2 n]``."""
    if packed.dtype != torch.uint8:
        raise ValueError(f"unpack_e2m1: got dtype {packed.dtype}, expected torch.uint8")
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def _encode(x: Tensor, element: Element, ties: Ties) -> Tensor:
    require_float(x, f"{element.name}_encode")
    flat = x.reshape(-1)
    codes = torch.empty(flat.shape, dtype=torch.uint8, device=x.device)
    chunk = _CHUNK if flat.device.type == "cpu" else _CARD_CHUNK
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk]
        codes[start : start + chunk] = _encode_part(part, element, ties)
    if bool(torch.isnan(x).any()):
        where = first_index(torch.isnan(x))
        raise ValueError(f"{element.name}_encode: value at index {where} is NaN, expected a number")
    return codes.reshape(x.shape)


def _encode_part(x: Tensor, element: Element, ties: Ties) -> Tensor:
    wide = x.to(torch.float64)
    magnitude = wide.abs().clamp_(max=element.max_value)
    exponent = (magnitude.view(torch.int64) >> 52).sub_(1023).clamp_(min=element.min_exponent)
    # 2**(mantissa_bits - exponent), written as bits: the multiplication below is exact.
    scale = (1023 + element.mantissa_bits - exponent).bitwise_left_shift_(52).view(torch.float64)
    grid = magnitude.mul_(scale)
    grid = grid.round_() if ties is Ties.EVEN else grid.sub_(0.5).ceil_()
    exponent.sub_(element.min_exponent).bitwise_left_shift_(element.mantissa_bits)
    exponent.add_(grid.to(torch.int64))
    exponent.add_(torch.signbit(wide), alpha=element.sign_bit)
    return exponent.to(torch.uint8)


def _decode(codes: Tensor, element: Element) -> Tensor:
    require_codes(codes, element)
    return _TABLES[element.name].to(codes.device)[codes.to(torch.int64)]


def require_codes(codes: Tensor, element: Element) -> None:
    """Raise ``ValueError`` unless ``codes`` are uint8 codes of the element, one a byte."""
    if codes.dtype != torch.uint8:
        raise ValueError(
            f"{element.name} codes: got dtype {codes.dtype}, expected torch.uint8, one code a byte"
        )
    limit = (1 << element.bits) - 1
    if codes.numel() and int(codes.max()) > limit:
        where = first_index(codes > limit)
        raise ValueError(
            f"{element.name} codes: {int(codes[where])} at index {where}, expected 0 .. {limit}; "
            "packed bytes must be unpacked first"
        )
