// compress -> norm -> RoPE -> quantise -> paged store at ratio 128, in one launch.
//
// A block stays and takes one window after another, always the same slice of the channels, so that
// its part of the position embedding stays near. Each of its sixteen pooling warps holds one group
// of S3; one more warp adds the groups up and hands the slice on, while the pooling warps go on to
// the next window.
#pragma once

#include <algorithm>

#include "handover128.cuh"
#include "launch_shared.h"
#include "slots128.cuh"

namespace needlepoint {

// A window that a block takes.
struct Turn {
  Window window;
  int number;
  int64_t slot;
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
  using Source = std::conditional_t<kAnyState, FromBoth<T, kLaneChannels>,
                                    FromState<T, kLaneChannels>>;

  struct alignas(4 * kLaneChannels) Lane {
    float of[kLaneChannels];
  };

  // kv and score of a window, each element its thread's own.
  using Stage = typename Source::Raw[2][kGroupSlots][32 * kGroups];
  // As needlepoint.optimized.cuda_variants states it.
  static_assert(!kStaged || sizeof(Stage) == 16384 * sizeof(typename T::Input), "stage");

  struct Shared {
    Turn turns[32];
    int count;  // negative: that was all
    int maxima[3][kLaneChannels][32];  // m of S2, as ordered integers
    Lane sums[2][kGroups][32];      // s of S3
    Lane weighted[2][kGroups][32];  // v of S3
    float norm_weight[T::kDim];
    float4 angles[kRopeDims / 4];
  };
};

// Barriers 1 and 2: the maxima of a window are complete and its sums may be written. 3 and 4: its
// sums are complete. The windows of a block use them in turn.
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
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
__device__ __forceinline__ void list_turns(
    const StoreParams& p, int first, int streams, typename B::Shared& shared) {
  const int lane = threadIdx.x % 32, number = first + lane * streams;
  Turn own = {{}, number, -1};
  if (number < p.windows) {
    const int index = T::kMode == Mode::decode ? number : find_own_segment(p, number);
    const int64_t slot = p.slots[number];
    if (window_of_segment<T>(p, index, number, own.window)) own.slot = slot;
  }
  const uint32_t stored = __ballot_sync(0xffffffffu, own.slot >= 0);
  if (own.slot >= 0) shared.turns[__popc(stored & ((1u << lane) - 1))] = own;
  if (lane == 0) shared.count = __popc(stored);
}

// A thread's slots of a window, all read at once.
template <class Source>
struct DirectSlots {
  typename Source::Raw kept_score[8], kept_kv[8];

  __device__ __forceinline__ explicit DirectSlots(const Source& source) {
#pragma unroll
    for (int i = 0; i < 8; ++i) kept_score[i] = source.read_score(i);
#pragma unroll
    for (int i = 0; i < 8; ++i) kept_kv[i] = source.read_kv(i);
    after_loads();
  }
  __device__ __forceinline__ typename Source::Raw score(int i) const { return kept_score[i]; }
  __device__ __forceinline__ typename Source::Raw kv(int i) const { return kept_kv[i]; }
  __device__ __forceinline__ void await() const {}
  __device__ __forceinline__ void read_next_score() const {}
  __device__ __forceinline__ void read_next_kv() const {}
};

// A thread's slots of a window out of shared memory, where no other thread touches them; the scores
// and then kv of its next window take their place as soon as they have been used.
template <class T, class B>
struct StagedSlots {
  using Raw = typename B::Source::Raw;
  const StoreParams& p;
  typename B::Stage& stage;
  int group, column;
  const Turn* next;  // null: there is none

