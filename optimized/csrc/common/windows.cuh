// From a window's number to its tokens.
#pragma once

#include "common/store_params.h"
#include "common/store_traits.cuh"

namespace needlepoint {

// Notes a window whose bytes mean nothing.
__device__ __forceinline__ void report(const StoreParams& p, Fault fault, int window) {
  atomicMin(p.faults + fault, window);
}

// The last segment whose windows begin at or before `number`; the whole warp searches together, 32
// segments a step.
__device__ __forceinline__ int find_segment(const StoreParams& p, int number) {
  const int lane = threadIdx.x % 32;
  int low = 0, span = p.num_segments;
  while (span > 1) {
    const int step = (span + 31) / 32;
    const int probe = low + lane * step;
    const bool before = lane * step < span && __ldg(&p.segments[probe].first) <= number;
    low += (__popc(__ballot_sync(0xffffffffu, before)) - 1) * step;
    span = min(step, p.num_segments - low);
  }
  return low;
}

// The window of a number from its segment. False if there is no such window: padding of a captured
// graph, or a decode step that ends none.
template <class T>
__device__ __forceinline__ bool window_of_segment(const StoreParams& p, int index, int number,
                                                  Window& window) {
  const Segment* own = p.segments + index;
  const int4 low = early4(own), high = early4(&own->behind);
  const int step = T::kMode == Mode::decode ? 0 : number - low.x;
  if (step >= low.y) return false;
  window.token = low.z + step * T::kRatio;
  window.entry = low.w + step;
  window.from_state = max(high.x - step * T::kRatio, 0);
  window.state_base = high.y;
  window.state_slot = high.z + step * T::kRatio;
  return true;
}

template <class T>
__device__ __forceinline__ bool find_window(const StoreParams& p, int number, Window& window) {
  const int index = T::kMode == Mode::decode ? number : find_segment(p, number);
  return window_of_segment<T>(p, index, number, window);
}

// Element offset in the state of a window's slot: part 0 is kv, part 1 score.
template <class T>
__device__ __forceinline__ int64_t state_element(const StoreParams& p, const Window& window,
                                                 int slot, int part) {
  const int64_t row = window.state_base + ((window.state_slot + slot) & p.ring_mask);
  return (row * 2 + part) * T::kWidth;
}

// Whether a slot lies in the state. A decode step brings one token, the last slot of its window.
template <class T>
__device__ __forceinline__ bool in_state(const Window& window, int slot) {
  return T::kMode == Mode::decode ? slot < T::kSlots - 1 : slot < window.from_state;
}

}  // namespace needlepoint
