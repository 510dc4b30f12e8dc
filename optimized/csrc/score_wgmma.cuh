// Scores on sm_90a through wgmma: keys are the rows of a product and head rows its columns, so that a
// thread has all heads of a key but those of three neighbours, and sums them where they are.
//
// One warpgroup brings keys into a ring of stages, two multiply, 64 keys each, and take turns at the
// matrix unit: while one sums over heads the other keeps it busy. Blocks stay and take one piece of work after the other,
// so that keys of the next are on their way while a piece ends. As in score.cuh the order of every
// sum is fixed by row and key alone.
#pragma once

#include <algorithm>
#include <type_traits>

#include "score_topk.cuh"
#include "wgmma.cuh"

namespace needlepoint {

// kColumns: head rows of a block, 64, 128 or 256. kSpared: stages left out, for other shared memory.
template <int kHeads_, Row kRow_, int kColumns_, int kSpared = 0>
struct WgmmaTraits {
  static constexpr int kHeads = kHeads_;
  static constexpr Row kRow = kRow_;
  static constexpr int kColumns = kColumns_;
  static constexpr bool kWide = kColumns > 64;
  static constexpr int kQueries = kColumns / kHeads;  // query rows of a block
  static constexpr int kWarps = 4;                    // that load
  static constexpr int kConsumers = 2;                // warpgroups that multiply
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kResident = kWide ? 1 : 2;
  static constexpr int kRegisters = kWide ? 232 : 96;  // of a multiplying thread
  static constexpr int kKeys = 64 * kConsumers;
  static constexpr int kRowBytes = Operand<kRow>::kBytes;
  static constexpr int kScaleBytes = Operand<kRow>::kScaleBytes;
  static constexpr int kBlockBytes = 8 * 128;  // swizzled rows have 128 bytes
  static constexpr int kStageBytes = kKeys * kRowBytes + (kScaleBytes > 0 ? 1024 : 0);
  static constexpr int kStages =
      (kWide ? (kRow == Row::bf16 ? 4 : 8) : (kRow == Row::bf16 ? 2 : 6)) - kSpared;
  static constexpr int kLag = kWide ? kStages / 2 : kStages > 2 ? kStages - 2 : 1;  // stages in flight when a stage is handed over
  static constexpr int kQueryBytes = kColumns * kRowBytes;
  static constexpr int kQueryOffset = kStages * kStageBytes;
  static constexpr int kBarrierOffset = kQueryOffset + kQueryBytes;
  static constexpr int kWeightOffset = kBarrierOffset + 16 * kStages;
  static constexpr int kUsedBytes = kWeightOffset + 4 * kColumns;
  static constexpr int kSharedBytes = kUsedBytes + 1008;  // of alignment

  static_assert(kRow == Row::bf16 || kRow == Row::fp8, "wgmma has no operand of fp4 on sm_90a");

  __device__ static __forceinline__ int place(int key, int piece) {
    return piece / 8 * (kKeys * 128) + key * 128 + ((piece % 8) ^ (key & 7)) * 16;
  }
  __device__ static __forceinline__ int query_place(int column, int piece) {
    return piece / 8 * (kColumns * 128) + column * 128 + ((piece % 8) ^ (column & 7)) * 16;
  }
};

template <class T>
struct Ring {
  uint32_t shared;

