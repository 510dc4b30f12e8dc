// S1 to S3 at ratio 128: a warp a group of slots, and the tree over the groups.
#pragma once

#include "store128/block.cuh"

namespace needlepoint {

// The position embedding of a thread's slots, times log2 e.
template <class B>
using Ape128 = float[B::kGroupSlots][B::kLaneChannels];

// S2 and S3 of one warp's slots, given the maxima.
template <class B, class Slots, class Clamp>
__device__ __forceinline__ void add_slots(const Slots& slots,
                                          const float (&z)[B::kGroupSlots][B::kLaneChannels],
                                          const float (&m)[B::kLaneChannels], const Clamp& clamp,
                                          typename B::Lane& sum, typename B::Lane& weighted) {
#pragma unroll
  for (int i = 0; i < B::kGroupSlots; ++i) {
    const auto kv = slots.kv(i);
#pragma unroll
    for (int c = 0; c < B::kLaneChannels; ++c) {
      const float e = exp2_weight(clamp(__fsub_rn(z[i][c], m[c])));
      sum.of[c] = i == 0 ? e : __fadd_rn(sum.of[c], e);  // 0 + e = e: weights are not negative
      weighted.of[c] = __fmaf_rn(e, kv[c], weighted.of[c]);
    }
  }
}

// S1 to S3 of one warp's slots. The window's number is read where it is told of, which is rare:
// registers are short.
template <class B, class Slots>
__device__ __forceinline__ void pool_group(const StoreParams& p, Slots& slots, const Ape128<B>& ape,
                                           const int& number, uint32_t before,
                                           typename B::Shared& shared) {
  constexpr int kChannels = B::kLaneChannels, kSlots = B::kGroupSlots;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, buffer = before % 2;
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
  auto& maxima = shared.maxima[before % 4];
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    atomicMax(&maxima[c][lane], ordered(__float_as_int(m[c])));
  }
  const bool small = peak.value() < p.score_small;
  if (!small) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < kSlots; ++i) {
#pragma unroll
      for (int c = 0; c < kChannels; ++c) largest = larger_magnitude(largest, z[i][c]);
    }
    if (!(largest < kScoreLimit)) report(p, kFaultScore, number);
  }
  slots.read_next_score();
  meet<B>();
#pragma unroll
  for (int c = 0; c < kChannels; ++c) m[c] = __int_as_float(ordered(maxima[c][lane]));
  slots.await();
  bool near = small;  // below the clamp of S2 there is nothing then
#pragma unroll
  for (int c = 0; c < kChannels; ++c) near = near && m[c] < kSmallLogit;
  typename B::Lane sum = {}, weighted = {};
  if (__all_sync(0xffffffffu, near)) {
    add_slots<B>(slots, z, m, [](float t) { return t; }, sum, weighted);
  } else {
    add_slots<B>(slots, z, m, [](float t) { return clamped(t); }, sum, weighted);
  }
  slots.read_next_kv();
  shared.sums[buffer][warp][lane] = sum;
  shared.weighted[buffer][warp][lane] = weighted;
}

// S3's tree over the groups.
template <class B>
__device__ __forceinline__ void add_groups(const typename B::Lane (&groups)[B::kGroups][32],
                                           int lane, float (&sum)[B::kLaneChannels]) {
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

}  // namespace needlepoint
