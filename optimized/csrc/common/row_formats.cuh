// S7: one fp32 row becomes the bytes of one cache slot.
#pragma once

#include <cuda_fp8.h>

#include "common/arith.cuh"
#include "common/row_math.cuh"
#include "common/vec.cuh"

namespace needlepoint {

// fp32 rows are no cache format: they carry a row from one separate step to the next.
enum class Row { bf16, fp8, fp4, packed584, fp32 };

template <Row kRow, int kDim>
constexpr bool kRowSupported =
    kRow == Row::bf16 || kRow == Row::fp32 ||
    (kDim == 128 ? kRow == Row::fp8 || kRow == Row::fp4 : kRow == Row::packed584);

// The paged pool. A slot is page * page_size + row; offsets are 64-bit throughout.
struct Pool {
  uint8_t* bytes;
  int64_t page_stride;  // bytes
  int32_t page_shift;   // log2(page_size)

  __device__ __forceinline__ uint8_t* page(int64_t slot) const {
    return bytes + (slot >> page_shift) * page_stride;
  }
  __device__ __forceinline__ int64_t row(int64_t slot) const {
    return slot & ((int64_t{1} << page_shift) - 1);
  }
  __device__ __forceinline__ int64_t rows() const { return int64_t{1} << page_shift; }
};

// Two E4M3 codes, nearest even, saturating at 448; `low` in the lower byte.
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ uint32_t e4m3_quad(float a, float b, float c, float d) {
  return e4m3_pair(a, b) | (e4m3_pair(c, d) << 16);
}

// One E2M1 code, nearest even, saturating at 6, the sign kept on zero. The grid has step 1/2 below
// 2, 1 below 4 and 2 above. Adding 1.5 * 2^23 steps leaves the magnitude in steps, rounded to even,
// in the last bits of the sum; two codes more for each doubling of the step. Hopper has no
// conversion instruction for it.
__device__ __forceinline__ uint32_t e2m1_code(float x) {
  const float a = fminf(fabsf(x), 6.0f);
  const uint32_t binade = __float_as_uint(fmaxf(a, 1.0f)) & 0x7f800000u;
  const float magic = __uint_as_float(binade + (22u << 23) + 0x400000u);
  const uint32_t steps = __float_as_uint(__fadd_rn(a, magic));
  const uint32_t code = (steps + (binade >> 22) + 2u) & 7u;  // binade >> 22 is 254, 256 or 258
  return code | ((__float_as_uint(x) >> 28) & 8u);
}

__device__ __forceinline__ uint32_t e2m1_pair(float low, float high) {
  return e2m1_code(low) | (e2m1_code(high) << 4);
}

__device__ __forceinline__ float max_magnitude(const float (&x)[4]) {
  return fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3])));
}

// Every thread of the row calls this with its four channels [4 * thread, 4 * thread + 4).
template <Row kRow, int kDim>
__device__ __forceinline__ void store_row(const Pool& pool, int64_t slot, int thread,
                                          const float (&x)[4]) {
  static_assert(kRowSupported<kRow, kDim>,
                "supported rows: bf16, fp8 and fp4 at head_dim 128; bf16 and 584-byte rows at 512");
  uint8_t* page = pool.page(slot);
  const int64_t row = pool.row(slot);
  if constexpr (kRow == Row::fp32) {
    *reinterpret_cast<float4*>(page + row * (4 * kDim) + thread * 16) =
        make_float4(x[0], x[1], x[2], x[3]);
  } else if constexpr (kRow == Row::bf16) {
    uint8_t* target = page + row * (2 * kDim) + thread * 8;
    *reinterpret_cast<uint2*>(target) = make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
  } else if constexpr (kRow == Row::fp8) {
    const float amax = warp_max_nonnegative(max_magnitude(x));
    const float scale = divide_by_448(fmaxf(amax, kFloor));
    const float inverse = reciprocal(scale);
    *reinterpret_cast<uint32_t*>(page + row * 128 + thread * 4) =
        e4m3_quad(__fmul_rn(x[0], inverse), __fmul_rn(x[1], inverse), __fmul_rn(x[2], inverse),
                  __fmul_rn(x[3], inverse));
    if (thread == 0) *reinterpret_cast<float*>(page + pool.rows() * 128 + row * 4) = scale;
  } else if constexpr (kRow == Row::fp4) {
    const float amax = lane_max<8>(max_magnitude(x));
    const uint32_t byte = ue8m0_byte(__fmul_rn(fmaxf(amax, kFloorFp4), kInverse6));
    const float inverse = ue8m0_inverse(byte);
    const uint32_t low = e2m1_pair(__fmul_rn(x[0], inverse), __fmul_rn(x[1], inverse));
    const uint32_t high = e2m1_pair(__fmul_rn(x[2], inverse), __fmul_rn(x[3], inverse));
    *reinterpret_cast<uint16_t*>(page + row * 64 + thread * 2) =
        static_cast<uint16_t>(low | (high << 8));
    if (thread % 8 == 0) {
      page[pool.rows() * 64 + row * 4 + thread / 8] = static_cast<uint8_t>(byte);
    }
  } else {
    constexpr int kFirstRope = RowThreads<512>::kFirstRope;
    const uint32_t pair0 = pack_bf16(x[0], x[1]), pair1 = pack_bf16(x[2], x[3]);
    const float b[4] = {widen_low(pair0), widen_high(pair0), widen_low(pair1), widen_high(pair1)};
    const float amax = lane_max<16>(max_magnitude(b));
    const uint32_t byte = ue8m0_byte(__fmul_rn(fmaxf(amax, kFloor), kInverse448));
    if (thread < kFirstRope) {
      const float inverse = ue8m0_inverse(byte);
      *reinterpret_cast<uint32_t*>(page + row * 576 + thread * 4) =
          e4m3_quad(__fmul_rn(b[0], inverse), __fmul_rn(b[1], inverse), __fmul_rn(b[2], inverse),
                    __fmul_rn(b[3], inverse));
    } else {
      *reinterpret_cast<uint2*>(page + row * 576 + 448 + (thread - kFirstRope) * 8) =
          make_uint2(pair0, pair1);
    }
    if (thread % 16 == 0) {  // seven scales; the eighth byte is padding, written as zero
      page[pool.rows() * 576 + row * 8 + thread / 16] =
          static_cast<uint8_t>(thread < kFirstRope ? byte : 0u);
    }
  }
}

}  // namespace needlepoint
