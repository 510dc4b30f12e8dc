// Launches of kernels that ask for dynamic shared memory.
#pragma once

#include "launch.h"

namespace needlepoint {

template <class Params>
void launch_shared(const char* name, void (*kernel)(Params), const Params& params, dim3 grid,
                   int block, int shared_bytes, DLDevice device, bool overlap) {
  if (grid.x == 0) return;
  check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                  cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
             name);
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(block);
  config.dynamicSmemBytes = shared_bytes;
  config.stream =
      static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, params), name);
}

}  // namespace needlepoint
