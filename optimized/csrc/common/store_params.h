// What a store launch is given; needlepoint.optimized.serving.plan says how a plan is made.
#pragma once

#include <cstdint>

#include "common/row_formats.cuh"
#include "launch/launch.h"

namespace needlepoint {

// The windows that one request completes in this call. A launch has thousands of windows and few
// segments, so a window finds its own in L1 instead of waiting for a plan entry from memory.
struct alignas(16) Segment {
  int32_t first;       // windows of the segments before it
  int32_t count;       // windows it completes
  int32_t token;       // row in kv and score of the token that completes its first window
  int32_t entry;       // number of the entry that its first window becomes
  int32_t behind;      // slots of its first window that lie in the state
  int32_t state_base;  // request * ring
  int32_t state_slot;  // ring position of slot 0 of its first window
  int32_t unused;
};

// One window to complete. Slots are in time order; the last is the token that completes the window.
struct Window {
  int32_t token;       // row of the last token in kv and score
  int32_t entry;       // w; RoPE stands at w * ratio
  int32_t from_state;  // leading slots read from the state instead of the input
  int32_t state_base;
  int32_t state_slot;  // ring position of slot 0; the ring wraps
};

// One token to keep for later calls.
struct WriteEntry {
  int32_t token;      // row in kv and score, negative: padding
  int32_t state_row;  // request * ring + ring position
};

// What a launch found outside the preconditions: for each kind the lowest window, or kNoFault. The
// bytes of such a window mean nothing. See needlepoint.optimized.cuda.faults.
enum Fault { kFaultScore, kFaultRow };

struct StoreParams {
  const void* kv;      // [tokens, c * head_dim]
  const void* score;   // [tokens, c * head_dim]
  uint32_t kv_stride;  // elements between tokens
  uint32_t score_stride;
  const float* ape;          // [ratio, c * head_dim], A = fl(ape * log2 e)
  const float* norm_weight;  // [head_dim]
  const float* rope;         // [positions, 32, 2]
  const Segment* segments;   // [num_segments]
  const int64_t* slots;      // [windows], negative: not stored
  const WriteEntry* writes;  // [num_writes]
  void* state;               // [requests * ring, 2, c * head_dim], kv then score
  Pool pool;
  int32_t num_segments;
  int32_t windows;  // prefill: of all segments; decode: one a segment
  int32_t num_writes;
  int32_t ring_mask;  // ring - 1, ring a power of two
  bool state_is_bf16;
  float eps;
  // Scores below it, wherever they stand, keep the precondition, and no weight reaches S2's clamp.
  float score_small;
  int32_t* faults;  // [2]
  // Ratio 128: pooled rows [windows, 512] on their way to the block that finishes each. Words that
  // are not there yet are kAbsent, which is also what a launch leaves behind.
  uint32_t* pooled;
};

inline Pool make_pool(const TensorView& pool, int64_t page_shift) {
  return Pool{static_cast<uint8_t*>(pool.data_ptr()), pool.stride(0),
              static_cast<int32_t>(page_shift)};
}

template <class Arguments>
StoreParams store_params(const Arguments& a) {
  StoreParams p;
  p.kv = a.kv.data_ptr();
  p.score = a.score.data_ptr();
  p.kv_stride = static_cast<uint32_t>(a.kv.stride(0));
  p.score_stride = static_cast<uint32_t>(a.score.stride(0));
  p.ape = address<const float>(a.ape);
  p.norm_weight = address<const float>(a.norm_weight);
  p.rope = address<const float>(a.rope);
  p.segments = address<const Segment>(a.segments);
  p.slots = address<const int64_t>(a.slots);
  p.writes = address<const WriteEntry>(a.writes);
  p.state = a.state.data_ptr();
  p.pool = make_pool(a.pool, a.page_shift);
  p.num_segments = static_cast<int32_t>(a.segments.size(0));
  p.windows = static_cast<int32_t>(a.slots.size(0));
  p.num_writes = static_cast<int32_t>(a.writes.size(0));
  p.ring_mask = static_cast<int32_t>(a.state.size(1)) - 1;
  p.state_is_bf16 = a.state.dtype().bits == 16;
  p.eps = static_cast<float>(a.eps);
  p.score_small = static_cast<float>(a.score_small);
  p.faults = address<int32_t>(a.faults);
  p.pooled = address<uint32_t>(a.workspace);
  return p;
}

}  // namespace needlepoint
