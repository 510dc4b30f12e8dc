// Gathers what reaches a threshold of a row, in order of columns, and selects among that.
//
// A row is read in rounds of 32 numbers a thread. Counts of a round's vectors give every number its
// place in the list, so that the list, and with it the picks, are ascending without a sort.
#pragma once

#include <cstdint>
#include <type_traits>

#include "topk/select.cuh"

namespace needlepoint {

constexpr int kVectors = 8;  // of four numbers that a thread reads in a round
using Numbers = float[kVectors][4];

template <class Select>
struct Gather {
  static constexpr int kThreads = Select::kThreads;
  static constexpr int kWarps = Select::kWarps;
  static constexpr int kColumns = kThreads * kVectors * 4;  // of a round
  // Counts of a round by vector and warp, which is by column; a lane adds up a word of them.
  static constexpr int kCounts = kVectors * kWarps / 32;
  using Word = std::conditional_t<kCounts == 4, uint32_t, uint16_t>;
  static_assert(kCounts == sizeof(Word), "blocks of 256 or 512 threads");

  struct Shared {
    Word counts[2][32];  // by parity of the round
  };

  __device__ static __forceinline__ int column_of(int first, int vector) {
    return first + 4 * (vector * kThreads + static_cast<int>(threadIdx.x));
  }

  // Numbers from column `first` on; -inf where the row has ended.
  __device__ static __forceinline__ void load(const float* row, int columns, int first,
                                              Numbers& x) {
    if (first + kColumns <= columns) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) load_vector(row + column_of(first, i), x[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int column = column_of(first, i);
      if (column + 4 <= columns) {
        load_vector(row + column, x[i]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i][j] = column + j < columns ? row[column + j] : -INFINITY;
      }
    }
  }

  __device__ static __forceinline__ void load_vector(const float* from, float (&x)[4]) {
    const float4 four = __ldcs(reinterpret_cast<const float4*>(from));
    x[0] = four.x;
    x[1] = four.y;
    x[2] = four.z;
    x[3] = four.w;
  }

  // Which numbers of a round are not below the threshold, as bits; NaN never is. The sign of a
  // difference tells: that of NaN is 0, and the threshold is not +0, from which -0 would be below.
  __device__ static __forceinline__ uint32_t wanted(const Numbers& x, int columns, int first,
                                                    float threshold) {
    uint32_t below = 0;
#pragma unroll
    for (int n = 4 * kVectors - 1; n >= 0; --n) {
      const uint32_t difference = __float_as_uint(__fsub_rn(x[n / 4][n % 4], threshold));
      below = __funnelshift_l(difference, below, 1);
    }
    const uint32_t bits = ~below;
    if (first + kColumns <= columns) return bits;
    uint32_t real = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int count = min(max(columns - column_of(first, i), 0), 4);
      real |= ((1u << count) - 1) << 4 * i;
    }
    return bits & real;
  }

  // Appends what is wanted of a round to a list of `count`, and returns how many it then has. What
  // does not fit whole is counted and left out. To the end: `list` is where the numbers stop.
  template <bool kToEnd = false>
  __device__ static __forceinline__ int append(const Numbers& x, uint32_t bits, int first,
                                               uint2* list, int count, int capacity, int round,
                                               Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t pairs = bits - (bits >> 1 & 0x55555555u);
    const uint32_t fours = (pairs & 0x33333333u) + (pairs >> 2 & 0x33333333u);
    // Bytes: counts of vectors 0, 2, .. and 1, 3, ..; sums over a warp are at most 128.
    const uint32_t even = fours & 0x0f0f0f0fu, odd = fours >> 4 & 0x0f0f0f0fu;
    uint32_t even_sum = even, odd_sum = odd;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const uint32_t x_even = __shfl_up_sync(0xffffffffu, even_sum, step);
      const uint32_t x_odd = __shfl_up_sync(0xffffffffu, odd_sum, step);
      if (lane >= step) {
        even_sum += x_even;
        odd_sum += x_odd;
      }
    }
    const uint32_t all_even = __shfl_sync(0xffffffffu, even_sum, 31);
    const uint32_t all_odd = __shfl_sync(0xffffffffu, odd_sum, 31);
    Word* words = shared.counts[round % 2];
    if (lane < kVectors) {
      const uint32_t all = lane % 2 == 0 ? all_even : all_odd;
      reinterpret_cast<uint8_t*>(words)[lane * kWarps + warp] =
          static_cast<uint8_t>(all >> 8 * (lane / 2));
    }
    Select::sync();
    const uint32_t word = words[lane];
    const uint32_t own = __dp4a(word, 0x01010101u, 0u);
    uint32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    const int total = count + static_cast<int>(__shfl_sync(0xffffffffu, sum, 31));
    if (total > capacity) return total;
    if constexpr (kToEnd) list -= total;
    const uint32_t lower = word & ((1u << 8 * (warp % kCounts)) - 1);  // of warps before this one
    const uint32_t start = count + sum - own + __dp4a(lower, 0x01010101u, 0u);
    even_sum -= even;
    odd_sum -= odd;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      uint32_t place = __shfl_sync(0xffffffffu, start, i * (kWarps / kCounts) + warp / kCounts);
      place += ((i % 2 == 0 ? even_sum : odd_sum) >> 8 * (i / 2)) & 0xffu;
      uint2* to = list + place;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (bits >> (4 * i + j) & 1) {
          *to++ = make_uint2(__float_as_uint(x[i][j]), column_of(first, i) + j);
        }
      }
    }
    return total;
  }
};

