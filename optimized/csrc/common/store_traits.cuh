// One struct carries a variant of the store.
#pragma once

#include <type_traits>

#include "common/row_formats.cuh"

namespace needlepoint {

// In decode every segment has at most one window, which is found without a search, and nearly all
// slots come from the state, so they are read at once where prefill spares registers for its common
// case.
enum class Mode { prefill, decode };

template <int kRatio_, int kDim_, class Input_, Row kRow_, Mode kMode_>
struct StoreTraits {
  using Input = Input_;
  static constexpr int kRatio = kRatio_;
  static constexpr int kDim = kDim_;
  static constexpr Row kRow = kRow_;
  static constexpr Mode kMode = kMode_;
  static constexpr int kHalves = kRatio == 4 ? 2 : 1;  // c: overlap and fresh columns
  static constexpr int kSlots = kHalves * kRatio;
  static constexpr int kWidth = kHalves * kDim;  // columns of kv, score and ape
  static constexpr bool kHadamard = kDim == 128;
  // Asked for by a launch at ratio 128: kv and score of a block's slice of a window.
  static constexpr int kSharedBytes = kRatio == 128 ? 16384 * sizeof(Input) : 0;

  static_assert(std::is_same_v<Input, float> || std::is_same_v<Input, bf16>,
                "supported inputs: fp32 and bf16");
  static_assert((kRatio == 4 && (kDim == 128 || kDim == 512)) || (kRatio == 128 && kDim == 512),
                "supported: ratio 4 with head_dim 128 or 512, ratio 128 with head_dim 512");
  static_assert(kRowSupported<kRow, kDim>,
                "supported rows: bf16, fp8 and fp4 at head_dim 128; bf16 and 584-byte rows at 512");
};

}  // namespace needlepoint
