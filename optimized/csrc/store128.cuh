// compress -> norm -> RoPE -> quantise -> paged store at ratio 128, in one launch.
//
// A window is shared by eight blocks, each with 64 of the 512 channels, two channels a lane. The
// sixteen groups of S3 are spread over the eight warps of a block and meet in shared memory. Each
// block leaves its pooled channels in memory; the one that arrives last finishes the row, so that no
// block waits for another.
#pragma once

#include "launch.h"
#include "row512.cuh"
#include "windows.cuh"

namespace needlepoint {

struct Store128 {
  static constexpr int kGroups = 16;
  static constexpr int kGroupSlots = 8;
  static constexpr int kBlocks = 8;     // of a window
  static constexpr int kChannels = 64;  // of a block
};

// kAnyState: the state's dtype differs from the input's, which takes more registers.
template <class T, bool kAnyState>
struct Block128 : Store128 {
  static constexpr int kWarps = 8;
  static constexpr int kWarpGroups = kGroups / kWarps;
  static constexpr int kWarpSlots = kWarpGroups * kGroupSlots;
  static constexpr int kThreads = 32 * kWarps;
  // Blocks an SM that the registers must allow.
  static constexpr int kResident = std::is_same_v<typename T::Input, bf16> && !kAnyState ? 3 : 2;
  static constexpr int kWrites = kThreads / 128;  // state rows kept by one block

  struct Shared {
    float2 maxima[kWarps][32];
    float2 sums[kWarps][32];      // s of S3, two channels a lane
    float2 weighted[kWarps][32];  // v of S3
  };
};

// Where a lane's slots are read from: slot `first + i`, two channels. One 64-bit base each, then
// 32-bit steps. This one reads tokens of this call.
template <class T>
struct FromInput {
  static constexpr bool kLate = false;  // whether kv is read once the scores have arrived
  using Input = typename T::Input;
  using Element = Input;
  using Raw = Raw2<Input>;
  const Input* kv;
  const Input* score;
  uint32_t kv_stride, score_stride;

  __device__ __forceinline__ FromInput(
      const StoreParams& p, const Window& window, int first, int column)
      : kv_stride(p.kv_stride), score_stride(p.score_stride) {
    const int64_t token = static_cast<int64_t>(window.token) - (T::kSlots - 1) + first;
    kv = static_cast<const Input*>(p.kv) + token * kv_stride + column;
    score = static_cast<const Input*>(p.score) + token * score_stride + column;
  }
  __device__ __forceinline__ Raw read_kv(int i) const {
    return stream2(kv + static_cast<uint64_t>(i) * kv_stride);
  }
  __device__ __forceinline__ Raw read_score(int i) const {
    return stream2(score + static_cast<uint64_t>(i) * score_stride);
  }
};

// Element offsets in the state of a request.
template <class T>
struct StateRing {
  int64_t base;  // of its first row, this lane's columns
  uint32_t slot, mask;

  __device__ __forceinline__ StateRing(
      const StoreParams& p, const Window& window, int first, int column)
      : base(static_cast<int64_t>(window.state_base) * (2 * T::kWidth) + column),
        slot(window.state_slot + first),
        mask(p.ring_mask) {}
  __device__ __forceinline__ uint32_t offset(int i, int part) const {
    return ((slot + i) & mask) * (2 * T::kWidth) + part * T::kWidth;
  }
};

// A window that begins in a state of the input's dtype: only addresses differ. In decode every slot
// but the window's last lies in the state.
template <class T, int kWarpSlots>
struct FromState {
  static constexpr bool kLate = T::kMode == Mode::prefill;  // few windows: registers come first
  using Input = typename T::Input;
  using Element = Input;
  using Raw = Raw2<Input>;
  FromInput<T> input;
  StateRing<T> ring;
  const Input* state;
  int from_state;  // slots of this lane in the state

  __device__ __forceinline__ FromState(
      const StoreParams& p, const Window& window, int first, int column)
      : input(p, window, first, column),
        ring(p, window, first, column),
        state(static_cast<const Input*>(p.state) + ring.base),
        from_state((T::kMode == Mode::decode ? T::kSlots - 1 : window.from_state) - first) {}
  __device__ __forceinline__ bool kept(int i) const {
    return (T::kMode == Mode::decode && i < kWarpSlots - 1) || i < from_state;
  }
  __device__ __forceinline__ Raw read_kv(int i) const {
    return kept(i) ? stream2(state + ring.offset(i, 0)) : input.read_kv(i);
  }
  __device__ __forceinline__ Raw read_score(int i) const {
    return kept(i) ? stream2(state + ring.offset(i, 1)) : input.read_score(i);
  }
};

// Any mixture, and a state of any dtype.
template <class T>
struct FromBoth {
  static constexpr bool kLate = false;
  using Element = float;
  using Raw = Raw2<float>;
  const StoreParams& p;
  FromInput<T> input;
  StateRing<T> ring;
  int from_state;  // slots of this lane in the state

