// S1 to S3 at ratio 4: eight slots, four channels a thread.
#pragma once

#include "common/windows.cuh"

namespace needlepoint {

// Blocks an SM for bf16 input: the most without spills. Main rows of a prefill keep nothing but
// their slots in registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kResidentBf16 = 5, kResidentMain = 5;
#else
constexpr int kResidentBf16 = 6, kResidentMain = 8;
#endif

template <class T>
struct Store4 {
  static constexpr int kThreads = RowThreads<T::kDim>::kThreads;  // of one window
  static constexpr int kBlock = 128;
  static constexpr int kUnits = kBlock / kThreads;  // windows a block
  // Whether one warp finishes the row (store4/prefill_main.cuh).
  static constexpr bool kOneFinishes =
      T::kMode == Mode::prefill && T::kDim == 512 && T::kRow != Row::fp32;
  // Blocks an SM that the registers must allow, which fixes how many registers a thread may have.
  static constexpr int kResident =
      T::kMode == Mode::decode || std::is_same_v<typename T::Input, float> ? 4
      : kOneFinishes                                                       ? kResidentMain
                                                                           : kResidentBf16;
};

// The window, or further on the token to keep, of this thread's warp or block.
template <class T>
__device__ __forceinline__ int own_unit() {
  return blockIdx.x * Store4<T>::kUnits + threadIdx.x / Store4<T>::kThreads;
}

template <class T>
struct Window4 {
  using Input = typename T::Input;
  const StoreParams& p;
  const Window& window;
  int column;  // first of this thread's four channels
  int unit;    // number of the window in the launch

  // Offset of slot i's columns inside a token row: overlap columns, then fresh ones.
  __device__ __forceinline__ int slot_column(int i) const {
    return i < 4 ? column : T::kDim + column;
  }

  __device__ __forceinline__ const float4* prescaled_ape(int i) const {
    return reinterpret_cast<const float4*>(p.ape + (i % 4) * T::kWidth + slot_column(i));
  }

  __device__ __forceinline__ uint32_t stride(int part) const {
    return part == 0 ? p.kv_stride : p.score_stride;
  }

  // Slot i of kv (part 0) or score (part 1), if it is a token of this call.
  __device__ __forceinline__ const Input* input(int i, int part) const {
    const Input* rows = static_cast<const Input*>(part == 0 ? p.kv : p.score);
    const uint64_t token = static_cast<uint32_t>(window.token - 7 + i);
    return rows + (token * stride(part) + slot_column(i));
  }

  // All eight of them. A row's address is one wide multiply and add behind the last one's; left
  // alone, the compiler begins again in the middle, with several instructions a row.
  __device__ __forceinline__ void read_input(Raw4<Input> (&slots)[8], int part) const {
    const Input* row = input(0, part);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      slots[i] = stream4(row + (i < 4 ? 0 : T::kDim));
      row += stride(part);
      asm("" : "+l"(row));
    }
  }

  // Notes a stored window with a score outside the precondition.
  __device__ __forceinline__ void check_scores(float largest) const {
    if (!(largest < kScoreLimit) && p.slots[unit] >= 0) report(p, kFaultScore, unit);
  }

  // Slots 0..3 of a request's first window lie before its first token.
  __device__ __forceinline__ bool first() const { return window.entry == 0; }
};

// S1 to S3 on loaded slots. A masked slot repeats slot 4's logit, which leaves the maximum alone,
// and then weighs +0; what it loaded is finite, so its product is zero.
template <class T, class Element>
__device__ __forceinline__ void pool_slots(const Window4<T>& window,
                                           const Raw4<Element> (&score)[8],
                                           const Raw4<Element> (&kv)[8], const float4 (&ape)[8],
                                           bool masked, float (&pooled)[4]) {
  Peak<Element> peak;
  float z[8][4];  // later z - m
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    score[i].raise(peak);
#pragma unroll
    for (int channel = 0; channel < 4; ++channel) {
      z[i][channel] = __fmaf_rn(score[i][channel], kLog2e, component(ape[i], channel));
    }
  }
