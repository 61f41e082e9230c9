// The GPU as a Machine of csrc/gpu/stages.h. Needs no torch, and nvcc only where kernels are compiled.
#pragma once

#include <atomic>
#include <cstdint>

#include "../../csrc/gpu/stages.h"
#ifdef __CUDACC__
#include "run_kernel.h"
#endif

namespace nasfast::gpu {

// Launches on one stream. While it exists, its device is the current one.
class Gpu {
 public:
  int multiprocessors = 0;
  size_t shared_memory = 0;
  bool panels = false;

  // stream: a cudaStream_t of the device.
  Gpu(int device, void* stream);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  template <class Kernel>
  void launch(int count_x, int count_y, size_t shared, const typename Kernel::Args& args) const;
  // Raises if the launch failed. With NASFAST_CUDA_DEBUG it waits for the kernel, whose errors a later call would
  // report otherwise; a stream that is captured cannot wait.
  void launched(const char* kernel, const Geometry& geometry) const;

  struct Shape {
    int count_x, count_y, threads;
    size_t shared;
  };
  // What launch() does with a kernel that is compiled. prepared: a bit for each device on which the kernel has its attributes.
  void start(const void* kernel, std::atomic<uint64_t>* prepared, const Shape& shape, const void* args) const;

 private:
  int device_, previous_device_ = 0;  // the latter: what was the current one
  void* stream_;
  bool debug_;
  mutable int status_ = 0;  // of the last launch, a cudaError_t
};

#ifdef __CUDACC__
template <class Kernel>
void Gpu::launch(int count_x, int count_y, size_t shared, const typename Kernel::Args& args) const {
  static std::atomic<uint64_t> prepared{0};
  start(reinterpret_cast<const void*>(run_kernel<Kernel>), &prepared, {count_x, count_y, Kernel::kThreads, shared},
        &args);
}
#endif

}  // namespace nasfast::gpu