  __device__ __forceinline__ FromBoth(
      const StoreParams& p, const Window& window, int first, int column)
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

__device__ __forceinline__ float2 larger(float2 a, float2 b) {
  return make_float2(fmaxf(a.x, b.x), fmaxf(a.y, b.y));
}

// S3's tree over adjacent items; its result is items[0].
template <int kCount>
__device__ __forceinline__ void tree(float2 (&items)[kCount]) {
#pragma unroll
  for (int stride = 1; stride < kCount; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; i += 2 * stride) {
      items[i].x = __fadd_rn(items[i].x, items[i + stride].x);
      items[i].y = __fadd_rn(items[i].y, items[i + stride].y);
    }
  }
}

template <int kWarps>
__device__ __forceinline__ float2 tree_warps(const float2 (&sums)[kWarps][32], int lane) {
  float2 items[kWarps];
#pragma unroll
  for (int i = 0; i < kWarps; ++i) items[i] = sums[i][lane];
  tree(items);
  return items[0];
}

template <class T>
__device__ __forceinline__ void keep_token128(const StoreParams& p, int index, int column) {
  const WriteEntry write = p.writes[index];
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

// S4, S5 and S7 of a whole row by one warp.
template <class T>
__device__ __forceinline__ void finish_row(
    const StoreParams& p, int window, int entry, int64_t slot, int lane) {
  const float* pooled = p.pooled + static_cast<int64_t>(window) * T::kDim;
  const float4* row = reinterpret_cast<const float4*>(pooled);
  const float4* table = reinterpret_cast<const float4*>(
      p.rope + static_cast<int64_t>(entry) * T::kRatio * kRopeDims);
  const int first = 2 * max(lane - Row512::kFirstRope, 0);
  const float4 angles[2] = {__ldg(table + first), __ldg(table + first + 1)};
  float x[16];
#pragma unroll
  for (int i = 0; i < 4; ++i) Row512::set(x, i, __ldcg(row + Row512::quad(lane, i)));
  if (!(normalize512(x, p.norm_weight, p.eps, lane) > 0.0f)) report(p, kFaultRow, window);
  rotate512(x, angles, lane);
  store_row512<T::kRow>(p.pool, slot, x, lane);
}

// S2 and S3 of a warp's slots: the sums of its groups, added pairwise.
template <class B, class Raw>
__device__ __forceinline__ void weigh128(
    const float2 (&z)[B::kWarpSlots], const Raw (&kv)[B::kWarpSlots], float2 m, float2& sum,
    float2& weighted) {
  float2 s[B::kWarpGroups], v[B::kWarpGroups];
#pragma unroll
  for (int i = 0; i < B::kWarpSlots; ++i) {
    const int group = i / Store128::kGroupSlots;
    if (i % Store128::kGroupSlots == 0) s[group] = v[group] = make_float2(0.0f, 0.0f);
    const float2 e = make_float2(exp2_weight(clamped(__fsub_rn(z[i].x, m.x))),
                                 exp2_weight(clamped(__fsub_rn(z[i].y, m.y))));
    s[group].x = __fadd_rn(s[group].x, e.x);
    s[group].y = __fadd_rn(s[group].y, e.y);
    v[group].x = __fmaf_rn(e.x, kv[i][0], v[group].x);
    v[group].y = __fmaf_rn(e.y, kv[i][1], v[group].y);
  }
  tree(s);
  tree(v);
  sum = s[0];
  weighted = v[0];
}

// S1 to S3 for this block's channels; the result is valid in warp 0.
template <class T, class B, class Source>
__device__ __forceinline__ float2 pool128(
    const StoreParams& p, const Source& source, int column, typename B::Shared& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = warp * B::kWarpSlots;
  typename Source::Raw score[B::kWarpSlots], kv[B::kWarpSlots];
#pragma unroll
  for (int i = 0; i < B::kWarpSlots; ++i) score[i] = source.read_score(i);
  const auto read_kv = [&] {
#pragma unroll
    for (int i = 0; i < B::kWarpSlots; ++i) kv[i] = source.read_kv(i);
  };
  if constexpr (!Source::kLate) read_kv();
  __syncthreads();  // as after_loads(), whose barrier is optimised away here
  Peak<typename Source::Element> peak;
  float2 z[B::kWarpSlots], m;
#pragma unroll
  for (int i = 0; i < B::kWarpSlots; ++i) {
    const float* row = p.ape + static_cast<int64_t>(first + i) * T::kWidth + column;
    const float2 ape = __ldg(reinterpret_cast<const float2*>(row));
    z[i].x = __fmaf_rn(score[i][0], kLog2e, ape.x);
    z[i].y = __fmaf_rn(score[i][1], kLog2e, ape.y);
    m = i == 0 ? z[0] : larger(m, z[i]);
    score[i].raise(peak);
  }
  shared.maxima[warp][lane] = m;
  if (!(peak.value() < p.score_small)) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < B::kWarpSlots; ++i) {
      largest = larger_magnitude(larger_magnitude(largest, z[i].x), z[i].y);
    }
    const int window = blockIdx.x / Store128::kBlocks;
    if (!(largest < kScoreLimit) && p.slots[window] >= 0) report(p, kFaultScore, window);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < B::kWarps; ++i) m = larger(m, shared.maxima[i][lane]);
  if constexpr (Source::kLate) read_kv();
  float2 s, v;
  weigh128<B>(z, kv, m, s, v);
  shared.sums[warp][lane] = s;
  shared.weighted[warp][lane] = v;
  __syncthreads();
  if (warp != 0) return make_float2(0.0f, 0.0f);
  s = tree_warps(shared.sums, lane);
  v = tree_warps(shared.weighted, lane);
  float pooled[2];
  divide({v.x, v.y}, {s.x, s.y}, pooled);
  return make_float2(pooled[0], pooled[1]);
}