#pragma unroll
  for (int channel = 0; channel < 4; ++channel) {
#pragma unroll
    for (int i = 0; i < 4; ++i) z[i][channel] = masked ? z[4][channel] : z[i][channel];
  }
  const bool small = peak.value() < window.p.score_small;
  if (!small) {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int channel = 0; channel < 4; ++channel) {
        largest = larger_magnitude(largest, z[i][channel]);
      }
    }
    window.check_scores(largest);
  }
#pragma unroll
  for (int channel = 0; channel < 4; ++channel) {
    float m = z[0][channel];
#pragma unroll
    for (int i = 1; i < 8; ++i) m = fmaxf(m, z[i][channel]);
#pragma unroll
    for (int i = 0; i < 8; ++i) z[i][channel] = __fsub_rn(z[i][channel], m);
  }
  if (!small) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int channel = 0; channel < 4; ++channel) z[i][channel] = clamped(z[i][channel]);
    }
  }
  float s[4], v[4];
#pragma unroll
  for (int channel = 0; channel < 4; ++channel) {
    v[channel] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float weight = exp2_weight(z[i][channel]);
      const float e = masked && i < 4 ? 0.0f : weight;
      s[channel] = i == 0 ? e : __fadd_rn(s[channel], e);  // 0 + e = e: weights are not negative
      v[channel] = __fmaf_rn(e, kv[i][channel], v[channel]);
    }
  }
  divide(v, s, pooled);
}

// The common case: every slot is a token of this call. In L1 the position embedding waits behind
// every row that is on its way, so it is asked for with them: into registers, or where they are
// short into shared memory, each thread its own. Here and below `meanwhile` is called when the
// reads are on their way.
template <class T, class Meanwhile>
__device__ __forceinline__ void pool_from_input(const Window4<T>& window, float (&pooled)[4],
                                                const Meanwhile& meanwhile) {
  using Input = typename T::Input;
  constexpr bool kInRegisters = T::kDim == 128 || std::is_same_v<Input, float>;
  Raw4<Input> score[8], kv[8];
  float4 ape[8];
  window.read_input(score, 1);
  window.read_input(kv, 0);
  if constexpr (kInRegisters) {
#pragma unroll
    for (int i = 0; i < 8; ++i) ape[i] = early(window.prescaled_ape(i));
    after_loads();
    meanwhile();
  } else {
    __shared__ float4 stage[8][Store4<T>::kBlock];
#pragma unroll
    for (int i = 0; i < 8; ++i) copy_async<16>(&stage[i][threadIdx.x], window.prescaled_ape(i));
    after_loads();
    meanwhile();
    wait_copies();
#pragma unroll
    for (int i = 0; i < 8; ++i) ape[i] = stage[i][threadIdx.x];
  }
  pool_slots(window, score, kv, ape, false, pooled);
}

// Windows that begin in the state, and the first of a request, when the state has the input's
// dtype: only addresses differ. A masked slot reads the last token instead.
template <class T, class Meanwhile>
__device__ __forceinline__ void pool_from_both(const Window4<T>& window, float (&pooled)[4],
                                               const Meanwhile& meanwhile) {
  using Input = typename T::Input;
  Raw4<Input> score[8], kv[8];
  const auto source = [&](int i, int part) -> const Input* {
    if (i < 4 && window.first()) return window.input(7, part);
    const int64_t element = state_element<T>(window.p, window.window, i, part);
    const Input* kept = static_cast<const Input*>(window.p.state) + element + window.slot_column(i);
    return in_state<T>(window.window, i) ? kept : window.input(i, part);
  };
#pragma unroll
  for (int i = 0; i < 8; ++i) score[i] = stream4(source(i, 1));
#pragma unroll
  for (int i = 0; i < 8; ++i) kv[i] = stream4(source(i, 0));
  after_loads();
  meanwhile();
  float4 ape[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) ape[i] = __ldg(window.prescaled_ape(i));
  pool_slots(window, score, kv, ape, window.first(), pooled);
}