  __device__ __forceinline__ void read(const Turn& turn, int part) const {
    if (T::kMode == Mode::prefill && turn.window.from_state == 0) {
      const FromInput<T, B::kLaneChannels> source(p, turn.window, group, column);
      read_from<8>(source, part);
    } else {  // in prefill the few windows that begin in the state: registers come first
      const typename B::Source source(p, turn.window, group, column);
      read_from<T::kMode == Mode::prefill ? 1 : 8>(source, part);
    }
  }
  template <int kUnroll, class Source>
  __device__ __forceinline__ void read_from(const Source& source, int part) const {
#pragma unroll kUnroll
    for (int i = 0; i < 8; ++i) {
      copy_async<sizeof(Raw)>(&stage[part][i][threadIdx.x],
                              part == 0 ? source.kv_place(i) : source.score_place(i));
    }
  }
  __device__ __forceinline__ Raw score(int i) const { return stage[1][i][threadIdx.x]; }
  __device__ __forceinline__ Raw kv(int i) const { return stage[0][i][threadIdx.x]; }
  // Scores and kv follow each other: all but the youngest copies are there.
  __device__ __forceinline__ void await() const { wait_copies_but<1>(); }
  __device__ __forceinline__ void read_next_score() const {
    if (next != nullptr) read(*next, 1);
    commit_copies();
  }
  __device__ __forceinline__ void read_next_kv() const {
    if (next != nullptr) read(*next, 0);
    commit_copies();
  }
};

// The position embedding of a thread's slots, times log2 e.
template <class B>
using Ape128 = float[B::kGroupSlots][B::kLaneChannels];

// S1 to S3 of one warp's slots.
template <class B, class Slots>
__device__ __forceinline__ void pool_group(
    const StoreParams& p, const Slots& slots, const Ape128<B>& ape, int number, int before,
    typename B::Shared& shared) {
  constexpr int kChannels = B::kLaneChannels, kSlots = B::kGroupSlots;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, buffer = before % 2;
  Peak<typename B::Source::Element> peak;
  float z[kSlots][kChannels], m[kChannels];
  slots.await();
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const auto score = slots.score(i);
    score.raise(peak);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      z[i][c] = __fmaf_rn(score[c], kLog2e, ape[i][c]);
      m[c] = i == 0 ? z[0][c] : fmaxf(m[c], z[i][c]);
    }
  }
  auto& maxima = shared.maxima[before % 3];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    atomicMax(&maxima[c][lane], ordered(__float_as_int(m[c])));
  }
  if (!(peak.value() < p.score_small)) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) largest = larger_magnitude(largest, z[i][c]);
    }
    if (!(largest < kScoreLimit)) report(p, kFaultScore, number);
  }
  slots.read_next_score();
  barrier_sync(1 + buffer, B::kThreads);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) m[c] = __int_as_float(ordered(maxima[c][lane]));
  if (warp < kChannels) shared.maxima[(before + 2) % 3][warp][lane] = kLowest;
  slots.await();
  typename B::Lane sum = {}, weighted = {};
#pragma unroll
  for (int i = 0; i < kSlots; ++i) {
    const auto kv = slots.kv(i);
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const float e = exp2_weight(clamped(__fsub_rn(z[i][c], m[c])));
      sum.of[c] = __fadd_rn(sum.of[c], e);
      weighted.of[c] = __fmaf_rn(e, kv[c], weighted.of[c]);
    }
  }
  slots.read_next_kv();
  shared.sums[buffer][warp][lane] = sum;
  shared.weighted[buffer][warp][lane] = weighted;
  barrier_arrive(3 + buffer, B::kThreads);
}

