// S9: scores sum_h w_h relu(q_h . k) * key_scale, with no per-head number in memory.
//
// A warp keeps 64 head rows of queries in registers as A; keys stream through shared memory as B in
// chunks of 16. While one chunk is multiplied the chunk before it goes through ReLU, weight and
// head sum, four accumulators at a time, so that the tensor cores never wait for the epilogue. The
// order of every sum is fixed by the row and key alone: no split of a batch changes a bit.
#pragma once

#include <utility>

#include "score/mma_stage.cuh"

namespace needlepoint {

// The 64 head rows of a warp.
template <class T>
struct WarpQueries {
  static constexpr Unit kUnit = Operand<T::kRow>::kUnit;
  uint32_t a[4][kSteps<kUnit>][4];  // by tile of 16 head rows
  float weight[4][2];               // head rows g and g + 8

  // Head rows beyond `heads` are zero with weight zero; query rows beyond the last repeat it.
  __device__ __forceinline__ void load(const ScoreParams& p, int first, int last) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int m = 0; m < 4; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int place = m * 16 + half * 8 + g;
        const int64_t row = min(first + place / T::kHeads, last);
        const int head = place % T::kHeads;
        const bool real = head < p.heads;
        const int64_t index = row * p.heads + (real ? head : 0);
        uint32_t scale = 0;
        if constexpr (T::kRow == Row::fp4) scale = ue8m0_bf16x2(p.query_scales[index * 4 + t]);
        weight[m][half] = real ? p.weights[index] : 0.0f;
        const uint4* source =
            reinterpret_cast<const uint4*>(p.queries + index * T::kRowBytes) + t * kPieces;
#pragma unroll
        for (int j = 0; j < kPieces; ++j) {
          Piece<T::kRow> piece{real ? __ldg(source + j) : make_uint4(0, 0, 0, 0)};
          spread(piece, m, half, j, scale, std::make_integer_sequence<int, kEach>());
        }
      }
    }
  }

 private:
  static constexpr int kPieces = Piece<T::kRow>::kPieces;
  static constexpr int kEach = Piece<T::kRow>::kStepsEach;

  template <int... s>
  __device__ __forceinline__ void spread(const Piece<T::kRow>& piece, int m, int half, int j,
                                         uint32_t scale, std::integer_sequence<int, s...>) {
    ((a[m][j * kEach + s][half] = piece.template word<s, 0>(scale),
      a[m][j * kEach + s][2 + half] = piece.template word<s, 1>(scale)),
     ...);
  }
};

// Accumulators of a chunk: 4 tiles of head rows, 2 tiles of 8 keys.
struct Chunk {
  float c[4][2][4];
};

// Head sums of a chunk in the making: by query row of the warp, tile of keys, and key 2t or 2t + 1.
template <class T>
struct HeadSums {
  float v[T::kQueries][2][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int q = 0; q < T::kQueries; ++q) v[q][0][0] = v[q][0][1] = v[q][1][0] = v[q][1][1] = 0.0f;
  }

  // Adds one tile: head rows g then g + 8, tiles in ascending order.
  template <int m, int n>
  __device__ __forceinline__ void add(const Chunk& chunk, const float (&weight)[4][2]) {
    float (&sum)[2] = v[m * 16 / T::kHeads][n];
    const float (&c)[4] = chunk.c[m][n];
    sum[0] = __fmaf_rn(weight[m][0], relu(c[0]), sum[0]);
    sum[1] = __fmaf_rn(weight[m][0], relu(c[1]), sum[1]);
    sum[0] = __fmaf_rn(weight[m][1], relu(c[2]), sum[0]);
    sum[1] = __fmaf_rn(weight[m][1], relu(c[3]), sum[1]);
  }

  // Sums over g, first g ^ 4, then g ^ 2. What remains is the sum with g ^ 1, one number a query
  // row: key 8 * (lane / 16) + 2t + (lane / 8) % 2 of the chunk.
  __device__ __forceinline__ float partial(int q) const {
    const int lane = threadIdx.x % 32;
    const bool upper = lane & 16, odd = lane & 8;
    float x[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float kept = upper ? v[q][1][c] : v[q][0][c], sent = upper ? v[q][0][c] : v[q][1][c];
      x[c] = __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, sent, 16));
    }
    const float kept = odd ? x[1] : x[0], sent = odd ? x[0] : x[1];
    return __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, sent, 8));
  }
};

// The last step over g: lanes with bit 2 clear finish `low`, the others `high`.
__device__ __forceinline__ float finish_pair(float low, float high) {
  const bool second = threadIdx.x & 4;
  const float kept = second ? high : low, sent = second ? low : high;
  return __fadd_rn(kept, __shfl_xor_sync(0xffffffffu, sent, 4));
}

