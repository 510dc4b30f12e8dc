// Top-k of rows of scores, one block a row.
//
// A sample of the row gives a threshold that most likely leaves a few more than k numbers. One pass
// over the row gathers those into shared memory, where the exact selection happens. If they are too
// few or too many (plateaus, rows that the sample misjudges) the selection reads the row itself,
// which is slower and gives the same picks.
#pragma once

#include "launch_shared.h"
#include "topk_select.cuh"

namespace needlepoint {

struct TopkParams {
  const float* scores;      // [rows, ..]
  const int32_t* limits;    // [rows]: columns [0, limit) count
  const int32_t* list;      // [rows, ..]: the column that each score is of; null: its own place
  const int32_t* requests;  // [rows], row of the page table; null: the row itself
  const int32_t* table;     // page table to translate picks with; null: none
  int32_t* picks;           // [rows, k]
  int64_t stride;           // elements between rows of scores and of the list
  int64_t table_stride;
  int32_t rows;
  int32_t columns;
  int32_t k;
  int32_t page_shift;       // log2 of the rows of a page
  int32_t span, slots;      // a list holds min(slots, seen) of every `span` columns; 0: no list
};

template <int kThreads, int kResident_, int kCapacity_, int kSampleLoads_, int kUnroll_>
struct TopkTraits {
  using Select = BlockSelect<kThreads>;
  static constexpr int kResident = kResident_;  // blocks a multiprocessor
  static constexpr int kCapacity = kCapacity_;
  static constexpr int kSampleLoads = kSampleLoads_;  // of four numbers a thread, at most
  static constexpr int kUnroll = kUnroll_;            // vectors of four that a thread reads at once
  static constexpr int kDirect = kThreads * 8;        // so few columns are gathered whole

  struct Shared {
    typename Select::Shared select;
    uint2 sample_counts[2][Select::kWarps];  // by parity of the round
    uint32_t keys[kCapacity];
    uint32_t columns[kCapacity];
  };
  static constexpr int kSharedBytes = sizeof(Shared);
  static_assert(kDirect <= kCapacity, "a row that is gathered whole must fit");
};

// Many rows, k up to 512 or 1,024; few or long rows, k up to 2,048.
using TopkSmall = TopkTraits<128, 8, 2048, 2, 4>;
using TopkRows = TopkTraits<256, 3, 4096, 1, 4>;
using TopkLong = TopkTraits<512, 1, 8192, 4, 8>;

// The largest key with its low 16 bits clear that at least `rank` of the sampled numbers reach.
template <class T>
__device__ __forceinline__ uint32_t sampled_key(
    const float* row, int columns, int loads, int rank, typename T::Shared& shared) {
  uint32_t keys[4 * T::kSampleLoads] = {};  // key 0 reaches nothing
  const int pieces = columns / 4, lane = threadIdx.x % 32, count = loads * T::Select::kThreads;
#pragma unroll
  for (int i = 0; i < T::kSampleLoads; ++i) {
    if (i >= loads) break;
    const int64_t place = static_cast<int64_t>(i * T::Select::kThreads + threadIdx.x) * pieces;
    const float4 x = reinterpret_cast<const float4*>(row)[place / count];
    keys[4 * i] = order_key(x.x);
    keys[4 * i + 1] = order_key(x.y);
    keys[4 * i + 2] = order_key(x.z);
    keys[4 * i + 3] = order_key(x.w);
  }
  uint32_t found = 0;
#pragma unroll 1
  for (int round = 7; round >= 0; --round) {  // two bits a round
    const uint32_t base = found << 16, step = 0x10000u << 2 * round;
    uint32_t one_two = 0, three = 0;
#pragma unroll
    for (int i = 0; i < 4 * T::kSampleLoads; ++i) {
      one_two += (keys[i] >= base + step) + (keys[i] >= base + 2 * step) * 0x10000u;
      three += keys[i] >= base + 3 * step;
    }
    one_two = __reduce_add_sync(0xffffffffu, one_two);
    three = __reduce_add_sync(0xffffffffu, three);
    uint2* counts = shared.sample_counts[round % 2];
    if (lane == 0) counts[threadIdx.x / 32] = make_uint2(one_two, three);
    T::Select::sync();
    const uint2 other = lane < T::Select::kWarps ? counts[lane] : make_uint2(0, 0);
    one_two = __reduce_add_sync(0xffffffffu, other.x);
    three = __reduce_add_sync(0xffffffffu, other.y);
    const int reach[3] = {static_cast<int>(one_two & 0xffffu), static_cast<int>(one_two >> 16),
                          static_cast<int>(three)};
    const uint32_t digit = (reach[0] >= rank) + (reach[1] >= rank) + (reach[2] >= rank);
    found += digit << 2 * round;
  }
  return found << 16;
}

// Gathers every number that is not below the threshold, in any order; NaN never is. What does not
// fit is counted and left out.
template <class T>
__device__ __forceinline__ void gather(
    const float* row, int columns, float threshold, typename T::Shared& shared) {
  constexpr int kUnroll = T::kUnroll;
  const int pieces = columns / 4, lane = threadIdx.x % 32;
  const float4* vectors = reinterpret_cast<const float4*>(row);
  for (int first = 0; first <= pieces; first += kUnroll * T::Select::kThreads) {
    float x[kUnroll][4];
    uint32_t wanted = 0;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int piece = first + i * T::Select::kThreads + threadIdx.x;
      if (piece < pieces) {
        const float4 four = __ldcs(vectors + piece);
        x[i][0] = four.x;
        x[i][1] = four.y;
        x[i][2] = four.z;
        x[i][3] = four.w;
      } else {  // the last one to three columns
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i][j] = 4 * piece + j < columns ? row[4 * piece + j] : 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int piece = first + i * T::Select::kThreads + threadIdx.x;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool real = piece < pieces || 4 * piece + j < columns;
        if (real && !(x[i][j] < threshold)) wanted |= 1u << (4 * i + j);
      }
    }
    if (!__any_sync(0xffffffffu, wanted != 0)) continue;
    const uint32_t own = __popc(wanted);
    uint32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    uint32_t place = 0;
    if (lane == 31) place = atomicAdd(&shared.select.counter, sum);
    place = __shfl_sync(0xffffffffu, place, 31) + sum - own;
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (wanted >> (4 * i + j) & 1) {
          if (place < T::kCapacity) {
            shared.keys[place] = order_key(x[i][j]);
            shared.columns[place] = 4 * (first + i * T::Select::kThreads + threadIdx.x) + j;
          }
          ++place;
        }
      }
    }
  }
}

