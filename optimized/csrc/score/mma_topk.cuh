// Scores of long decode rows, of which only the best of every span of keys leave the block: no
// score matrix is written. topk/topk.cuh then picks among the lists of all spans.
//
// A list is in ascending order of columns and so are the spans, so equal scores still go to the
// lower column.
#pragma once

#include "score/mma.cuh"
#include "topk/select.cuh"

namespace needlepoint {

struct ScoreTopkParams {
  ScoreParams scores;
  float* list_scores;     // [rows, list_stride]
  int32_t* list_columns;  // [rows, list_stride]
  int64_t list_stride;
  int32_t slots;  // of a span
};

template <class Arguments>
ScoreTopkParams score_topk_params(const Arguments& a) {
  ScoreTopkParams p;
  p.scores = score_params(a, a.list_scores);
  p.list_scores = address<float>(a.list_scores);
  p.list_columns = address<int32_t>(a.list_columns);
  p.list_stride = a.list_scores.stride(0);
  p.slots = static_cast<int32_t>(a.slots);
  return p;
}

// What a block keeps beside its stages: the scores of a span, and what selecting needs.
struct SpanShared {
  using Select = BlockSelect<128>;
  static constexpr int kNumbers = 4096;

  float scores[kNumbers];
  Select::Shared select;
};

template <int kHeads_, Row kRow_>
struct ScoreTopkTraits : ScoreTraits<kHeads_, kRow_, Tile::narrow> {
  using Base = ScoreTraits<kHeads_, kRow_, Tile::narrow>;
  static constexpr int kStages = kRow_ == Row::bf16 ? 2 : 4;
  static constexpr int kSharedBytes = kStages * Base::kStageBytes + sizeof(SpanShared);
  static_assert(Base::kWarps == 4, "128 threads select");
};

// The span is read where it is used: it lies in constant memory and would cost a register.
struct ToShared {
  const ScoreParams& p;
  uint32_t rows;  // shared address, one span behind the other
  int begin;      // first column

  __device__ __forceinline__ void put(int, int row, int column, float score) const {
    const int place = column - begin;
    if (place >= p.span) return;
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(rows + 4 * (row * p.span + place)), "f"(score)
                 : "memory");
  }
};

// Remembers what the selection will need: the registers are needed for the products.
__device__ __forceinline__ void remember(int row, int count, int stop, SpanShared& shared) {
  shared.select.few[0] = row;
  shared.select.few[1] = count;
  shared.select.few[2] = stop;
}

// Writes the lists of a block's rows, by its first 128 threads.
__device__ __forceinline__ void write_lists(const ScoreTopkParams& p, SpanShared& shared) {
  using Select = SpanShared::Select;
  const ScoreParams& s = p.scores;
  Select::Shared& select = shared.select;
  const int first_row = select.few[0], count = select.few[1], stop = select.few[2];
  Select::sync();
  const int part = blockIdx.x / s.num_groups, begin = part * s.span;
  for (int i = 0; i < count; ++i) {
    const int64_t index = first_row + i;
    const int seen = min(max(s.context_lens[index] - begin, 0), stop - begin);
    const float* row = shared.scores + i * s.span;
    const int64_t first = index * p.list_stride + static_cast<int64_t>(part) * p.slots;
    const auto emit = [&](int place, int column) {
      p.list_scores[first + place] = row[column];
      p.list_columns[first + place] = begin + column;
    };
    if (seen <= p.slots) {
      for (int j = threadIdx.x; j < seen; j += Select::kThreads) emit(j, j);
    } else {
      const RowSource<Select> source{row, seen};
      const uint2 range = Select::range(source, select);
      const Cut cut = Select::find(source, range.x, range.y, p.slots, select);
      Select::walk(source, seen, cut, select, emit);
    }
    Select::sync();
  }
}

template <class T>
__global__ __launch_bounds__(T::kWarps * 32, T::kResident) void score_topk_kernel(
    const __grid_constant__ ScoreTopkParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  auto& own = *reinterpret_cast<SpanShared*>(shared + T::kStages * T::kStageBytes);
  wait_for_predecessor();
  const ScoreParams& s = p.scores;
  const ScoreGroup group = s.groups[s.num_groups - 1 - blockIdx.x % s.num_groups];
  const int begin = blockIdx.x / s.num_groups * s.span;
  const int stop = min(min(begin + s.span, s.columns), group_context_len(s, group));
  if (begin >= stop) return;
  if (threadIdx.x == 0) remember(group.row, group.count, stop, own);
  score_keys<T>(s, group, begin, stop, ToShared{s, shared_address(own.scores), begin}, shared);
  __syncthreads();
  write_lists(p, own);
}

template <class T, class Arguments>
void run_score_topk(const char* name, const Arguments& a) {
  const ScoreTopkParams p = score_topk_params(a);
  if (p.scores.num_groups == 0 || p.scores.columns == 0) return;
  launch(Call{name, a.queries.device(), a.overlap}, score_topk_kernel<T>, p,
         dim3(static_cast<unsigned>(pieces_of(p.scores))), T::kWarps * 32, T::kSharedBytes);
}

}  // namespace needlepoint
