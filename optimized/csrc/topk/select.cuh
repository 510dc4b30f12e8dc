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
  const uint32_t key =
      bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
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
  static constexpr int kWordsEach = kThreads > 256 ? 2 : 4;
  static constexpr int kWords = kThreads * kWordsEach;  // of one round of the walk
  static constexpr int kColumns = kWords * 32;
  static constexpr int kTableWords = 2 * kWords > kDigits ? 2 * kWords : kDigits;
  static constexpr int kFew = 64;
  static_assert(kColumns < 1 << 16, "two counts of a round share a word");

  struct Shared {
    uint32_t table[kTableWords];  // counts of a digit, or the two bit rows of a round
    uint32_t warp_sums[kWarps], warp_largest[kWarps];
    uint32_t found[3];   // digit, keys above it, keys in it
    uint32_t few[kFew];  // the keys of a digit
    uint32_t counter;
  };

  // Among the threads that select: a block may have others.
  __device__ static __forceinline__ void sync() {
    asm volatile("bar.sync 1, %0;" ::"n"(kThreads) : "memory");
  }

  // Sum over the threads before this one; `total` over all. A barrier must lie between two calls.
  __device__ static __forceinline__ uint32_t before(uint32_t own, uint32_t& total, Shared& shared) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    uint32_t sum = own;
