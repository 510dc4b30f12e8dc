"""What one fp32 step of a kernel may cost: the constants of the running error analysis.

The judge never sets a limit from the error it just measured. It carries a radius from stage to
stage: "an admissible candidate computes, before it rounds at this stage, some number within
``delta`` of the reference". How fast the radius grows is decided here, once, by what fp32
arithmetic and the approximate units of a GPU may lose. ``docs/limits.md`` has the derivations in
full; ``verify/numerics/error_bound.py`` and ``verify/numerics/bounds.py`` apply them.
"""

from __future__ import annotations

from dataclasses import dataclass

from needlepoint.reference.profile import Accumulator

U = 2.0**-24
"""Unit roundoff of fp32: one correctly rounded operation is off by at most ``U`` of its result."""

TINY = 2.0**-126
"""Smallest normal fp32 number: what a kernel that flushes subnormals to zero may lose at a time."""

SCORE_TINY = 2.0**-100
"""Index scores this close are equal: products of codes, weights and scales flush below it."""


@dataclass(frozen=True)
class Constant:
    """One constant of the error analysis."""

    value: float  # The constant.
    unit: str  # What it multiplies.
    derivation: str  # Which operations it pays for, and why that is enough.


LOGIT = Constant(
    2.0,
    "U (|s| + |ape|)",
    "a softmax exponent is formed from score and ape: fl(ape log2e), one FMA or product and sum, "
    "at most U (|score| + |ape| + |s|) with s = score + ape and |score| <= |s| + |ape|",
)
SPAN = Constant(
    4.0,
    "U (max s - s)",
    "subtracting the maximum 1, product with log2e 1, log2e held in fp32 0.22, range reduction of "
    "the exponential 1; the fast exponential of CUDA needs 1 + 2.35",
)
EXP = Constant(
    2.0**-22,
    "relative",
    "one base-2 exponential: degree-5 polynomial 2e-7, ex2.approx and __expf 2 ulp = 4 U, libm "
    "1 ulp",
)
RESCALES = Constant(
    16.0,
    "exponentials a term",
    "an online softmax rescales a term once per new maximum: 16 groups merged in turn, or the new "
    "maxima in time order where these are more; each costs one EXP and one product",
)
QUOTIENT = Constant(
    4.0,
    "U",
    "the division of the softmax: 2 ulp for an approximate division, 3 U for reciprocal and "
    "product; the product of weight and value is counted with the sums",
)
REDUCTION = Constant(
    32.0,
    "U, at most",
    "adds in sequence in a sum of squares: 512 dims over 32 lanes are 16 adds, 5 shuffles and a "
    "few over the warps; a shorter row has at most its own length",
)
RSQRT = Constant(4.0, "U", "1/sqrt: rsqrt.approx 2 ulp; square root and division 2 U")
SCALING = Constant(3.0, "U", "the products with 1/sqrt and with the norm weight, in either order")
ROTATION = Constant(
    2.0,
    "U (|a c| + |b s|)",
    "one RoPE pair: two products and a sum without FMA, U (|a c| + |b s| + |a c - b s|)",
)
HADAMARD_SUM = Constant(
    24.0,
    "U sum |x| / sqrt(128)",
    "128-point Hadamard transform: 7 for butterflies in any order of strides; a product with the "
    "matrix sums 128 terms in turn, whose errors of independent sign stay below 2.1 sqrt(128)",
)
HADAMARD_FACTOR = Constant(
    5.0, "U", "128**-0.5 as 0x3DB504F3 or from an rsqrt of 2 ulp, and its product"
)
HEAD_WEIGHT = Constant(
    4.0,
    "U",
    "128**-0.5 and heads**-0.5 as one fp32 constant or two, their products, and the product with a "
    "query scale that the judge divides out again",
)
DIVISION = Constant(
    3.0,
    "U",
    "value over fp32 scale as reciprocal (1 ulp = 2 U) and product; amax / max the same. A power "
    "of two divides exactly and pays nothing",
)
PROJECTION = Constant(
    8.0,
    "U sqrt(n) sum |x w|",
    "n products summed in fp32 in any order: rounding errors of independent sign grow with sqrt(n) "
    "(Higham and Mary 2019); 8 is their lambda for a failure probability below 1e-13",
)

LEAN = Constant(
    16.0,
    "U a stage, relative",
    "what may push every element of a stage one way: approximate root 4, division 4, constants "
    "held in fp32 5, a sum whose roundings all fall alike 3; roundings to nearest have no side",
)

BF16_STEP = Constant(
    2.0**-7,
    "sum_h |w_h| sum_d |q_hd k_d|, for each rounding point",
    "a score chain that rounds to bf16 (after the dot, the weight or the head sum) may land one "
    "step away at each point; taken for every head at once, so it is loose",
)

ACCUMULATORS: dict[Accumulator, Constant] = {
    Accumulator.FP32: Constant(
        2.0**-20,
        "sum_h |w_h| sum_d |q_hd k_d|",
        "dot of 128, ReLU, weight, head sum and key scale with fp32 accumulators, products exact: "
        "16 U; sums of one sign lose up to 7 U (64 equal heads), of mixed signs 0.3 U",
    ),
    Accumulator.SM90_FP8: Constant(
        2.0**-13,
        "sum_h |w_h| sum_d |q_hd k_d|",
        "FP8 wgmma of Hopper aligns products to about 14 bits before it adds them",
    ),
}
"""Score accumulation by unit; the profile of a candidate names its own."""
