// Scores on sm_90a through wgmma: keys are the rows of a product and head rows its columns, so that
// a thread has all heads of a key but those of three neighbours, and sums them where they are.
//
// One warpgroup brings keys into a ring of stages. Two multiply, 64 keys each, and keep the matrix
// unit busy while they sum over heads: each with the second half of its head rows while it sums the
// first, and both by taking turns. Weights stay in registers, for the matrix unit needs the
// bandwidth of shared memory. Blocks stay and take one piece of work after the other, and what a
// piece needs is there when it begins. As in mma.cuh the order of every sum is fixed by row and
// key alone.
#pragma once

#include <algorithm>
#include <type_traits>

#include "score/wgmma_loader.cuh"
#include "score/wgmma_multiply.cuh"

namespace needlepoint {

// Scores a block's pieces of work. `output` says where scores of a piece go; the loading warpgroup,
// which has time, lets it fill what is not scored.
template <class T, class Output>
__device__ __forceinline__ void wgmma_keys(const ScoreParams& p, const Work& work,
                                           const Output& output, uint8_t* shared) {
  const Ring<T> ring{shared_address(shared)};
  if (ring.shared % 1024 != 0) __trap();  // swizzled blocks would not be found
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  if (threadIdx.x < 128) {
    if constexpr (T::kRegisters > 0) fewer_registers<T::kLoadRegisters>();
    Loader<T> loader(p, ring);
    ScorePiece piece = piece_of_work(p, work.number(0));
#pragma unroll 1
    for (int round = 1; piece.count > 0; ++round) {
      ScorePiece next = {};
      const auto pause = [&] {
        output.fill(piece);
        const int number = work.number(round);
        if (round < work.rounds() && number < work.end) next = piece_of_work(p, number);
      };
      if (piece.begin < piece.stop) {
        loader.bring(piece, pause);
      } else {
        pause();
      }
      piece = next;
    }
    loader.finish();
  } else {
    if constexpr (T::kRegisters > 0) more_registers<T::kRegisters>();
    if (threadIdx.x / 128 == T::kConsumers) pass_turn<T>();
    uint32_t turn = 0;                               // stages before this piece
    uint32_t half = uniform(threadIdx.x / 128) - 1;  // of all stages, the next one to multiply
#pragma unroll 1
    for (uint32_t buffer = 0;; buffer = (buffer + 1) % T::kBuffers) {
      barrier_wait(ring.full(turn % T::kStages), turn / T::kStages % 2);
      ScorePiece piece = {};
      asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(piece.row), "=r"(piece.count), "=r"(piece.begin), "=r"(piece.stop)
                   : "r"(ring.piece(buffer)));
      if (uniform(piece.count) == 0) break;
      const auto sink = output.sink(piece.begin);
      WgmmaScores<T, std::decay_t<decltype(sink)>> scores(ring, buffer, piece, sink);
      const int first_key = piece.begin - T::kKeys * turn;
      turn += uniform((piece.stop - piece.begin + T::kKeys - 1) / T::kKeys);
#pragma unroll 1
      for (; half < 2 * turn; half += T::kConsumers) scores.half(half, first_key + 64 * half);
      if (threadIdx.x % 32 == 0) barrier_arrive(ring.free(buffer));
    }
  }
}

// Scores in memory; keys that no row of a piece sees are -inf.
struct ToRows {
  const ScoreParams& p;

  __device__ __forceinline__ ToGlobal sink(int) const { return ToGlobal{p}; }
  __device__ __forceinline__ void fill(const ScorePiece& piece) const {
    const int halves = (max(piece.stop - piece.begin, 0) + 63) / 64;
    const int scored = min(piece.begin + 64 * halves, piece.end);
    for (int row = 0; row < piece.count; ++row) {
      ToGlobal{p}.hide(piece.row, row, scored, piece.end, 128);
    }
  }
};

// Scores of one span in shared memory.
struct ToSpan {
  const ScoreParams& p;
  uint32_t rows;

  __device__ __forceinline__ ToShared sink(int begin) const { return ToShared{p, rows, begin}; }
  __device__ __forceinline__ void fill(const ScorePiece&) const {}
};

template <class T>
__global__ __launch_bounds__(T::kThreads, T::kResident) void wgmma_kernel(
    const __grid_constant__ ScoreParams p) {
  extern __shared__ __align__(1024) uint8_t swizzled_stages[];
  wait_for_predecessor();
  const int pieces = (p.columns + p.span - 1) / p.span * p.num_groups;
  wgmma_keys<T>(p, Work{static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x), pieces},
                ToRows{p}, swizzled_stages);
}

template <class T, class Arguments>
void run_wgmma(const char* name, const Arguments& a) {
  const ScoreParams p = score_params(a, a.out);
  if (p.num_groups == 0 || p.columns == 0) return;
  const Call call{name, a.queries.device(), a.overlap};
  const int64_t blocks =
      std::min<int64_t>(pieces_of(p), multiprocessors(call.device) * T::kResident);
  launch(call, wgmma_kernel<T>, p, dim3(static_cast<unsigned>(blocks)), T::kThreads,
         T::kSharedBytes);
}

// As score_topk_kernel; the warpgroup that loads also selects.
template <int kHeads_, Row kRow_>
struct WgmmaTopkTraits : WgmmaTraits<kHeads_, kRow_, 64, 1> {
  using Base = WgmmaTraits<kHeads_, kRow_, 64, 1>;
  static constexpr int kRegisters = 0;  // as at the start: the loading threads select afterwards
  static constexpr int kSpanOffset = Base::kSharedBytes;
  static constexpr int kSharedBytes = kSpanOffset + sizeof(SpanShared);
};

template <class T>
__global__ __launch_bounds__(T::kThreads, T::kResident) void wgmma_topk_kernel(
    const __grid_constant__ ScoreTopkParams p) {
  extern __shared__ __align__(1024) uint8_t swizzled_stages[];
  auto& own = *reinterpret_cast<SpanShared*>(swizzled_stages + T::kSpanOffset);
  wait_for_predecessor();
  const ScoreParams& s = p.scores;
  const int blocks = static_cast<int>(gridDim.x), number = static_cast<int>(blockIdx.x);
  const ScorePiece piece = piece_of_work(s, number);
  if (piece.begin >= piece.stop) return;
  if (threadIdx.x == 0) remember(piece.row, piece.count, piece.stop, own);
  wgmma_keys<T>(s, Work{number, blocks, blocks}, ToSpan{s, shared_address(own.scores)},
                swizzled_stages);
  __syncthreads();
  if (threadIdx.x < SpanShared::Select::kThreads) write_lists(p, own);
}

template <class T, class Arguments>
void run_wgmma_topk(const char* name, const Arguments& a) {
  const ScoreTopkParams p = score_topk_params(a);
  if (p.scores.num_groups == 0 || p.scores.columns == 0) return;
  launch(Call{name, a.queries.device(), a.overlap}, wgmma_topk_kernel<T>, p,
         dim3(static_cast<unsigned>(pieces_of(p.scores))), T::kThreads, T::kSharedBytes);
}

}  // namespace needlepoint
