// householder on the GPU: csrc/orthogonal/tasks.h has the order of the launches, orthogonal.cu the kernel.

#include "orthogonal.h"

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

#include "../../csrc/orthogonal/tasks.h"

namespace nasfast::cuda {
namespace {

using namespace orthogonal;

template <typename T>
void run(const std::vector<Task<T>>& tasks, int device, cudaStream_t stream) {
  if (tasks.empty()) return;
  const size_t bytes = tasks.size() * sizeof(Task<T>);
  const Tensor table = torch::stable::empty({static_cast<int64_t>(bytes)}, ScalarType::Byte, std::nullopt,
                                            torch::stable::Device(torch::headeronly::DeviceType::CUDA, device));
  // The memory of the host may be freed afterwards: from pageable memory, the call returns only when the copy no longer
  // needs it.
  STD_CUDA_CHECK(cudaMemcpyAsync(table.mutable_data_ptr(), tasks.data(), bytes, cudaMemcpyHostToDevice, stream));
  run_steps(tasks, [&](Step step, int i_panel, int count, int most) {
    launch_step(static_cast<const Task<T>*>(table.const_data_ptr()), count, step, i_panel, most, stream);
  });
}

void householder_cuda(const std::vector<Tensor>& vs, const std::vector<Tensor>& qs, const std::vector<Tensor>& ts) {
  if (vs.empty()) return;
  const int device = vs[0].device().index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* current = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
  const auto stream = static_cast<cudaStream_t>(current);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  STD_CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
  STD_TORCH_CHECK(capture == cudaStreamCaptureStatusNone,
                  "orthogonalize: cannot be captured in a CUDA graph, because it copies tables of matrices from memory "
                  "of the host that is freed before the graph runs: call it before the capture");
  run(tasks_of<float>(vs, qs, ts), device, stream);
  run(tasks_of<double>(vs, qs, ts), device, stream);
}

}  // namespace
}  // namespace nasfast::cuda

STABLE_TORCH_LIBRARY_IMPL(nasfast, CUDA, m) { m.impl("householder", TORCH_BOX(&nasfast::cuda::householder_cuda)); }
