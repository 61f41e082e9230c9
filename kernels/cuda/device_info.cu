// Whether the GPU of this machine can run the kernels compiled into this build.

#include <cuda_runtime.h>

#include "device_info.h"

namespace nasfast::cuda {
namespace {

__global__ void probe_kernel() {}

}  // namespace

DeviceInfo device_info() {
  DeviceInfo info;
  cudaError_t status = cudaGetDeviceCount(&info.count);
  if (status == cudaSuccess && info.count > 0) {
    // this looks up the kernel for the current device without a launch; it fails when no compiled image fits
    cudaFuncAttributes attributes;
    status = cudaFuncGetAttributes(&attributes, probe_kernel);
    info.kernels_run = status == cudaSuccess;
    info.binary_version = info.kernels_run ? attributes.binaryVersion : 0;
  }
  if (status != cudaSuccess) {
    info.count = status == cudaErrorInsufficientDriver || status == cudaErrorNoDevice ? 0 : info.count;
    info.error = cudaGetErrorString(status);
    cudaGetLastError();
  }
  return info;
}

}  // namespace nasfast::cuda
