// The matrix instructions of sm_90a over shared memory, and the barriers around them.
#pragma once

#include <cstdint>

#include "score/fragments.cuh"

namespace needlepoint {

// Rows of 128 bytes, eight to a swizzled block of 1,024 bytes, blocks one behind the other: the low
// word of a descriptor, which counts units of 16 bytes. The high word is the same for all.
__device__ __forceinline__ uint32_t row_descriptor(uint32_t address) {
  return 1u << 16 | address >> 4;
}

__device__ __forceinline__ uint64_t whole_descriptor(uint32_t low) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kBlockStride = uint64_t{1024 / 16} << 32;
  return kSwizzle128 | kBlockStride | low;
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define NEEDLEPOINT_D8(c, i)                                                                  \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
      "+f"(c[i + 6]), "+f"(c[i + 7])
#define NEEDLEPOINT_D32(c, i)                                                \
  NEEDLEPOINT_D8(c, i), NEEDLEPOINT_D8(c, i + 8), NEEDLEPOINT_D8(c, i + 16), \
      NEEDLEPOINT_D8(c, i + 24)
#define NEEDLEPOINT_R32                                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NEEDLEPOINT_R64                                                                          \
  NEEDLEPOINT_R32                                                                                \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, " \
  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// 64 keys by 64 or 128 head rows, over 32 bytes of each; `add` is 0 for the first product of a sum.
template <Row kRow>
__device__ __forceinline__ void wgmma(float (&c)[32], uint32_t a, uint32_t b, int add) {
  if constexpr (kRow == Row::bf16) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NEEDLEPOINT_R32
        "}, %32, %33, p, 1, 1, 0, 0; }"
        : NEEDLEPOINT_D32(c, 0)
        : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "r"(add));
  } else {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" NEEDLEPOINT_R32
        "}, %32, %33, p, 1, 1; }"
        : NEEDLEPOINT_D32(c, 0)
        : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "r"(add));
  }
}

template <Row kRow>
__device__ __forceinline__ void wgmma(float (&c)[64], uint32_t a, uint32_t b, int add) {
  if constexpr (kRow == Row::bf16) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NEEDLEPOINT_R64
        "}, %64, %65, p, 1, 1, 0, 0; }"
        : NEEDLEPOINT_D32(c, 0), NEEDLEPOINT_D32(c, 32)
        : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "r"(add));
  } else {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" NEEDLEPOINT_R64
        "}, %64, %65, p, 1, 1; }"
        : NEEDLEPOINT_D32(c, 0), NEEDLEPOINT_D32(c, 32)
        : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "r"(add));
  }
}

#undef NEEDLEPOINT_D8
#undef NEEDLEPOINT_D32
#undef NEEDLEPOINT_R32
#undef NEEDLEPOINT_R64

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, int phase) {
  asm volatile(
      "{ .reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished: }" ::"r"(barrier),
      "r"(phase)
      : "memory");
}

__device__ __forceinline__ bool barrier_done(uint32_t barrier, int phase) {
  int done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.s32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(barrier), "r"(phase)
      : "memory");
  return done != 0;
}

// Makes this thread's writes to shared memory visible to the matrix unit.
__device__ __forceinline__ void fence_for_matrix_unit() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace needlepoint
