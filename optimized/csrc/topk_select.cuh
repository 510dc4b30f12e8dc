// Exact selection by a block: which numbers of a row are the k largest, equal ones by lower index.
//
// A radix select over order-preserving keys, 11 bits a pass, finds the k-th largest key; then one
// walk over the columns, as bits of words, writes the picks in ascending order. Which thread saw
// which number never matters: counts are sums, and places come from prefix sums over columns.
#pragma once

#include <cstdint>

namespace needlepoint {

constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;
constexpr uint32_t kNanKey = 0xffffffffu;

// Larger number, larger key. -0 equals +0; NaN is larger than every number and equal to every NaN,
// so that a broken score is picked and seen rather than hidden.
__device__ __forceinline__ uint32_t order_key(float x) {
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));  // -0 + 0 is +0
  const uint32_t key = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return x != x ? kNanKey : key;
}

// The number of a key that order_key returns.
__device__ __forceinline__ float number_of_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// What is picked: keys above `cut`; where `ties` > 0 also the first `ties` keys equal to it, else
// all of those.
struct Cut {
  uint32_t cut;
  int ties;

  __device__ __forceinline__ bool strict(uint32_t key) const {
    return ties > 0 ? key > cut : key >= cut;
  }
  __device__ __forceinline__ bool tie(uint32_t key) const { return ties > 0 && key == cut; }
};

template <int kThreads_>
struct BlockSelect {
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarps = kThreads / 32;
  static constexpr int kWordsEach = 4;
  static constexpr int kWords = kThreads * kWordsEach;  // of one round of the walk
  static constexpr int kColumns = kWords * 32;
  static constexpr int kTableWords = 2 * kWords > kDigits ? 2 * kWords : kDigits;
  static constexpr int kFew = 64;

  struct Shared {
    uint32_t table[kTableWords];  // counts of a digit, or the two bit rows of a round
    uint2 warp_sums[kWarps];
    uint32_t found[3];            // digit, keys above it, keys in it
    uint32_t few[kFew];           // the keys of a digit
    uint32_t counter;
    uint32_t smallest, largest;
  };

  // Among the threads that select: a block may have others.
  __device__ static __forceinline__ void sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
  }

  // Sums over the threads before this one; `total` over all. Two sums at once.
  __device__ static __forceinline__ uint2 before(uint2 own, uint2& total, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint2 sum = own;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const uint32_t x = __shfl_up_sync(0xffffffffu, sum.x, step);
      const uint32_t y = __shfl_up_sync(0xffffffffu, sum.y, step);
      if (lane >= step) sum = make_uint2(sum.x + x, sum.y + y);
    }
    if (lane == 31) shared.warp_sums[warp] = sum;
    sync();
    uint2 warps = lane < kWarps ? shared.warp_sums[lane] : make_uint2(0, 0);
