// compress -> norm -> RoPE -> quantise -> paged store at ratio 128, in one launch.
//
// A block stays and takes one window after another, always the same slice of the channels, so that
// its part of the position embedding stays near. Each of its sixteen pooling warps holds one group
// of S3; one more warp adds the groups up and hands the slice on, while the pooling warps go on to
// the next window.
#pragma once

#include <algorithm>

#include "store128/handover.cuh"
#include "store128/staged.cuh"

namespace needlepoint {

// A block's share of the state rows of a window, into L2.
template <class T, class B>
__device__ __forceinline__ void prefetch_share(const StoreParams& p, const Window& window,
                                               int slice) {
  constexpr int kRows = T::kSlots / B::kSlices;
  const int lane = threadIdx.x % 32, slot = slice * kRows + lane;
  if (lane >= kRows || slot >= T::kSlots - 1) return;
  const int bytes = p.state_is_bf16 ? 2 : 4;
  const int64_t element = state_element<T>(p, window, slot, 0);
  prefetch_row(static_cast<const uint8_t*>(p.state) + element * bytes, 2 * T::kWidth * bytes);
}

template <class T>
__device__ __forceinline__ void keep_token128(const StoreParams& p, const WriteEntry& write,
                                              int column) {
  if (write.token < 0) return;
  using Input = typename T::Input;
  const int64_t element = static_cast<int64_t>(write.state_row) * 2 * T::kWidth + column;
  const int64_t token = write.token;
  const Raw4<Input> kv = stream4(static_cast<const Input*>(p.kv) + token * p.kv_stride + column);
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
__global__ __launch_bounds__(B::kThreads, B::kResident) void store128_kernel(
    const __grid_constant__ StoreParams p) {
  __shared__ typename B::Shared shared;
  extern __shared__ __align__(16) uint8_t stage[];
  const int keeping = (p.num_writes + B::kTokens - 1) / B::kTokens;
  const int pooling = gridDim.x - keeping;
  release_successor();
  // In a decode step blocks that keep tokens come first: most steps do nothing else, and behind
  // blocks that pool they queue for a place.
  constexpr bool kKeepFirst = T::kMode == Mode::decode;
  if (kKeepFirst ? blockIdx.x < keeping : blockIdx.x >= pooling) {
    keep_tokens128<T>(p, (kKeepFirst ? blockIdx.x : blockIdx.x - pooling) * B::kTokens);
    return;
  }
  const uint32_t number = kKeepFirst ? blockIdx.x - keeping : blockIdx.x;
  const int stream = number / B::kSlices, streams = pooling / B::kSlices;
  const int slice = number % B::kSlices, warp = threadIdx.x / 32;
  for (int i = threadIdx.x; i < T::kDim; i += B::kThreads) {
    reinterpret_cast<float*>(shared.norm_weight)[i] = p.norm_weight[i];
    (&shared.maxima[0][0][0])[i % (4 * B::kChannels)] = kLowest;
  }
  uint32_t before = 0;
  if (warp == B::kGroups) {
    for (int first = stream; first < p.windows; first += 32 * streams) {
      meet<B>();  // the list before has been read
      list_turns<T, B>(p, first, streams, shared);
      meet<B>();
      if (B::kPrefetch && shared.count != 0) {
        prefetch_share<T, B>(p, shared.turns[0].window, slice);
      }
      wait_for_predecessor();
      hand_over<T, B>(p, slice, before, shared);
    }
    meet<B>();
    if (threadIdx.x % 32 == 0) shared.count = -1;
    meet<B>();
    return;
  }
  const int column = slice * B::kChannels + B::kLaneChannels * (threadIdx.x % 32);
  const int group = warp * B::kGroupSlots;
  if constexpr (B::kStaged) StagedSlots<T, B>::note(p, slice, shared.offsets);
  Ape128<B> ape;
#pragma unroll
  for (int i = 0; i < B::kGroupSlots; ++i) early(ape[i], p.ape + (group + i) * T::kWidth + column);
  for (;;) {
    meet<B>();
    meet<B>();
    wait_for_predecessor();
    const int count = shared.count;
    if (count < 0) return;
    if constexpr (B::kStaged) {
      StagedSlots<T, B> slots{
          p,           reinterpret_cast<typename B::Stage&>(stage), shared.offsets, slice, count,
          shared.turns};
      slots.read_next_score();
      slots.read_next_kv();
      for (bool last = count == 0; !last; ++before) {
        last = slots.left == 0;  // all have been copied, the last one is worked on
        pool_group<B>(p, slots, ape, slots.next[-1].number, before, shared);
      }
    } else {
      for (int i = 0; i < count; ++i, ++before) {
        const Turn& turn = shared.turns[i];
        const typename B::Source source(p, turn.window, group, column);
        DirectSlots slots(source);
        pool_group<B>(p, slots, ape, turn.number, before, shared);
      }
    }
    if (count > 0) meet<B>();
  }
}

// Blocks of windows that run at the same time.
template <class B>
int room128(DLDevice device) {
  return std::max(1, B::kResident * multiprocessors(device) / B::kSlices);
}

template <class T, class B>
void launch128(const Call& call, const StoreParams& p) {
  const int streams = std::min(p.windows, room128<B>(call.device));
  const int keeping = (p.num_writes + B::kTokens - 1) / B::kTokens;
  launch(call, store128_kernel<T, B>, p, dim3(streams * B::kSlices + keeping), B::kThreads,
         B::kStaged ? sizeof(typename B::Stage) : 0);
}

template <class T, class Arguments>
void run_store128(const char* name, const Arguments& a) {
  const StoreParams p = store_params(a);
  const Call call{name, a.kv.device(), a.overlap};
  if (p.state_is_bf16 != std::is_same_v<typename T::Input, bf16>) {
    launch128<T, Block128<T, 2, true>>(call, p);
    return;
  }
  if constexpr (T::kMode == Mode::decode) {
    using Narrow = Block128<T, 1, false>;
    if (p.windows <= room128<Narrow>(call.device)) {
      launch128<T, Narrow>(call, p);
      return;
    }
  }
  launch128<T, Block128<T, 2, false>>(call, p);
}

}  // namespace needlepoint
