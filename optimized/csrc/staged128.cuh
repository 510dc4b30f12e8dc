// How a window's slots come to a pooling warp at ratio 128: read at once, or copied a window ahead.
#pragma once

#include "block128.cuh"

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
// then kv of its next window take their place as soon as they have been used. A lane copies 16 bytes
// of a slot at a time.
template <class T, class B>
struct StagedSlots {
  using Raw = typename B::Source::Raw;
  static constexpr int kPiece = 16 / sizeof(typename T::Input);  // channels of a copy
  static constexpr int kPieces = B::kChannels / kPiece;          // of a slot
  static constexpr int kAtOnce = 32 / kPieces;                   // slots that a warp copies at once
  static constexpr int kCopies = B::kGroupSlots / kAtOnce;
  const StoreParams& p;
  typename B::WarpStage& stage;
  const Turn* turns;
  int first, column, lane;  // slot and column of the lane's copies
  const typename T::Input *kv_base, *score_base;  // of these, if the first token were token 0
  int next;                 // of the turns; negative: there is none

  __device__ __forceinline__ StagedSlots(
      const StoreParams& params, typename B::WarpStage& own, const Turn* listed, int group,
      int slice)
      : p(params),
        stage(own),
        turns(listed),
        first(group + threadIdx.x % 32 / kPieces),
        column(slice * B::kChannels + threadIdx.x % kPieces * kPiece),
        lane(threadIdx.x % 32),
        kv_base(static_cast<const typename T::Input*>(p.kv) + first * p.kv_stride + column),
        score_base(static_cast<const typename T::Input*>(p.score) + first * p.score_stride + column),
        next(-1) {}

  template <int kPart>
  __device__ __forceinline__ void read_next() const {
    if (next >= 0) {
      const Turn& turn = turns[next];
      if (T::kMode == Mode::prefill && turn.window.from_state == 0) {
        const auto* source = kPart == 0 ? kv_base + turn.kv : score_base + turn.score;
        const uint64_t step = kAtOnce * (kPart == 0 ? p.kv_stride : p.score_stride);
        copy<kPart, kCopies>([&](int i) { return source + i * step; });
      } else {  // in prefill the few windows that begin in the state: registers come first
        const FromState<T, kPiece, false> source(p, turn.window, first, column);
        copy<kPart, T::kMode == Mode::prefill ? 1 : kCopies>([&](int i) {
          return kPart == 0 ? source.kv_place(i * kAtOnce) : source.score_place(i * kAtOnce);
        });
      }
    }
    commit_copies();
  }
  template <int kPart, int kUnroll, class Place>
  __device__ __forceinline__ void copy(const Place& place) const {
    auto* target = reinterpret_cast<uint4*>(stage[kPart]) + lane;
#pragma unroll kUnroll
    for (int i = 0; i < kCopies; ++i) copy_async<16>(target + 32 * i, place(i));
  }
  __device__ __forceinline__ Raw score(int i) const { return stage[1][i][lane]; }
  __device__ __forceinline__ Raw kv(int i) const { return stage[0][i][lane]; }
  // Scores and kv follow each other: all but the youngest copies are there, of all lanes.
  __device__ __forceinline__ void await() const {
    wait_copies_but<1>();
    __syncwarp();
  }
  __device__ __forceinline__ void read_next_score() const {
    __syncwarp();  // all lanes have used what is overwritten
    read_next<1>();
  }
  __device__ __forceinline__ void read_next_kv() const {
    __syncwarp();
    read_next<0>();
  }
};

}  // namespace needlepoint