#pragma unroll
    for (int step = 1; step < 32; step <<= 1) {
      const uint32_t other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) shared.warp_sums[warp] = sum;
    sync();
    const uint32_t warps = lane < kWarps ? shared.warp_sums[lane] : 0;
    total = __reduce_add_sync(0xffffffffu, warps);
    return __reduce_add_sync(0xffffffffu, lane < warp ? warps : 0) + sum - own;
  }

  // The smallest key of a source and how many bits its keys need above it.
  template <class Source>
  __device__ static uint2 range(const Source& source, Shared& shared) {
    uint32_t smallest = 0xffffffffu, largest = 0;
    source.each([&](uint32_t key, uint32_t) {
      smallest = min(smallest, key);
      largest = max(largest, key);
    });
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    smallest = __reduce_min_sync(0xffffffffu, smallest);
    largest = __reduce_max_sync(0xffffffffu, largest);
    if (lane == 0) {
      shared.warp_sums[warp] = smallest;
      shared.warp_largest[warp] = largest;
    }
    sync();
    smallest = lane < kWarps ? shared.warp_sums[lane] : 0xffffffffu;
    largest = lane < kWarps ? shared.warp_largest[lane] : 0;
    smallest = __reduce_min_sync(0xffffffffu, smallest);
    largest = __reduce_max_sync(0xffffffffu, largest);
    return make_uint2(smallest, 32 - __clz(largest - smallest));
  }

  // The cut among few keys, by counting for each how many are larger. `counter` is 0.
  template <class Source>
  __device__ static Cut find_among_few(const Source& source, uint32_t low, uint32_t prefix,
                                       int shift, int need, Shared& shared) {
    source.each([&](uint32_t key, uint32_t) {
      if ((key - low) >> shift == prefix) shared.few[atomicAdd(&shared.counter, 1u)] = key;
    });
    sync();
    const int count = static_cast<int>(shared.counter), lane = threadIdx.x % 32;
    const uint32_t first = lane < count ? shared.few[lane] : 0;  // 0 is no number's key
    const uint32_t second = lane + 32 < count ? shared.few[lane + 32] : 0;
    for (int i = threadIdx.x / 32; i < count; i += kWarps) {
      const uint32_t own = shared.few[i];
      const int above = __popc(__ballot_sync(0xffffffffu, first > own)) +
                        __popc(__ballot_sync(0xffffffffu, second > own));
      const int equal = __popc(__ballot_sync(0xffffffffu, first == own)) +
                        __popc(__ballot_sync(0xffffffffu, second == own));
      if (lane == 0 && above < need && need <= above + equal) {  // the same for all equal keys
        shared.found[0] = own;
        shared.found[1] = above + equal == need ? 0 : need - above;
      }
    }
    sync();
    return Cut{shared.found[0], static_cast<int>(shared.found[1])};
  }

  // The cut that picks exactly `need` of the source's keys, which has more. Keys lie in
  // [low, low + 2^bits).
  template <class Source>
  __device__ static Cut find(const Source& source, uint32_t low, int bits, int need,
                             Shared& shared) {
    return find_digits<true>(source, low, bits, need, 0, shared);
  }

  // A key that `need` of the source's keys reach, and at most `slack` more unless they are equal.
  template <class Source>
  __device__ static uint32_t find_roughly(const Source& source, int need, int slack,
                                          Shared& shared) {
    return find_digits<false>(source, 0, 32, need, slack, shared).cut;
  }

  // The same for keys close to each other, and a coarser one that `also` of them reach: the lowest
  // of a thread's digits of their range. `step` is shared memory for it.
  template <class Source>
  __device__ static uint2 find_two_roughly(const Source& source, int need, int slack, int also,
                                           uint32_t& step, Shared& shared) {
    const uint2 keys = range(source, shared);
    const int bits = keys.y, shift = bits - min(kDigitBits, bits);
    const uint32_t key =
        find_digits<false, true>(source, keys.x, bits, need, slack, shared, also, &step).cut;
    return make_uint2(key, keys.x + (step << shift));
  }

  template <bool kExact, bool kAlso = false, class Source>
  __device__ static Cut find_digits(const Source& source, uint32_t low, int bits, int need,
                                    int slack, Shared& shared, int also = 0,
                                    uint32_t* step = nullptr) {
    uint4* table = reinterpret_cast<uint4*>(shared.table);  // by digit, downwards
    uint32_t prefix = 0;
    int shift = bits;
    while (true) {
      const int above_shift = shift;  // the bits from here up are known to be `prefix`
      const int width = min(kDigitBits, shift);
      shift -= width;
#pragma unroll
      for (int i = 0; i < kDigits / 4; i += kThreads) table[threadIdx.x + i] = uint4{0, 0, 0, 0};
      sync();
      source.each([&](uint32_t key, uint32_t) {
        const uint32_t offset = key - low, digit = offset >> shift & ((1u << width) - 1);
        const bool same = __funnelshift_rc(offset, 0, above_shift) == prefix;  // shifts by 32 also
        if (same) atomicAdd(&shared.table[digit ^ (kDigits - 1)], 1u);
      });
      sync();
      constexpr int kEach = kDigits / kThreads / 4;  // vectors of a thread
      uint32_t sum = 0, total;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const uint4 four = table[threadIdx.x * kEach + i];
        sum += four.x + four.y + four.z + four.w;
      }
      const uint32_t first = before(sum, total, shared);
      uint32_t above = first;
      const uint32_t wanted = static_cast<uint32_t>(need);
      if (above < wanted && wanted <= above + sum) {
#pragma unroll 1
        for (int i = threadIdx.x * kEach; i < (threadIdx.x + 1) * kEach; ++i) {
          const uint4 four = table[i];
          const uint32_t counts[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (above < wanted && wanted <= above + counts[j]) {
              shared.found[0] = kDigits - 1 - (4 * i + j);
              shared.found[1] = above;
              shared.found[2] = counts[j];
            }
            above += counts[j];
          }
        }
        shared.counter = 0;
      }
      if (kAlso && above_shift == bits) {  // to the lowest digit of a thread
        const uint32_t wanted_also = static_cast<uint32_t>(also);
        if (first < wanted_also && wanted_also <= first + sum) {
          *step = kDigits - 4 * kEach * (threadIdx.x + 1);
        }
      }
      sync();
      prefix = prefix << width | shared.found[0];
      need -= static_cast<int>(shared.found[1]);
      const int count = static_cast<int>(shared.found[2]);
      if (count <= need + slack) return Cut{low + (prefix << shift), 0};
      if (shift == 0) return Cut{low + prefix, need};
      if constexpr (kExact) {
        if (count <= kFew) return find_among_few(source, low, prefix, shift, need, shared);
      }
    }
  }

  // Calls emit(place, column) for every pick, places 0 .. in ascending order of columns.
  template <class Source, class Emit>
  __device__ static void walk(const Source& source, int columns, const Cut& cut, Shared& shared,
                              const Emit& emit) {
    uint32_t* strict = shared.table;
    uint32_t* ties = shared.table + kWords;
    uint32_t strict_done = 0, ties_done = 0;
    const uint32_t wanted = static_cast<uint32_t>(cut.ties);
    for (int base = 0; base < columns; base += kColumns) {
      source.mark(base, cut, strict, ties);
      sync();
      uint32_t s[kWordsEach], t[kWordsEach];
      uint32_t own = 0, total;  // strict ones, and ties from bit 16 on
#pragma unroll
      for (int i = 0; i < kWordsEach; ++i) {
        s[i] = strict[threadIdx.x * kWordsEach + i];
        t[i] = ties[threadIdx.x * kWordsEach + i];
        own += __popc(s[i]) + (__popc(t[i]) << 16);
      }
      const uint32_t first = before(own, total, shared);
      uint32_t tie = ties_done + (first >> 16);
      uint32_t place = strict_done + (first & 0xffffu) + min(tie, wanted);
#pragma unroll
      for (int i = 0; i < kWordsEach; ++i) {
        const int column = base + (threadIdx.x * kWordsEach + i) * 32;
        for (uint32_t bits = s[i] | t[i]; bits != 0; bits &= bits - 1) {
          const uint32_t lowest = bits & (~bits + 1);
          if (t[i] & lowest && tie++ >= wanted) continue;
          emit(static_cast<int>(place++), column + __ffs(bits) - 1);
        }
      }
      strict_done += total & 0xffffu;
      ties_done += total >> 16;
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

  __device__ __forceinline__ void mark(int base, const Cut& cut, uint32_t* strict,
                                       uint32_t* ties) const {
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

}  // namespace needlepoint
