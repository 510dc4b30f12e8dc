// The warpgroups of a wgmma score kernel that multiply and sum over heads.
#pragma once

#include "score/wgmma_ring.cuh"

namespace needlepoint {

// A value that is the same in all lanes, which the compiler is to know: descriptors are made in
// uniform registers.
__device__ __forceinline__ uint32_t uniform(uint32_t value) {
  return __reduce_or_sync(0xffffffffu, value);
}

// The multiplying warpgroups issue their products in turn: left alone they would run in step, and
// the matrix unit would wait while all sum. The first turn is given by the last warpgroup.
template <class T>
__device__ __forceinline__ void take_turn() {
  if constexpr (T::kWide) {
    asm volatile("bar.sync %0, 256;" ::"r"(threadIdx.x / 128) : "memory");
  }
}
template <class T>
__device__ __forceinline__ void pass_turn() {
  if constexpr (T::kWide) {
    const uint32_t own = threadIdx.x / 128;
    asm volatile("bar.arrive %0, 256;" ::"r"(own == T::kConsumers ? 1 : own + 1) : "memory");
  }
}

// A multiplying thread: keys g and g + 8 of its warp's 16, head rows 2t and 2t + 1 of every eight.
template <class T, class Sink>
class WgmmaScores {
  static constexpr int kPairs = T::kQueries > 1 ? T::kQueries / 2 : 1;  // of query rows of a slice
  static constexpr int kRows = T::kQueries > 1 ? 2 : 1;                 // of a pair
  static constexpr int kOfRow = T::kHeads / 8;                          // tiles of a query row
  static constexpr int kSteps = T::kRowBytes / 32;

 public:
  __device__ __forceinline__ WgmmaScores(const Ring<T>& ring, int buffer, const ScorePiece& piece,
                                         const Sink& sink)
      : ring_(ring),
        sink_(sink),
        first_(piece.row),
        stop_(piece.stop),
        columns_(row_descriptor(uniform(ring.queries(buffer)))) {
    const uint32_t weights = ring.weights(buffer) + threadIdx.x % 4 * 8;
#pragma unroll
    for (int j = 0; j < T::kColumns / 8; ++j) {
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(weight_[j][0]), "=f"(weight_[j][1])
                   : "r"(weights + 32 * j));
    }
#pragma unroll
    for (int pair = 0; pair < T::kSlices * kPairs; ++pair) {
      const int row = row_of(pair);
      asm volatile("ld.shared.s32 %0, [%1];"
                   : "=r"(context_len_[pair])
                   : "r"(ring.context_lens(buffer) + 4 * row));
      const bool own = row < piece.count && (T::kQueries > 1 || threadIdx.x % 4 < 2);
      context_len_[pair] = own ? max(context_len_[pair], 0) : -1;
    }
  }

  // Half a stage: 64 keys, of which `key` is the first. Halves that nobody sees are passed over.
  __device__ __forceinline__ void half(uint32_t number, int key) {
    const uint32_t turn = number / 2, half = number % 2, stage = turn % T::kStages;
    const uint32_t keys = ring_.keys(stage) + half * 64 * 128;
    const uint32_t thread = threadIdx.x % 128;
    const uint32_t own = thread / 32 * 16 + thread % 32 / 4 + 8 * (thread & 1);
    barrier_wait(ring_.full(stage), turn / T::kStages % 2);
    take_turn<T>();
    if (key >= stop_) {
      pass_turn<T>();
      return release(stage);
    }
    Sums sums[T::kSlices];
#pragma unroll
    for (int i = 0; i < T::kSlices; ++i) multiply(keys, i, sums[i]);
    pass_turn<T>();
    float scale = 1.0f;
    if constexpr (T::kRow == Row::fp8) {
      asm volatile("ld.shared.f32 %0, [%1];"
                   : "=f"(scale)
                   : "r"(ring_.keys(stage) + T::kKeys * T::kRowBytes + 4 * (half * 64 + own)));
    }
    if constexpr (T::kSlices == 2) {
      wgmma_wait<1>();
      sums[0].arrived();
      finish(sums[0], 0, key + own, scale);
    }
    wgmma_wait<0>();
    release(stage);
    sums[T::kSlices - 1].arrived();
    finish(sums[T::kSlices - 1], T::kSlices - 1, key + own, scale);
  }

