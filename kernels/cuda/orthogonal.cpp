// orthogonalize on the GPU: csrc/orthogonal/plan.h divides the matrices among blocks, orthogonal.cu has the kernels.

#include "orthogonal.h"

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include "../../csrc/orthogonal/plan.h"

namespace nasfast::cuda {
namespace {

using namespace orthogonal;

struct Launcher {
  int device;
  cudaStream_t stream;

  explicit Launcher(int device) : device(device) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
    stream = static_cast<cudaStream_t>(current);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    STD_CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
    STD_TORCH_CHECK(
        capture == cudaStreamCaptureStatusNone,
        "orthogonalize: cannot be captured in a CUDA graph, because it copies tables of matrices from memory of "
        "the host that is freed before the graph runs: call it before the capture");
  }

  Tensor empty(size_t size, ScalarType type) const {
    return torch::stable::empty({static_cast<int64_t>(size)}, type, std::nullopt,
                                torch::stable::Device(torch::headeronly::DeviceType::CUDA, device));
  }

  // Copies the tasks to the device. The memory of the host may be freed afterwards: from pageable memory, the call
  // returns only when the copy no longer needs it.
  template <typename Item>
  Tensor upload(const std::vector<Item>& items) const {
    Tensor table = empty(items.size() * sizeof(Item), ScalarType::Byte);
    STD_CUDA_CHECK(cudaMemcpyAsync(table.mutable_data_ptr(), items.data(), items.size() * sizeof(Item),
                                   cudaMemcpyHostToDevice, stream));
    return table;
  }

  template <typename T>
  void tiny(const std::vector<TinyTask<T>>& tasks) const {
    if (tasks.empty()) return;
    const Tensor table = upload(tasks);
    launch_tiny(static_cast<const TinyTask<T>*>(table.const_data_ptr()), static_cast<int>(tasks.size()), stream);
  }

  // Does every matrix by one block.
  template <typename T>
  void whole(const std::vector<Task<T>>& tasks) const {
    if (tasks.empty()) return;
    const Tensor table = upload(tasks);
    launch_whole(static_cast<const Task<T>*>(table.const_data_ptr()), static_cast<int>(tasks.size()),
                 Plan<T>::rows(tasks), stream);
  }

  // Does all matrices together, with one launch for every panel and step.
  template <typename T>
  void in_step(const std::vector<Task<T>>& tasks, int panels) const {
    if (tasks.empty()) return;
    const Tensor table = upload(tasks);
    for (int i = 0; i < step_count(panels); ++i) {
      const PanelStep now = step_at(panels, i);
      int most = 0;
      for (const Task<T>& task : tasks) most = std::max(most, tiles(task, now.step, now.i_panel));
      if (most == 0) continue;
      launch_step(static_cast<const Task<T>*>(table.const_data_ptr()), static_cast<int>(tasks.size()),
                  Plan<T>::rows(tasks), now, most, stream);
    }
  }

  template <typename T>
  void run(const std::vector<Matrices<T>>& all) const {
    Plan<T> plan(all);
    const Tensor workspace = empty(plan.workspace, scalar_type<T>());
    plan.place(static_cast<T*>(workspace.mutable_data_ptr()));
    in_step(plan.large, plan.most_panels());
    whole(plan.medium);
    whole(plan.small);
    tiny(plan.tiny);
  }
};

std::vector<Tensor> orthogonalize_cuda(const std::vector<Tensor>& matrices) {
  if (matrices.empty()) return {};
  const int device = matrices[0].device().index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Launcher launcher(device);
  Work work(matrices);
  launcher.run(work.of_type<float>());
  launcher.run(work.of_type<double>());
  return work.results;
}

}  // namespace
}  // namespace nasfast::cuda

STABLE_TORCH_LIBRARY_IMPL(nasfast, CUDA, m) { m.impl("orthogonalize", TORCH_BOX(&nasfast::cuda::orthogonalize_cuda)); }
