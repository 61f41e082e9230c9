// gaussians and householder on a GPU. csrc/orthogonal has the work of a team of threads and the order of launches.

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include "../../csrc/orthogonal/tasks.h"

namespace nasfast::cuda {
namespace {

using namespace orthogonal;

template <int threads, int columns>
struct Team {
  static constexpr int kThreads = threads, kColumns = columns, kTile = columns * kPanel;

  template <typename F>
  __device__ __forceinline__ void each(const F& f) const {
    f(static_cast<int>(threadIdx.x) % kThreads);
    wait();
  }
  template <typename T, typename F, typename G>
  __device__ __forceinline__ void each_sum(const F& f, const G& g) const {
    const int thread = static_cast<int>(threadIdx.x) % kThreads;
    Quad<T> sum{};
    f(thread, sum);
    NASFAST_UNROLL for (int offset = kQuads; offset < 32; offset *= 2) {
      NASFAST_UNROLL for (int c = 0; c < kQuad; ++c) sum.of[c] += __shfl_xor_sync(~0u, sum.of[c], offset);
    }
    if (thread % 32 < kQuads) g(thread, sum);
    wait();
  }
  __device__ __forceinline__ void wait() const {
    if constexpr (kThreads == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
};

using Warp = Team<32, kWarpColumns>;
template <typename T>
using Block = Team<kBlockThreads, kBlockColumns<T>>;
constexpr int kWarps = 4;  // of a block, each with a matrix of its own

template <typename T>
__device__ T* shared_memory() {
  extern __shared__ __align__(16) unsigned char shared[];
  return reinterpret_cast<T*>(shared);
}

__global__ void __launch_bounds__(kBlockThreads) draw_kernel(const Draw* draws) {
  __shared__ DrawMemory memory;
  run(Block<float>{}, draws[blockIdx.x], memory);
}

template <typename T>
__global__ void __launch_bounds__(kWarps * 32, 16 / sizeof(T))
    small_kernel(const Task<T>* batches, const Item* items, int count, int64_t elements) {
  const int warp = static_cast<int>(threadIdx.x) / 32, i_item = static_cast<int>(blockIdx.x) * kWarps + warp;
  if (i_item >= count) return;
  const Item item = items[i_item];
  run_steps(Warp{}, batches[item.i_batch].at(item.n), shared_memory<T>() + warp * elements);
}

template <typename T>
__global__ void __launch_bounds__(kBlockThreads, 2)
    step_kernel(const Task<T>* batches, const Item* items, Step step, int64_t limit) {
  const Item item = items[blockIdx.x];
  const Task<T> task = batches[item.i_batch].at(item.n);  // a copy: the compiler need not read it after each store
  const int tile = static_cast<int>(blockIdx.y);
  if (tile < tiles<T, Block<T>>(task, step)) run_tile(Block<T>{}, task, step, tile, limit, shared_memory<T>());
}

// Launches a kernel with so many bytes of shared memory on the current stream of a device.
class Launcher {
 public:
  explicit Launcher(const Tensor& like) : device_(like.device()), guard_(device_.index()) {
    void* current = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_.index(), &current));
    stream_ = static_cast<cudaStream_t>(current);
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    STD_CUDA_CHECK(cudaStreamIsCapturing(stream_, &capture));
    STD_TORCH_CHECK(
        capture == cudaStreamCaptureStatusNone,
        "orthogonalize: cannot be captured in a CUDA graph, because it copies tables of matrices from memory "
        "of the host that is freed before the graph runs: call it before the capture");
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_.index()));
  }

  // A copy on the device, which lives as long as this. From pageable memory, the call of CUDA returns only when the
  // copy no longer needs the memory of the host.
  template <typename Row>
  const Row* table(const std::vector<Row>& rows) {
    const size_t bytes = rows.size() * sizeof(Row);
    tables_.push_back(torch::stable::empty({static_cast<int64_t>(bytes)}, ScalarType::Byte, std::nullopt, device_));
    void* const memory = tables_.back().mutable_data_ptr();
    STD_CUDA_CHECK(cudaMemcpyAsync(memory, rows.data(), bytes, cudaMemcpyHostToDevice, stream_));
    return static_cast<const Row*>(memory);
  }

  template <typename... Parameters, typename... Arguments>
  void operator()(void (*kernel)(Parameters...), dim3 blocks, int threads, int64_t bytes,
                  Arguments... arguments) const {
    if (bytes > 0) {  // always the most, so that threads which launch the same kernel do not take it from each other
      STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    }
    kernel<<<blocks, threads, static_cast<size_t>(bytes), stream_>>>(arguments...);
    STD_CUDA_CHECK(cudaGetLastError());
  }

  int shared_bytes = 0;  // that a block can have

 private:
  torch::stable::Device device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
  Tensors tables_;
};

void gaussians_cuda(const Tensors& zs, const std::vector<int64_t>& seeds) {
  if (zs.empty()) return;
  Launcher launch(zs[0]);
  const std::vector<Draw> draws = draws_of(zs, seeds);
  launch(draw_kernel, static_cast<int>(draws.size()), kBlockThreads, 0, launch.table(draws));
}

template <typename T>
void run(const Operands& operands, Launcher& launch) {
  const Work<T> work = work_of<T, Warp>(operands);
  if (work.batches.empty()) return;
  const Task<T>* const batches = launch.table(work.batches);
  if (!work.small.empty()) {
    const int count = static_cast<int>(work.small.size());
    launch(small_kernel<T>, (count + kWarps - 1) / kWarps, kWarps * 32, kWarps * work.small_elements * sizeof(T),
           batches, launch.table(work.small), count, work.small_elements);
  }
  if (work.large.empty()) return;
  const Item* const items = launch.table(work.large);
  const int64_t limit = launch.shared_bytes / sizeof(T);
  run_launches<T, Block<T>>(work, limit, [&](Step step, int count, int most, int64_t elements) {
    launch(step_kernel<T>, dim3(count, most), kBlockThreads, elements * sizeof(T), batches, items, step, limit);
  });
}

void householder_cuda(const Tensors& z, const Tensors& q, const Tensors& v, const std::vector<double>& scales) {
  const Operands operands{z, q, v, scales};
  operands.check();
  if (z.empty()) return;
  Launcher launch(z[0]);
  run<float>(operands, launch);
  run<double>(operands, launch);
}

}  // namespace
}  // namespace nasfast::cuda

STABLE_TORCH_LIBRARY_IMPL(nasfast, CUDA, m) {
  m.impl("gaussians", TORCH_BOX(&nasfast::cuda::gaussians_cuda));
  m.impl("householder", TORCH_BOX(&nasfast::cuda::householder_cuda));
}
