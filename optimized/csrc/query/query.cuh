// RoPE -> Hadamard -> bf16 | fp8 | fp4 of the indexer's query, and its head weights, in one launch.
//
// Eight lanes hold one head's row: lane l owns channels [8l, 8l + 8) and [64 + 8l, 64 + 8l + 8), so
// that RoPE (dims 64..127) is spread evenly and three of the seven Hadamard strides cross lanes.
#pragma once

#include "launch/launch.h"
#include "common/row_formats.cuh"

namespace needlepoint {

struct QueryParams {
  const void* q;             // [tokens, heads, 128]
  const void* weights;       // [tokens, heads], same dtype
  const int32_t* positions;  // [tokens], rows of `rope`
  const float* rope;         // [positions, 32, 2]
  uint8_t* codes;            // [tokens, heads, bytes of a row]
  void* scales;              // fp8: fp32 [tokens, heads]; fp4: uint8 [tokens, heads, 4]
  float* folded;             // [tokens, heads]
  int64_t q_stride;          // elements between tokens; heads are contiguous
  int64_t weights_stride;
  int32_t heads;
  float weight_scale;
  int32_t* faults;  // [2]: lowest token with a row, or a weight, that is not finite
};

enum QueryFault { kFaultQuery, kFaultWeight };

struct Query {
  static constexpr int kLanes = 8;  // of one head
  static constexpr int kBlock = 128;
  static constexpr int kHeads = kBlock / kLanes;
};

__device__ __forceinline__ void load8(const float* source, float (&x)[8]) {
  const Raw4<float> low = stream4(source), high = stream4(source + 4);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[i] = low[i];
    x[4 + i] = high[i];
  }
}

__device__ __forceinline__ void load8(const bf16* source, float (&x)[8]) {
  uint4 raw;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
               : "l"(source)
               : "memory");
  const uint32_t pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = widen_low(pairs[i]);
    x[2 * i + 1] = widen_high(pairs[i]);
  }
}

template <int kStride, int kCount>
__device__ __forceinline__ void butterfly(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i & kStride) continue;
    const float a = x[i], b = x[i + kStride];
    x[i] = __fadd_rn(a, b);
    x[i + kStride] = __fsub_rn(a, b);
  }
}

// S6 in ascending strides: 1, 2, 4 in the lane, 8, 16, 32 across lanes, 64 between the two halves.
__device__ __forceinline__ void hadamard16(float (&x)[16], int lane) {
  butterfly<1>(x);
  butterfly<2>(x);
  butterfly<4>(x);
#pragma unroll
  for (int mask = 1; mask < Query::kLanes; mask <<= 1) {
    const float sign = lane & mask ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      x[i] = __fmaf_rn(x[i], sign, __shfl_xor_sync(0xffffffffu, x[i], mask));
    }
  }
  butterfly<8>(x);
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = __fmul_rn(x[i], kHadamard);
}

// NaN if one of the eight is NaN.
template <int kBegin>
__device__ __forceinline__ float max_magnitude8(const float (&x)[16]) {
  float amax = fabsf(x[kBegin]);
#pragma unroll
  for (int i = 1; i < 8; ++i) amax = larger_magnitude(amax, x[kBegin + i]);
  return amax;
}

template <int kBegin>
__device__ __forceinline__ uint32_t store_fp4_half(uint8_t* codes, const float (&x)[16],
                                                   float amax) {
  const uint32_t byte = ue8m0_byte(__fmul_rn(fmaxf(amax, kFloorFp4), kInverse6));
  const float inverse = ue8m0_inverse(byte);
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    packed |= e2m1_code(__fmul_rn(x[kBegin + i], inverse)) << (4 * i);
  }
  *reinterpret_cast<uint32_t*>(codes) = packed;
  return byte;
}

template <class Input_, Row kRow_>
struct QueryTraits {
  using Input = Input_;
  static constexpr Row kRow = kRow_;

  static_assert(kRow == Row::bf16 || kRow == Row::fp8 || kRow == Row::fp4,
                "supported query formats: bf16, fp8 and fp4");
};

