// How a window's slots come to a pooling warp at ratio 128: read at once, or copied a window ahead.
#pragma once

#include "store128/block.cuh"

namespace needlepoint {

// A thread's slots of a window, all read at once.
template <class Source>
struct DirectSlots {
  typename Source::Raw kept_score[8], kept_kv[8];

  __device__ __forceinline__ explicit DirectSlots(const Source& source) {
#pragma unroll
    for (int i = 0; i < 8; ++i) kept_score[i] = source.read_score(i);
#pragma unroll
    for (int i = 0; i < 8; ++i) kept_kv[i] = source.read_kv(i);
    after_loads();
  }
  __device__ __forceinline__ typename Source::Raw score(int i) const { return kept_score[i]; }
  __device__ __forceinline__ typename Source::Raw kv(int i) const { return kept_kv[i]; }
  __device__ __forceinline__ void await() const {}
  __device__ __forceinline__ void read_next_score() const {}
  __device__ __forceinline__ void read_next_kv() const {}
};

// A warp's slots of a window out of shared memory, where no other warp touches them; the scores and
// then kv of its next window take their place as soon as they have been used. A thread copies 16
// bytes of a slot at a time.
template <class T, class B>
struct StagedSlots {
  using Input = typename T::Input;
  using Raw = typename B::Source::Raw;
  const StoreParams& p;
  typename B::Stage& stage;
  const typename B::Offsets& offsets;
  int slice;
  int left;          // turns whose slots have not been copied
  const Turn* next;  // the first of them

  // Slot and column of a thread's first copy.
  static __device__ __forceinline__ int first() {
    return threadIdx.x / 32 * B::kGroupSlots + threadIdx.x % 32 / B::kPieces;
  }
  static __device__ __forceinline__ int column(int slice) {
    return slice * B::kChannels + threadIdx.x % B::kPieces * B::kPiece;
  }
  // Elements from a window's first token to a thread's first copy: a read takes less than their
  // arithmetic, and registers are short.
  static __device__ __forceinline__ void note(const StoreParams& p, int slice,
                                              typename B::Offsets& offsets) {
    offsets[0][threadIdx.x] = first() * p.kv_stride + column(slice);
    offsets[1][threadIdx.x] = first() * p.score_stride + column(slice);
  }

  template <int kPart>
  __device__ __forceinline__ void read_next() const {
    if (left > 0) {
      const Turn& turn = *next;
      if (T::kMode == Mode::prefill && turn.window.from_state == 0) {
        const auto* rows = static_cast<const Input*>(kPart == 0 ? p.kv : p.score);
        const auto* source =
            rows + ((kPart == 0 ? turn.kv : turn.score) + offsets[kPart][threadIdx.x]);
        const uint64_t step = B::kAtOnce * (kPart == 0 ? p.kv_stride : p.score_stride);
        copy<kPart, B::kCopies>([&](int i) { return source + i * step; });
      } else {  // one after another: a decode step waits for memory, and registers are short
        const FromState<T, B::kPiece, false> source(p, turn.window, first(), column(slice));
        copy<kPart, 1>([&](int i) {
          return kPart == 0 ? source.kv_place(i * B::kAtOnce) : source.score_place(i * B::kAtOnce);
        });
      }
    }
    commit_copies();
  }
  template <int kPart, int kUnroll, class Place>
  __device__ __forceinline__ void copy(const Place& place) const {
#pragma unroll kUnroll
    for (int i = 0; i < B::kCopies; ++i) {
      copy_async<16>(&stage[kPart][i][threadIdx.x], place(i));
    }
  }
  template <int kPart>
  __device__ __forceinline__ Raw slot(int i) const {
    const auto* own =
        reinterpret_cast<const Raw*>(&stage[kPart][i / B::kAtOnce][threadIdx.x & ~31]);
    return own[i % B::kAtOnce * 32 + threadIdx.x % 32];
  }
  __device__ __forceinline__ Raw score(int i) const { return slot<1>(i); }
  __device__ __forceinline__ Raw kv(int i) const { return slot<0>(i); }
  // Scores and kv follow each other: all but the youngest copies are there, of all lanes.
  __device__ __forceinline__ void await() const {
    wait_copies_but<1>();
    __syncwarp();
  }
  __device__ __forceinline__ void read_next_score() const {
    __syncwarp();  // all lanes have used what is overwritten
    read_next<1>();
  }
  __device__ __forceinline__ void read_next_kv() {
    __syncwarp();
    read_next<0>();
    if (left > 0) --left, ++next;
  }
};

}  // namespace needlepoint