  __device__ __forceinline__ uint32_t full(int stage) const {
    return shared + T::kBarrierOffset + 8 * stage;
  }
  __device__ __forceinline__ uint32_t empty(int stage) const {
    return shared + T::kBarrierOffset + 8 * (T::kStages + stage);
  }
  __device__ __forceinline__ void init() const {
    for (int s = 0; s < T::kStages; ++s) {
      barrier_init(full(s), 128);
      barrier_init(empty(s), 4 * T::kConsumers);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
};

// One piece of work: a group of query rows and a span of keys.
struct ScorePiece {
  ScoreGroup group;
  int begin, stop, end;  // keys to score, and where the span ends
};

// Later groups see more keys under a causal limit: they go first, so that the tail is short.
__device__ __forceinline__ ScorePiece piece_of_work(const ScoreParams& p, int number) {
  ScorePiece out;
  out.group = p.groups[p.num_groups - 1 - number % p.num_groups];
  out.begin = number / p.num_groups * p.span;
  out.end = min(out.begin + p.span, p.columns);
  out.stop = min(out.end, group_limit(p, out.group));
  return out;
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

// The loading warpgroup: stage after stage, each handed over kLag stages later.
template <class T>
__device__ __forceinline__ void bring_keys(
    const ScoreParams& p, const Work& work, const Ring<T>& ring) {
  int turn = 0, done = 0;
#pragma unroll 1
  for (int round = 0; round < work.rounds(); ++round) {
    const int number = work.number(round);
    if (number >= work.end) continue;
    const ScorePiece piece = piece_of_work(p, number);
    if (piece.begin >= piece.stop) continue;
    const int tiles = (piece.stop - piece.begin + T::kKeys - 1) / T::kKeys;
    KeyLoader<T> loader(p, piece.group.request, piece.begin, piece.stop, ring.shared);
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = turn % T::kStages;
      barrier_wait(ring.empty(stage), turn / T::kStages % 2 ^ 1);  // a fresh barrier counts as free
      loader.fill(stage, tile);
      commit_copies();
      if (++turn > T::kLag) {
        wait_for_copies<T::kLag>();
        fence_for_matrix_unit();
        barrier_arrive(ring.full(done++ % T::kStages));
      }
    }
  }
  wait_for_copies<0>();
  fence_for_matrix_unit();
#pragma unroll 1
  for (; done < turn; ++done) barrier_arrive(ring.full(done % T::kStages));
}

// The multiplying warpgroups wait for each other.
template <class T>
__device__ __forceinline__ void sync_consumers() {
  asm volatile("bar.sync 2, %0;" ::"n"(128 * T::kConsumers) : "memory");
}

// The multiplying warpgroups issue their products in turn: left alone they would run in step, and
// the matrix unit would wait while both sum. The first turn is given by the second warpgroup.
template <class T>
__device__ __forceinline__ void take_turn() {
  if constexpr (T::kWide) {
    asm volatile("bar.sync %0, 256;" ::"r"(2 + static_cast<int>(threadIdx.x) / 128) : "memory");
  }
}
template <class T>
__device__ __forceinline__ void pass_turn() {
  if constexpr (T::kWide) {
    asm volatile("bar.arrive %0, 256;" ::"r"(5 - static_cast<int>(threadIdx.x) / 128) : "memory");
  }
}

// Copies the block's query rows and weights to shared memory; padding heads are zero, padding rows
// repeat.
template <class T>
__device__ __forceinline__ void bring_queries(
    const ScoreParams& p, const ScoreGroup& group, uint8_t* shared) {
  constexpr int kPieces = T::kRowBytes / 16, kThreads = 128 * T::kConsumers;
#pragma unroll 8
  for (int i = threadIdx.x - 128; i < T::kColumns * kPieces; i += kThreads) {
    const int column = i / kPieces, piece = i % kPieces;
    const int64_t row = group.row + min(column / T::kHeads, group.count - 1);
    const int head = column % T::kHeads;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (head < p.heads) {
      const uint8_t* source = p.queries + (row * p.heads + head) * T::kRowBytes + piece * 16;
      value = __ldg(reinterpret_cast<const uint4*>(source));
    }
    *reinterpret_cast<uint4*>(shared + T::kQueryOffset + T::query_place(column, piece)) = value;
  }
  const int column = threadIdx.x - 128, head = column % T::kHeads;
  if (column < T::kColumns) {
    const int64_t row = group.row + min(column / T::kHeads, group.count - 1);
    reinterpret_cast<float*>(shared + T::kWeightOffset)[column] =
        head < p.heads ? __ldg(p.weights + row * p.heads + head) : 0.0f;
  }
  fence_for_matrix_unit();
  sync_consumers<T>();
}

// Asks for the query rows of a later piece, which come from memory, to be in L2 by then.
template <class T>
__device__ __forceinline__ void expect_queries(const ScoreParams& p, int number) {
  const ScoreGroup group = p.groups[p.num_groups - 1 - number % p.num_groups];
  const int64_t bytes = static_cast<int64_t>(p.heads) * T::kRowBytes;
  const uint8_t* first = p.queries + group.row * bytes;
  for (int64_t i = (threadIdx.x - 128) * 128; i < group.count * bytes; i += 256 * 128) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(first + i));
  }
}

// A multiplying thread: keys g and g + 8 of its warp's 16, head rows 2t and 2t + 1 of every eight.
template <class T, class Sink>
class WgmmaScores {
  static constexpr int kPairs = T::kQueries > 1 ? T::kQueries / 2 : 1;  // of query rows
  static constexpr int kSteps = T::kRowBytes / 32;

