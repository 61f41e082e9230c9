#include "gpu.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

#include "device_info.h"

namespace nasfast::gpu {
namespace {

// What never changes about a device.
struct Properties {
  std::mutex mutex;
  bool queried = false;
  int multiprocessors = 0, shared_memory = 0;
  int ptx = 0;  // architecture of the PTX from which the kernels for it were made
};
constexpr int kDevices = 64;  // bits of `prepared`
Properties all_properties[kDevices];

// Clears the error, which the next call of the runtime would report otherwise.
[[noreturn]] void raise(const std::string& what, cudaError_t status) {
  cudaGetLastError();
  throw std::runtime_error("nasfast: " + what + " failed: " + cudaGetErrorString(status));
}
void check(const char* what, cudaError_t status) {
  if (status != cudaSuccess) raise(what, status);
}

const Properties& properties_of(int device) {
  if (device < 0 || device >= kDevices) throw std::runtime_error("nasfast: CUDA kernels need a device below 64");
  Properties& properties = all_properties[device];
  const std::lock_guard<std::mutex> lock(properties.mutex);
  if (!properties.queried) {
    check("cudaDeviceGetAttribute",
          cudaDeviceGetAttribute(&properties.multiprocessors, cudaDevAttrMultiProcessorCount, device));
    check("cudaDeviceGetAttribute",
          cudaDeviceGetAttribute(&properties.shared_memory, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    const cuda::DeviceInfo info = cuda::device_info(device);
    if (!info.kernels_run) throw std::runtime_error("nasfast: no kernel for this GPU: " + info.error);
    properties.ptx = info.ptx_version;
    properties.queried = true;
  }
  return properties;
}

bool equals(const char* setting, const char* value) { return setting != nullptr && std::strcmp(setting, value) == 0; }

std::string text(const Geometry& g) {
  const auto size = [](int height, int width) { return std::to_string(height) + " x " + std::to_string(width); };
  return std::to_string(g.images) + " images, " + size(g.height, g.width) + " -> " + size(g.out_height, g.out_width) +
         " pixels, " + std::to_string(g.in_channels) + " -> " + std::to_string(g.out_channels) + " channels, kernel " +
         std::to_string(g.kernel) + ", stride " + std::to_string(g.stride);
}

}  // namespace

Gpu::Gpu(int device, void* stream)
    : device_(device), stream_(stream), debug_(equals(std::getenv("NASFAST_CUDA_DEBUG"), "1")) {
  const Properties& properties = properties_of(device);
  multiprocessors = properties.multiprocessors;
  shared_memory = static_cast<size_t>(properties.shared_memory) - kReserved;
  panels = properties.ptx != 86 && properties.ptx != 89;  // kMatricesRun in csrc/gpu/depthwise_matrices.h
  check("cudaGetDevice", cudaGetDevice(&previous_device_));
  check("cudaSetDevice", cudaSetDevice(device));
}

Gpu::~Gpu() { cudaSetDevice(previous_device_); }

void Gpu::start(const void* kernel, std::atomic<uint64_t>* prepared, const Shape& shape, const void* args) const {
  const uint64_t device_bit = uint64_t{1} << device_;
  if ((*prepared & device_bit) == 0) {
    const auto set = [&](cudaFuncAttribute attribute, int value) {
      check("cudaFuncSetAttribute", cudaFuncSetAttribute(kernel, attribute, value));
    };
    set(cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_memory));
    // The kernels hardly use the L1 cache. A multiprocessor divides its memory anew only while it is idle, so a kernel
    // that wants another division waits.
    set(cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    *prepared |= device_bit;
  }
  void* list[] = {const_cast<void*>(args)};
  status_ = cudaLaunchKernel(kernel, dim3(shape.count_x, shape.count_y), dim3(shape.threads), list, shape.shared,
                             static_cast<cudaStream_t>(stream_));
}

void Gpu::launched(const char* kernel, const Geometry& geometry) const {
  cudaError_t status = static_cast<cudaError_t>(status_);
  if (status == cudaSuccess && debug_) {
    const auto stream = static_cast<cudaStream_t>(stream_);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    status = cudaStreamIsCapturing(stream, &capture);
    if (status == cudaSuccess && capture == cudaStreamCaptureStatusNone) status = cudaStreamSynchronize(stream);
  }
  if (status == cudaSuccess) return;
  const char* const where = debug_ ? "" : " (it may be an earlier kernel: NASFAST_CUDA_DEBUG=1 tells which)";
  raise(std::string("the CUDA kernel ") + kernel + " (" + text(geometry) + ")" + where, status);
}

}  // namespace nasfast::gpu
