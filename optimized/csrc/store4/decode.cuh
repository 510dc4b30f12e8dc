// The store at ratio 4 for a decode step: one token a request, at most one window.
//
// A step is a handful of windows, so it takes as long as one window does, from the end of the
// launch before it to its last byte. What that launch cannot write is read ahead of its end (plan,
// weights, frequencies), rows of the state are brought into L2 meanwhile, and a window is spread
// over more threads than the row that it becomes. Tokens are kept by blocks of their own while the
// card has room for them beside the windows; else the block of a window also keeps one, the same
// number in the plan, not always the same request.
#pragma once

#include <algorithm>

#include "launch/launch.h"
#include "store4/pool.cuh"

namespace needlepoint {

template <class T>
struct Decode4 {
  // Channels of a thread. Fewer for index rows, whose windows would be one warp; at 512 dims a read
  // is four bytes.
  static constexpr int kChannels = T::kDim == 128 ? 1 : 4 / sizeof(typename T::Input);
  static constexpr int kThreads = T::kDim / kChannels;
  static constexpr int kRowThreads = RowThreads<T::kDim>::kThreads;
  static constexpr int kResident = kThreads == 256 ? 3 : 1024 / kThreads;  // by registers, on an SM
  // Released at once, blocks of the next launch take threads from this one's: at 512 dims that
  // costs more (3.2 us instead of 2.6 for 64 requests) than it hides.
  static constexpr bool kReleaseAtOnce = T::kDim == 128;
};

template <int kChannels>
struct Slots8 {
  float score[8][kChannels], kv[8][kChannels];
};

// Where a thread's channels of the slots are: seven in the state, the last one is the token. Slots
// 0..3 of a request's first window lie before its first token; slot 4 is read in their place.
template <class T>
struct Places8 {
  using Input = typename T::Input;
  const uint8_t* ring;  // this thread's overlap columns in the request's first row
  uint32_t kept[7];     // bytes from there to kv; the score follows kWidth elements behind
  const Input* kv;
  const Input* score;

  __device__ __forceinline__ Places8(const StoreParams& p, const Window& window, int column) {
    const int64_t token = window.token;
    const uint32_t bytes = p.state_is_bf16 ? 2 : 4;
    kv = static_cast<const Input*>(p.kv) + token * p.kv_stride + T::kDim + column;
    score = static_cast<const Input*>(p.score) + token * p.score_stride + T::kDim + column;
    const int64_t first = static_cast<int64_t>(window.state_base) * (2 * T::kWidth) + column;
    ring = static_cast<const uint8_t*>(p.state) + first * bytes;
#pragma unroll
    for (int i = 0; i < 7; ++i) {
      const int from = window.entry == 0 ? max(i, 4) : i;
      const uint32_t row = (window.state_slot + from) & p.ring_mask;
      kept[i] = (row * (2 * T::kWidth) + (from < 4 ? 0 : T::kDim)) * bytes;
    }
  }

  template <class State, int kChannels>
  __device__ __forceinline__ void read(Slots8<kChannels>& slots) const {
    Raw<State, kChannels> old[2][7];
    Raw<Input, kChannels> own[2];
#pragma unroll
    for (int i = 0; i < 7; ++i) {
      const State* row = reinterpret_cast<const State*>(ring + kept[i]);
      old[0][i] = stream<kChannels>(row);
      old[1][i] = stream<kChannels>(row + T::kWidth);
    }
    own[0] = stream<kChannels>(kv);
    own[1] = stream<kChannels>(score);
    after_loads();
#pragma unroll
    for (int channel = 0; channel < kChannels; ++channel) {
#pragma unroll
      for (int i = 0; i < 7; ++i) {
        slots.kv[i][channel] = old[0][i][channel];
        slots.score[i][channel] = old[1][i][channel];
      }
      slots.kv[7][channel] = own[0][channel];
      slots.score[7][channel] = own[1][channel];
    }
  }
};

// S1 to S3. A masked slot repeats slot 4's logit, which leaves the maximum alone, and weighs +0.
template <int kChannels>
__device__ __forceinline__ void pool_slots(const StoreParams& p, const Slots8<kChannels>& slots,
                                           const float (&ape)[8][kChannels], bool masked,
                                           float (&pooled)[kChannels]) {
  float largest = 0.0f, s[kChannels], v[kChannels];
#pragma unroll
  for (int channel = 0; channel < kChannels; ++channel) {
    float z[8];
#pragma unroll
    for (int i = 7; i >= 0; --i) {
      z[i] = __fmaf_rn(slots.score[i][channel], kLog2e, ape[i][channel]);
      if (i < 4 && masked) z[i] = z[4];
      largest = larger_magnitude(largest, z[i]);
    }
    float m = z[0];
#pragma unroll
    for (int i = 1; i < 8; ++i) m = fmaxf(m, z[i]);
    s[channel] = v[channel] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float weight = exp2_weight(clamped(__fsub_rn(z[i], m)));
      const float e = masked && i < 4 ? 0.0f : weight;
      s[channel] = __fadd_rn(s[channel], e);
      v[channel] = __fmaf_rn(e, slots.kv[i][channel], v[channel]);
    }
  }
  if (!(largest < kScoreLimit)) report(p, kFaultScore, blockIdx.x);
  divide(v, s, pooled);
}

