// Launches of orthogonalize on the GPU. csrc/orthogonal/blocks.h has the work of a block of threads, plan.h the
// division of the matrices among blocks.

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include "../../csrc/orthogonal/plan.h"

namespace nasfast::cuda {
namespace {

using namespace orthogonal;

// Blocks of kThreads threads on one multiprocessor that the compiler reserves registers for; a double takes two
// registers.
template <typename T>
constexpr int kBlocksPerSm = sizeof(T) == sizeof(float) ? 2 : 1;

struct ThreadBlock {
  template <typename F>
  __device__ __forceinline__ void each(const F& f) const {
    f(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
};

template <typename T>
__device__ T* shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return reinterpret_cast<T*>(memory);
}

template <typename T>
__global__ void __launch_bounds__(kTinyThreads) tiny_kernel(const TinyTask<T>* tasks) {
  run_tiny(ThreadBlock{}, tasks[blockIdx.x], shared_memory<T>());
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<T>) matrix_kernel(const Task<T>* tasks, int resident_rows) {
  const Task<T> task = tasks[blockIdx.x];  // a copy: the compiler need not read it again after each store
  run_matrix(ThreadBlock{}, task, resident_rows, shared_memory<T>());
}

template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<T>)
    step_kernel(const Task<T>* tasks, Step step, int i_panel, int resident_rows) {
  const Task<T> task = tasks[blockIdx.x];
  const int tile = static_cast<int>(blockIdx.y);
  if (tile >= tiles(task, step, i_panel)) return;
  run_step(ThreadBlock{}, task, step, i_panel, tile, resident_rows, shared_memory<T>());
}

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
  SharedMemory shared_memory(const void* kernel, int rows) const {
    int limit = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    // always the same value, because another thread of the host may set it between this call and the launch
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit));
    return SharedMemory(rows, sizeof(T), limit);
  }

  template <typename T>
  void tiny(const std::vector<TinyTask<T>>& tasks) const {
    if (tasks.empty()) return;
    const Tensor table = upload(tasks);
    tiny_kernel<T><<<tasks.size(), kTinyThreads, kTinyShared * sizeof(T), stream>>>(
        static_cast<const TinyTask<T>*>(table.const_data_ptr()));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  // Does every matrix by one block.
  template <typename T>
  void whole(const std::vector<Task<T>>& tasks) const {
    if (tasks.empty()) return;
    const auto shared = shared_memory<T>(reinterpret_cast<const void*>(&matrix_kernel<T>), Plan<T>::rows(tasks));
    const Tensor table = upload(tasks);
    matrix_kernel<T><<<tasks.size(), kThreads, shared.bytes, stream>>>(
        static_cast<const Task<T>*>(table.const_data_ptr()), shared.resident_rows);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  // Does all matrices together, with one launch for every panel and step.
  template <typename T>
  void in_step(const std::vector<Task<T>>& tasks, int panels) const {
    if (tasks.empty()) return;
    const auto shared = shared_memory<T>(reinterpret_cast<const void*>(&step_kernel<T>), Plan<T>::rows(tasks));
    const size_t tile_bytes = kTileScratch * sizeof(T);
    const Tensor table = upload(tasks);
    for (int i = 0; i < step_count(panels); ++i) {
      const PanelStep now = step_at(panels, i);
      int most = 0;
      for (const Task<T>& task : tasks) most = std::max(most, tiles(task, now.step, now.i_panel));
      if (most == 0) continue;
      const dim3 grid(tasks.size(), most);
      step_kernel<T><<<grid, kThreads, now.step == Step::kFactor ? shared.bytes : tile_bytes, stream>>>(
          static_cast<const Task<T>*>(table.const_data_ptr()), now.step, now.i_panel, shared.resident_rows);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
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