// Order keys of the largest of every kKeys-th number of a round: where k of these reach a key, k
// numbers of the row do.
template <int kKeys>
__device__ __forceinline__ void group_keys(const Numbers& x, uint32_t (&keys)[kKeys]) {
#pragma unroll
  for (int n = 0; n < kKeys; ++n) {
    float largest = x[n / 4][n % 4];
#pragma unroll
    for (int m = n + kKeys; m < 4 * kVectors; m += kKeys) {
      largest = fmaxf(largest, x[m / 4][m % 4]);
    }
    keys[n] = order_key(largest);
  }
}

// Order keys of numbers from all over a row, four in a place.
template <int kThreads, int kKeys>
__device__ __forceinline__ void sample_keys(const float* row, int columns,
                                            uint32_t (&keys)[kKeys]) {
  const int pieces = columns / 4;
  constexpr int kLoads = kKeys / 4;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int64_t place = static_cast<int64_t>(i * kThreads + threadIdx.x) * pieces;
    const float4 four = reinterpret_cast<const float4*>(row)[place / (kThreads * kLoads)];
    keys[4 * i] = order_key(four.x);
    keys[4 * i + 1] = order_key(four.y);
    keys[4 * i + 2] = order_key(four.z);
    keys[4 * i + 3] = order_key(four.w);
  }
}

// How many samples the threshold must leave so that k numbers very likely reach it: the expected
// number, four standard deviations of counts that neighbours make half as independent, and two.
__device__ __forceinline__ int sample_rank(int k, int samples, int columns) {
  const float expected = __fdiv_rn(static_cast<float>(k) * samples, static_cast<float>(columns));
  return static_cast<int>(expected + 4.0f * __fsqrt_rn(1.5f * expected)) + 3;
}

// The number that a threshold key stands for, -0 for zero. Nothing lies below -inf, and no number
// above +inf; NaN stays with +inf.
__device__ __forceinline__ float threshold_of(uint32_t key) {
  key = min(key, order_key(INFINITY));
  if (key == order_key(0.0f)) return -0.0f;
  return key <= order_key(-INFINITY) ? -INFINITY : number_of_key(key);
}

// Keys that every thread holds some of.
template <int kKeys>
struct HeldKeys {
  const uint32_t (&keys)[kKeys];

  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) f(keys[i], i);
  }
};

// What was gathered: bits of numbers and their columns, ascending.
template <class Select>
struct List {
  const uint2* list;
  int count;

  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
    constexpr int kAtOnce = 4;  // loads, before what f stores
    for (int base = 0; base < count; base += kAtOnce * Select::kThreads) {
      uint32_t bits[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int place = base + i * Select::kThreads + threadIdx.x;
        bits[i] = place < count ? list[place].x : 0;
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int place = base + i * Select::kThreads + threadIdx.x;
        if (place < count) f(order_key(__uint_as_float(bits[i])), place);
      }
    }
  }

  // Calls emit(place, column) for every pick, as BlockSelect::walk does.
  template <class Emit>
  __device__ __forceinline__ void pick(const Cut& cut, typename Select::Shared& shared,
                                       const Emit& emit) const {
    const int each = (count + Select::kThreads - 1) / Select::kThreads;
    const int first = threadIdx.x * each, stop = min(first + each, count);
    uint32_t own = 0, total;  // strict ones, and ties from bit 16 on
    for (int i = first; i < stop; ++i) {
      const uint32_t key = order_key(__uint_as_float(list[i].x));
      own += cut.strict(key) + (cut.tie(key) << 16);
    }
    const uint32_t done = Select::before(own, total, shared);
    const uint32_t wanted = static_cast<uint32_t>(cut.ties);
    uint32_t tie = done >> 16, place = (done & 0xffffu) + min(tie, wanted);
    for (int i = first; i < stop; ++i) {
      const uint32_t key = order_key(__uint_as_float(list[i].x));
      if (cut.strict(key) || (cut.tie(key) && tie++ < wanted)) emit(place++, list[i].y);
    }
  }
};

}  // namespace needlepoint
