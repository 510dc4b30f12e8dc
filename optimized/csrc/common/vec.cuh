// Four consecutive channels of one row: what a thread owns everywhere but in the query kernel.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "common/arith.cuh"

namespace needlepoint {

using bf16 = __nv_bfloat16;

__device__ __forceinline__ float widen_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float widen_high(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

__device__ __forceinline__ float component(const float4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// Two fp32 numbers rounded to bf16, `low` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The largest magnitude among raw numbers, NaN if one of them is NaN: a filter for scores outside
// the preconditions. bf16 numbers are compared two at a time.
template <class Element>
struct Peak;

template <>
struct Peak<float> {
  float largest = 0.0f;
  __device__ __forceinline__ void add(float x) { largest = larger_magnitude(largest, x); }
  __device__ __forceinline__ float value() const { return largest; }
};

template <>
struct Peak<bf16> {
  uint32_t largest = 0;
  __device__ __forceinline__ void add(uint32_t pair) {
    // One instruction: the larger magnitude, with a sign that means nothing.
    asm("max.NaN.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(largest) : "r"(pair));
  }
  __device__ __forceinline__ float value() const {
    return larger_magnitude(fabsf(widen_low(largest)), widen_high(largest));
  }
};

// Raw bits as loaded; widened where they are used, so that bf16 rows wait in half the registers.
template <class Element>
struct Raw4;

template <>
struct Raw4<float> {
  float4 bits;
  __device__ __forceinline__ float operator[](int i) const {
    return i == 0 ? bits.x : i == 1 ? bits.y : i == 2 ? bits.z : bits.w;
  }
  __device__ __forceinline__ void raise(Peak<float>& peak) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) peak.add((*this)[i]);
  }
};

template <>
struct Raw4<bf16> {
  uint2 bits;
  __device__ __forceinline__ float operator[](int i) const {
    const uint32_t pair = i < 2 ? bits.x : bits.y;
    return i % 2 == 0 ? widen_low(pair) : widen_high(pair);
  }
  __device__ __forceinline__ void raise(Peak<bf16>& peak) const {
    peak.add(bits.x);
    peak.add(bits.y);
  }
};

// Streaming read of an input row: each byte is needed by exactly one window, so it bypasses L1. It
// is an ordinary global load (not .nc) on purpose: the compiler may not move it across a barrier,
// and that is what keeps all reads of a window ahead of its arithmetic (see after_loads).
__device__ __forceinline__ Raw4<float> stream4(const float* source) {
  Raw4<float> out;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(out.bits.x), "=f"(out.bits.y), "=f"(out.bits.z), "=f"(out.bits.w)
               : "l"(source)
               : "memory");
  return out;
}

__device__ __forceinline__ Raw4<bf16> stream4(const bf16* source) {
  Raw4<bf16> out;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(out.bits.x), "=r"(out.bits.y)
               : "l"(source)
               : "memory");
  return out;
}

// One channel.
template <class Element>
struct Raw1;

template <>
struct Raw1<float> {
  float bits;
  __device__ __forceinline__ float operator[](int) const { return bits; }
  __device__ __forceinline__ void raise(Peak<float>& peak) const { peak.add(bits); }
};

template <>
struct Raw1<bf16> {
  uint16_t bits;
  __device__ __forceinline__ float operator[](int) const { return widen_low(bits); }
  __device__ __forceinline__ void raise(Peak<bf16>& peak) const { peak.add(bits); }
};

__device__ __forceinline__ Raw1<float> stream1(const float* source) {
  Raw1<float> out;
  asm volatile("ld.global.L1::no_allocate.f32 %0, [%1];" : "=f"(out.bits) : "l"(source) : "memory");
  return out;
}

__device__ __forceinline__ Raw1<bf16> stream1(const bf16* source) {
  Raw1<bf16> out;
  asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(out.bits) : "l"(source) : "memory");
  return out;
}

// Two channels.
template <class Element>
struct Raw2;

template <>
struct Raw2<float> {
  float2 bits;
  __device__ __forceinline__ float operator[](int i) const { return i == 0 ? bits.x : bits.y; }
  __device__ __forceinline__ void raise(Peak<float>& peak) const {
    peak.add(bits.x);
    peak.add(bits.y);
  }
};

template <>
struct Raw2<bf16> {
  uint32_t bits;
  __device__ __forceinline__ float operator[](int i) const {
    return i == 0 ? widen_low(bits) : widen_high(bits);
  }
  __device__ __forceinline__ void raise(Peak<bf16>& peak) const { peak.add(bits); }
};

