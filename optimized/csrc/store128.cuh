// compress -> norm -> RoPE -> quantise -> paged store at ratio 128, in one launch.
//
// A window is a cluster of eight blocks, each with 64 of the 512 channels, two channels a lane. The
// sixteen groups of S3 are spread over the eight warps of a block. They meet in shared memory; warp
// 0 then holds the pooled channels, and the blocks exchange nothing but their share of the sum of
// squares. The last block owns exactly the RoPE dims, every other block one scale group.
#pragma once

#include <cooperative_groups.h>

#include "launch.h"
#include "windows.cuh"

namespace needlepoint {

struct Store128 {
  static constexpr int kGroups = 16;
  static constexpr int kGroupSlots = 8;
  static constexpr int kCluster = 8;    // blocks of a window
  static constexpr int kChannels = 64;  // of a block
};

template <class T>
struct Block128 : Store128 {
  static constexpr int kWarps = 8;
  static constexpr int kWarpGroups = kGroups / kWarps;
  static constexpr int kWarpSlots = kWarpGroups * kGroupSlots;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kResident = 2;             // blocks an SM that the registers must allow
  static constexpr int kWrites = kThreads / 128;  // state rows kept by one block

  struct Shared {
    float2 maxima[kWarps][32];
    float2 sums[kWarps][32];      // s of S3, two channels a lane
    float2 weighted[kWarps][32];  // v of S3
    float squares[kCluster];      // each block's share of ss, written by that block
    // What only the last warp needs is kept here rather than in everybody's registers.
    int64_t slot;
    int32_t entry;
    int32_t block;
  };
};

// Where a lane's slots are read from: slot `first + i`, two channels. One 64-bit base each, then
// 32-bit steps. This one reads tokens of this call.
template <class T>
struct FromInput {
  using Input = typename T::Input;
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

// A decode step: every slot but the window's last lies in a state of the input's dtype.
template <class T, int kWarpSlots>
struct FromState {
  using Input = typename T::Input;
  using Raw = Raw2<Input>;
  FromInput<T> input;
  StateRing<T> ring;
  const Input* state;
  bool last;  // this warp holds the window's last slot