// Where finished scores go: rows of the output. Its place and stride are read where they are used,
// from constant memory, since registers are scarce.
struct ToGlobal {
  const ScoreParams& p;

  // `row` of the group that begins at row `first`. Spans are whole stages, so that only the last
  // one can reach past its columns.
  __device__ __forceinline__ void put(int first, int row, int column, float score) const {
    if (column < p.columns) p.out[(first + row) * p.out_stride + column] = score;
  }

  // Columns [begin, end) of a row that does not see them, by `threads` threads; begin is a multiple
  // of 4.
  __device__ __forceinline__ void hide(int first, int row, int begin, int end, int threads) const {
    float* out = p.out + (first + row) * p.out_stride;
    int column = begin + threadIdx.x;
    if (reinterpret_cast<uint64_t>(out) % 16 == 0) {
      const float4 hidden = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
      for (int i = begin + 4 * threadIdx.x; i + 4 <= end; i += 4 * threads) {
        *reinterpret_cast<float4*>(out + i) = hidden;
      }
      column = max(begin, end / 4 * 4) + threadIdx.x;
    }
    for (; column < end; column += threads) out[column] = -INFINITY;
  }
};

// The keys of a block against the query rows of a warp.
template <class T, class Sink>
class WarpScores {
  static constexpr Row kRow = T::kRow;
  static constexpr Unit kUnit = Operand<kRow>::kUnit;
  using P = Piece<kRow>;

 public:
  __device__ __forceinline__ WarpScores(const ScoreParams& p, const ScoreGroup& group, int slot,
                                        const Sink& sink)
      : sink_(sink), first_(group.row), row_(slot * T::kQueries), count_(group.count) {
    queries_.load(p, group.row + row_, group.row + group.count - 1);
    const int lane = threadIdx.x % 32;
    column_ = (lane & 16) / 2 + 2 * (lane % 4) + (lane & 8) / 8;
    if constexpr (T::kQueries == 1) {
      column_ += 4 * (lane & 4);  // the pair's second chunk
    } else {
      row_ += (lane & 4) / 4;
    }
    context_len_ = row_ < count_ ? p.context_lens[group.row + row_] : 0;
    for (int j = 0; j < P::kPieces; ++j) {
      place_[j] = T::place(lane / 4, lane % 4 * P::kPieces + j);
    }
    for (int m = 0; m < 4; ++m) {
      for (int n = 0; n < 2; ++n) {
        for (float& x : second_.c[m][n]) x = 0.0f;
      }
    }
  }

  // Two chunks, keys [32 * pair, 32 * pair + 32) of a stage; `key` is the first one's number. The
  // second chunk of the pair before is finished meanwhile.
  __device__ __forceinline__ void pair(uint32_t stage, int pair, int key) {
    const uint32_t scales = stage + T::kKeys * T::kRowBytes + pair * 32 * T::kScaleBytes;
    stage += pair * 32 * T::kRowBytes;
    Chunk first;
    HeadSums<T> sums;
    sums.clear();
    Pieces pieces = read(stage, 0, 0);
    multiply_chunk(stage, scales, 0, pieces, 16, first, second_, sums);
    write_second(sums);
    sums.clear();
    multiply_chunk(stage, scales, 16, pieces, -1, second_, first, sums);
    if constexpr (kRow == Row::fp8) {
      scale_[0] = read_scale(scales + 4 * column_);
      if constexpr (T::kQueries == 2) scale_[1] = read_scale(scales + 4 * column_ + 64);
    }
    key_ = key;
    write_first(sums);
  }

  // Finishes the last chunk.
  __device__ __forceinline__ void finish() {
    HeadSums<T> sums;
    sums.clear();
    add_all(sums, second_, std::make_integer_sequence<int, 8>());
    write_second(sums);
  }

 private:
  template <int... i>
  __device__ __forceinline__ void add_all(HeadSums<T>& sums, const Chunk& chunk,
                                          std::integer_sequence<int, i...>) {
    (sums.template add<i / 2, i % 2>(chunk, queries_.weight), ...);
  }

  // Pieces of the two keys that a lane has of a chunk.
  struct Pieces {
    P low, high;
  };

