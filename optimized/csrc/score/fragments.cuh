// Operands of the tensor cores, and what they sum in.
//
// Lane l of a warp (g = l / 4, t = l % 4) owns dims [32 t, 32 t + 32) of key g of a tile of 8 keys,
// and the same dims of query rows g and g + 8 of a tile of 16 rows. The instruction calls other
// dims its own; a sum over dims does not care, as long as both operands are permuted alike. So a
// lane reads whole 16-byte words, an fp4 lane has exactly one scale, and nothing is shuffled.
#pragma once

#include <cuda_fp16.h>

#include "common/row_formats.cuh"

namespace needlepoint {

// What an index row is multiplied as. fp8 is native from sm_120 on; on sm_90 the instruction exists
// but is lowered to more work than widening to fp16, which is exact. fp4 with its scale is exact in
// bf16.
enum class Unit { bf16, fp16, e4m3 };

template <Row kRow>
struct Operand;

template <>
struct Operand<Row::bf16> {
  static constexpr Unit kUnit = Unit::bf16;
  static constexpr int kBytes = 256, kScaleBytes = 0;
};

template <>
struct Operand<Row::fp8> {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  static constexpr Unit kUnit = Unit::e4m3;
#else
  static constexpr Unit kUnit = Unit::fp16;
#endif
  static constexpr int kBytes = 128, kScaleBytes = 4;
};

template <>
struct Operand<Row::fp4> {
  static constexpr Unit kUnit = Unit::bf16;
  static constexpr int kBytes = 64, kScaleBytes = 4;
};

// Words of 32 bits that a lane holds of a row, and instructions over its 128 dims.
template <Unit kUnit>
constexpr int kWords = kUnit == Unit::e4m3 ? 8 : 16;
template <Unit kUnit>
constexpr int kSteps = kWords<kUnit> / 2;

template <Unit kUnit>
__device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  if constexpr (kUnit == Unit::bf16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else if constexpr (kUnit == Unit::fp16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// The first product of a sum adds to zero, which costs no register.
template <Unit kUnit>
__device__ __forceinline__ void multiply_first(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                               uint32_t b1) {
  c[0] = c[1] = c[2] = c[3] = 0.0f;
  multiply<kUnit>(c, a, b0, b1);
}

// Two of a word's four E4M3 codes as two fp16, exact.
template <int half>
__device__ __forceinline__ uint32_t widen_e4m3(uint32_t four) {
  uint32_t out;
  if constexpr (half == 0) {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }"
        : "=r"(out)
        : "r"(four));
  } else {
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high; }"
        : "=r"(out)
        : "r"(four));
  }
  return out;
}

__device__ __forceinline__ uint32_t product_bf16x2(uint32_t a, uint32_t b) {
  uint32_t out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
  return out;
}

// 2^(byte - 127) twice, as bf16; byte 255 is NaN.
__device__ __forceinline__ uint32_t ue8m0_bf16x2(uint32_t byte) {
  const uint32_t one = byte == 0 ? 0x0040u : byte == 255 ? 0x7fffu : byte << 7;
  return one | (one << 16);
}

// Nibbles i and i + 4 of a word of E2M1 codes as two bf16, times a scale. The three bits of a code
// are a bf16 exponent and mantissa scaled by 2^-126, also where the code is subnormal.
template <int i>
__device__ __forceinline__ uint32_t widen_e2m1(uint32_t word, uint32_t scale) {
  const uint32_t high = word << (12 - 4 * i);  // the two codes at the top of each half
  const uint32_t bits = (high & 0x80008000u) | ((high >> 6) & 0x01c001c0u);
  return product_bf16x2(product_bf16x2(bits, 0x7e807e80u), scale);
}

// The operand words of one 16-byte piece of a stored row. `scale` is for fp4.
template <Row kRow, Unit kUnit = Operand<kRow>::kUnit>
struct Piece {
  static constexpr int kPieces = Operand<kRow>::kBytes / 64;  // of a lane: 4, 2 or 1
  static constexpr int kStepsEach = kSteps<kUnit> / kPieces;

  uint4 raw;

  // Word `half` (0 or 1) of step `s` of this piece.
  template <int s, int half>
  __device__ __forceinline__ uint32_t word(uint32_t scale) const {
    if constexpr (kUnit == Unit::e4m3 || kRow == Row::bf16) {
      constexpr int k = 2 * s + half;
      return k == 0 ? raw.x : k == 1 ? raw.y : k == 2 ? raw.z : raw.w;
    } else if constexpr (kRow == Row::fp8) {
      const uint32_t four = s == 0 ? raw.x : s == 1 ? raw.y : s == 2 ? raw.z : raw.w;
      return widen_e4m3<half>(four);
    } else {
      constexpr int k = 2 * s + half;
      const uint32_t eight = k / 4 == 0 ? raw.x : k / 4 == 1 ? raw.y : k / 4 == 2 ? raw.z : raw.w;
      return widen_e2m1<k % 4>(eight, scale);
    }
  }
};

// max(x, 0) that keeps NaN: a score made of an unwritten byte is not to look like a small one.
__device__ __forceinline__ float relu(float x) {
  float out;
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(out) : "f"(x));
  return out;
}

}  // namespace needlepoint
