// The warpgroup of a wgmma score kernel that brings keys into stages and queries into buffers.
#pragma once

#include "score/wgmma_ring.cuh"

namespace needlepoint {

template <class T>
class Loader {
 public:
  __device__ __forceinline__ Loader(const ScoreParams& p, const Ring<T>& ring)
      : p_(p), ring_(ring) {}

  // Brings a piece of work that has keys. What else is to be done is done behind its first stage:
  // between two pieces stages would run out.
  template <class Else>
  __device__ __forceinline__ void bring(const ScorePiece& piece, const Else& other) {
    open_buffer(piece);
    bring_queries(piece);
    KeyLoader<T> keys(p_, piece.request, piece.begin, piece.stop, ring_.shared);
    const int tiles = (piece.stop - piece.begin + T::kKeys - 1) / T::kKeys;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      open_stage();
      keys.fill(opened_ % T::kStages, tile);
      close_stage();
      if (tile == 0) other();
    }
  }

  // Says that there are no more, by a piece without rows.
  __device__ __forceinline__ void finish() {
    open_buffer(ScorePiece{});
    open_stage();
    close_stage();
    hand_over_all();
  }

 private:
  // A fresh barrier counts as free. The pieces before cannot end while stages of theirs are held
  // back, as those of short pieces may be.
  __device__ __forceinline__ void open_buffer(const ScorePiece& piece) {
    buffer_ = pieces_ % T::kBuffers;
    const uint32_t free = ring_.free(buffer_), parity = pieces_ / T::kBuffers % 2 ^ 1;
    if (!__all_sync(0xffffffffu, barrier_done(free, parity))) {
      hand_over_all();
      barrier_wait(free, parity);
    }
    ++pieces_;
    if (threadIdx.x > 0) return;
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(ring_.piece(buffer_)),
                 "r"(piece.row), "r"(piece.count), "r"(piece.begin), "r"(piece.stop)
                 : "memory");
  }

  __device__ __forceinline__ void open_stage() const {
    barrier_wait(ring_.empty(opened_ % T::kStages), opened_ / T::kStages % 2 ^ 1);
  }

  // Ends what was copied to a stage. The stage kLag before it has arrived by then.
  __device__ __forceinline__ void close_stage() {
    commit_copies();
    if (++opened_ - handed_over_ <= T::kLag) return;
    wait_copies_but<T::kLag>();
    fence_for_matrix_unit();
    hand_over();
  }

  __device__ __forceinline__ void hand_over_all() {
    wait_copies_but<0>();
    fence_for_matrix_unit();
#pragma unroll 1
    while (handed_over_ < opened_) hand_over();
  }

  __device__ __forceinline__ void hand_over() {
    barrier_arrive(ring_.full(handed_over_ % T::kStages));
    ++handed_over_;
  }

  // Query rows, weights and context lengths; padding heads are zero, padding rows repeat.
  __device__ __forceinline__ void bring_queries(const ScorePiece& piece) const {
    constexpr int kPieces = T::kRowBytes / 16, kStep = 128 / kPieces;  // columns copied at once
    static_assert(kStep % 8 == 0, "whole swizzled blocks");
    const int thread = threadIdx.x, part = thread % kPieces;
    const uint32_t queries = ring_.queries(buffer_), weights = ring_.weights(buffer_);
    const uint32_t place = queries + T::query_place(thread / kPieces, part);
    if (p_.heads == T::kHeads && piece.count * T::kHeads == T::kColumns) {
      const int64_t column = static_cast<int64_t>(piece.row) * T::kHeads + thread / kPieces;
      const uint8_t* source = p_.queries + column * T::kRowBytes + part * 16;
#pragma unroll 4
      for (int i = 0; i < T::kColumns; i += kStep) {
        copy_async<16>(place + i * 128, source + i * T::kRowBytes);
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < T::kColumns; i += kStep) {
        const int column = thread / kPieces + i, head = column % T::kHeads;
        const int64_t row = piece.row + min(column / T::kHeads, piece.count - 1);
        if (head < p_.heads) {
          copy_async<16>(place + i * 128,
                         p_.queries + (row * p_.heads + head) * T::kRowBytes + part * 16);
        } else {
          asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(place + i * 128), "r"(0)
                       : "memory");
        }
      }
    }
#pragma unroll 1
    for (int column = thread; column < T::kColumns; column += 128) {
      const int head = column % T::kHeads;
      const int64_t row = piece.row + min(column / T::kHeads, piece.count - 1);
      if (head < p_.heads) {
        copy_async<4>(weights + 4 * column,
                      reinterpret_cast<const uint8_t*>(p_.weights + row * p_.heads + head));
      } else {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(weights + 4 * column), "r"(0) : "memory");
      }
    }
    if (thread < piece.count) {
      copy_async<4>(ring_.context_lens(buffer_) + 4 * thread,
                    reinterpret_cast<const uint8_t*>(p_.context_lens + piece.row + thread));
    }
  }

  const ScoreParams& p_;
  const Ring<T> ring_;
  uint32_t opened_ = 0, handed_over_ = 0;  // stages
  uint32_t pieces_ = 0;
  uint32_t buffer_ = 0;  // of the last piece
};

}  // namespace needlepoint