 private:
  struct Sums {
    float c[T::kSlice / 2];

    // Nothing reads them before this.
    __device__ __forceinline__ void arrived() {
#pragma unroll
      for (float& x : c) asm volatile("" : "+f"(x)::"memory");
    }
  };

  __device__ __forceinline__ void release(uint32_t stage) const {
    if (threadIdx.x % 32 == 0) barrier_arrive(ring_.empty(stage));
  }

  // Products of 64 keys and the head rows of a slice. Descriptors count units of 16 bytes.
  __device__ __forceinline__ void multiply(uint32_t keys, int slice, Sums& sums) const {
    const uint32_t rows = row_descriptor(keys), columns = columns_ + slice * T::kSlice * 8;
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int half = s / 4 * 8, step = s % 4 * 2;
      wgmma<T::kRow>(sums.c, rows + half * T::kKeys + step, columns + half * T::kColumns + step,
                     s > 0);
    }
    wgmma_commit();
  }

  // The query row of a pair that this thread finishes: lanes with bit 1 the second; even and odd
  // lanes finish other keys.
  __device__ static __forceinline__ int row_of(int pair) {
    return kRows * pair + (T::kQueries > 1 ? threadIdx.x % 4 / 2 : 0);
  }

  __device__ __forceinline__ void finish(const Sums& sums, int slice, int column,
                                         float scale) const {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      finish_pair(sums.c + pair * kRows * kOfRow * 4, slice * kPairs + pair, column, scale);
    }
  }

  // Sums over the heads of a pair of query rows.
  __device__ __forceinline__ void finish_pair(const float* c, int pair, int column,
                                              float scale) const {
    float sum[2][2] = {};  // by query row of the pair and key
#pragma unroll
    for (int i = 0; i < kOfRow; ++i) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float* own = c + (r * kOfRow + i) * 4;
        const float (&weight)[2] = weight_[(pair * kRows + r) * kOfRow + i];
        sum[r][0] = __fmaf_rn(weight[0], relu(own[0]), sum[r][0]);
        sum[r][1] = __fmaf_rn(weight[0], relu(own[2]), sum[r][1]);
        sum[r][0] = __fmaf_rn(weight[1], relu(own[1]), sum[r][0]);
        sum[r][1] = __fmaf_rn(weight[1], relu(own[3]), sum[r][1]);
      }
    }
    // Over t: first t ^ 2, then t ^ 1, however many rows there are.
    const bool second = threadIdx.x & 2, odd = threadIdx.x & 1;
    float x[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float kept = T::kQueries > 1 && second ? sum[1][k] : sum[0][k];
      const float sent = T::kQueries > 1 && !second ? sum[1][k] : sum[0][k];
      x[k] = __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, sent, 2));
    }
    const float kept = odd ? x[1] : x[0], sent = odd ? x[0] : x[1];
    float score = __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, sent, 1));
    if constexpr (T::kRow == Row::fp8) score = __fmul_rn(score, scale);
    if (context_len_[pair] >= 0) {
      sink_.put(first_, row_of(pair), column, column < context_len_[pair] ? score : -INFINITY);
    }
  }

  const Ring<T> ring_;
  Sink sink_;
  float weight_[T::kColumns / 8][2];
  int context_len_[T::kSlices * kPairs];  // -1 for a row that this thread does not finish
  int first_, stop_;
  uint32_t columns_;  // descriptor of the head rows
};

}  // namespace needlepoint