// S3's tree over the groups.
template <class B>
__device__ __forceinline__ void add_groups(
    const typename B::Lane (&groups)[B::kGroups][32], int lane, float (&sum)[B::kLaneChannels]) {
  typename B::Lane items[B::kGroups];
#pragma unroll
  for (int i = 0; i < B::kGroups; ++i) items[i] = groups[i][lane];
#pragma unroll
  for (int stride = 1; stride < B::kGroups; stride *= 2) {
#pragma unroll
    for (int i = 0; i < B::kGroups; i += 2 * stride) {
#pragma unroll
      for (int c = 0; c < B::kLaneChannels; ++c) {
        items[i].of[c] = __fadd_rn(items[i].of[c], items[i + stride].of[c]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < B::kLaneChannels; ++c) sum[c] = items[0].of[c];
}

// The warp behind the pooling warps: adds the groups of a window up and leaves the slice for the
// last block of the window, which finishes the row. With fp32 rows the slice is stored as it is.
template <class T, class B>
__device__ __forceinline__ void hand_over(
    const StoreParams& p, int slice, const Turn& turn, int before, typename B::Shared& shared) {
  const int lane = threadIdx.x % 32, buffer = before % 2;
  const int channel = slice * B::kChannels + B::kLaneChannels * lane;
  float s[B::kLaneChannels], v[B::kLaneChannels], x[B::kLaneChannels];
  if (before == 0) {
    barrier_arrive(1, B::kThreads);
    barrier_arrive(2, B::kThreads);
  }
  barrier_sync(3 + buffer, B::kThreads);
  add_groups<B>(shared.sums[buffer], lane, s);
  add_groups<B>(shared.weighted[buffer], lane, v);
  barrier_arrive(1 + buffer, B::kThreads);  // two windows on they may be written again
  divide(v, s, x);
  if constexpr (T::kRow == Row::fp32) {
    float largest = 0.0f;
#pragma unroll
    for (int c = 0; c < B::kLaneChannels; ++c) largest = larger_magnitude(largest, x[c]);
    if (!(largest < kPooledLimit)) report(p, kFaultRow, turn.number);
    auto* row = p.pool.page(turn.slot) + p.pool.row(turn.slot) * 2048 + channel * 4;
#pragma unroll
    for (int c = 0; c < B::kLaneChannels; ++c) reinterpret_cast<float*>(row)[c] = x[c];
  } else {
    leave_pooled(p.pooled + static_cast<int64_t>(turn.number) * T::kDim + channel, x);
    if (slice == B::kSlices - 1) {
      finish_row<T>(p, shared.norm_weight, shared.angles, turn.number, turn.window.entry, turn.slot,
                    lane);
    }
  }
}

// A block's share of the state rows of a window, into L2.
template <class T, class B>
__device__ __forceinline__ void prefetch_share(
    const StoreParams& p, const Window& window, int slice) {
  constexpr int kRows = T::kSlots / B::kSlices;
  const int lane = threadIdx.x % 32, slot = slice * kRows + lane;
  if (lane >= kRows || slot >= T::kSlots - 1) return;
  const int bytes = p.state_is_bf16 ? 2 : 4;
  const int64_t element = state_element<T>(p, window, slot, 0);
  prefetch_row(static_cast<const uint8_t*>(p.state) + element * bytes, 2 * T::kWidth * bytes);
}

template <class T>
__device__ __forceinline__ void keep_token128(
    const StoreParams& p, const WriteEntry& write, int column) {
  if (write.token < 0) return;
  using Input = typename T::Input;
  const int64_t element = static_cast<int64_t>(write.state_row) * 2 * T::kWidth + column;
  const int64_t token = write.token;
  const Raw4<Input> kv =
      stream4(static_cast<const Input*>(p.kv) + token * p.kv_stride + column);
  const Raw4<Input> score =
      stream4(static_cast<const Input*>(p.score) + token * p.score_stride + column);
  write_state4(p.state, p.state_is_bf16, element, kv);
  write_state4(p.state, p.state_is_bf16, element + T::kWidth, score);
}

template <class T>
__device__ __forceinline__ void keep_tokens128(const StoreParams& p, int first) {
  if (threadIdx.x >= 32 * Store128::kGroups) return;
  const int index = first + threadIdx.x / 128;
  WriteEntry write = {-1, 0};
  if (index < p.num_writes) write = p.writes[index];
  wait_for_predecessor();
  keep_token128<T>(p, write, threadIdx.x % 128 * 4);
}

template <class T, class B>
__global__ __launch_bounds__(B::kThreads, B::kResident)
void store128_kernel(const __grid_constant__ StoreParams p) {
  __shared__ typename B::Shared shared;
  extern __shared__ __align__(16) uint8_t stage[];
  const int keeping = (p.num_writes + B::kTokens - 1) / B::kTokens;
  const int pooling = gridDim.x - keeping;
  release_successor();
  if (blockIdx.x >= pooling) {
    keep_tokens128<T>(p, (blockIdx.x - pooling) * B::kTokens);
    return;
  }
  const int stream = blockIdx.x / B::kSlices, streams = pooling / B::kSlices;
  const int slice = blockIdx.x % B::kSlices, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < T::kDim; i += B::kThreads) {
    shared.norm_weight[i] = p.norm_weight[i];
    (&shared.maxima[0][0][0])[i % (3 * B::kChannels)] = kLowest;
  }
  int before = 0;
  if (warp == B::kGroups) {
    for (int first = stream; first < p.windows; first += 32 * streams) {
      barrier_sync(0, B::kThreads);  // the list before has been read
      list_turns<T, B>(p, first, streams, shared);
      barrier_sync(0, B::kThreads);
      if (B::kPrefetch && shared.count != 0) {
        prefetch_share<T, B>(p, shared.turns[0].window, slice);
      }
      wait_for_predecessor();
      for (int i = 0; i < shared.count; ++i, ++before) {
        hand_over<T, B>(p, slice, shared.turns[i], before, shared);
      }
    }
    barrier_sync(0, B::kThreads);
    if (threadIdx.x % 32 == 0) shared.count = -1;
    barrier_sync(0, B::kThreads);
    return;
  }
  const int column = slice * B::kChannels + B::kLaneChannels * (threadIdx.x % 32);
  const int group = warp * B::kGroupSlots;
  Ape128<B> ape;
#pragma unroll
  for (int i = 0; i < B::kGroupSlots; ++i) early(ape[i], p.ape + (group + i) * T::kWidth + column);
  for (;;) {
    barrier_sync(0, B::kThreads);
    barrier_sync(0, B::kThreads);
    wait_for_predecessor();
    const int count = shared.count;
    if (count < 0) return;
    if constexpr (B::kStaged) {
      StagedSlots<T, B> slots = {p, *reinterpret_cast<typename B::Stage*>(stage), group, column,
                                 shared.turns};
      if (count == 0) slots.next = nullptr;
      slots.read_next_score();
      slots.read_next_kv();
      for (int i = 0; i < count; ++i, ++before) {
        slots.next = i + 1 < count ? shared.turns + i + 1 : nullptr;
        pool_group<B>(p, slots, ape, shared.turns[i].number, before, shared);
      }
    } else {
      for (int i = 0; i < count; ++i, ++before) {
        const Turn& turn = shared.turns[i];
        const typename B::Source source(p, turn.window, group, column);
        pool_group<B>(p, DirectSlots(source), ape, turn.number, before, shared);
      }
    }
  }
}

// Blocks of windows that run at the same time.
template <class B>
int room128(DLDevice device) {
  return std::max(1, B::kResident * multiprocessors(device) / B::kSlices);
}

template <class T, class B>
void launch128(const char* name, const StoreParams& p, DLDevice device, bool overlap) {
  const int streams = std::min(p.windows, room128<B>(device));
  const int keeping = (p.num_writes + B::kTokens - 1) / B::kTokens;
  launch_shared(name, store128_kernel<T, B>, p, dim3(streams * B::kSlices + keeping), B::kThreads,
                B::kStaged ? sizeof(typename B::Stage) : 0, device, overlap);
}

template <class T>
void run_store128(const char* name, const StoreParams& p, DLDevice device, bool overlap) {
  if (p.state_is_bf16 != std::is_same_v<typename T::Input, bf16>) {
    launch128<T, Block128<T, 2, true>>(name, p, device, overlap);
    return;
  }
  if constexpr (T::kMode == Mode::decode) {
    using Narrow = Block128<T, 1, false>;
    if (p.windows <= room128<Narrow>(device)) {
      launch128<T, Narrow>(name, p, device, overlap);
      return;
    }
  }
  launch128<T, Block128<T, 2, false>>(name, p, device, overlap);
}

}  // namespace needlepoint
