// Top-k of rows of scores, one block a row.
//
// A threshold that k numbers reach, and hopefully few more, comes from the largest of groups of
// numbers or, in rows of several rounds, from a sample. One pass over the row gathers what reaches
// it into shared memory, where the exact selection happens. If that is too few or too many
// (plateaus, rows that the sample misjudges) the selection reads the row itself, which is slower
// and gives the same picks.
#pragma once

#include "launch/launch.h"
#include "topk/gather.cuh"

namespace needlepoint {

struct TopkParams {
  const float* scores;          // [rows, ..]
  const int32_t* context_lens;  // [rows]: columns [0, context_len) count
  const int32_t* list;          // [rows, ..]: the column that each score is of; null: its own place
  const int32_t* requests;      // [rows], row of the page table; null: the row itself
  const int32_t* table;         // page table to translate picks with; null: none
  int32_t* topk_indices;        // [rows, k]
  int64_t stride;               // elements between rows of scores and of the list
  int64_t table_stride;
  int32_t rows;
  int32_t columns;
  int32_t k;
  int32_t page_shift;   // log2 of the rows of a page
  int32_t span, slots;  // a list holds min(slots, seen) of every `span` columns; 0: no list
};

// Writes what a place stands for: a column, or a slot of the paged pool.
struct PickWriter {
  int32_t* picks;
  const int32_t* list;
  const int32_t* table;
  int32_t page_shift;

  __device__ __forceinline__ void operator()(int place, int found) const {
    int32_t pick = list == nullptr ? found : list[found];
    if (table != nullptr) {
      const int32_t mask = (1 << page_shift) - 1;
      pick = (table[pick >> page_shift] << page_shift) | (pick & mask);
    }
    picks[place] = pick;
  }
};

// A row of a launch, and where its picks go.
struct TopkRow {
  const TopkParams& p;
  int64_t index;
  int columns;

  __device__ __forceinline__ TopkRow(const TopkParams& params, int64_t number)
      : p(params), index(number), columns(min(max(p.context_lens[index], 0), p.columns)) {
    if (p.list != nullptr) columns = columns / p.span * p.slots + min(columns % p.span, p.slots);
  }

  __device__ __forceinline__ const float* numbers() const { return p.scores + index * p.stride; }

  __device__ __forceinline__ PickWriter writer() const {
    const int64_t owner = p.requests == nullptr ? index : p.requests[index];
    return PickWriter{
        p.topk_indices + index * p.k, p.list == nullptr ? nullptr : p.list + index * p.stride,
        p.table == nullptr ? nullptr : p.table + owner * p.table_stride, p.page_shift};
  }

  // For a row that has no more than k columns.
  __device__ __forceinline__ void pick_all(int threads) const {
    const PickWriter write = writer();
    for (int i = threadIdx.x; i < p.k; i += threads) {
      if (i < columns) write(i, i);
      else write.picks[i] = -1;
    }
  }

  // From a list that holds the k largest, or from the row if it has too few or too many numbers.
  template <class Select>
  __device__ __forceinline__ void pick(const uint2* list, int count, int capacity,
                                       typename Select::Shared& shared) const {
    if (count < p.k || count > capacity) {
      const RowSource<Select> source{numbers(), columns};
      const uint2 range = Select::range(source, shared);
      const Cut cut = Select::find(source, range.x, range.y, p.k, shared);
      Select::walk(source, columns, cut, shared, writer());
      return;
    }
    const List<Select> source{list, count};
    Cut cut{0, 0};
    if (count > p.k) {
      const uint2 range = Select::range(source, shared);
      cut = Select::find(source, range.x, range.y, p.k, shared);
    }
    source.pick(cut, shared, writer());
  }
};

template <int kThreads, int kResident_, int kKeys_, int kCapacity_>
struct TopkTraits {
  using Select = BlockSelect<kThreads>;
  using Gather = needlepoint::Gather<Select>;
  static constexpr int kResident = kResident_;  // blocks a multiprocessor
  static constexpr int kKeys = kKeys_;          // that a thread holds to find the threshold
  static constexpr int kCapacity = kCapacity_;  // of the list

  struct Shared {
    typename Select::Shared select;
    typename Gather::Shared gather;
    uint2 list[kCapacity];
  };
  static constexpr int kSharedBytes = sizeof(Shared);
};

// k up to 1,024; k up to 2,048 and the longest rows.
using TopkRows = TopkTraits<256, 4, 8, 4096>;
using TopkLong = TopkTraits<512, 1, 16, 8192>;

template <class T>
__global__ __launch_bounds__(T::Select::kThreads,
                             T::kResident) void topk_kernel(const __grid_constant__ TopkParams p) {
  using Select = typename T::Select;
  using Gather = typename T::Gather;
  extern __shared__ __align__(16) uint8_t raw[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(raw);
  wait_for_predecessor();
  const TopkRow row(p, blockIdx.x);
  if (row.columns <= p.k) {
    row.pick_all(Select::kThreads);
    return;
  }
  Numbers x;
  uint32_t keys[T::kKeys];
  const bool whole = row.columns <= Gather::kColumns;
  int rank = p.k;
  if (whole) {
    Gather::load(row.numbers(), row.columns, 0, x);
    group_keys(x, keys);
  } else {
    sample_keys<Select::kThreads>(row.numbers(), row.columns, keys);
    rank = sample_rank(p.k, Select::kThreads * T::kKeys, row.columns);
  }
  const HeldKeys<T::kKeys> held{keys};
  const float threshold =
      threshold_of(Select::find_roughly(held, rank, rank >> (whole ? 1 : 2), shared.select));
  int count = 0;
  for (int first = 0; first < row.columns && count <= T::kCapacity; first += Gather::kColumns) {
    if (!whole) Gather::load(row.numbers(), row.columns, first, x);
    const uint32_t wanted = Gather::wanted(x, row.columns, first, threshold);
    count = Gather::append(x, wanted, first, shared.list, count, T::kCapacity,
                           first / Gather::kColumns, shared.gather);
  }
  release_successor();
  __syncthreads();
  row.template pick<Select>(shared.list, count, T::kCapacity, shared.select);
}

template <class Arguments>
TopkParams topk_params(const Arguments& a) {
  TopkParams p;
  p.scores = address<const float>(a.scores);
  p.context_lens = address<const int32_t>(a.context_lens);
  p.list = address<const int32_t>(a.list);
  p.requests = address<const int32_t>(a.requests);
  p.table = address<const int32_t>(a.table);
  p.topk_indices = address<int32_t>(a.topk_indices);
  p.stride = a.scores.stride(0);
  p.table_stride = a.table.stride(0);
  p.rows = static_cast<int32_t>(a.topk_indices.size(0));
  p.columns = static_cast<int32_t>(a.columns);
  p.k = static_cast<int32_t>(a.topk_indices.size(1));
  p.page_shift = static_cast<int32_t>(a.page_shift);
  p.span = static_cast<int32_t>(a.span);
  p.slots = static_cast<int32_t>(a.slots);
  return p;
}

template <class T, class Arguments>
void run_topk(const char* name, const Arguments& a) {
  const TopkParams p = topk_params(a);
  if (p.rows == 0 || p.k == 0) return;
  launch(Call{name, a.scores.device(), a.overlap}, topk_kernel<T>, p,
         dim3(static_cast<unsigned>(p.rows)), T::Select::kThreads, T::kSharedBytes);
}

}  // namespace needlepoint
