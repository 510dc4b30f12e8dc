// compress -> norm -> RoPE -> Hadamard -> quantise -> paged store at ratio 4, in one launch.
//
// With fp32 rows the launch stops after pooling: the first of the separate steps.
//
// A window belongs to one warp at head_dim 128 and to one block at head_dim 512; the tokens that
// later calls will need are copied into the state by further warps or blocks of the same launch.
// Reads and writes of the state never meet: the ring has room for both (see cuda_plan.py).
#pragma once

#include "launch.h"
#include "pool4.cuh"

namespace needlepoint {

// Blocks an SM for bf16 input, which is bound by instruction issue: the most without spills.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
constexpr int kResidentBf16 = 5;
#else
constexpr int kResidentBf16 = 6;
#endif

template <class T>
struct Store4 {
  static constexpr int kThreads = RowThreads<T::kDim>::kThreads;  // of one window
  static constexpr int kBlock = 128;
  static constexpr int kUnits = kBlock / kThreads;                // windows a block
  // Blocks an SM that the registers must allow, which fixes how many registers a thread may have.
  static constexpr int kResident =
      T::kMode == Mode::decode || std::is_same_v<typename T::Input, float> ? 4 : kResidentBf16;
};

template <class T>
__global__ __launch_bounds__(Store4<T>::kBlock, Store4<T>::kResident) void store_kernel(
    const __grid_constant__ StoreParams p) {
  __shared__ float warp_sums[4];
  wait_for_predecessor();
  constexpr int kThreads = Store4<T>::kThreads;
  const int unit = blockIdx.x * Store4<T>::kUnits + threadIdx.x / kThreads;
  const int thread = threadIdx.x % kThreads;
  if (unit >= p.windows) {
    const int index = unit - p.windows;
    if (index < p.num_writes) keep_token<T>(p, index, thread * 4);
    return;
  }
  const int64_t slot = __ldg(reinterpret_cast<const long long*>(p.slots) + unit);
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
  pool_window(Window4<T>{p, window, thread * 4}, x);
  if (slot < 0) return;
  if constexpr (T::kRow == Row::fp32) {
    store_row<T::kRow, T::kDim>(p.pool, slot, thread, x);
    return;
  }
  const float4 weight = __ldg(reinterpret_cast<const float4*>(p.norm_weight) + thread);  // in L1
  normalize<T::kDim>(x, weight, p.eps, warp_sums);
  if (thread >= kFirstRope) rotate(x, table);
  if constexpr (T::kHadamard) hadamard(x, thread);
  release_successor();
  store_row<T::kRow, T::kDim>(p.pool, slot, thread, x);
}

template <class T>
void run_store4(const char* name, const StoreParams& p, DLDevice device, bool overlap) {
  const int64_t units = static_cast<int64_t>(p.windows) + p.num_writes;
  const auto blocks = static_cast<unsigned>((units + Store4<T>::kUnits - 1) / Store4<T>::kUnits);
  launch(name, store_kernel<T>, p, dim3(blocks), Store4<T>::kBlock, device, overlap);
}

}  // namespace needlepoint