// How many samples the threshold must leave so that k numbers very likely reach it: the expected
// number, four standard deviations of counts that neighbours make half as independent, and two.
__device__ __forceinline__ int sample_rank(int k, int samples, int columns) {
  const float expected = __fdiv_rn(static_cast<float>(k) * samples, static_cast<float>(columns));
  return static_cast<int>(expected + 4.0f * __fsqrt_rn(1.5f * expected)) + 3;
}

// As many samples as it takes to expect 16 of the k largest among them, if there can be so many.
template <class T>
__device__ __forceinline__ int sample_loads(int k, int columns) {
  const int64_t wanted = int64_t{4} * columns / (static_cast<int64_t>(k) * T::Select::kThreads) + 1;
  return static_cast<int>(min(wanted, static_cast<int64_t>(T::kSampleLoads)));
}

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

template <class T>
__global__ __launch_bounds__(T::Select::kThreads, T::kResident) void topk_kernel(
    const __grid_constant__ TopkParams p) {
  using Select = typename T::Select;
  extern __shared__ __align__(16) uint8_t raw[];
  auto& shared = *reinterpret_cast<typename T::Shared*>(raw);
  wait_for_predecessor();
  const int64_t index = blockIdx.x;
  const float* row = p.scores + index * p.stride;
  int columns = min(max(p.limits[index], 0), p.columns);
  if (p.list != nullptr) columns = columns / p.span * p.slots + min(columns % p.span, p.slots);
  const int64_t owner = p.requests == nullptr ? index : p.requests[index];
  const PickWriter write{p.picks + index * p.k,
                         p.list == nullptr ? nullptr : p.list + index * p.stride,
                         p.table == nullptr ? nullptr : p.table + owner * p.table_stride,
                         p.page_shift};
  if (columns <= p.k) {  // everything is picked
    for (int i = threadIdx.x; i < p.k; i += Select::kThreads) {
      if (i < columns) write(i, i);
      else write.picks[i] = -1;
    }
    return;
  }
  if (threadIdx.x == 0) shared.select.counter = 0;
  __syncthreads();
  uint32_t low = 0;
  if (columns > T::kDirect) {
    const int loads = sample_loads<T>(p.k, columns);
    const int rank = sample_rank(p.k, loads * 4 * T::Select::kThreads, columns);
    low = sampled_key<T>(row, columns, loads, rank, shared);
  }
  // Nothing lies below -inf, and no number above +inf; NaN stays with +inf.
  low = min(low, order_key(INFINITY));
  const float threshold = low <= order_key(-INFINITY) ? -INFINITY : number_of_key(low);
  if (low <= order_key(-INFINITY)) low = 0;
  gather<T>(row, columns, threshold, shared);
  __syncthreads();
  const int count = static_cast<int>(shared.select.counter);
  if (count < p.k || count > T::kCapacity) {
    const RowSource<Select> source{row, columns};
    const uint2 range = Select::range(source, shared.select);
    Select::walk(source, columns,
                 Select::find(source, range.x, range.y, p.k, shared.select), shared.select, write);
    return;
  }
  const ListSource<Select> source{shared.keys, shared.columns, count};
  Cut cut{low, 0};
  if (count > p.k) {
    const uint2 range = Select::range(source, shared.select);
    cut = Select::find(source, range.x, range.y, p.k, shared.select);
  }
  Select::walk(source, columns, cut, shared.select, write);
}

template <class T>
void run_topk(const char* name, const TopkParams& p, DLDevice device, bool overlap) {
  if (p.rows == 0 || p.k == 0) return;
  launch_shared(name, topk_kernel<T>, p, dim3(static_cast<unsigned>(p.rows)),
                T::Select::kThreads, T::kSharedBytes, device, overlap);
}

}  // namespace needlepoint
