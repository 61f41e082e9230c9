// The kernels of conv_bn_act_chain on a GPU: csrc/gpu has their text, this file launches them.

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include <cstdlib>
#include <string>

#include "../../csrc/gpu/chain.h"
#include "run_kernel.h"

namespace nasfast::gpu {
namespace {

std::string text(const Geometry& g) {
  const auto size = [](int height, int width) { return std::to_string(height) + " x " + std::to_string(width); };
  return std::to_string(g.images) + " images, " + size(g.height, g.width) + " -> " + size(g.out_height, g.out_width) +
         " pixels, " + std::to_string(g.in_channels) + " -> " + std::to_string(g.out_channels) + " channels, kernel " +
         std::to_string(g.kernel) + ", stride " + std::to_string(g.stride);
}

class Gpu {
 public:
  int multiprocessors = 0;
  size_t shared_memory = 0;

  explicit Gpu(int device) : guard_(device), debug_(std::getenv("NASFAST_CUDA_DEBUG") != nullptr) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
    stream_ = static_cast<cudaStream_t>(current);
    int limit = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    shared_memory = static_cast<size_t>(limit) - kReserved;
    early_ = !debug_ && can_start_early();
  }

  template <class Kernel>
  void launch(int count_x, int count_y, size_t shared, const typename Kernel::Args& args) const {
    const auto kernel = run_kernel<Kernel>;
    if (shared > kWithoutAsking) {
      // always the same value, because another thread of the host may set it between this call and the launch
      STD_CUDA_CHECK(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_memory)));
    }
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t config{dim3(count_x, count_y),     Kernel::kThreads, shared, stream_, &early,
                                    early_ && behind_ ? 1u : 0u};
    cudaLaunchKernelEx(&config, kernel, args);  // launched() has the error
    behind_ = true;
  }

  // Raises if the launch failed. With NASFAST_CUDA_DEBUG it waits for the kernel, whose errors a later call would
  // report otherwise; a stream that is captured cannot wait.
  void launched(const char* kernel, const Geometry& geometry) const {
    cudaError_t status = cudaGetLastError();
    if (status == cudaSuccess && debug_) {
      cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
      status = cudaStreamIsCapturing(stream_, &capture);
      if (status == cudaSuccess && capture == cudaStreamCaptureStatusNone) status = cudaStreamSynchronize(stream_);
    }
    STD_TORCH_CHECK(status == cudaSuccess, "conv_bn_act_chain: the CUDA kernel ", kernel, " (", text(geometry),
                    ") failed: ", cudaGetErrorString(status),
                    debug_ ? "" : "; it may be an earlier kernel: set NASFAST_CUDA_DEBUG=1 to know which");
  }

 private:
  static constexpr size_t kWithoutAsking = 48 * 1024 - kReserved;  // bytes that every kernel may have

  // Whether the kernels that run on the current device wait by themselves for those in front (run_kernel.h), and the
  // driver takes such launches in CUDA graphs, too.
  static bool can_start_early() {
    int driver = 0;
    cudaFuncAttributes attributes{};
    STD_CUDA_CHECK(cudaDriverGetVersion(&driver));
    STD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, run_kernel<ApplyKernel<Bf16>>));
    return driver >= 12030 && attributes.ptxVersion >= kWaits;
  }

  torch::stable::accelerator::DeviceGuard guard_;  // launches go to the current device
  bool debug_;
  bool early_ = false;           // whether a kernel may start before the one in front of it in the same call has ended
  mutable bool behind_ = false;  // whether this call has launched a kernel
  cudaStream_t stream_ = nullptr;
};

Gpu gpu_of(const Tensor& x) { return Gpu(x.device().index()); }

using Operators = ChainOperators<gpu_of>;

}  // namespace
}  // namespace nasfast::gpu

STABLE_TORCH_LIBRARY_IMPL(nasfast, CUDA, m) {
  m.impl("conv_bn_act_chain_gpu_counters", TORCH_BOX(&nasfast::gpu::Operators::counters));
  m.impl("conv_bn_act_chain_gpu_fwd", TORCH_BOX(&nasfast::gpu::Operators::forward));
  m.impl("conv_bn_act_chain_gpu_make", TORCH_BOX(&nasfast::gpu::Operators::make));
  m.impl("conv_bn_act_chain_gpu_reduce", TORCH_BOX(&nasfast::gpu::Operators::reduce));
  m.impl("conv_bn_act_chain_gpu_bwd", TORCH_BOX(&nasfast::gpu::Operators::backward));
}
