// Keys on their way to shared memory: a ring of stages, filled by 16-byte asynchronous copies.
#pragma once

#include "score_fragments.cuh"
#include "score_params.h"

namespace needlepoint {

// Which 16-byte piece of a row holds a piece in shared memory. The eight lanes of a read (two rows,
// four lanes each) hit all banks once.
template <Row kRow>
__device__ __forceinline__ int swizzled(int row, int piece) {
  if constexpr (kRow == Row::bf16) return piece ^ (piece >> 3) ^ ((row & 1) << 1);
  if constexpr (kRow == Row::fp8) return piece ^ (row & 1);
  return piece;
}

// wide: many query rows a request; every warp keeps other rows and reads all keys.
// narrow: few rows, as in decode; warps share the rows and divide the keys.
enum class Tile { wide, narrow };

template <int kHeads_, Row kRow_, Tile kTile_>
struct ScoreTraits {
  static constexpr int kHeads = kHeads_;
  static constexpr Row kRow = kRow_;
  static constexpr Tile kTile = kTile_;
  static constexpr int kWarps = kTile == Tile::wide ? 8 : 4;
  static constexpr int kKeys = kTile == Tile::wide ? 64 : 128;  // of a stage
  static constexpr int kResident = kTile == Tile::wide ? 1 : 2;  // blocks a multiprocessor
  static constexpr int kRowBytes = Operand<kRow>::kBytes;
  static constexpr int kScaleBytes = Operand<kRow>::kScaleBytes;
  static constexpr int kStageBytes = kKeys * (kRowBytes + kScaleBytes);
  static constexpr int kStages =
      kTile == Tile::wide ? (kRow == Row::bf16 ? 6 : 8) : (kRow == Row::bf16 ? 3 : 4);
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kQueries = 64 / kHeads;  // query rows of a warp

  // Byte of a stage at which a 16-byte piece of a key lies.
  __device__ static __forceinline__ int place(int key, int piece) {
    return key * kRowBytes + swizzled<kRow>(key, piece) * 16;
  }

  static_assert(kHeads == 32 || kHeads == 64, "a query row is held as 32 or 64 heads");
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t target, const uint8_t* source) {
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target), "l"(source), "n"(kBytes)
                 : "memory");
  }
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// One warp's part of filling stages: blocks of eight consecutive keys, each within one page.
template <class T>
class KeyLoader {
  static constexpr int kBlocks = T::kKeys / T::kWarps / 8;
  static constexpr int kPieces = T::kRowBytes / 16;  // of a row
  static constexpr int kRowsEach = 32 / kPieces;     // rows that a warp copies at once

 public:
  __device__ __forceinline__ KeyLoader(
      const ScoreParams& p, int request, int first, int stop, uint32_t shared)
      : p_(p), shared_(shared), first_(first), last_(stop - 1) {
    if (p.table == nullptr) {
      start_ = p.starts[request];
    } else {
      table_ = p.table + request * p.table_stride;
    }
    look_up(0);
  }

  // Copies keys [first + tile * kKeys, ..) to a stage and looks up the pages of the tile after it.
  // Keys behind the last one are copies of it: what lies behind a row's limit may be unwritten. A
  // key whose page does not exist becomes NaN, by its scale or, without one, by its values.
  __device__ __forceinline__ void fill(int stage, int tile) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t values = shared_ + stage * T::kStageBytes;
    const uint32_t scales = values + T::kKeys * T::kRowBytes;
    const int64_t mask = (int64_t{1} << p_.page_shift) - 1;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int base = (warp * kBlocks + b) * 8;  // in the tile
      const int key = first_ + tile * T::kKeys + base;
      const bool paged = table_ != nullptr;
      const bool missing = paged && (pages_[b] < 0 || pages_[b] >= p_.pages);
      const int64_t page = missing || !paged ? 0 : pages_[b];
      const uint8_t* page_values = p_.keys + page * p_.page_stride;
#pragma unroll
      for (int i = 0; i < 8 / kRowsEach; ++i) {
        const int row = i * kRowsEach + lane / kPieces, piece = lane % kPieces;
        const int64_t place = paged ? min(key + row, last_) & mask : start_ + min(key + row, last_);
        const uint32_t target = values + T::place(base + row, piece);
        if (T::kScaleBytes == 0 && missing) {
          asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(target), "r"(~0u) : "memory");
        } else {
          copy_async<16>(target, page_values + place * T::kRowBytes + piece * 16);
        }
      }
      if constexpr (T::kScaleBytes > 0) {
        if (lane < 8) {
          const int64_t place =
              paged ? min(key + lane, last_) & mask : start_ + min(key + lane, last_);
          const uint32_t target = scales + (base + lane) * 4;
          if (missing) {
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(target), "r"(~0u) : "memory");
          } else {
            copy_async<4>(target, p_.key_scales + page * p_.scale_stride + place * 4);
          }
        }
      }
    }
    look_up(tile + 1);
  }

 private:
  __device__ __forceinline__ void look_up(int tile) {
    if (table_ == nullptr) return;
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int key = first_ + tile * T::kKeys + (warp * kBlocks + b) * 8;
      pages_[b] = __ldg(table_ + (min(key, last_) >> p_.page_shift));
    }
  }

  const ScoreParams& p_;
  const int32_t* table_ = nullptr;
  int64_t start_ = 0;
  uint32_t shared_;
  int first_, last_;
  int32_t pages_[kBlocks] = {};
};

}  // namespace needlepoint
