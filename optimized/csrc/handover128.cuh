// From pooled channels to a stored row at ratio 128: blocks leave their channels of a row in
// memory, one block takes all of them and finishes the row.
//
// A word of the row is its own signal: it is kAbsent until it is there. The block that waits for
// the others of a row comes behind them in the grid, so that they run or have run when it starts,
// and none of them waits for another block.
#pragma once

#include "launch.h"
#include "windows.cuh"

namespace needlepoint {

constexpr uint32_t kAbsent = 0xffffffffu;  // a NaN, and no number left is this one

template <int kChannels>
__device__ __forceinline__ void leave_pooled(uint32_t* place, const float (&x)[kChannels]) {
  uint32_t words[kChannels];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    words[c] = isnan(x[c]) ? 0x7fffffffu : __float_as_uint(x[c]);
  }
  if constexpr (kChannels == 1) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(place), "r"(words[0]) : "memory");
  } else {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(place), "r"(words[0]),
                 "r"(words[1])
                 : "memory");
  }
}

// Waits for the words of a row, and marks them absent again.
template <int kWords>
__device__ __forceinline__ void take_pooled(uint32_t* place, float (&x)[kWords]) {
  uint32_t words[kWords];
  bool there;
  do {
    there = true;
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]), "=r"(words[i + 3])
                   : "l"(place + i)
                   : "memory");
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) there = there && words[i] != kAbsent;
  } while (!__all_sync(0xffffffffu, there));
#pragma unroll
  for (int i = 0; i < kWords; i += 4) {
    *reinterpret_cast<uint4*>(place + i) = make_uint4(kAbsent, kAbsent, kAbsent, kAbsent);
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) x[i] = __uint_as_float(words[i]);
}

// S4, S5 and S7 of a whole row by one warp: lane l holds channels 16 l .. 16 l + 15.
template <class T>
__device__ __forceinline__ void finish_row(
    const StoreParams& p, const float* weights, float4* angles, int window, int entry, int64_t slot,
    int lane) {
  constexpr int kOwn = 16, kFirstRope = 28;  // lanes 28..31 hold the RoPE dims
  float x[kOwn], h[kOwn / 2];
  if (lane < kRopeDims / 4) {
    const float* table = p.rope + static_cast<int64_t>(entry) * T::kRatio * kRopeDims;
    copy_async<16>(angles + lane, table + 4 * lane);
  }
  take_pooled(p.pooled + static_cast<int64_t>(window) * T::kDim + lane * kOwn, x);
  wait_copies();
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kOwn / 2; ++i) {
    h[i] = __fmaf_rn(x[2 * i + 1], x[2 * i + 1], __fmul_rn(x[2 * i], x[2 * i]));
  }
#pragma unroll
  for (int stride = 1; stride < kOwn / 2; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kOwn / 2; i += 2 * stride) h[i] = __fadd_rn(h[i], h[i + stride]);
  }
  const float r = inverse_rms<T::kDim>(tree_sum<32>(h[0]), p.eps);
  if (!(r > 0.0f)) report(p, kFaultRow, window);
#pragma unroll
  for (int i = 0; i < kOwn; ++i) x[i] = __fmul_rn(__fmul_rn(x[i], r), weights[lane * kOwn + i]);
  if (lane >= kFirstRope) {
#pragma unroll
    for (int i = 0; i < kOwn / 4; ++i) {
      const float4 table = angles[(lane - kFirstRope) * (kOwn / 4) + i];
      rotate_pair(x[4 * i], x[4 * i + 1], table.x, table.y);
      rotate_pair(x[4 * i + 2], x[4 * i + 3], table.z, table.w);
    }
  }
  uint8_t* page = p.pool.page(slot);
  const int64_t place = p.pool.row(slot);
  uint32_t pairs[kOwn / 2];
#pragma unroll
  for (int i = 0; i < kOwn / 2; ++i) pairs[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
  if constexpr (T::kRow == Row::bf16) {
    auto* target = reinterpret_cast<uint2*>(page + place * 1024 + lane * 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) target[i] = make_uint2(pairs[2 * i], pairs[2 * i + 1]);
  } else {
    float b[kOwn], amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      b[i] = i % 2 == 0 ? widen_low(pairs[i / 2]) : widen_high(pairs[i / 2]);
      amax = fmaxf(amax, fabsf(b[i]));
    }
    amax = lane_max<4>(amax);
    const uint32_t byte = ue8m0_byte(__fmul_rn(fmaxf(amax, kFloor), kInverse448));
    const float inverse = ue8m0_inverse(byte);
    if (lane < kFirstRope) {
      auto* target = reinterpret_cast<uint2*>(page + place * 576 + lane * 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t words[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float* y = b + 8 * i + 4 * j;
          words[j] = e4m3_quad(__fmul_rn(y[0], inverse), __fmul_rn(y[1], inverse),
                               __fmul_rn(y[2], inverse), __fmul_rn(y[3], inverse));
        }
        target[i] = make_uint2(words[0], words[1]);
      }
    } else {
      auto* target = reinterpret_cast<uint2*>(page + place * 576 + 448 + (lane - kFirstRope) * 32);
#pragma unroll
      for (int i = 0; i < 4; ++i) target[i] = make_uint2(pairs[2 * i], pairs[2 * i + 1]);
    }
    if (lane % 4 == 0) {  // seven scales; the eighth byte is padding, written as zero
      page[p.pool.rows() * 576 + place * 8 + lane / 4] =
          static_cast<uint8_t>(lane < kFirstRope ? byte : 0u);
    }
  }
}

}  // namespace needlepoint
