// What a block of the wgmma score kernels holds and does: stages of keys, buffers of queries, and
// the pieces of work that it takes.
#pragma once

#include "score/mma_topk.cuh"
#include "score/wgmma_instructions.cuh"

namespace needlepoint {

// kColumns: head rows of a block, 64, 128 or 256. kBuffers: pieces of work that are held at once.
template <int kHeads_, Row kRow_, int kColumns_, int kBuffers_ = 2>
struct WgmmaTraits {
  static constexpr int kHeads = kHeads_;
  static constexpr Row kRow = kRow_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kBuffers = kBuffers_;
  static constexpr bool kWide = kColumns > 64;
  static constexpr int kSlices = kColumns > 128 ? 2 : 1;  // of the columns: what is summed at once
  static constexpr int kSlice = kColumns / kSlices;
  static constexpr int kQueries = kSlice / kHeads;  // query rows of a slice
  static constexpr int kWarps = 4;                  // that load
  static constexpr int kConsumers = 2;              // warpgroups that multiply
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kResident = kWide ? 1 : 2;
  static constexpr int kRegisters = kWide ? 216 : 96;     // of a multiplying thread
  static constexpr int kLoadRegisters = kWide ? 72 : 40;  // of a loading one
  static constexpr int kKeys = 128;
  static constexpr int kRowBytes = Operand<kRow>::kBytes;
  static constexpr int kScaleBytes = Operand<kRow>::kScaleBytes;
  static constexpr int kBlockBytes = 8 * 128;  // swizzled rows have 128 bytes
  static constexpr int kStageBytes = kKeys * kRowBytes + (kScaleBytes > 0 ? 1024 : 0);
  static constexpr int kWideStages = kRow == Row::fp8 ? 8 : kSlices == 2 ? 3 : 4;
  static constexpr int kStages = kWide ? kWideStages : kRow == Row::fp8 ? 3 + kBuffers : 2;
  // Stages in flight when a stage is handed over.
  static constexpr int kLag = kWide ? kStages / 2 : kStages > 2 ? kStages - 2 : 1;
  static constexpr int kQueryBytes = kColumns * kRowBytes;
  static constexpr int kPieceBytes = 16 + 4 * kColumns + 16 * ((kColumns / 32 + 3) / 4);
  static constexpr int kQueryOffset = kStages * kStageBytes;
  static constexpr int kPieceOffset = kQueryOffset + kBuffers * kQueryBytes;
  static constexpr int kBarrierOffset = kPieceOffset + kBuffers * kPieceBytes;
  static constexpr int kSharedBytes = kBarrierOffset + 16 * ((2 * kStages + kBuffers + 1) / 2);

  static_assert(kRow == Row::bf16 || kRow == Row::fp8, "wgmma has no operand of fp4 on sm_90a");

  // Bytes at which a 16-byte piece of a row lies, of a block of eight keys and of the queries.
  __device__ static __forceinline__ int place(int key, int piece) {
    return piece / 8 * (kKeys * 128) + key * 128 + ((piece % 8) ^ key) * 16;
  }
  __device__ static __forceinline__ int query_place(int column, int piece) {
    return piece / 8 * (kColumns * 128) + column * 128 + ((piece % 8) ^ (column & 7)) * 16;
  }
};

// Shared memory of a block. A stage has keys, and barriers that say that it is full and empty. A
// buffer has what belongs to a piece of work, which is there when the piece's first stage is full,
// and a barrier that says that it is free.
template <class T>
struct Ring {
  uint32_t shared;

  __device__ __forceinline__ uint32_t full(int stage) const {
    return shared + T::kBarrierOffset + 8 * stage;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const { return full(T::kStages + stage); }
  __device__ __forceinline__ uint32_t free(int buffer) const {
    return full(2 * T::kStages + buffer);
  }
  __device__ __forceinline__ uint32_t keys(int stage) const {
    return shared + stage * T::kStageBytes;
  }
  __device__ __forceinline__ uint32_t queries(int buffer) const {
    return shared + T::kQueryOffset + buffer * T::kQueryBytes;
  }
  // First row, rows, first key and last key + 1 of a piece; weights; context_lens.
  __device__ __forceinline__ uint32_t piece(int buffer) const {
    return shared + T::kPieceOffset + buffer * T::kPieceBytes;
  }
  __device__ __forceinline__ uint32_t weights(int buffer) const { return piece(buffer) + 16; }
  __device__ __forceinline__ uint32_t context_lens(int buffer) const {
    return weights(buffer) + 4 * T::kColumns;
  }
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < T::kStages; ++s) {
      barrier_init(full(s), 32 * T::kWarps);
      barrier_init(empty(s), 4 * T::kConsumers);
    }
    for (int b = 0; b < T::kBuffers; ++b) barrier_init(free(b), 4 * T::kConsumers);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// One piece of work: a group of query rows and a span of keys.
struct ScorePiece {
  int row, count;
  int begin, stop, end;  // keys to score, and where the span ends
  int request;
};

// Later groups see more keys under a causal mask: they go first, so that the tail is short.
__device__ __forceinline__ ScorePiece piece_of_work(const ScoreParams& p, int number) {
  const ScoreGroup group = p.groups[p.num_groups - 1 - number % p.num_groups];
  const int begin = number / p.num_groups * p.span, end = min(begin + p.span, p.columns);
  return {group.row, group.count, begin, min(end, group_context_len(p, group)), end, group.request};
}

// The pieces that a block takes: one of every `step`, in turn from the front and from the back, so
// that no block always has the heavier one.
struct Work {
  int place, step, end;

  __device__ __forceinline__ int number(int round) const {
    return round * step + (round % 2 == 0 ? place : step - 1 - place);
  }
  __device__ __forceinline__ int rounds() const { return (end + step - 1) / step; }
};

}  // namespace needlepoint
