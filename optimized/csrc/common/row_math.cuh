// S4 to S6 on one row, four channels a thread: a warp at d = 128, a 128-thread block at d = 512.
#pragma once

#include "common/arith.cuh"

namespace needlepoint {

constexpr int kRopeDims = 64;

template <int kDim>
struct RowThreads {
  static_assert(kDim == 128 || kDim == 512, "supported head_dim: 128 (index) and 512 (main)");
  static constexpr int kThreads = kDim / 4;
  static constexpr int kFirstRope = kThreads - kRopeDims / 4;  // first thread with RoPE dims
};

// ss of S4 over the whole row, in every thread of it.
template <int kDim>
__device__ __forceinline__ float sum_of_squares(const float (&x)[4], float* warp_sums) {
  const float h0 = __fmaf_rn(x[1], x[1], __fmul_rn(x[0], x[0]));
  const float h1 = __fmaf_rn(x[3], x[3], __fmul_rn(x[2], x[2]));
  float sum = tree_sum<32>(__fadd_rn(h0, h1));
  if constexpr (kDim == 512) {
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = __fadd_rn(__fadd_rn(warp_sums[0], warp_sums[1]), __fadd_rn(warp_sums[2], warp_sums[3]));
  }
  return sum;
}

template <int kDim>
__device__ __forceinline__ float inverse_rms(float sum, float eps) {
  return reciprocal(__fsqrt_rn(__fmaf_rn(sum, 1.0f / kDim, eps)));
}

// S4. Returns 1 / rms, which is positive unless the sum of squares is not finite.
template <int kDim>
__device__ __forceinline__ float normalize(float (&x)[4], const float4& weight, float eps,
                                           float* warp_sums) {
  const float r = inverse_rms<kDim>(sum_of_squares<kDim>(x, warp_sums), eps);
  x[0] = __fmul_rn(__fmul_rn(x[0], r), weight.x);
  x[1] = __fmul_rn(__fmul_rn(x[1], r), weight.y);
  x[2] = __fmul_rn(__fmul_rn(x[2], r), weight.z);
  x[3] = __fmul_rn(__fmul_rn(x[3], r), weight.w);
  return r;
}

// S5 on one adjacent pair.
__device__ __forceinline__ void rotate_pair(float& x0, float& x1, float c, float s) {
  const float y0 = __fmaf_rn(-x1, s, __fmul_rn(x0, c));
  const float y1 = __fmaf_rn(x1, c, __fmul_rn(x0, s));
  x0 = y0;
  x1 = y1;
}

// `table` holds cos, sin, cos, sin of this thread's two pairs; only threads with RoPE dims call it.
__device__ __forceinline__ void rotate(float (&x)[4], const float4& table) {
  rotate_pair(x[0], x[1], table.x, table.y);
  rotate_pair(x[2], x[3], table.z, table.w);
}

// S6 for one warp. The upper lane of a pair needs fl(other - own) = fl(own * -1 + other).
__device__ __forceinline__ void hadamard(float (&x)[4], int lane) {
  const float a0 = __fadd_rn(x[0], x[1]), a1 = __fsub_rn(x[0], x[1]);
  const float a2 = __fadd_rn(x[2], x[3]), a3 = __fsub_rn(x[2], x[3]);
  x[0] = __fadd_rn(a0, a2);
  x[1] = __fadd_rn(a1, a3);
  x[2] = __fsub_rn(a0, a2);
  x[3] = __fsub_rn(a1, a3);
#pragma unroll
  for (int mask = 1; mask < 32; mask <<= 1) {
    const float sign = lane & mask ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(0xffffffffu, x[i], mask));
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __fmul_rn(x[i], kHadamard);
}

}  // namespace needlepoint
