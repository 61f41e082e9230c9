// Runs kernels/cuda/gpu.cpp on a runtime that fails where the test says so: `launches CALL...`, each CALL the name of a
// call of the runtime that fails once. Makes three calls of two launches each, and prints for each how many kernels it
// launched and what it raised.

#include <cuda_runtime_api.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "../../../kernels/cuda/device_info.h"
#include "../../../kernels/cuda/gpu.h"

namespace {
std::vector<std::string> failing;
cudaError_t last = cudaSuccess;
int launched = 0;
}  // namespace

cudaError_t answer(const char* call) {
  const std::string name = call;
  if (name == "cudaGetLastError") {
    const cudaError_t found = last;
    last = cudaSuccess;
    return found;
  }
  cudaError_t status = cudaSuccess;
  for (size_t i = 0; i < failing.size(); ++i) {
    if (failing[i] != name) continue;
    failing.erase(failing.begin() + static_cast<long>(i));
    status = cudaErrorInvalidValue;
    break;
  }
  if (status != cudaSuccess) last = status;
  if (name == "cudaLaunchKernel" && status == cudaSuccess) ++launched;
  return status;
}

namespace nasfast::cuda {
DeviceInfo device_info(int) {
  DeviceInfo info;
  info.count = 1;
  info.kernels_run = true;
  info.binary_version = info.ptx_version = 90;
  return info;
}
}  // namespace nasfast::cuda

int main(int count, char** given) {
  for (int i = 1; i < count; ++i) failing.push_back(given[i]);
  const nasfast::gpu::Geometry shape{1, 8, 8, 8, 8, 16, 16, 1, 1};
  std::atomic<uint64_t> prepared{0};
  for (int call = 0; call < 3; ++call) {
    launched = 0;
    std::string raised;
    try {
      const nasfast::gpu::Gpu gpu(0, nullptr);
      for (const char* name : {"first", "second"}) {
        gpu.start(&prepared, &prepared, {1, 1, 128, 0}, &shape);
        gpu.launched(name, shape);
      }
    } catch (const std::exception& error) {
      raised = error.what();
    }
    std::printf("%d|%s\n", launched, raised.c_str());
  }
}