#pragma unroll
    for (int step = 1; step < kWarps; step <<= 1) {
      const uint32_t x = __shfl_up_sync(0xffffffffu, warps.x, step);
      const uint32_t y = __shfl_up_sync(0xffffffffu, warps.y, step);
      if (lane >= step) warps = make_uint2(warps.x + x, warps.y + y);
    }
    total.x = __shfl_sync(0xffffffffu, warps.x, kWarps - 1);
    total.y = __shfl_sync(0xffffffffu, warps.y, kWarps - 1);
    const uint32_t x = __shfl_sync(0xffffffffu, warps.x, max(warp - 1, 0));
    const uint32_t y = __shfl_sync(0xffffffffu, warps.y, max(warp - 1, 0));
    sync();
    return make_uint2((warp > 0 ? x : 0) + sum.x - own.x, (warp > 0 ? y : 0) + sum.y - own.y);
  }

  // The smallest key of a source and how many bits its keys need above it.
  template <class Source>
  __device__ static uint2 range(const Source& source, Shared& shared) {
    if (threadIdx.x == 0) {
      shared.smallest = 0xffffffffu;
      shared.largest = 0;
    }
    sync();
    uint32_t smallest = 0xffffffffu, largest = 0;
    source.each([&](uint32_t key, uint32_t) {
      smallest = min(smallest, key);
      largest = max(largest, key);
    });
    smallest = __reduce_min_sync(0xffffffffu, smallest);
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (threadIdx.x % 32 == 0) {
      atomicMin(&shared.smallest, smallest);
      atomicMax(&shared.largest, largest);
    }
    sync();
    return make_uint2(shared.smallest, 32 - __clz(shared.largest - shared.smallest));
  }

  // The cut among few keys, by counting for each how many are larger.
  template <class Source>
  __device__ static Cut find_among_few(
      const Source& source, uint32_t low, uint32_t prefix, int shift, int need, Shared& shared) {
    if (threadIdx.x == 0) shared.counter = 0;
    sync();
    source.each([&](uint32_t key, uint32_t) {
      if ((key - low) >> shift == prefix) shared.few[atomicAdd(&shared.counter, 1u)] = key;
    });
    sync();
    const uint32_t count = shared.counter;
    if (threadIdx.x < count) {
      const uint32_t own = shared.few[threadIdx.x];
      int above = 0, equal = 0;
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t other = shared.few[i];
        above += other > own;
        equal += other == own;
      }
      if (above < need && need <= above + equal) {  // the same for all equal keys
        shared.found[0] = own;
        shared.found[1] = above + equal == need ? 0 : need - above;
      }
    }
    sync();
    return Cut{shared.found[0], static_cast<int>(shared.found[1])};
  }

  // The cut that picks exactly `need` of the source's keys; the source has more than `need`. Keys
  // lie in [low, low + 2^bits).
  template <class Source>
  __device__ static Cut find(const Source& source, uint32_t low, int bits, int need, Shared& shared) {
    uint32_t prefix = 0;
    int shift = bits;
    while (true) {
      const int above_shift = shift;  // the bits from here up are known to be `prefix`
      const int width = min(kDigitBits, shift);
      shift -= width;
      for (int i = threadIdx.x; i < kDigits; i += kThreads) shared.table[i] = 0;
      sync();
      source.each([&](uint32_t key, uint32_t) {
        const uint32_t offset = key - low;
        const bool same = above_shift >= 32 || offset >> above_shift == prefix;
        if (same) atomicAdd(&shared.table[offset >> shift & ((1u << width) - 1)], 1u);
      });
      sync();
      constexpr int kEach = kDigits / kThreads;
      const uint32_t* counts = shared.table + kDigits - 1 - threadIdx.x * kEach;  // downwards
      uint32_t sum = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum += counts[-i];
      uint2 total;
      uint32_t above = before(make_uint2(sum, 0), total, shared).x;
      const uint32_t wanted = static_cast<uint32_t>(need);
      if (above < wanted && wanted <= above + sum) {
#pragma unroll 1
        for (int i = 0; i < kEach; ++i) {
          const uint32_t own = counts[-i];
          if (above < wanted && wanted <= above + own) {
            shared.found[0] = kDigits - 1 - (threadIdx.x * kEach + i);
            shared.found[1] = above;
            shared.found[2] = own;
          }
          above += own;
        }
      }
      sync();
      prefix = width == 32 ? shared.found[0] : prefix << width | shared.found[0];
      need -= static_cast<int>(shared.found[1]);
      const int count = static_cast<int>(shared.found[2]);
      sync();
      if (count == need) return Cut{low + (prefix << shift), 0};
      if (shift == 0) return Cut{low + prefix, need};
      if (count <= kFew) return find_among_few(source, low, prefix, shift, need, shared);
    }
  }

  // Calls emit(place, column) for every pick, places 0 .. in ascending order of columns.
  template <class Source, class Emit>
  __device__ static void walk(
      const Source& source, int columns, const Cut& cut, Shared& shared, const Emit& emit) {
    uint32_t* strict = shared.table;
    uint32_t* ties = shared.table + kWords;
    uint32_t strict_done = 0, ties_done = 0;
    const uint32_t wanted = static_cast<uint32_t>(cut.ties);
    for (int base = 0; base < columns; base += kColumns) {
      source.mark(base, cut, strict, ties);
      sync();
      uint32_t s[kWordsEach], t[kWordsEach];
      uint2 own = make_uint2(0, 0), total;
#pragma unroll
      for (int i = 0; i < kWordsEach; ++i) {
        s[i] = strict[threadIdx.x * kWordsEach + i];
        t[i] = ties[threadIdx.x * kWordsEach + i];
        own = make_uint2(own.x + __popc(s[i]), own.y + __popc(t[i]));
      }
      const uint2 first = before(own, total, shared);
      uint32_t tie = ties_done + first.y;
      uint32_t place = strict_done + first.x + min(tie, wanted);
#pragma unroll
      for (int i = 0; i < kWordsEach; ++i) {
        const int column = base + (threadIdx.x * kWordsEach + i) * 32;
        for (uint32_t bits = s[i] | t[i]; bits != 0; bits &= bits - 1) {
          const uint32_t lowest = bits & (~bits + 1);
          if (t[i] & lowest && tie++ >= wanted) continue;
          emit(static_cast<int>(place++), column + __ffs(bits) - 1);
        }
      }
      strict_done += total.x;
      ties_done += total.y;
      sync();
    }
  }
};

// Numbers in a row of memory, by column.
template <class Select>
struct RowSource {
  const float* row;
  int columns;

  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
    for (int i = threadIdx.x; i < columns; i += Select::kThreads) f(order_key(row[i]), i);
  }

  __device__ __forceinline__ void mark(
      int base, const Cut& cut, uint32_t* strict, uint32_t* ties) const {
    const int lane = threadIdx.x % 32;
    for (int word = threadIdx.x / 32; word < Select::kWords; word += Select::kWarps) {
      const int column = base + word * 32 + lane;
      const bool real = column < columns;
      const uint32_t key = real ? order_key(row[column]) : 0;
      const uint32_t s = __ballot_sync(0xffffffffu, real && cut.strict(key));
      const uint32_t t = __ballot_sync(0xffffffffu, real && cut.tie(key));
      if (lane == 0) {
        strict[word] = s;
        ties[word] = t;
      }
    }
  }
};

// Keys and columns gathered in shared memory, in any order.
template <class Select>
struct ListSource {
  const uint32_t* keys;
  const uint32_t* columns;
  int count;

  template <class F>
  __device__ __forceinline__ void each(const F& f) const {
    for (int i = threadIdx.x; i < count; i += Select::kThreads) f(keys[i], columns[i]);
  }

  __device__ __forceinline__ void mark(
      int base, const Cut& cut, uint32_t* strict, uint32_t* ties) const {
    for (int i = threadIdx.x; i < Select::kWords; i += Select::kThreads) strict[i] = ties[i] = 0;
    Select::sync();
    each([&](uint32_t key, uint32_t column) {
      const uint32_t place = column - base;
      if (place >= static_cast<uint32_t>(Select::kColumns)) return;
      if (cut.strict(key)) atomicOr(&strict[place / 32], 1u << place % 32);
      if (cut.tie(key)) atomicOr(&ties[place / 32], 1u << place % 32);
    });
  }
};

}  // namespace needlepoint