// The token that a block keeps, kv and score one after the other.
template <class T>
struct KeptToken {
  using Input = typename T::Input;
  static constexpr int kPieces = Decode4<T>::kChannels;
  Raw4<Input> pieces[kPieces];

  static __device__ __forceinline__ int column(int i) {
    return (threadIdx.x + i * Decode4<T>::kThreads) * 4;
  }
  __device__ __forceinline__ void read(const StoreParams& p, const WriteEntry& write) {
    if (write.token < 0) return;
    const int64_t token = write.token;
    const Input* kv = static_cast<const Input*>(p.kv) + token * p.kv_stride;
    const Input* score = static_cast<const Input*>(p.score) + token * p.score_stride - T::kWidth;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      pieces[i] = stream4((column(i) < T::kWidth ? kv : score) + column(i));
    }
  }
  __device__ __forceinline__ void write_back(const StoreParams& p, const WriteEntry& write) const {
    if (write.token < 0) return;
    const int64_t row = static_cast<int64_t>(write.state_row) * 2 * T::kWidth;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      write_state4(p.state, p.state_is_bf16, row + column(i), pieces[i]);
    }
  }
};

// The state rows of a window into L2, one thread a part of a slot.
template <class T>
__device__ __forceinline__ void prefetch_slots(const StoreParams& p, const Window& window) {
  const int slot = threadIdx.x / 2, bytes = p.state_is_bf16 ? 2 : 4;
  if (slot >= 7) return;
  const int64_t element =
      state_element<T>(p, window, slot, threadIdx.x % 2) + (slot < 4 ? 0 : T::kDim);
  prefetch_row(static_cast<const uint8_t*>(p.state) + element * bytes, T::kDim * bytes);
}

template <class T>
__global__ __launch_bounds__(Decode4<T>::kThreads) void decode4_kernel(
    const __grid_constant__ StoreParams p) {
  using D = Decode4<T>;
  constexpr int kChannels = D::kChannels, kFirstRope = RowThreads<T::kDim>::kFirstRope;
  __shared__ float pooled[T::kDim], warp_sums[4];
  const int number = blockIdx.x, thread = threadIdx.x, column = thread * kChannels;
  const bool apart = gridDim.x == p.windows + p.num_writes;
  const int kept = number - (apart ? p.windows : 0);
  WriteEntry write = {-1, 0};
  if (kept >= 0 && kept < p.num_writes) write = p.writes[kept];
  KeptToken<T> token;
  Window window;
  int64_t slot = -1;
  if (number < p.windows && find_window<T>(p, number, window)) slot = p.slots[number];
  if (D::kReleaseAtOnce || slot < 0) release_successor();
  if (slot < 0) {
    wait_for_predecessor();
    token.read(p, write);
    token.write_back(p, write);
    return;
  }
  prefetch_slots<T>(p, window);
  float ape[8][kChannels];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    early(ape[i], p.ape + (i % 4) * T::kWidth + (i < 4 ? 0 : T::kDim) + column);
  }
  float weight[4] = {}, table[4] = {};
  if (thread < D::kRowThreads) early(weight, p.norm_weight + thread * 4);
  if (thread >= kFirstRope && thread < D::kRowThreads) {
    const int64_t position = static_cast<int64_t>(window.entry) * T::kRatio;
    early(table, p.rope + position * kRopeDims + (thread - kFirstRope) * 4);
  }
  const Places8<T> places(p, window, column);
  wait_for_predecessor();
  if (!D::kReleaseAtOnce) release_successor();
  Slots8<kChannels> slots;
  if (p.state_is_bf16) {
    places.template read<bf16>(slots);
  } else {
    places.template read<float>(slots);
  }
  token.read(p, write);
  token.write_back(p, write);
  float own[kChannels];
  pool_slots(p, slots, ape, window.entry == 0, own);
#pragma unroll
  for (int i = 0; i < kChannels; ++i) pooled[column + i] = own[i];
  __syncthreads();
  if (thread >= D::kRowThreads) return;  // the row takes four channels a thread
  const float4 four = *reinterpret_cast<const float4*>(pooled + thread * 4);
  float x[4] = {four.x, four.y, four.z, four.w};
  const float4 norm = make_float4(weight[0], weight[1], weight[2], weight[3]);
  const bool sound = normalize<T::kDim>(x, norm, p.eps, warp_sums) > 0.0f;
  if (!sound) report(p, kFaultRow, number);
  if (thread >= kFirstRope) rotate(x, make_float4(table[0], table[1], table[2], table[3]));
  if constexpr (T::kHadamard) hadamard(x, thread);
  store_row<T::kRow, T::kDim>(p.pool, slot, thread, x);
}

template <class T, class Arguments>
void run_decode4(const char* name, const Arguments& a) {
  using D = Decode4<T>;
  const StoreParams p = store_params(a);
  const Call call{name, a.kv.device(), a.overlap};
  // Blocks that only keep a token are short: half of them may wait for a place.
  const bool apart = p.windows + p.num_writes / 2 <= D::kResident * multiprocessors(call.device);
  const int blocks = apart ? p.windows + p.num_writes : std::max(p.windows, p.num_writes);
  launch(call, decode4_kernel<T>, p, dim3(blocks), D::kThreads);
}

}  // namespace needlepoint
