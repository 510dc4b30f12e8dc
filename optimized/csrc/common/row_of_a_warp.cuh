// S4, S5 and S7 of a row of 512 channels by one warp, sixteen channels a lane.
//
// Lane l owns [8l, 8l + 8) and [256 + 8l, 256 + 8l + 8): what a lane stores is contiguous, and RoPE
// lies in the upper half.
#pragma once

#include "common/row_math.cuh"
#include "common/row_formats.cuh"

namespace needlepoint {

struct Row512 {
  static constexpr int kFirstRope = 24;  // lanes 24..31 hold RoPE dims in their upper half

  // Which of the row's float4 is the i-th of a lane's four.
  static __device__ __forceinline__ int quad(int lane, int i) {
    return i / 2 * 64 + lane * 2 + i % 2;
  }

  static __device__ __forceinline__ void set(float (&x)[16], int i, const float4& quad) {
    x[4 * i] = quad.x;
    x[4 * i + 1] = quad.y;
    x[4 * i + 2] = quad.z;
    x[4 * i + 3] = quad.w;
  }
};

// S4. `quad(i)` is the i-th float4 of the norm weights. Returns 1 / rms, which is positive unless
// the sum of squares is not finite.
template <class Quad>
__device__ __forceinline__ float normalize512(float (&x)[16], const Quad& quad, float eps,
                                              int lane) {
  float4 weight[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) weight[i] = quad(Row512::quad(lane, i));
  float halves[2];  // of the tree, joined by its last stride
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float even = x[8 * half + 2 * i], odd = x[8 * half + 2 * i + 1];
      h[i] = __fmaf_rn(odd, odd, __fmul_rn(even, even));
    }
    halves[half] = tree_sum<32>(__fadd_rn(__fadd_rn(h[0], h[1]), __fadd_rn(h[2], h[3])));
  }
  const float r = inverse_rms<512>(__fadd_rn(halves[0], halves[1]), eps);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    x[i] = __fmul_rn(__fmul_rn(x[i], r), component(weight[i / 4], i % 4));
  }
  return r;
}

// S5. `table` holds the cosines and sines of this lane's four pairs; lanes without RoPE dims leave
// it alone.
__device__ __forceinline__ void rotate512(float (&x)[16], const float4 (&table)[2], int lane) {
  if (lane < Row512::kFirstRope) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    rotate_pair(x[8 + 4 * i], x[9 + 4 * i], table[i].x, table[i].y);
    rotate_pair(x[10 + 4 * i], x[11 + 4 * i], table[i].z, table[i].w);
  }
}

// S7.
template <Row kRow>
__device__ __forceinline__ void store_row512(const Pool& pool, int64_t slot, const float (&x)[16],
                                             int lane) {
  static_assert(kRow == Row::bf16 || kRow == Row::packed584,
                "supported rows of 512 channels: bf16 and 584 bytes");
  uint8_t* page = pool.page(slot);
  const int64_t row = pool.row(slot);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = pack_bf16(x[8 * half + 2 * i], x[8 * half + 2 * i + 1]);
    if constexpr (kRow == Row::bf16) {
      reinterpret_cast<uint4*>(page + row * 1024 + half * 512)[lane] =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    } else {
      float b[8], amax = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        b[i] = i % 2 == 0 ? widen_low(pairs[i / 2]) : widen_high(pairs[i / 2]);
        amax = fmaxf(amax, fabsf(b[i]));
      }
      amax = lane_max<8>(amax);
      const uint32_t byte = ue8m0_byte(__fmul_rn(fmaxf(amax, kFloor), kInverse448));
      const bool coded = half == 0 || lane < Row512::kFirstRope;
      if (coded) {
        const float inverse = ue8m0_inverse(byte);
#pragma unroll
        for (int i = 0; i < 8; ++i) b[i] = __fmul_rn(b[i], inverse);
        *reinterpret_cast<uint2*>(page + row * 576 + half * 256 + lane * 8) =
            make_uint2(e4m3_quad(b[0], b[1], b[2], b[3]), e4m3_quad(b[4], b[5], b[6], b[7]));
      } else {
        auto* target =
            reinterpret_cast<uint2*>(page + row * 576 + 448) + 2 * (lane - Row512::kFirstRope);
        target[0] = make_uint2(pairs[0], pairs[1]);
        target[1] = make_uint2(pairs[2], pairs[3]);
      }
      if (lane % 8 == 0) {  // seven scales; the eighth byte is padding, written as zero
        page[pool.rows() * 576 + row * 8 + half * 4 + lane / 8] =
            static_cast<uint8_t>(coded ? byte : 0u);
      }
    }
  }
}

}  // namespace needlepoint