  // Multiplies 16 keys into `now` while `before` is summed over heads. `pieces` are the first ones;
  // the next are read while these are multiplied, and at last those of the chunk at `following`.
  __device__ __forceinline__ void multiply_chunk(uint32_t stage, uint32_t scales, int base,
                                                 Pieces& pieces, int following, Chunk& now,
                                                 const Chunk& before, HeadSums<T>& sums) {
    uint32_t scale[2] = {0, 0};
    if constexpr (kRow == Row::fp4) {  // a byte for each key and quarter, as lanes are numbered
      scale[0] = ue8m0_bf16x2(read_byte(scales + base * 4 + threadIdx.x % 32));
      scale[1] = ue8m0_bf16x2(read_byte(scales + base * 4 + 32 + threadIdx.x % 32));
    }
    all_pieces(stage, base, pieces, following, scale, now, before, sums,
               std::make_integer_sequence<int, P::kPieces>());
  }

  // A piece of the two keys of this lane. Chunks begin at even keys: pieces lie alike in all.
  __device__ __forceinline__ Pieces read(uint32_t stage, int base, int piece) const {
    const uint32_t source = stage + base * T::kRowBytes + place_[piece];
    return Pieces{read16(source), read16(source + 8 * T::kRowBytes)};
  }

  // Volatile, so that it stays ahead of the products that follow it.
  __device__ static __forceinline__ P read16(uint32_t source) {
    P out;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out.raw.x), "=r"(out.raw.y), "=r"(out.raw.z), "=r"(out.raw.w)
                 : "r"(source));
    return out;
  }

  __device__ static __forceinline__ float read_scale(uint32_t source) {
    float out;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(out) : "r"(source));
    return out;
  }

  __device__ static __forceinline__ uint32_t read_byte(uint32_t source) {
    uint32_t out;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(out) : "r"(source));
    return out;
  }

  template <int... j>
  __device__ __forceinline__ void all_pieces(uint32_t stage, int base, Pieces& pieces,
                                             int following, const uint32_t (&scale)[2], Chunk& now,
                                             const Chunk& before, HeadSums<T>& sums,
                                             std::integer_sequence<int, j...>) {
    (one_piece<j>(stage, base, pieces, following, scale, now, before, sums), ...);
  }

  template <int j>
  __device__ __forceinline__ void one_piece(uint32_t stage, int base, Pieces& pieces, int following,
                                            const uint32_t (&scale)[2], Chunk& now,
                                            const Chunk& before, HeadSums<T>& sums) {
    Pieces next = pieces;
    if constexpr (j + 1 < P::kPieces) {
      next = read(stage, base, j + 1);
    } else {
      if (following >= 0) next = read(stage, following, 0);
    }
    all_steps<j>(pieces, scale, now, before, sums,
                 std::make_integer_sequence<int, P::kStepsEach>());
    pieces = next;
  }

  template <int j, int... s>
  __device__ __forceinline__ void all_steps(const Pieces& pieces, const uint32_t (&scale)[2],
                                            Chunk& now, const Chunk& before, HeadSums<T>& sums,
                                            std::integer_sequence<int, s...>) {
    (step<j * P::kStepsEach + s>(pieces.low.template word<s, 0>(scale[0]),
                                 pieces.low.template word<s, 1>(scale[0]),
                                 pieces.high.template word<s, 0>(scale[1]),
                                 pieces.high.template word<s, 1>(scale[1]), now, before, sums),
     ...);
  }

  template <int s>
  __device__ __forceinline__ void step(uint32_t low0, uint32_t low1, uint32_t high0, uint32_t high1,
                                       Chunk& now, const Chunk& before, HeadSums<T>& sums) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      if constexpr (s == 0) {
        multiply_first<kUnit>(now.c[m][0], queries_.a[m][s], low0, low1);
        multiply_first<kUnit>(now.c[m][1], queries_.a[m][s], high0, high1);
      } else {
        multiply<kUnit>(now.c[m][0], queries_.a[m][s], low0, low1);
        multiply<kUnit>(now.c[m][1], queries_.a[m][s], high0, high1);
      }
    }
    constexpr int kEach = 8 / kSteps<kUnit>;  // tiles of the chunk before that go with a step
    constexpr int i = s * kEach;
    sums.template add<i / 2, i % 2>(before, queries_.weight);
    if constexpr (kEach == 2) sums.template add<(i + 1) / 2, (i + 1) % 2>(before, queries_.weight);
  }

  __device__ __forceinline__ void write_first(const HeadSums<T>& sums) {
    if constexpr (T::kQueries == 1) {
      first_partial_ = sums.partial(0);
    } else {
      put(column_, 0, finish_pair(sums.partial(0), sums.partial(1)));
    }
  }

  __device__ __forceinline__ void write_second(const HeadSums<T>& sums) {
    if constexpr (T::kQueries == 1) {
      put(column_, 0, finish_pair(first_partial_, sums.partial(0)));
    } else {
      put(column_ + 16, 1, finish_pair(sums.partial(0), sums.partial(1)));
    }
  }

  __device__ __forceinline__ void put(int column, int chunk, float sum) const {
    if (key_ < 0 || row_ >= count_) return;
    const float score = kRow == Row::fp8 ? __fmul_rn(sum, scale_[chunk]) : sum;
    sink_.put(first_, row_, key_ + column, key_ + column < context_len_ ? score : -INFINITY);
  }

  WarpQueries<T> queries_;
  Chunk second_;  // of the pair before
  Sink sink_;
  float first_partial_ = 0.0f;
  float scale_[T::kQueries] = {};
  int first_, row_, count_, context_len_ = 0;
  int column_;                  // of the pair
  uint32_t place_[P::kPieces];  // of the pieces of this lane's key in a chunk
  int key_ = -1;                // first key of the pair before
};