template <class T, class B, bool kAnyState>
__device__ __forceinline__ float2 pool_place(
    const StoreParams& p, const Window& place, typename B::Shared& shared) {
  const int column =
      blockIdx.x % Store128::kBlocks * Store128::kChannels + 2 * (threadIdx.x % 32);
  const int first = threadIdx.x / 32 * B::kWarpSlots;
  if (T::kMode == Mode::prefill && place.from_state == 0) {
    return pool128<T, B>(p, FromInput<T>(p, place, first, column), column, shared);
  }
  using Source = std::conditional_t<kAnyState, FromBoth<T>, FromState<T, B::kWarpSlots>>;
  return pool128<T, B>(p, Source(p, place, first, column), column, shared);
}

template <class T, bool kAnyState>
__global__ __launch_bounds__(Block128<T, kAnyState>::kThreads, Block128<T, kAnyState>::kResident)
void store128_kernel(const __grid_constant__ StoreParams p) {
  using B = Block128<T, kAnyState>;
  __shared__ typename B::Shared shared;
  wait_for_predecessor();
  const int window = blockIdx.x / Store128::kBlocks;
  if (window >= p.windows) {
    const int index = (blockIdx.x - p.windows * Store128::kBlocks) * B::kWrites +
                      threadIdx.x / 128;
    if (index < p.num_writes) keep_token128<T>(p, index, threadIdx.x % 128 * 4);
    return;
  }
  Window place;
  if (!find_window<T>(p, window, place)) return;  // the same for all blocks of the window
  const float2 x = pool_place<T, B, kAnyState>(p, place, shared);
  if (threadIdx.x >= 32) return;  // warp 0 finishes alone
  const int block = blockIdx.x % Store128::kBlocks, lane = threadIdx.x;
  const int64_t slot = p.slots[window];
  if (slot < 0) return;
  const int channel = block * Store128::kChannels + 2 * lane;
  if constexpr (T::kRow == Row::fp32) {
    if (!(larger_magnitude(larger_magnitude(0.0f, x.x), x.y) < kPooledLimit)) {
      report(p, kFaultRow, window);
    }
    *reinterpret_cast<float2*>(p.pool.page(slot) + p.pool.row(slot) * 2048 + channel * 4) = x;
    return;
  }
  float* row = p.pooled + static_cast<int64_t>(window) * T::kDim;
  __stcg(reinterpret_cast<float2*>(row + channel), x);
  __threadfence();
  __syncwarp();
  int arrived = 0;
  if (lane == 0) arrived = atomicAdd(p.arrived + window, 1);
  arrived = __shfl_sync(0xffffffffu, arrived, 0);
  if (arrived != Store128::kBlocks - 1) return;
  __threadfence();
  if (lane == 0) p.arrived[window] = 0;  // as the next launch expects it
  release_successor();
  if constexpr (T::kRow != Row::fp32) finish_row<T>(p, window, place.entry, slot, lane);
}

template <class T>
void run_store128(const char* name, const StoreParams& p, DLDevice device, bool overlap) {
  using B = Block128<T, true>;
  constexpr int kPer = B::kWrites * Store128::kBlocks;
  const int64_t groups = static_cast<int64_t>(p.windows) + (p.num_writes + kPer - 1) / kPer;
  const bool same = p.state_is_bf16 == std::is_same_v<typename T::Input, bf16>;
  const auto kernel = same ? store128_kernel<T, false> : store128_kernel<T, true>;
  launch(name, kernel, p, dim3(static_cast<unsigned>(groups * Store128::kBlocks)), B::kThreads,
         device, overlap);
}

}  // namespace needlepoint
