// One macro a kind of launch: it defines the exported function of one variant. Arguments have been
// checked by needlepoint.optimized.cuda_checks; what is read here is their addresses and extents.
#pragma once

#include "decode4.cuh"
#include "query.cuh"
#include "steps.cuh"
#include "store.cuh"
#include "store128.cuh"

namespace needlepoint {

template <class T>
const T* pointer(const TensorView& tensor) {
  return static_cast<const T*>(tensor.data_ptr());
}

inline Pool make_pool(const TensorView& pool, int64_t page_shift) {
  return Pool{static_cast<uint8_t*>(pool.data_ptr()), pool.stride(0),
              static_cast<int32_t>(page_shift)};
}

inline StoreParams store_params(
    const TensorView& kv, const TensorView& score, const TensorView& ape,
    const TensorView& norm_weight, const TensorView& rope, const TensorView& segments,
    const TensorView& slots, const TensorView& writes, const TensorView& state,
    const TensorView& pool, const TensorView& faults, const TensorView& workspace,
    int64_t page_shift, double eps,
    double score_small) {
  StoreParams p;
  p.kv = kv.data_ptr();
  p.score = score.data_ptr();
  p.kv_stride = static_cast<uint32_t>(kv.stride(0));
  p.score_stride = static_cast<uint32_t>(score.stride(0));
  p.ape = pointer<float>(ape);
  p.norm_weight = pointer<float>(norm_weight);
  p.rope = pointer<float>(rope);
  p.segments = pointer<Segment>(segments);
  p.slots = pointer<int64_t>(slots);
  p.writes = pointer<WriteEntry>(writes);
  p.state = state.data_ptr();
  p.pool = make_pool(pool, page_shift);
  p.num_segments = static_cast<int32_t>(segments.size(0));
  p.windows = static_cast<int32_t>(slots.size(0));
  p.num_writes = static_cast<int32_t>(writes.size(0));
  p.ring_mask = static_cast<int32_t>(state.size(1)) - 1;
  p.state_is_bf16 = state.dtype().bits == 16;
  p.eps = static_cast<float>(eps);
  p.score_small = static_cast<float>(score_small);
  p.faults = static_cast<int32_t*>(faults.data_ptr());
  p.pooled = static_cast<uint32_t*>(workspace.data_ptr());
  return p;
}

template <class T>
void run_store(const char* name, const StoreParams& p, DLDevice device, bool overlap) {
  if constexpr (T::kRatio == 4 && T::kMode == Mode::decode) {
    run_decode4<T>(name, p, device, overlap);
  } else if constexpr (T::kRatio == 4) {
    run_store4<T>(name, p, device, overlap);
  } else {
    run_store128<T>(name, p, device, overlap);
  }
}

}  // namespace needlepoint

#define NEEDLEPOINT_STORE(NAME, ...)                                                               \
  static void NAME(needlepoint::TensorView kv, needlepoint::TensorView score,                      \
                   needlepoint::TensorView ape, needlepoint::TensorView norm_weight,               \
                   needlepoint::TensorView rope, needlepoint::TensorView segments,                 \
                   needlepoint::TensorView slots, needlepoint::TensorView writes,                  \
                   needlepoint::TensorView state, needlepoint::TensorView pool,                    \
                   needlepoint::TensorView faults, needlepoint::TensorView workspace,              \
                   int64_t page_shift, double eps,                                                 \
                   double score_small, bool overlap) {                                              \
    using namespace needlepoint;                                                                   \
    run_store<StoreTraits<__VA_ARGS__>>(                                                           \
        #NAME,                                                                                     \
        store_params(kv, score, ape, norm_weight, rope, segments, slots, writes, state, pool,      \
                     faults, workspace, page_shift, eps, score_small),                              \
        kv.device(), overlap);                                                                     \
  }                                                                                                \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(NAME, NAME)

#define NEEDLEPOINT_STEP(NAME, DIM, STEP, ROW)                                                     \
  static void NAME(needlepoint::TensorView rows, needlepoint::TensorView norm_weight,              \
                   needlepoint::TensorView rope, needlepoint::TensorView positions,                \
                   needlepoint::TensorView slots, needlepoint::TensorView pool,                    \
                   int64_t page_shift,                                                             \
                   double eps) {                                                                   \
    using namespace needlepoint;                                                                   \
    const StepParams p{pointer<float>(rows),        pointer<float>(norm_weight),                   \
                       pointer<float>(rope),        pointer<int32_t>(positions),                   \
                       pointer<int64_t>(slots),     make_pool(pool, page_shift),                   \
                       static_cast<int32_t>(rows.size(0)), static_cast<float>(eps)};               \
    run_step<DIM, STEP, ROW>(#NAME, p, rows.device());                                             \
  }                                                                                                \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(NAME, NAME)

#define NEEDLEPOINT_QUERY(NAME, INPUT, ROW)                                                        \
  static void NAME(needlepoint::TensorView q, needlepoint::TensorView weights,                     \
                   needlepoint::TensorView positions, needlepoint::TensorView rope,                \
                   needlepoint::TensorView codes, needlepoint::TensorView scales,                  \
                   needlepoint::TensorView folded, needlepoint::TensorView faults,                 \
                   double weight_scale, bool overlap) {                                            \
    using namespace needlepoint;                                                                   \
    const QueryParams p{q.data_ptr(),                                                              \
                        weights.data_ptr(),                                                        \
                        pointer<int32_t>(positions),                                               \
                        pointer<float>(rope),                                                      \
                        static_cast<uint8_t*>(codes.data_ptr()),                                   \
                        scales.data_ptr(),                                                         \
                        static_cast<float*>(folded.data_ptr()),                                    \
                        q.stride(0),                                                               \
                        weights.stride(0),                                                         \
                        static_cast<int32_t>(q.size(1)),                                           \
                        static_cast<float>(weight_scale),                                          \
                        static_cast<int32_t*>(faults.data_ptr())};                                 \
    run_query<INPUT, ROW>(#NAME, p, q.size(0), q.device(), overlap);                               \
  }                                                                                                \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(NAME, NAME)
