// Keys on their way to shared memory: a ring of stages, filled by 16-byte asynchronous copies.
#pragma once

#include "score/fragments.cuh"
#include "score/params.h"

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
  static constexpr int kKeys = 128;                              // of a stage
  static constexpr int kResident = kTile == Tile::wide ? 1 : 2;  // blocks a multiprocessor
  static constexpr int kRowBytes = Operand<kRow>::kBytes;
  static constexpr int kScaleBytes = Operand<kRow>::kScaleBytes;
  static constexpr int kStageBytes = kKeys * (kRowBytes + kScaleBytes);
  static constexpr int kStages = kRow == Row::bf16 ? 3 : 4;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static constexpr int kQueries = 64 / kHeads;  // query rows of a warp
  static constexpr int kBlockBytes = 8 * kRowBytes;

  // Byte of a block of eight keys at which a 16-byte piece of one lies.
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

// One warp's part of filling stages: up to 32 consecutive keys in blocks of eight, each within one
// page. Lane l looks up the page of key l.
template <class T>
class KeyLoader {
  static constexpr int kOwn = T::kKeys / T::kWarps;
  static constexpr int kPieces = T::kRowBytes / 16;  // of a row
  static constexpr int kRowsEach = 32 / kPieces;     // rows that a warp copies at once
  static_assert(kOwn % 8 == 0 && kOwn <= 32, "a lane has at most one key");

 public:
  __device__ __forceinline__ KeyLoader(const ScoreParams& p, int request, int first, int stop,
                                       uint32_t shared)
      : p_(p), keys_(p.keys), scales_(p.key_scales), last_(stop - 1) {
    const int lane = threadIdx.x % 32, own = threadIdx.x / 32 * kOwn;
    first_ = first + own;
    values_ = shared + own / 8 * T::kBlockBytes;
    own_scale_ = shared + T::kKeys * T::kRowBytes + 4 * (own + lane);
    if (p.table == nullptr) {  // one page, in which all keys of the request lie
      keys_ += p.starts[request] * T::kRowBytes;
      scales_ += p.starts[request] * T::kScaleBytes;
    } else {
      table_ = p.table + request * p.table_stride;
      mask_ = (1 << p.page_shift) - 1;
    }
    keys_ += lane * 16;
    look_up(0);
  }

  // Copies keys [first + tile * kKeys, ..) to a stage and looks up the pages of the tile after it.
  __device__ __forceinline__ void fill(int stage, int tile) {
    const int key = first_ + tile * T::kKeys;
    const bool missing = table_ != nullptr && static_cast<uint32_t>(page_) >= p_.pages;
    if (__any_sync(0xffffffffu, missing || key + kOwn - 1 > last_)) {
      copy<true>(stage * T::kStageBytes, key, missing ? -1 : page_);
    } else {
      copy<false>(stage * T::kStageBytes, key, page_);
    }
    look_up(tile + 1);
  }

 private:
  // Keys behind the last one are copies of it: what lies behind a row's context may be unwritten. A
  // key whose page does not exist, -1, becomes NaN, by its scale or, without one, by its values.
  // kOdd: there may be such keys.
  template <bool kOdd>
  __device__ __forceinline__ void copy(int stage, int key, int page) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int b = 0; b < kOwn / 8; ++b) {
      copy_block<kOdd>(stage + b * T::kBlockBytes, key + 8 * b,
                       __shfl_sync(0xffffffffu, page, 8 * b));
    }
    if constexpr (T::kScaleBytes > 0) {
      if (lane >= kOwn) return;
      const int own = kOdd ? min(key + lane, last_) : key + lane;
      if (kOdd && page < 0) {
        store_nan<4>(own_scale_ + stage);
      } else {
        copy_async<4>(own_scale_ + stage, scales_ + page * p_.scale_stride +
                                              static_cast<int64_t>(own & mask_) * T::kScaleBytes);
      }
    }
  }

  template <bool kOdd>
  __device__ __forceinline__ void copy_block(int block, int key, int page) const {
    const int lane = threadIdx.x % 32, row = lane / kPieces;
    const int first = kOdd ? min(key, last_) : key;
    const uint8_t* source = keys_ + (kOdd ? max(page, 0) : page) * p_.page_stride +
                            static_cast<int64_t>(first & mask_) * T::kRowBytes;
#pragma unroll
    for (int i = 0; i < 8; i += kRowsEach) {
      const uint32_t target = values_ + block + T::place(row + i, lane % kPieces);
      if (kOdd && T::kScaleBytes == 0 && page < 0) {
        store_nan<16>(target);
      } else {
        const int further = kOdd ? min(row + i, last_ - first) - row : i;
        copy_async<16>(target, source + further * T::kRowBytes);
      }
    }
  }

  // Bytes 0xFF are NaN in all formats of values and scales.
  template <int kBytes>
  __device__ static __forceinline__ void store_nan(uint32_t target) {
#pragma unroll
    for (int i = 0; i < kBytes; i += 4) {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(target + i), "r"(~0u) : "memory");
    }
  }

  __device__ __forceinline__ void look_up(int tile) {
    if (table_ == nullptr) return;
    const int key = first_ + tile * T::kKeys + threadIdx.x % 32 % kOwn;
    page_ = __ldg(table_ + (min(key, last_) >> p_.page_shift));
  }

  const ScoreParams& p_;
  const uint8_t *keys_, *scales_;  // the former of this lane
  const int32_t* table_ = nullptr;
  uint32_t values_, own_scale_;
  int first_, last_;
  int mask_ = -1;  // of a key's place in its page
  int page_ = 0;
};

}  // namespace needlepoint