template <class T>
__global__ __launch_bounds__(Query::kBlock) void query_kernel(
    const __grid_constant__ QueryParams p) {
  using Input = typename T::Input;
  constexpr Row kRow = T::kRow;
  wait_for_predecessor();
  const int64_t token = blockIdx.x;
  const int head = blockIdx.y * Query::kHeads + threadIdx.x / Query::kLanes;
  const int lane = threadIdx.x % Query::kLanes;
  const bool owned = head < p.heads;
  const int readable = owned ? head : p.heads - 1;  // idle lanes still take part in the shuffles
  const Input* row =
      static_cast<const Input*>(p.q) + token * p.q_stride + readable * 128 + lane * 8;
  const int64_t position = early(p.positions + token);
  float low[8], high[8];
  load8(row, low);
  load8(row + 64, high);
  // Read with the row: a head weight that comes late is a second wait for memory.
  float weight = early(static_cast<const Input*>(p.weights) + token * p.weights_stride + readable);
  after_loads();
  const float4* table = reinterpret_cast<const float4*>(p.rope + position * kRopeDims + lane * 8);
  const float4 angle0 = early(table), angle1 = early(table + 1);
  rotate_pair(high[0], high[1], angle0.x, angle0.y);
  rotate_pair(high[2], high[3], angle0.z, angle0.w);
  rotate_pair(high[4], high[5], angle1.x, angle1.y);
  rotate_pair(high[6], high[7], angle1.z, angle1.w);
  float x[16];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = low[i];
    x[8 + i] = high[i];
  }
  hadamard16(x, lane);
  release_successor();

  const int64_t index = token * p.heads + head;
  const float amax_low = max_magnitude8<0>(x), amax_high = max_magnitude8<8>(x);
  // Finite unless a channel is not; for fp8 the scale, which is that of the whole row.
  float largest = larger_magnitude(amax_low, amax_high);
  if constexpr (kRow == Row::fp8) {
    largest = divide_by_448(larger_magnitude(kFloor, lane_magnitude<Query::kLanes>(largest)));
  }
  if (!(largest < INFINITY)) atomicMin(p.faults + kFaultQuery, blockIdx.x);
  if constexpr (kRow == Row::bf16) {
    if (!owned) return;
    uint4* target = reinterpret_cast<uint4*>(p.codes + index * 256 + lane * 16);
    target[0] = make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                           pack_bf16(x[6], x[7]));
    target[8] = make_uint4(pack_bf16(x[8], x[9]), pack_bf16(x[10], x[11]), pack_bf16(x[12], x[13]),
                           pack_bf16(x[14], x[15]));
  } else if constexpr (kRow == Row::fp8) {
    const float inverse = reciprocal(largest);
    if (!owned) return;
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = __fmul_rn(x[i], inverse);
    uint8_t* target = p.codes + index * 128 + lane * 8;
    *reinterpret_cast<uint2*>(target) =
        make_uint2(e4m3_quad(x[0], x[1], x[2], x[3]), e4m3_quad(x[4], x[5], x[6], x[7]));
    *reinterpret_cast<uint2*>(target + 64) =
        make_uint2(e4m3_quad(x[8], x[9], x[10], x[11]), e4m3_quad(x[12], x[13], x[14], x[15]));
    if (lane == 0) static_cast<float*>(p.scales)[index] = largest;
  } else {
    // Blocks of 32 dims: four lanes of one half.
    uint8_t* target = p.codes + index * 64 + lane * 4;
    uint8_t* scales = static_cast<uint8_t*>(p.scales) + index * 4 + lane / 4;
    const float low_block = lane_max<4>(amax_low), high_block = lane_max<4>(amax_high);
    if (!owned) return;
    const uint32_t byte_low = store_fp4_half<0>(target, x, low_block);
    const uint32_t byte_high = store_fp4_half<8>(target + 32, x, high_block);
    if (lane % 4 == 0) {
      scales[0] = static_cast<uint8_t>(byte_low);
      scales[2] = static_cast<uint8_t>(byte_high);
    }
  }
  if (lane != 0) return;
  weight = __fmul_rn(weight, p.weight_scale);
  if (!(fabsf(weight) < INFINITY)) atomicMin(p.faults + kFaultWeight, blockIdx.x);
  p.folded[index] = kRow == Row::fp8 ? __fmul_rn(weight, largest) : weight;
}

template <class T, class Arguments>
void run_query(const char* name, const Arguments& a) {
  QueryParams p;
  p.q = a.q.data_ptr();
  p.weights = a.weights.data_ptr();
  p.positions = address<const int32_t>(a.positions);
  p.rope = address<const float>(a.rope);
  p.codes = address<uint8_t>(a.codes);
  p.scales = a.scales.data_ptr();
  p.folded = address<float>(a.folded);
  p.q_stride = a.q.stride(0);
  p.weights_stride = a.weights.stride(0);
  p.heads = static_cast<int32_t>(a.q.size(1));
  p.weight_scale = static_cast<float>(a.weight_scale);
  p.faults = address<int32_t>(a.faults);
  const dim3 grid(static_cast<unsigned>(a.q.size(0)),
                  static_cast<unsigned>((p.heads + Query::kHeads - 1) / Query::kHeads));
  launch(Call{name, a.q.device(), a.overlap}, query_kernel<T>, p, grid, Query::kBlock);
}

}  // namespace needlepoint
