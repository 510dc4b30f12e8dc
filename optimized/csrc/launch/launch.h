// One way to launch, one way to fail.
//
// A launch function takes the name of its variant and a struct of arguments. The struct stands in
// the generated module, written from needlepoint.optimized.build.arguments, which Python fills by
// name; the header of a kernel sets the fields of its parameters from it, also by name.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

namespace needlepoint {

using tvm::ffi::TensorView;

inline void check_cuda(cudaError_t status, const char* kernel) {
  if (status != cudaSuccess) {
    TVM_FFI_THROW(RuntimeError) << kernel << ": CUDA error " << cudaGetErrorName(status) << ": "
                                << cudaGetErrorString(status);
  }
}

// Which launch this is. The name is for messages.
struct Call {
  const char* name;
  DLDevice device;
  bool overlap;
};

// Addresses of checked tensors; an empty one has none.
template <class T>
T* address(const TensorView& tensor) {
  return tensor.numel() == 0 ? nullptr : static_cast<T*>(tensor.data_ptr());
}

// Launches on the caller's current stream. `overlap` allows the next kernel of the stream to be
// scheduled while this one drains (programmatic dependent launch). Every kernel here waits for its
// predecessor before it reads what kernels write: tokens, state, what blocks pass to one another.
// Plans and weights may be read ahead of that: they were there before, or a kernel wrote them that
// releases nothing early. Prefill at ratio 4 releases its successor when its own reads are over:
// released at once, the blocks of short launches that follow each other crowd some SMs.
template <class Params>
void launch(const Call& call, void (*kernel)(Params), const Params& params, dim3 grid, int block,
            int shared_bytes = 0) {
  if (grid.x == 0 || grid.y == 0) return;
  if (shared_bytes > 0) {
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
               call.name);
  }
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_bytes;
  config.stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(call.device.device_type, call.device.device_id));
  config.attrs = &attribute;
  config.numAttrs = call.overlap ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params), call.name);
}

// Multiprocessors of a device.
inline int multiprocessors(DLDevice device) {
  int count = 0;
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device.device_id),
             "cudaDeviceGetAttribute");
  return count;
}

__device__ __forceinline__ void wait_for_predecessor() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void release_successor() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace needlepoint
