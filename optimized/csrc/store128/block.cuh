// What a block of the store at ratio 128 holds, and which windows it takes.
#pragma once

#include "store128/slots.cuh"

namespace needlepoint {

// A window that a block takes.
struct Turn {
  Window window;
  int number;
  int64_t slot;
  int64_t kv, score;  // elements before those of its first token
};

// kLaneChannels: one for few windows, which take as long as one of them does; two when blocks stay
// for several. kAnyState: the state's dtype differs from the input's, which takes more registers.
template <class T, int kLaneChannels_, bool kAnyState_>
struct Block128 : Store128 {
  static constexpr bool kAnyState = kAnyState_;
  static constexpr int kLaneChannels = kLaneChannels_;
  static constexpr int kChannels = 32 * kLaneChannels;
  static constexpr int kSlices = T::kDim / kChannels;  // blocks of a window
  static constexpr int kThreads = 32 * (kGroups + 1);
  static constexpr int kResident = kAnyState ? 1 : 2;  // blocks an SM
  static constexpr int kTokens = 32 * kGroups / 128;   // kept by one block
  static constexpr bool kPrefetch = kLaneChannels == 1;
  static constexpr bool kStaged = kLaneChannels == 2 && !kAnyState;
  using Source =
      std::conditional_t<kAnyState, FromBoth<T, kLaneChannels>, FromState<T, kLaneChannels, true>>;

  struct alignas(4 * kLaneChannels) Lane {
    float of[kLaneChannels];
  };

  // kv and score of a window: what the pooling threads copy at once, 16 bytes each, lies together.
  static constexpr int kPiece = 16 / sizeof(typename T::Input);  // channels of a copy
  static constexpr int kPieces = kChannels / kPiece;             // of a slot
  static constexpr int kAtOnce = 32 / kPieces;                   // slots that a warp copies at once
  static constexpr int kCopies = kGroupSlots / kAtOnce;
  using Stage = uint4[2][kCopies][32 * kGroups];
  using Offsets = uint32_t[2][32 * kGroups];
  static_assert(!kStaged || sizeof(Stage) == T::kSharedBytes, "StoreTraits states another size");

  struct Shared {
    Turn turns[32];
    int count;                         // negative: that was all
    int maxima[4][kLaneChannels][32];  // m of S2, as ordered integers
    Lane sums[2][kGroups][32];         // s of S3
    Lane weighted[2][kGroups][32];     // v of S3
    float4 norm_weight[T::kDim / 4];
    float4 angles[kRopeDims / 4];
    std::conditional_t<kStaged, Offsets, int> offsets;  // see StagedSlots
  };
};

// All warps of a block that pools, wherever each of them is.
template <class B>
__device__ __forceinline__ void meet() {
  asm volatile("barrier.sync 0, %0;" ::"n"(B::kThreads) : "memory");
}

// Integers that order as the bits' numbers do; its own inverse.
__device__ __forceinline__ int ordered(int bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }
constexpr int kLowest = -0x7fffffff - 1;

// The segment of this lane's window.
__device__ __forceinline__ int find_own_segment(const StoreParams& p, int number) {
  int low = 0, high = p.num_segments;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (__ldg(&p.segments[middle].first) <= number) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Lists the windows that are stored, of the 32 that a stream takes from `first` on: a plan costs
// one round trip to memory for all of them.
template <class T, class B>
__device__ __forceinline__ void list_turns(const StoreParams& p, int first, int streams,
                                           typename B::Shared& shared) {
  const int lane = threadIdx.x % 32, number = first + lane * streams;
  Turn own = {{}, number, -1, 0, 0};
  if (number < p.windows) {
    const int index = T::kMode == Mode::decode ? number : find_own_segment(p, number);
    const int64_t slot = p.slots[number];
    if (window_of_segment<T>(p, index, number, own.window)) own.slot = slot;
    const int64_t token = static_cast<int64_t>(own.window.token) - (T::kSlots - 1);
    own.kv = token * p.kv_stride;
    own.score = token * p.score_stride;
  }
  const uint32_t stored = __ballot_sync(0xffffffffu, own.slot >= 0);
  if (own.slot >= 0) shared.turns[__popc(stored & ((1u << lane) - 1))] = own;
  if (lane == 0) shared.count = __popc(stored);
}

}  // namespace needlepoint
