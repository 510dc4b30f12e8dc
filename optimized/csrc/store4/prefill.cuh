// compress -> norm -> RoPE -> Hadamard -> quantise -> paged store at ratio 4, in one launch.
//
// With fp32 rows the launch stops after pooling: the first of the separate steps.
//
// A window belongs to one warp at head_dim 128 and to one block at head_dim 512; the tokens that
// later calls will need are copied into the state by further warps or blocks of the same launch.
// Reads and writes of the state never meet: the ring has room for both (see serving/plan.py).
#pragma once

#include "store4/prefill_main.cuh"

namespace needlepoint {

template <class T>
__global__ __launch_bounds__(Store4<T>::kBlock, Store4<T>::kResident) void prefill4_kernel(
    const __grid_constant__ StoreParams p) {
  // At 512 registers are short: the slot waits in shared memory and is read behind a barrier.
  constexpr bool kSharedSlot = T::kDim == 512;
  __shared__ float warp_sums[4];
  __shared__ int64_t shared_slot;
  constexpr int kThreads = Store4<T>::kThreads;
  const int unit = own_unit<T>();
  const int thread = threadIdx.x % kThreads;
  // Blocks that copy tokens are short: what follows may start beside them.
  if (unit >= p.windows) release_successor();
  wait_for_predecessor();
  if (unit >= p.windows) {
    const int index = unit - p.windows;
    if (index < p.num_writes) keep_token<T>(p, index, thread * 4);
    return;
  }
  int64_t slot = 0;
  if constexpr (kSharedSlot) {
    if (thread == 0) copy_async<8>(&shared_slot, p.slots + unit);
  } else {
    slot = __ldg(reinterpret_cast<const long long*>(p.slots) + unit);
  }
  Window window;
  if (!find_window<T>(p, unit, window)) return;
  constexpr int kFirstRope = RowThreads<T::kDim>::kFirstRope;
  float4 table = {};
  if (thread >= kFirstRope) {
    const int64_t position = static_cast<int64_t>(window.entry) * T::kRatio;
    table = __ldg(reinterpret_cast<const float4*>(p.rope + position * kRopeDims) +
                  (thread - kFirstRope));
  }
  float x[4];
  pool_window(Window4<T>{p, window, thread * 4, own_unit<T>()}, x, [] {});
  if constexpr (kSharedSlot) wait_copies();
  if (slot < 0) return;
  if constexpr (T::kRow == Row::fp32) {
    if constexpr (kSharedSlot) {
      __syncthreads();
      slot = shared_slot;
      if (slot < 0) return;
    }
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = larger_magnitude(largest, x[i]);
    if (!(largest < kPooledLimit)) report(p, kFaultRow, own_unit<T>());
    store_row<T::kRow, T::kDim>(p.pool, slot, thread, x);
    return;
  }
  const float4 weight = __ldg(reinterpret_cast<const float4*>(p.norm_weight) + thread);  // in L1
  const bool sound = normalize<T::kDim>(x, weight, p.eps, warp_sums) > 0.0f;
  if constexpr (kSharedSlot) {
    slot = shared_slot;
    if (slot < 0) return;
  }
  if (!sound) report(p, kFaultRow, own_unit<T>());
  if (thread >= kFirstRope) rotate(x, table);
  if constexpr (T::kHadamard) hadamard(x, thread);
  release_successor();
  store_row<T::kRow, T::kDim>(p.pool, slot, thread, x);
}

template <class T, class Arguments>
void run_prefill4(const char* name, const Arguments& a) {
  const StoreParams p = store_params(a);
  const int64_t units = static_cast<int64_t>(p.windows) + p.num_writes;
  const dim3 blocks(static_cast<unsigned>((units + Store4<T>::kUnits - 1) / Store4<T>::kUnits));
  const Call call{name, a.kv.device(), a.overlap};
  if constexpr (Store4<T>::kOneFinishes) {
    launch(call, prefill_main_kernel<T>, p, blocks, Store4<T>::kBlock);
  } else {
    launch(call, prefill4_kernel<T>, p, blocks, Store4<T>::kBlock);
  }
}

}  // namespace needlepoint
