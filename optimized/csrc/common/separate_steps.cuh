// The steps after pooling as launches of their own, on fp32 rows [n, head_dim]. They call the same
// functions as the one launch, so their bytes are equal; they exist to observe every stage.
#pragma once

#include "common/store_params.h"

namespace needlepoint {

enum class Step { norm, rope, hadamard, store };

struct StepParams {
  const float* rows;         // [n, head_dim]
  const float* norm_weight;  // [head_dim]
  const float* rope;         // [positions, 32, 2]
  const int32_t* positions;  // [n]
  const int64_t* slots;      // [n], negative: padding
  Pool pool;
  int32_t count;
  float eps;
};

template <int kDim_, Step kStep_, Row kRow_>
struct StepTraits {
  static constexpr int kDim = kDim_;
  static constexpr Step kStep = kStep_;
  static constexpr Row kRow = kRow_;
  static constexpr int kUnits = 128 / RowThreads<kDim>::kThreads;  // rows a block
};

template <class T>
__global__ __launch_bounds__(128) void step_kernel(const __grid_constant__ StepParams p) {
  constexpr int kDim = T::kDim;
  constexpr Step kStep = T::kStep;
  static_assert(kStep != Step::hadamard || kDim == 128, "supported head_dim of Hadamard: 128");
  __shared__ float warp_sums[4];
  wait_for_predecessor();
  constexpr int kThreads = RowThreads<kDim>::kThreads;
  constexpr int kFirstRope = RowThreads<kDim>::kFirstRope;
  const int unit = blockIdx.x * T::kUnits + threadIdx.x / kThreads;
  const int thread = threadIdx.x % kThreads;
  if (unit >= p.count || p.slots[unit] < 0) return;
  const float4 raw =
      reinterpret_cast<const float4*>(p.rows + static_cast<int64_t>(unit) * kDim)[thread];
  float x[4] = {raw.x, raw.y, raw.z, raw.w};
  if constexpr (kStep == Step::norm) {
    const float4 weight = __ldg(reinterpret_cast<const float4*>(p.norm_weight) + thread);
    normalize<kDim>(x, weight, p.eps, warp_sums);
  } else if constexpr (kStep == Step::rope) {
    if (thread >= kFirstRope) {
      const int64_t position = p.positions[unit];
      rotate(x, __ldg(reinterpret_cast<const float4*>(p.rope + position * kRopeDims) +
                      (thread - kFirstRope)));
    }
  } else if constexpr (kStep == Step::hadamard) {
    hadamard(x, thread);
  }
  release_successor();
  store_row<T::kRow, kDim>(p.pool, p.slots[unit], thread, x);
}

template <class T, class Arguments>
void run_step(const char* name, const Arguments& a) {
  StepParams p;
  p.rows = address<const float>(a.rows);
  p.norm_weight = address<const float>(a.norm_weight);
  p.rope = address<const float>(a.rope);
  p.positions = address<const int32_t>(a.positions);
  p.slots = address<const int64_t>(a.slots);
  p.pool = make_pool(a.pool, a.page_shift);
  p.count = static_cast<int32_t>(a.rows.size(0));
  p.eps = static_cast<float>(a.eps);
  launch(Call{name, a.rows.device(), true}, step_kernel<T>, p,
         dim3((p.count + T::kUnits - 1) / T::kUnits), 128);
}

}  // namespace needlepoint
