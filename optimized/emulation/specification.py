"""Constants of docs/specification.md, bit for bit, and its version.

Every constant is given by its bits, so that no decimal conversion stands between the page, the
emulation and a kernel.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import numpy as np

SPEC_VERSION = 1

CONSTANT_BITS: dict[str, int] = {
    "L": 0x3FB8AA3B,
    "magic": 0x4B400000,
    "C1": 0x3F317215,
    "C2": 0x3E75FCE1,
    "C3": 0x3D635B6C,
    "C4": 0x3C1E7456,
    "C5": 0x3AADED2A,
    "H": 0x3DB504F3,
    "floor": 0x38D1B717,
    "1/448": 0x3B124925,
    "1/6": 0x3E2AAAAB,
    "floor4": 0x01C00000,
}


def _constant(name: str) -> np.float32:
    return np.uint32(CONSTANT_BITS[name]).view(np.float32)


LOG2_E = _constant("L")
MAGIC = _constant("magic")
EXP2_COEFFICIENTS = tuple(_constant(f"C{i}") for i in (5, 4, 3, 2, 1))
"""Highest degree first; the constant term is exactly 1."""
HADAMARD_SCALE = _constant("H")
AMAX_FLOOR = _constant("floor")
INVERSE_448 = _constant("1/448")
INVERSE_6 = _constant("1/6")
AMAX_FLOOR_FP4 = _constant("floor4")

LOWEST_EXPONENT = np.float32(-126.0)
"""Lower clamp of the base-2 exponent (S2)."""
SCORE_LIMIT = 2.0**22
"""Precondition: magnitudes of prescaled scores stay below."""
VALUE_LIMIT = 2.0**59
"""Precondition: magnitudes of every given number stay below, so that no sum overflows."""
TABLE_LIMIT = 1.0 + 2.0**-23
"""Precondition: cos and sin stay below, that is, at most 1."""
EPS_LIMIT = 2.0**-126
"""Precondition: least norm eps."""

ROPE_DIMS = 64
GROUP = 8
"""Slots that are summed one after the other (S3)."""
PAGE_TOKENS = 256
"""Tokens that one page covers: 64 rows at ratio 4, 2 at ratio 128."""


@cache  # the code that runs is the one that was loaded, whatever becomes of the files
def source_digest(modules: tuple[str, ...]) -> str:
    """Return the SHA-256 over the named source files of this folder, in the given order.

    Parameters
    ----------
    modules
        File names, for example ``("specification.py", "exact32.py")``.
    """
    digest = hashlib.sha256()
    for name in modules:
        text = (Path(__file__).parent / name).read_bytes()
        digest.update(f"{name}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()