// The same when the state has another dtype than the input.
template <class T, class Meanwhile>
__device__ __forceinline__ void pool_widened(const Window4<T>& window, float (&pooled)[4],
                                             const Meanwhile& meanwhile) {
  const auto read = [&](int i, int part) -> Raw4<float> {
    if (in_state<T>(window.window, i) && !(i < 4 && window.first())) {
      const int64_t element = state_element<T>(window.p, window.window, i, part);
      return Raw4<float>{
          state4(window.p.state, window.p.state_is_bf16, element + window.slot_column(i))};
    }
    const int slot = i < 4 && window.first() ? 7 : i;
    const Raw4<typename T::Input> raw = stream4(window.input(slot, part));
    return Raw4<float>{make_float4(raw[0], raw[1], raw[2], raw[3])};
  };
  // Prefill reads kv in steps, so that this rare path does not set the register count of all.
  constexpr int kBatch = T::kMode == Mode::decode ? 8 : 2;
  Raw4<float> score[8], kv[kBatch];
#pragma unroll
  for (int i = 0; i < 8; ++i) score[i] = read(i, 1);
  meanwhile();
  float e[8][4], s[4], v[4], largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float4 ape = __ldg(window.prescaled_ape(i));
#pragma unroll
    for (int channel = 0; channel < 4; ++channel) {
      e[i][channel] = __fmaf_rn(score[i][channel], kLog2e, component(ape, channel));
      const bool masked = window.first() && i < 4;
      largest = larger_magnitude(largest, masked ? 0.0f : e[i][channel]);
    }
  }
  window.check_scores(largest);
#pragma unroll
  for (int channel = 0; channel < 4; ++channel) {
    float m = e[4][channel];
#pragma unroll
    for (int i = 0; i < 8; ++i) m = fmaxf(m, window.first() && i < 4 ? m : e[i][channel]);
    s[channel] = v[channel] = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float weight = exp2_weight(clamped(__fsub_rn(e[i][channel], m)));
      e[i][channel] = window.first() && i < 4 ? 0.0f : weight;
      s[channel] = __fadd_rn(s[channel], e[i][channel]);
    }
  }
#pragma unroll
  for (int begin = 0; begin < 8; begin += kBatch) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) kv[i] = read(begin + i, 0);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int channel = 0; channel < 4; ++channel) {
        v[channel] = __fmaf_rn(e[begin + i][channel], kv[i][channel], v[channel]);
      }
    }
  }
  divide(v, s, pooled);
}

// S1 to S3 of a window.
template <class T, class Meanwhile>
__device__ __forceinline__ void pool_window(const Window4<T>& window, float (&pooled)[4],
                                            const Meanwhile& meanwhile) {
  constexpr bool kBf16 = std::is_same_v<typename T::Input, bf16>;
  if constexpr (T::kMode == Mode::prefill) {
    if (window.window.from_state == 0 && !window.first()) {
      pool_from_input(window, pooled, meanwhile);
      return;
    }
  }
  // Without slots in the state its dtype does not matter.
  if (window.p.state_is_bf16 == kBf16 || window.window.from_state == 0) {
    pool_from_both(window, pooled, meanwhile);
  } else {
    pool_widened(window, pooled, meanwhile);
  }
}

// One token row into the state.
template <class T>
__device__ __forceinline__ void keep_token(const StoreParams& p, int index, int column) {
  const WriteEntry write = p.writes[index];
  if (write.token < 0) return;
  using Input = typename T::Input;
  const int64_t token = write.token;
  const Input* kv = static_cast<const Input*>(p.kv) + token * p.kv_stride + column;
  const Input* score = static_cast<const Input*>(p.score) + token * p.score_stride + column;
  const int64_t element = static_cast<int64_t>(write.state_row) * 2 * T::kWidth + column;
  Raw4<Input> row[2 * T::kHalves];
#pragma unroll
  for (int half = 0; half < T::kHalves; ++half) {
    row[half] = stream4(kv + half * T::kDim);
    row[T::kHalves + half] = stream4(score + half * T::kDim);
  }
#pragma unroll
  for (int part = 0; part < 2 * T::kHalves; ++part) {
    write_state4(p.state, p.state_is_bf16, element + part * T::kDim, row[part]);
  }
}

}  // namespace needlepoint
