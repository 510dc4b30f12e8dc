// One macro a kind of launch of the score and selection kernels, as exports.h has for the stores.
// Arguments have been checked by needlepoint.optimized.cuda_scores and cuda_topk.
#pragma once

#include "score_wgmma.cuh"
#include "topk_pair.cuh"

namespace needlepoint {

template <class T>
T* address(const TensorView& tensor) {
  return tensor.numel() == 0 ? nullptr : static_cast<T*>(tensor.data_ptr());
}

// `keys` is a pool of pages if there is a table, else rows, which begin at `starts`.
inline ScoreParams score_params(
    const TensorView& queries, const TensorView& query_scales, const TensorView& weights,
    const TensorView& limits, const TensorView& groups, const TensorView& keys,
    const TensorView& key_scales, const TensorView& table, const TensorView& starts,
    int64_t page_shift, int64_t columns, int64_t span, const TensorView& out) {
  ScoreParams p;
  p.queries = address<const uint8_t>(queries);
  p.query_scales = address<const uint8_t>(query_scales);
  p.weights = address<const float>(weights);
  p.limits = address<const int32_t>(limits);
  p.groups = address<const ScoreGroup>(groups);
  p.keys = address<const uint8_t>(keys);
  p.key_scales = address<const uint8_t>(key_scales);
  p.table = address<const int32_t>(table);
  p.starts = address<const int64_t>(starts);
  p.page_stride = keys.stride(0);
  p.scale_stride = key_scales.stride(0);
  p.table_stride = table.stride(0);
  p.pages = static_cast<int32_t>(keys.size(0));
  p.page_shift = static_cast<int32_t>(page_shift);
  p.heads = static_cast<int32_t>(weights.size(1));
  p.num_groups = static_cast<int32_t>(groups.size(0));
  p.columns = static_cast<int32_t>(columns);
  p.span = static_cast<int32_t>(span);
  p.out = address<float>(out);
  p.out_stride = out.stride(0);
  return p;
}

}  // namespace needlepoint

#define NEEDLEPOINT_SCORES(NAME, RUN, SHARED, ...)                                                  \
  static void NAME(needlepoint::TensorView queries, needlepoint::TensorView query_scales,          \
                   needlepoint::TensorView weights, needlepoint::TensorView limits,                \
                   needlepoint::TensorView groups, needlepoint::TensorView keys,                   \
                   needlepoint::TensorView key_scales, needlepoint::TensorView table,              \
                   needlepoint::TensorView starts, int64_t page_shift, int64_t columns,            \
                   int64_t span, needlepoint::TensorView out, bool overlap) {                      \
    using namespace needlepoint;                                                                   \
    using Traits = __VA_ARGS__;                                                                    \
    static_assert(Traits::kSharedBytes == SHARED, "cuda_variants.py states another size");         \
    RUN<Traits>(#NAME,                                                                             \
                score_params(queries, query_scales, weights, limits, groups, keys, key_scales,     \
                             table, starts, page_shift, columns, span, out),                       \
                queries.device(), overlap);                                                        \
  }                                                                                                \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(NAME, NAME)

#define NEEDLEPOINT_SCORE_TOPK(NAME, RUN, SHARED, ...)                                              \
  static void NAME(needlepoint::TensorView queries, needlepoint::TensorView query_scales,          \
                   needlepoint::TensorView weights, needlepoint::TensorView limits,                \
                   needlepoint::TensorView groups, needlepoint::TensorView keys,                   \
                   needlepoint::TensorView key_scales, needlepoint::TensorView table,              \
                   needlepoint::TensorView starts, int64_t page_shift, int64_t columns,            \
                   int64_t span, needlepoint::TensorView list_scores,                              \
                   needlepoint::TensorView list_columns, int64_t slots, bool overlap) {            \
    using namespace needlepoint;                                                                   \
    using Traits = __VA_ARGS__;                                                                    \
    static_assert(Traits::kSharedBytes == SHARED, "cuda_variants.py states another size");         \
    const ScoreTopkParams p{                                                                       \
        score_params(queries, query_scales, weights, limits, groups, keys, key_scales, table,      \
                     starts, page_shift, columns, span, list_scores),                              \
        address<float>(list_scores), address<int32_t>(list_columns), list_scores.stride(0),        \
        static_cast<int32_t>(slots)};                                                              \
    RUN<Traits>(#NAME, p, queries.device(), overlap);                                              \
  }                                                                                                \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(NAME, NAME)

#define NEEDLEPOINT_TOPK(NAME, RUN, TRAITS, SHARED)                                                \
  static void NAME(needlepoint::TensorView scores, needlepoint::TensorView limits,                 \
                   needlepoint::TensorView list, needlepoint::TensorView requests,                 \
                   needlepoint::TensorView table, needlepoint::TensorView picks,                   \
                   int64_t columns, int64_t page_shift, int64_t span, int64_t slots,               \
                   bool overlap) {                                                                 \
    using namespace needlepoint;                                                                   \
    static_assert(TRAITS::kSharedBytes == SHARED, "cuda_variants.py states another size");         \
    TopkParams p;                                                                                  \
    p.scores = address<const float>(scores);                                                       \
    p.limits = address<const int32_t>(limits);                                                     \
    p.list = address<const int32_t>(list);                                                         \
    p.requests = address<const int32_t>(requests);                                                 \
    p.table = address<const int32_t>(table);                                                       \
    p.picks = address<int32_t>(picks);                                                             \
    p.stride = scores.stride(0);                                                                   \
    p.table_stride = table.stride(0);                                                              \
    p.rows = static_cast<int32_t>(picks.size(0));                                                  \
    p.columns = static_cast<int32_t>(columns);                                                     \
    p.k = static_cast<int32_t>(picks.size(1));                                                     \
    p.page_shift = static_cast<int32_t>(page_shift);                                               \
    p.span = static_cast<int32_t>(span);                                                           \
    p.slots = static_cast<int32_t>(slots);                                                         \
    RUN<TRAITS>(#NAME, p, scores.device(), overlap);                                               \
  }                                                                                                \
  TVM_FFI_DLL_EXPORT_TYPED_FUNC(NAME, NAME)