__device__ __forceinline__ Raw2<float> stream2(const float* source) {
  Raw2<float> out;
  asm volatile("ld.global.L1::no_allocate.v2.f32 {%0, %1}, [%2];"
               : "=f"(out.bits.x), "=f"(out.bits.y)
               : "l"(source)
               : "memory");
  return out;
}

__device__ __forceinline__ Raw2<bf16> stream2(const bf16* source) {
  Raw2<bf16> out;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(out.bits) : "l"(source) : "memory");
  return out;
}

// One or two channels.
template <class Element, int kChannels>
using Raw = std::conditional_t<kChannels == 1, Raw1<Element>, Raw2<Element>>;

template <int kChannels, class Element>
__device__ __forceinline__ Raw<Element, kChannels> stream(const Element* source) {
  if constexpr (kChannels == 1) {
    return stream1(source);
  } else {
    return stream2(source);
  }
}

// All loads before this point are issued before it; nothing waits for them here. Without it the
// compiler saves registers by loading kv only once the scores have arrived, which doubles the time
// that a window waits for memory.
__device__ __forceinline__ void after_loads() { __syncwarp(); }

// Small reads that are not to be moved behind a branch, or past after_loads() and reads like these.
__device__ __forceinline__ int32_t early(const int32_t* source) {
  int32_t out;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(out) : "l"(source) : "memory");
  return out;
}

__device__ __forceinline__ float early(const float* source) {
  float out;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(out) : "l"(source) : "memory");
  return out;
}

__device__ __forceinline__ float early(const bf16* source) {
  uint16_t out;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(out) : "l"(source) : "memory");
  return widen_low(out);
}

__device__ __forceinline__ float4 early(const float4* source) {
  float4 out;
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(out.x), "=f"(out.y), "=f"(out.z), "=f"(out.w)
               : "l"(source)
               : "memory");
  return out;
}

__device__ __forceinline__ int4 early4(const void* source) {
  int4 out;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.x), "=r"(out.y), "=r"(out.z), "=r"(out.w)
               : "l"(source)
               : "memory");
  return out;
}

// One, two or four numbers, likewise.
template <int kCount>
__device__ __forceinline__ void early(float (&out)[kCount], const float* source) {
  if constexpr (kCount == 1) {
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(out[0]) : "l"(source) : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("ld.global.v2.f32 {%0, %1}, [%2];"
                 : "=f"(out[0]), "=f"(out[1])
                 : "l"(source)
                 : "memory");
  } else {
    asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3])
                 : "l"(source)
                 : "memory");
  }
}

// Brings a row into L2, where another kernel may still write it: a hint, not a read.
__device__ __forceinline__ void prefetch_row(const void* row, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(row), "r"(bytes) : "memory");
}

// A small read into shared memory that no register waits for. It is there, for this thread, after
// wait_copies().
template <int kBytes>
__device__ __forceinline__ void copy_async(void* target, const void* source) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(target));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(source), "n"(kBytes)
               : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kYoungest>
__device__ __forceinline__ void wait_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kYoungest) : "memory");
}
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// State rows are written by the same launch (other rows), so they are read as ordinary memory.
// Their dtype is a run-time property: it changes one uniform branch, not the arithmetic.
__device__ __forceinline__ float4 state4(const void* state, bool is_bf16, int64_t element) {
  if (is_bf16) {
    const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const bf16*>(state) + element);
    return make_float4(widen_low(raw.x), widen_high(raw.x), widen_low(raw.y), widen_high(raw.y));
  }
  return *reinterpret_cast<const float4*>(static_cast<const float*>(state) + element);
}

__device__ __forceinline__ float2 state2(const void* state, bool is_bf16, int64_t element) {
  if (is_bf16) {
    const auto* narrow = static_cast<const bf16*>(state) + element;
    const uint32_t raw = *reinterpret_cast<const uint32_t*>(narrow);
    return make_float2(widen_low(raw), widen_high(raw));
  }
  return *reinterpret_cast<const float2*>(static_cast<const float*>(state) + element);
}

template <class Element>
__device__ __forceinline__ void write_state4(void* state, bool is_bf16, int64_t element,
                                             const Raw4<Element>& x) {
  if (is_bf16) {
    *reinterpret_cast<uint2*>(static_cast<bf16*>(state) + element) =
        make_uint2(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]));
  } else {
    *reinterpret_cast<float4*>(static_cast<float*>(state) + element) =
        make_float4(x[0], x[1], x[2], x[3]);
  }
}

}  // namespace needlepoint