// Warps that share a row divide the keys.
template <class T>
__device__ __forceinline__ int warps_with_rows(int count) {
  const int needed = (count + T::kQueries - 1) / T::kQueries;
  return needed <= 1 ? 1 : needed <= 2 ? 2 : needed <= 4 ? 4 : T::kWarps;
}

// The largest context of a group, which has at most 32 rows; the whole warp asks.
__device__ __forceinline__ int group_context_len(const ScoreParams& p, const ScoreGroup& group) {
  const int lane = threadIdx.x % 32;
  const int own = lane < group.count ? p.context_lens[group.row + lane] : 0;
  return __reduce_max_sync(0xffffffffu, own);
}

// Scores of keys [begin, begin + tiles * kKeys) in the stages of a block's shared memory.
template <class T, class Sink>
__device__ __forceinline__ void score_keys(const ScoreParams& p, const ScoreGroup& group, int begin,
                                           int stop, const Sink& sink, uint8_t* shared) {
  const int warp = threadIdx.x / 32, tiles = (stop - begin + T::kKeys - 1) / T::kKeys;
  const int row_warps = warps_with_rows<T>(group.count), key_warps = T::kWarps / row_warps;
  const uint32_t stages = shared_address(shared);
  KeyLoader<T> loader(p, group.request, begin, stop, stages);
#pragma unroll 1
  for (int s = 0; s < T::kStages - 1; ++s) {
    if (s < tiles) loader.fill(s, s);
    commit_copies();
  }
  WarpScores<T, Sink> scores(p, group, warp % row_warps, sink);
  int stage = 0, refill = T::kStages - 1;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    wait_copies_but<T::kStages - 2>();
    __syncthreads();
    if (tile + T::kStages - 1 < tiles) loader.fill(refill, tile + T::kStages - 1);
    commit_copies();
    const int pairs = min(T::kKeys / 32, (stop - begin - tile * T::kKeys + 31) / 32);
#pragma unroll 1
    for (int pair = warp / row_warps; pair < pairs; pair += key_warps) {
      scores.pair(stages + stage * T::kStageBytes, pair, begin + tile * T::kKeys + pair * 32);
    }
    stage = stage + 1 == T::kStages ? 0 : stage + 1;
    refill = refill + 1 == T::kStages ? 0 : refill + 1;
  }
  scores.finish();
}

template <class T>
__global__ __launch_bounds__(T::kWarps * 32, T::kResident) void score_kernel(
    const __grid_constant__ ScoreParams p) {
  extern __shared__ __align__(128) uint8_t shared[];
  wait_for_predecessor();
  // Later groups see more keys under a causal mask: they go first, so that the tail is short.
  const ScoreGroup group = p.groups[p.num_groups - 1 - blockIdx.x % p.num_groups];
  const int begin = blockIdx.x / p.num_groups * p.span;
  const int end = min(begin + p.span, p.columns);
  const int stop = min(end, group_context_len(p, group));
  const ToGlobal sink{p};
  if (begin < stop) score_keys<T>(p, group, begin, stop, sink, shared);
  const int scored = begin < stop ? min(begin + (stop - begin + 31) / 32 * 32, end) : begin;
  for (int row = 0; row < group.count; ++row) {
    sink.hide(group.row, row, scored, end, T::kWarps * 32);
  }
}

template <class T, class Arguments>
void run_scores(const char* name, const Arguments& a) {
  const ScoreParams p = score_params(a, a.out);
  if (p.num_groups == 0 || p.columns == 0) return;
  launch(Call{name, a.queries.device(), a.overlap}, score_kernel<T>, p,
         dim3(static_cast<unsigned>(pieces_of(p))), T::kWarps * 32, T::kSharedBytes);
}

}  // namespace needlepoint
