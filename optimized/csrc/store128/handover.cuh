// From pooled channels to a stored row at ratio 128: blocks leave their channels of a row in
// memory, one block takes all of them and finishes the row.
//
// A word of the row is its own signal: it is kAbsent until it is there. The block that waits for
// the others of a row comes behind them in the grid, so that they run or have run when it starts,
// and none of them waits for another block.
#pragma once

#include "launch/launch.h"
#include "store128/pool.cuh"
#include "common/row_of_a_warp.cuh"

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

// Waits for a lane's words of a row, and marks them absent again.
__device__ __forceinline__ void take_pooled(uint32_t* row, int lane, float (&x)[16]) {
  uint4 words[4];
  bool there;
  do {
    there = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[i].x), "=r"(words[i].y), "=r"(words[i].z), "=r"(words[i].w)
                   : "l"(row + 4 * Row512::quad(lane, i))
                   : "memory");
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      there = there && words[i].x != kAbsent && words[i].y != kAbsent && words[i].z != kAbsent &&
              words[i].w != kAbsent;
    }
  } while (!__all_sync(0xffffffffu, there));
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    reinterpret_cast<uint4*>(row)[Row512::quad(lane, i)] =
        make_uint4(kAbsent, kAbsent, kAbsent, kAbsent);
    Row512::set(x, i,
                make_float4(__uint_as_float(words[i].x), __uint_as_float(words[i].y),
                            __uint_as_float(words[i].z), __uint_as_float(words[i].w)));
  }
}

// S4, S5 and S7 of a row by one warp. Norm weights are in shared memory, and so is where cosines
// and sines go while the row is waited for.
template <class T>
__device__ __forceinline__ void finish_row(const StoreParams& p, const float4* weights,
                                           float4* angles, int window, int entry, int64_t slot,
                                           int lane) {
  __syncwarp();  // angles of the row before have been used
  if (lane < kRopeDims / 4) {
    const float* table = p.rope + static_cast<int64_t>(entry) * T::kRatio * kRopeDims;
    copy_async<16>(angles + lane, table + 4 * lane);
  }
  float x[16];
  take_pooled(p.pooled + static_cast<int64_t>(window) * T::kDim, lane, x);
  wait_copies();
  __syncwarp();
  const float r = normalize512(x, [=](int i) { return weights[i]; }, p.eps, lane);
  if (!(r > 0.0f)) report(p, kFaultRow, window);
  const int first = 2 * max(lane - Row512::kFirstRope, 0);
  rotate512(x, {angles[first], angles[first + 1]}, lane);
  store_row512<T::kRow>(p.pool, slot, x, lane);
}

// Adds the groups of a window up and leaves the slice for the last block of the window, which
// finishes the row. With fp32 rows the slice is stored as it is.
template <class T, class B>
__device__ __forceinline__ void leave_slice(const StoreParams& p, int slice, const Turn& turn,
                                            uint32_t before, typename B::Shared& shared) {
  const uint32_t lane = threadIdx.x % 32, buffer = before % 2;
  const int channel = slice * B::kChannels + B::kLaneChannels * lane;
  float s[B::kLaneChannels], v[B::kLaneChannels], x[B::kLaneChannels];
  add_groups<B>(shared.sums[buffer], lane, s);
  add_groups<B>(shared.weighted[buffer], lane, v);
#pragma unroll
  for (int c = 0; c < B::kLaneChannels; ++c) shared.maxima[before % 4][c][lane] = kLowest;
  divide(v, s, x);
  if constexpr (T::kRow == Row::fp32) {
    float largest = 0.0f;
#pragma unroll
    for (int c = 0; c < B::kLaneChannels; ++c) largest = larger_magnitude(largest, x[c]);
    if (!(largest < kPooledLimit)) report(p, kFaultRow, turn.number);
    auto* row = p.pool.page(turn.slot) + p.pool.row(turn.slot) * 2048 + channel * 4;
#pragma unroll
    for (int c = 0; c < B::kLaneChannels; ++c) reinterpret_cast<float*>(row)[c] = x[c];
  } else {
    leave_pooled(p.pooled + static_cast<int64_t>(turn.number) * T::kDim + channel, x);
  }
}

// The warp behind the pooling warps, which are a window further on: sums of a window are there when
// the maxima of the next one are. Rows wait for another window: by then the other blocks have
// left theirs.
template <class T, class B>
__device__ __forceinline__ void hand_over(const StoreParams& p, int slice, uint32_t& before,
                                          typename B::Shared& shared) {
  const int count = shared.count;
  if (count == 0) return;
  meet<B>();
#pragma unroll 1
  for (int i = 0; i <= count; ++i) {
    if (i < count) {
      meet<B>();
      leave_slice<T, B>(p, slice, shared.turns[i], before++, shared);
    }
    if constexpr (T::kRow != Row::fp32) {
      if (i == 0 || slice < B::kSlices - 1) continue;
      const Turn& turn = shared.turns[i - 1];
      finish_row<T>(p, shared.norm_weight, shared.angles, turn.number, turn.window.entry, turn.slot,
                    threadIdx.x % 32);
    }
  }
}

}  // namespace needlepoint
