// Runs kernels/cuda/gpu.cpp on a runtime that fails where the test says so: `launches CALL...`, each CALL the name of a
// call of the runtime that fails once, or "early" for every launch that may start early. Makes three calls of two
// launches each, and prints for each what it launched (E: early, P: plain) and what it raised.

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
std::string launched;
}  // namespace

cudaError_t answer(const char* call, bool early) {
  const std::string name = call;
  if (name == "cudaGetLastError") {
    const cudaError_t found = last;
    last = cudaSuccess;
    return found;
  }
  cudaError_t status = cudaSuccess;
  for (size_t i = 0; i < failing.size(); ++i) {
    if (failing[i] == "early" && early) status = cudaErrorInvalidResourceHandle;
    if (failing[i] != name) continue;
    failing.erase(failing.begin() + static_cast<long>(i));
    status = cudaErrorInvalidValue;
    break;
  }
  if (status != cudaSuccess) last = status;
  if (name == "cudaLaunchKernelExC") launched += status != cudaSuccess ? '-' : early ? 'E' : 'P';
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
    launched.clear();
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
    std::printf("%s|%s\n", launched.c_str(), raised.c_str());
  }
}