 public:
  __device__ __forceinline__ WgmmaScores(
      const ScoreParams& p, const ScoreGroup& group, const Sink& sink)
      : p_(p), sink_(sink), first_(group.row), count_(group.count) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    key_ = threadIdx.x / 128 * 64 - 64 + threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * (t & 1);
  }

  // The keys of a stage, of which `key` is the first.
  __device__ __forceinline__ void tile(
      const Ring<T>& ring, int stage, int phase, int key) {
    barrier_wait(ring.full(stage), phase);
    const uint32_t keys = ring.shared + stage * T::kStageBytes + (threadIdx.x / 128 - 1) * 64 * 128;
    const uint32_t columns = ring.shared + T::kQueryOffset;
    float c[T::kColumns / 2];
    take_turn<T>();
    wgmma_fence();
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int half = s / 4, step = s % 4 * 32;
      wgmma<T::kRow>(c, row_descriptor(keys + half * T::kKeys * 128 + step),
                     row_descriptor(columns + half * T::kColumns * 128 + step), s > 0);
    }
    wgmma_commit();
    pass_turn<T>();
    float scale = 1.0f;
    if constexpr (T::kRow == Row::fp8) {
      asm volatile("ld.shared.f32 %0, [%1];"
                   : "=f"(scale)
                   : "r"(ring.shared + stage * T::kStageBytes + T::kKeys * T::kRowBytes + 4 * key_));
    }
    wgmma_wait<0>();
    if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty(stage));
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) finish(ring, c, pair, key, scale);
  }

 private:
  // The query row of a pair that this thread finishes: lanes with bit 1 the second; even and odd
  // lanes finish other keys.
  __device__ static __forceinline__ int row_of(int pair) {
    return 2 * pair + (T::kQueries > 1 ? threadIdx.x % 4 / 2 : 0);
  }

  __device__ __forceinline__ void finish(
      const Ring<T>& ring, const float (&c)[T::kColumns / 2], int pair, int key,
      float scale) const {
    constexpr int kOfRow = T::kHeads / 8;  // tiles of a query row
    constexpr int kRows = T::kQueries > 1 ? 2 : 1;
    float sum[2][2] = {};  // by query row of the pair and key
#pragma unroll
    for (int i = 0; i < kRows * kOfRow; ++i) {
      const int j = pair * kRows * kOfRow + i;
      float(&own)[2] = sum[i / kOfRow];
      float2 weight;  // not kept: all of them would take 64 registers
      asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                   : "=f"(weight.x), "=f"(weight.y)
                   : "r"(ring.shared + T::kWeightOffset + threadIdx.x % 4 * 8 + 32 * j));
      own[0] = __fmaf_rn(weight.x, relu(c[4 * j]), own[0]);
      own[1] = __fmaf_rn(weight.x, relu(c[4 * j + 2]), own[1]);
      own[0] = __fmaf_rn(weight.y, relu(c[4 * j + 1]), own[0]);
      own[1] = __fmaf_rn(weight.y, relu(c[4 * j + 3]), own[1]);
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
    const int row = row_of(pair), column = key + key_;
    if (row < count_ && (T::kQueries > 1 || !second)) {
      const int limit = __ldg(p_.limits + first_ + row);
      sink_.put(first_, row, column, column < limit ? score : -INFINITY);
    }
  }

  const ScoreParams& p_;
  Sink sink_;
  int first_, count_;
  int key_;  // of a stage
};

// Scores a block's pieces of work; `sink_of` says where those of a piece go.
template <class T, class SinkOf>
__device__ __forceinline__ void wgmma_keys(
    const ScoreParams& p, const Work& work, const SinkOf& sink_of, uint8_t* shared) {
  const Ring<T> ring{shared_address(shared)};
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  if (threadIdx.x < 128) {
    if constexpr (T::kRegisters > 0) fewer_registers<40>();
    bring_keys<T>(p, work, ring);
  } else {
    if constexpr (T::kRegisters > 0) more_registers<T::kRegisters>();
    if (threadIdx.x >= 256) pass_turn<T>();
    int turn = 0;
#pragma unroll 1
    for (int round = 0; round < work.rounds(); ++round) {
      const int number = work.number(round);
      if (number >= work.end) continue;
      const ScorePiece piece = piece_of_work(p, number);
      const auto sink = sink_of(piece);
      if (piece.begin >= piece.stop) continue;
      WgmmaScores<T, std::decay_t<decltype(sink)>> scores(p, piece.group, sink);
      sync_consumers<T>();  // the queries of the piece before are no longer read
      bring_queries<T>(p, piece.group, shared);
      if (work.number(round + 1) < work.end) expect_queries<T>(p, work.number(round + 1));
#pragma unroll 1
      for (int key = piece.begin; key < piece.stop; key += T::kKeys) {
        scores.tile(ring, turn % T::kStages, turn / T::kStages % 2, key);
        ++turn;
      }
    }
  }
}

