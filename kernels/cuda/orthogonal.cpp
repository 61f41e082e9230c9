// gaussians and householder on the GPU: csrc/orthogonal/tasks.h has the order of launches, orthogonal.cu the kernels.

#include "orthogonal.h"

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include "../../csrc/orthogonal/tasks.h"

namespace nasfast::cuda {
namespace {

using namespace orthogonal;

// The current stream of a device, which is the current one meanwhile.
struct Current {
  torch::stable::accelerator::DeviceGuard guard;
  cudaStream_t stream;

  explicit Current(int device) : guard(device) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &current));
    stream = static_cast<cudaStream_t>(current);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    STD_CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
    STD_TORCH_CHECK(
        capture == cudaStreamCaptureStatusNone,
        "orthogonalize: cannot be captured in a CUDA graph, because it copies tables of matrices from memory "
        "of the host that is freed before the graph runs: call it before the capture");
  }
};

// A table on the device.
template <typename Row>
class Table {
 public:
  Table(const std::vector<Row>& rows, const torch::stable::Device& device, cudaStream_t stream)
      : memory_(torch::stable::empty({static_cast<int64_t>(rows.size() * sizeof(Row))}, ScalarType::Byte, std::nullopt,
                                     device)) {
    // The memory of the host may be freed afterwards: from pageable memory, the call returns only when the copy no
    // longer needs it.
    STD_CUDA_CHECK(cudaMemcpyAsync(memory_.mutable_data_ptr(), rows.data(), rows.size() * sizeof(Row),
                                   cudaMemcpyHostToDevice, stream));
  }
  const Row* rows() const { return static_cast<const Row*>(memory_.const_data_ptr()); }

 private:
  Tensor memory_;
};

template <typename T>
void draw(const std::vector<Tensor>& zs, const std::vector<int64_t>& seeds, cudaStream_t stream) {
  const std::vector<Draw<T>> draws = draws_of<T>(zs, seeds);
  if (draws.empty()) return;
  launch_draws(Table<Draw<T>>(draws, zs[0].device(), stream).rows(), static_cast<int>(draws.size()), stream);
}

void gaussians_cuda(const std::vector<Tensor>& zs, const std::vector<int64_t>& seeds) {
  if (zs.empty()) return;
  const Current current(zs[0].device().index());
  draw<float>(zs, seeds, current.stream);
  draw<double>(zs, seeds, current.stream);
}

template <typename T>
void run(const Given& given, cudaStream_t stream) {
  const Work<T> work = work_of<T, Warp>(given);
  if (work.batches.empty()) return;
  const torch::stable::Device device = given.z[0].device();
  const Table<Task<T>> batches(work.batches, device, stream);
  if (!work.small.empty()) {
    const Table<Item> items(work.small, device, stream);
    launch_small(batches.rows(), items.rows(), static_cast<int>(work.small.size()), work.small_elements, stream);
  }
  if (work.large.empty()) return;
  const Table<Item> items(work.large, device, stream);
  const int64_t limit = shared_limit<T>();
  run_launches<T, Block<T>>(work, limit, [&](Step step, int i_panel, int count, int most, int64_t elements) {
    launch_step(batches.rows(), items.rows(), count, step, i_panel, most, limit, elements, stream);
  });
}

void householder_cuda(const std::vector<Tensor>& z, const std::vector<Tensor>& q, const std::vector<Tensor>& v,
                      const std::vector<Tensor>& tau, const std::vector<double>& scales) {
  const Given given{z, q, v, tau, scales};
  check(given);
  if (z.empty()) return;
  const Current current(z[0].device().index());
  run<float>(given, current.stream);
  run<double>(given, current.stream);
}

}  // namespace
}  // namespace nasfast::cuda

STABLE_TORCH_LIBRARY_IMPL(nasfast, CUDA, m) {
  m.impl("gaussians", TORCH_BOX(&nasfast::cuda::gaussians_cuda));
  m.impl("householder", TORCH_BOX(&nasfast::cuda::householder_cuda));
}