  __device__ __forceinline__ FromState(
      const StoreParams& p, const Window& window, int first, int column)
      : input(p, window, first, column),
        ring(p, window, first, column),
        state(static_cast<const Input*>(p.state) + ring.base),
        last(first + kWarpSlots == T::kSlots) {}
  __device__ __forceinline__ Raw read_kv(int i) const {
    return i == kWarpSlots - 1 && last ? input.read_kv(i) : stream2(state + ring.offset(i, 0));
  }
  __device__ __forceinline__ Raw read_score(int i) const {
    return i == kWarpSlots - 1 && last ? input.read_score(i) : stream2(state + ring.offset(i, 1));
  }
};

// Any mixture, and a state of any dtype.
template <class T>
struct FromBoth {
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

// Bytes of this block's 64 channels; every lane holds channels 64 * block + 2 * lane, + 1.
template <Row kRow>
__device__ __forceinline__ void store_channels(
    const Pool& pool, int64_t slot, int block, int lane, float2 x) {
  uint8_t* page = pool.page(slot);
  const int64_t row = pool.row(slot);
  const uint32_t pair = pack_bf16(x.x, x.y);
  if constexpr (kRow == Row::fp32) {
    *reinterpret_cast<float2*>(page + row * 2048 + block * 256 + lane * 8) = x;
  } else if constexpr (kRow == Row::bf16) {
    *reinterpret_cast<uint32_t*>(page + row * 1024 + block * 128 + lane * 4) = pair;
  } else {
    uint8_t* scales = page + pool.rows() * 576 + row * 8;
    if (block == Store128::kCluster - 1) {
      *reinterpret_cast<uint32_t*>(page + row * 576 + 448 + lane * 4) = pair;
      if (lane == 0) scales[block] = 0;
      return;
    }
    const float b0 = widen_low(pair), b1 = widen_high(pair);
    const float amax = warp_max_nonnegative(fmaxf(fabsf(b0), fabsf(b1)));
    const uint32_t byte = ue8m0_byte(__fmul_rn(fmaxf(amax, kFloor), kInverse448));
    const float inverse = ue8m0_inverse(byte);
    *reinterpret_cast<uint16_t*>(page + row * 576 + block * 64 + lane * 2) =
        static_cast<uint16_t>(e4m3_pair(__fmul_rn(b0, inverse), __fmul_rn(b1, inverse)));
    if (lane == 0) scales[block] = static_cast<uint8_t>(byte);
  }
}

// S1 to S3 for this block's channels; the result is valid in warp 0.
template <class T, class Source>
__device__ __forceinline__ float2 pool128(
    const StoreParams& p, const Source& source, int column, typename Block128<T>::Shared& shared) {
  using B = Block128<T>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = warp * B::kWarpSlots;
  typename Source::Raw score[B::kWarpSlots], kv[B::kWarpSlots];
#pragma unroll
  for (int i = 0; i < B::kWarpSlots; ++i) score[i] = source.read_score(i);
#pragma unroll
  for (int i = 0; i < B::kWarpSlots; ++i) kv[i] = source.read_kv(i);
  __syncthreads();  // as after_loads(), whose barrier is optimised away here
  float2 z[B::kWarpSlots], m;
#pragma unroll
  for (int i = 0; i < B::kWarpSlots; ++i) {
    const float* row = p.ape + static_cast<int64_t>(first + i) * T::kWidth + column;
    const float2 ape = __ldg(reinterpret_cast<const float2*>(row));
    z[i].x = __fmaf_rn(score[i][0], kLog2e, ape.x);
    z[i].y = __fmaf_rn(score[i][1], kLog2e, ape.y);
    m = i == 0 ? z[0] : larger(m, z[i]);
  }
  shared.maxima[warp][lane] = m;
  float2 s[B::kWarpGroups], v[B::kWarpGroups];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < B::kWarps; ++i) m = larger(m, shared.maxima[i][lane]);
#pragma unroll
  for (int i = 0; i < B::kWarpSlots; ++i) {
    const int group = i / Store128::kGroupSlots;
    if (i % Store128::kGroupSlots == 0) s[group] = v[group] = make_float2(0.0f, 0.0f);
    const float2 e = make_float2(exp2_weight(z[i].x, m.x), exp2_weight(z[i].y, m.y));
    s[group].x = __fadd_rn(s[group].x, e.x);
    s[group].y = __fadd_rn(s[group].y, e.y);
    v[group].x = __fmaf_rn(e.x, kv[i][0], v[group].x);
    v[group].y = __fmaf_rn(e.y, kv[i][1], v[group].y);
  }
  tree(s);
  tree(v);
  shared.sums[warp][lane] = s[0];
  shared.weighted[warp][lane] = v[0];
  __syncthreads();
  if (warp != 0) return make_float2(0.0f, 0.0f);
  s[0] = tree_warps(shared.sums, lane);
  v[0] = tree_warps(shared.weighted, lane);
  return make_float2(__fdiv_rn(v[0].x, s[0].x), __fdiv_rn(v[0].y, s[0].y));
}

// In decode, kAnyState tells the kernel for a state of another dtype from the usual one: with both
// in one kernel the registers would not suffice.
template <class T, bool kAnyState>
__device__ __forceinline__ float2 pool_place(
    const StoreParams& p, const Window& place, typename Block128<T>::Shared& shared) {
  using B = Block128<T>;
  const int column =
      blockIdx.x % Store128::kCluster * Store128::kChannels + 2 * (threadIdx.x % 32);
  const int first = threadIdx.x / 32 * B::kWarpSlots;
  if (T::kMode == Mode::prefill && place.from_state == 0) {
    return pool128<T>(p, FromInput<T>(p, place, first, column), column, shared);
  }
  using Source = std::conditional_t<kAnyState, FromBoth<T>, FromState<T, B::kWarpSlots>>;
  return pool128<T>(p, Source(p, place, first, column), column, shared);
}

// A block may write another's shared memory once every block of the cluster has started: each says
// so on entry and looks when it needs it.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_arrive_release() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

template <class T, bool kAnyState>
__global__ __cluster_dims__(Store128::kCluster, 1, 1)
__launch_bounds__(Block128<T>::kThreads, Block128<T>::kResident)
void store128_kernel(const __grid_constant__ StoreParams p) {
  using B = Block128<T>;
  __shared__ typename B::Shared shared;
  wait_for_predecessor();
  const int window = blockIdx.x / Store128::kCluster;
  if (window >= p.windows) {
    const int index = (blockIdx.x - p.windows * Store128::kCluster) * B::kWrites +
                      threadIdx.x / 128;
    if (index < p.num_writes) keep_token128<T>(p, index, threadIdx.x % 128 * 4);
    return;
  }
  Window place;
  if (!find_window<T>(p, window, place)) return;  // the same for all blocks of the cluster
  if constexpr (T::kRow != Row::fp32) cluster_arrive();
  if (threadIdx.x == 0) {
    shared.slot = p.slots[window];
    shared.entry = place.entry;
    shared.block = blockIdx.x % Store128::kCluster;
  }
  float2 x = pool_place<T, kAnyState>(p, place, shared);
  if (threadIdx.x >= 32) return;  // warp 0 finishes the row alone
  const int block = shared.block, lane = threadIdx.x;
  const int64_t slot = shared.slot;
  if constexpr (T::kRow == Row::fp32) {
    if (slot >= 0) store_channels<T::kRow>(p.pool, slot, block, lane, x);
    return;
  }
  const float square = tree_sum<32>(__fmaf_rn(x.y, x.y, __fmul_rn(x.x, x.x)));
  cluster_wait();
  if (lane < Store128::kCluster) {
    auto cluster = cooperative_groups::this_cluster();
    *cluster.map_shared_rank(&shared.squares[block], lane) = square;
  }
  cluster_arrive_release();
  cluster_wait();  // also keeps every block's shared memory alive until it has been written
  const int column = block * Store128::kChannels + 2 * lane;
  const float2 weight = __ldg(reinterpret_cast<const float2*>(p.norm_weight + column));
  const float ss = tree_sum<Store128::kCluster>(shared.squares[lane % Store128::kCluster]);
  const float r = inverse_rms<T::kDim>(ss, p.eps);
  x.x = __fmul_rn(__fmul_rn(x.x, r), weight.x);
  x.y = __fmul_rn(__fmul_rn(x.y, r), weight.y);
  if (block == Store128::kCluster - 1) {
    const int64_t position = static_cast<int64_t>(shared.entry) * T::kRatio;
    const float* row = p.rope + position * kRopeDims;
    const float2 table = __ldg(reinterpret_cast<const float2*>(row) + lane);
    rotate_pair(x.x, x.y, table.x, table.y);
  }
  release_successor();
  if (slot >= 0) store_channels<T::kRow>(p.pool, slot, block, lane, x);
}

template <class T>
void run_store128(const char* name, const StoreParams& p, DLDevice device, bool overlap) {
  using B = Block128<T>;
  constexpr int kPer = B::kWrites * Store128::kCluster;
  const int64_t clusters = static_cast<int64_t>(p.windows) + (p.num_writes + kPer - 1) / kPer;
  const bool same = p.state_is_bf16 == std::is_same_v<typename T::Input, bf16>;
  constexpr bool kPrefill = T::kMode == Mode::prefill;
  const auto kernel = kPrefill || !same ? store128_kernel<T, true> : store128_kernel<T, kPrefill>;
  launch(name, kernel, p, dim3(static_cast<unsigned>(clusters * Store128::kCluster)), B::kThreads,
         device, overlap);
}

}  // namespace needlepoint
