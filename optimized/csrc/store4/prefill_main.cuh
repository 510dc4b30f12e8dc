// Main rows of a prefill at ratio 4: a block pools a window, and one of its warps finishes the row.
//
// That warp holds sixteen channels a lane instead of four: what is the same for a whole row is
// computed a quarter as often. What only it needs waits in shared memory and leaves registers for
// more blocks.
#pragma once

#include "launch/launch.h"
#include "store4/pool.cuh"
#include "common/row_of_a_warp.cuh"

namespace needlepoint {

struct Pooled512 {
  // A float4 of padding behind each 32 channels keeps the lanes out of each other's banks.
  float4 row[128 + 16];
  float4 table[kRopeDims / 4];  // cosines and sines

  static __device__ __forceinline__ int place(int quad) { return quad + quad / 8; }
};

template <class T>
__device__ __forceinline__ void finish512(const StoreParams& p, const Pooled512& pooled) {
  const int window = own_unit<T>(), lane = threadIdx.x % 32;
  const int64_t slot = __ldg(reinterpret_cast<const long long*>(p.slots) + window);
  float x[16];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    Row512::set(x, i, pooled.row[Pooled512::place(Row512::quad(lane, i))]);
  }
  const auto* weights = reinterpret_cast<const float4*>(p.norm_weight);
  const bool sound = normalize512(x, [=](int i) { return __ldg(weights + i); }, p.eps, lane) > 0.0f;
  const int first = 2 * max(lane - Row512::kFirstRope, 0);
  rotate512(x, {pooled.table[first], pooled.table[first + 1]}, lane);
  release_successor();
  if (slot < 0) return;
  if (!sound) report(p, kFaultRow, window);
  store_row512<T::kRow>(p.pool, slot, x, lane);
}

template <class T>
__global__ __launch_bounds__(Store4<T>::kBlock, Store4<T>::kResident) void prefill_main_kernel(
    const __grid_constant__ StoreParams p) {
  __shared__ Pooled512 pooled;
  const int unit = own_unit<T>(), thread = threadIdx.x;
  // Blocks that copy tokens are short: what follows may start beside them.
  if (unit >= p.windows) release_successor();
  wait_for_predecessor();
  if (unit >= p.windows) {
    if (unit - p.windows < p.num_writes) keep_token<T>(p, unit - p.windows, thread * 4);
    return;
  }
  Window window;
  if (!find_window<T>(p, unit, window)) return;  // the same for the whole block
  float4 angles;
  if (thread < kRopeDims / 4) {
    const int64_t position = static_cast<int64_t>(window.entry) * T::kRatio;
    angles = __ldg(reinterpret_cast<const float4*>(p.rope + position * kRopeDims) + thread);
  }
  float x[4];
  pool_window(Window4<T>{p, window, thread * 4, unit}, x, [&] {
    if (thread < kRopeDims / 4) pooled.table[thread] = angles;
  });
  pooled.row[Pooled512::place(thread)] = make_float4(x[0], x[1], x[2], x[3]);
  __syncthreads();
  // Blocks of one SM take turns in which of its schedulers gets the finishing warp.
  if (thread / 32 == (blockIdx.x * 0x9e3779b9u) >> 30) finish512<T>(p, pooled);
}

}  // namespace needlepoint
