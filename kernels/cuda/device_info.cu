// Whether a GPU of this machine can run the kernels compiled into this build.

#include <cuda_runtime.h>

#include "device_info.h"

namespace nasfast::cuda {
namespace {

__global__ void probe_kernel() {}

// This looks up the kernel for the device without a launch; it fails when no compiled image fits.
cudaError_t probe(int device, cudaFuncAttributes* attributes) {
  int before = 0;
  cudaError_t status = cudaGetDevice(&before);
  if (status == cudaSuccess) status = cudaSetDevice(device);
  if (status == cudaSuccess) status = cudaFuncGetAttributes(attributes, probe_kernel);
  if (status == cudaSuccess) status = cudaSetDevice(before);
  return status;
}

}  // namespace

DeviceInfo device_info(int device) {
  DeviceInfo info;
  cudaError_t status = cudaGetDeviceCount(&info.count);
  if (status == cudaSuccess && info.count > 0) {
    cudaFuncAttributes attributes{};
    status = probe(device, &attributes);
    info.kernels_run = status == cudaSuccess;
    info.binary_version = info.kernels_run ? attributes.binaryVersion : 0;
    info.ptx_version = info.kernels_run ? attributes.ptxVersion : 0;
  }
  if (status != cudaSuccess) {
    info.old_driver = status == cudaErrorInsufficientDriver;
    info.count = info.old_driver || status == cudaErrorNoDevice ? 0 : info.count;
    info.error = cudaGetErrorString(status);
    cudaGetLastError();
  }
  return info;
}

}  // namespace nasfast::cuda
