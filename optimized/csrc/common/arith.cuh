// Exact fp32 arithmetic of docs/specification.md.
//
// Every operation is an intrinsic with stated rounding, so that neither contraction nor
// reassociation can change a bit; the build also passes -fmad=false, -ftz=false, -prec-div=true and
// -prec-sqrt=true.
#pragma once

#include <cstdint>

namespace needlepoint {

constexpr float kLog2e = 0x1.715476p+0f;       // L, 0x3FB8AA3B
constexpr float kMagic = 12582912.0f;          // 1.5 * 2^23: adding it rounds to an integer
constexpr float kExp1 = 0x1.62e42ap-1f;        // C1, 0x3F317215
constexpr float kExp2 = 0x1.ebf9c2p-3f;        // C2, 0x3E75FCE1
constexpr float kExp3 = 0x1.c6b6d8p-5f;        // C3, 0x3D635B6C
constexpr float kExp4 = 0x1.3ce8acp-7f;        // C4, 0x3C1E7456
constexpr float kExp5 = 0x1.5bda54p-10f;       // C5, 0x3AADED2A
constexpr float kHadamard = 0x1.6a09e6p-4f;    // fl(128^-1/2), 0x3DB504F3
constexpr float kScoreLimit = 4194304.0f;      // 2^22, the limit of prescaled scores
constexpr float kPooledLimit = 0x1.0001p+59f;  // no pooled row of kv below 2^59 reaches it
constexpr float kFloor = 0x1.a36e2ep-14f;      // fl(1e-4), 0x38D1B717
constexpr float kFloorFp4 = 0x1.8p-124f;       // 6 * 2^-126, 0x01C00000
constexpr float kInverse448 = 0x1.24924ap-9f;  // fl(1/448), 0x3B124925
constexpr float kInverse6 = 0x1.555556p-3f;    // fl(1/6), 0x3E2AAAAB

// Between two numbers of at most this magnitude S2's clamp changes nothing.
constexpr float kSmallLogit = 63.0f;

// S2's clamp of t = z - m, below which a weight would be subnormal.
__device__ __forceinline__ float clamped(float t) { return fmaxf(t, -126.0f); }

// S2: base-2 exponential of t, -126 <= t <= 0.
__device__ __forceinline__ float exp2_weight(float t) {
  const float r = __fadd_rn(t, kMagic);
  const float f = __fsub_rn(t, __fsub_rn(r, kMagic));
  float p = __fmaf_rn(f, kExp5, kExp4);
  p = __fmaf_rn(f, p, kExp3);
  p = __fmaf_rn(f, p, kExp2);
  p = __fmaf_rn(f, p, kExp1);
  p = __fmaf_rn(f, p, 1.0f);
  return __uint_as_float(__float_as_uint(p) + (__float_as_uint(r) << 23));
}

// 1 / x, correctly rounded for 2^-125 <= x < 2^125: the steps that the compiler makes for __frcp_rn
// without its test of the range. Not finite where x is not.
__device__ __forceinline__ float reciprocal(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return __fmaf_rn(r, __fmaf_rn(-x, r, 1.0f), r);
}

// x / 448, correctly rounded for x >= 2^-100: with a correctly rounded reciprocal one correction of
// the product is enough. Not finite where x is not.
__device__ __forceinline__ float divide_by_448(float x) {
  const float q = __fmul_rn(x, kInverse448);
  return __fmaf_rn(__fmaf_rn(-448.0f, q, x), kInverse448, q);
}

// Correctly rounded v / s for sums of weights, 1 <= s < 256: the steps that the compiler makes for
// __fdiv_rn where it need not fear underflow, with one test for all numerators instead of a branch
// for each.
template <int kCount>
__device__ __forceinline__ void divide(const float (&v)[kCount], const float (&s)[kCount],
                                       float (&out)[kCount]) {
  float smallest = fabsf(v[0]), largest = smallest;
#pragma unroll
  for (int i = 1; i < kCount; ++i) {
    smallest = fminf(smallest, fabsf(v[i]));
    largest = fmaxf(largest, fabsf(v[i]));
  }
  if (smallest >= 0x1p-90f && largest < 0x1p+90f) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float r = reciprocal(s[i]);
      const float q = __fmul_rn(v[i], r);
      out[i] = __fmaf_rn(r, __fmaf_rn(-s[i], q, v[i]), q);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) out[i] = __fdiv_rn(v[i], s[i]);
  }
}

// The larger magnitude, NaN if one of them is NaN; fmaxf drops it.
__device__ __forceinline__ float larger_magnitude(float largest, float x) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(largest), "f"(fabsf(x)));
  return out;
}

// Adjacent-pair tree over 2^k lanes: addition commutes, so a butterfly gives every lane its value.
template <int kLanes>
__device__ __forceinline__ float tree_sum(float x) {
#pragma unroll
  for (int mask = 1; mask < kLanes; mask <<= 1) {
    x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, mask));
  }
  return x;
}

template <int kLanes>
__device__ __forceinline__ float lane_max(float x) {
#pragma unroll
  for (int mask = 1; mask < kLanes; mask <<= 1) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, mask));
  }
  return x;
}

// As lane_max for magnitudes, NaN if one of them is NaN.
template <int kLanes>
__device__ __forceinline__ float lane_magnitude(float x) {
#pragma unroll
  for (int mask = 1; mask < kLanes; mask <<= 1) {
    x = larger_magnitude(x, __shfl_xor_sync(0xffffffffu, x, mask));
  }
  return x;
}

// The largest of 32 non-negative numbers: their bits order as integers do.
__device__ __forceinline__ float warp_max_nonnegative(float x) {
  return __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(x)));
}

// e = exponent(g) + (mantissa(g) != 0), the power of two at or above g, as its UE8M0 byte.
__device__ __forceinline__ uint32_t ue8m0_byte(float g) {
  return (__float_as_uint(g) + 0x7fffffu) >> 23;
}

// 2^-e for the UE8M0 byte e + 127, exact while both are normal numbers.
__device__ __forceinline__ float ue8m0_inverse(uint32_t byte) {
  return __uint_as_float((254u - byte) << 23);
}

}  // namespace needlepoint
