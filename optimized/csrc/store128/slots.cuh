// Where the slots of a window at ratio 128 are read from.
#pragma once

#include "common/windows.cuh"

namespace needlepoint {

struct Store128 {
  static constexpr int kGroups = 16;  // of S3, one a warp
  static constexpr int kGroupSlots = 8;
};

// Where a lane's slots are read from: slot `first + i`, from a column on. One 64-bit base each,
// then 32-bit steps. This one reads tokens of this call.
template <class T, int kChannels>
struct FromInput {
  using Input = typename T::Input;
  using Element = Input;
  using Raw = needlepoint::Raw<Input, kChannels>;
  const Input* kv;
  const Input* score;
  uint32_t kv_stride, score_stride;

  __device__ __forceinline__ FromInput(const StoreParams& p, const Window& window, int first,
                                       int column)
      : kv_stride(p.kv_stride), score_stride(p.score_stride) {
    const int64_t token = static_cast<int64_t>(window.token) - (T::kSlots - 1) + first;
    kv = static_cast<const Input*>(p.kv) + token * kv_stride + column;
    score = static_cast<const Input*>(p.score) + token * score_stride + column;
  }
  __device__ __forceinline__ const Input* kv_place(int i) const {
    return kv + static_cast<uint64_t>(i) * kv_stride;
  }
  __device__ __forceinline__ const Input* score_place(int i) const {
    return score + static_cast<uint64_t>(i) * score_stride;
  }
  __device__ __forceinline__ Raw read_kv(int i) const { return stream<kChannels>(kv_place(i)); }
  __device__ __forceinline__ Raw read_score(int i) const {
    return stream<kChannels>(score_place(i));
  }
};

// Element offsets in the state of a request.
template <class T>
struct StateRing {
  int64_t base;  // of its first row, this lane's columns
  uint32_t slot, mask;

  __device__ __forceinline__ StateRing(const StoreParams& p, const Window& window, int first,
                                       int column)
      : base(static_cast<int64_t>(window.state_base) * (2 * T::kWidth) + column),
        slot(window.state_slot + first),
        mask(p.ring_mask) {}
  __device__ __forceinline__ uint32_t offset(int i, int part) const {
    return ((slot + i) & mask) * (2 * T::kWidth) + part * T::kWidth;
  }
};

// A window that begins in a state of the input's dtype: only addresses differ. In decode every slot
// but the window's last lies in the state; kGroup: `first` is that of a group of slots.
template <class T, int kChannels, bool kGroup>
struct FromState {
  using Input = typename T::Input;
  using Element = Input;
  using Raw = needlepoint::Raw<Input, kChannels>;
  FromInput<T, kChannels> input;
  StateRing<T> ring;
  const Input* state;
  int from_state;  // slots of this lane in the state

  __device__ __forceinline__ FromState(const StoreParams& p, const Window& window, int first,
                                       int column)
      : input(p, window, first, column),
        ring(p, window, first, column),
        state(static_cast<const Input*>(p.state) + ring.base),
        from_state((T::kMode == Mode::decode ? T::kSlots - 1 : window.from_state) - first) {}
  __device__ __forceinline__ bool kept(int i) const {
    constexpr bool kDecode = T::kMode == Mode::decode;
    return (kDecode && kGroup && i < Store128::kGroupSlots - 1) || i < from_state;
  }
  __device__ __forceinline__ const Input* kv_place(int i) const {
    return kept(i) ? state + ring.offset(i, 0) : input.kv_place(i);
  }
  __device__ __forceinline__ const Input* score_place(int i) const {
    return kept(i) ? state + ring.offset(i, 1) : input.score_place(i);
  }
  __device__ __forceinline__ Raw read_kv(int i) const { return stream<kChannels>(kv_place(i)); }
  __device__ __forceinline__ Raw read_score(int i) const {
    return stream<kChannels>(score_place(i));
  }
};

// Any mixture, and a state of any dtype.
template <class T, int kChannels>
struct FromBoth {
  using Element = float;
  using Raw = needlepoint::Raw<float, kChannels>;
  const StoreParams& p;
  FromInput<T, kChannels> input;
  StateRing<T> ring;
  int from_state;  // slots of this lane in the state

  __device__ __forceinline__ FromBoth(const StoreParams& p, const Window& window, int first,
                                      int column)
      : p(p),
        input(p, window, first, column),
        ring(p, window, first, column),
        from_state(window.from_state - first) {}
  __device__ __forceinline__ Raw state(int i, int part) const {
    return Raw{state2(p.state, p.state_is_bf16, ring.base + ring.offset(i, part))};
  }
  __device__ __forceinline__ Raw read_kv(int i) const {
    if (i < from_state) return state(i, 0);
    const auto raw = input.read_kv(i);
    return Raw{make_float2(raw[0], raw[1])};
  }
  __device__ __forceinline__ Raw read_score(int i) const {
    if (i < from_state) return state(i, 1);
    const auto raw = input.read_score(i);
    return Raw{make_float2(raw[0], raw[1])};
  }
};

}  // namespace needlepoint