// Swizzled blocks start at multiples of 1,024 bytes.
__device__ __forceinline__ uint8_t* aligned_1024(uint8_t* shared) {
  return shared + (1024 - (shared_address(shared) & 1023)) % 1024;
}

template <class T>
__global__ __launch_bounds__(T::kThreads, T::kResident) void wgmma_kernel(
    const __grid_constant__ ScoreParams p) {
  extern __shared__ __align__(128) uint8_t raw[];
  wait_for_predecessor();
  const auto sink_of = [&p](const ScorePiece& piece) {
    const ToGlobal sink{p};
    const int tiles = (max(piece.stop - piece.begin, 0) + T::kKeys - 1) / T::kKeys;
    const int scored = min(piece.begin + tiles * T::kKeys, piece.end);
    for (int row = 0; row < piece.group.count; ++row) {
      for (int column = scored + threadIdx.x - 128; column < piece.end; column += 256) {
        sink.put(piece.group.row, row, column, -INFINITY);
      }
    }
    return sink;
  };
  const int pieces = (p.columns + p.span - 1) / p.span * p.num_groups;
  wgmma_keys<T>(p, Work{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), pieces}, sink_of,
                aligned_1024(raw));
}

template <class T>
void run_wgmma(const char* name, const ScoreParams& p, DLDevice device, bool overlap) {
  if (p.num_groups == 0 || p.columns == 0) return;
  int processors = 0;
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device.device_id),
             name);
  const int64_t pieces = (static_cast<int64_t>(p.columns) + p.span - 1) / p.span * p.num_groups;
  const int64_t blocks = std::min<int64_t>(pieces, processors * T::kResident);
  launch_shared(name, wgmma_kernel<T>, p, dim3(static_cast<unsigned>(blocks)), T::kThreads,
                T::kSharedBytes, device, overlap);
}

// As score_topk_kernel; the warpgroup that loads also selects.
template <int kHeads_, Row kRow_>
struct WgmmaTopkTraits : WgmmaTraits<kHeads_, kRow_, 64, kRow_ == Row::fp8 ? 2 : 0> {
  using Base = WgmmaTraits<kHeads_, kRow_, 64, kRow_ == Row::fp8 ? 2 : 0>;
  static constexpr int kRegisters = 0;  // as at the start: the loading threads select afterwards
  static constexpr int kSpanOffset = Base::kUsedBytes;
  static constexpr int kSharedBytes = kSpanOffset + sizeof(SpanShared) + 1008;
};

template <class T>
__global__ __launch_bounds__(T::kThreads, T::kResident) void wgmma_topk_kernel(
    const __grid_constant__ ScoreTopkParams p) {
  extern __shared__ __align__(128) uint8_t raw[];
  uint8_t* shared = aligned_1024(raw);
  auto& own = *reinterpret_cast<SpanShared*>(shared + T::kSpanOffset);
  wait_for_predecessor();
  const ScoreParams& s = p.scores;
  const int blocks = static_cast<int>(gridDim.x), number = static_cast<int>(blockIdx.x);
  const ScorePiece piece = piece_of_work(s, number);
  if (piece.begin >= piece.stop) return;
  if (threadIdx.x == 0) remember(piece.group, piece.stop, own);
  const auto sink_of = [&](const ScorePiece& part) {
    return ToShared{s, shared_address(own.scores), part.begin};
  };
  wgmma_keys<T>(s, Work{number, blocks, blocks}, sink_of, shared);
  __syncthreads();
  if (threadIdx.x < SpanShared::Select::kThreads) write_lists(p, own);
}

template <class T>
void run_wgmma_topk(const char* name, const ScoreTopkParams& p, DLDevice device, bool overlap) {
  const ScoreParams& s = p.scores;
  if (s.num_groups == 0 || s.columns == 0) return;
  const int64_t blocks = (static_cast<int64_t>(s.columns) + s.span - 1) / s.span * s.num_groups;
  launch_shared(name, wgmma_topk_kernel<T>, p, dim3(static_cast<unsigned>(blocks)), T::kThreads,
                T::kSharedBytes, device, overlap);
}

}  // namespace needlepoint
