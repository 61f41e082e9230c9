// The kernels of orthogonalize. csrc/orthogonal/blocks.h has the work of a block of threads.

#include "orthogonal.h"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

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

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the next call would report it otherwise
  throw std::runtime_error(std::string("orthogonalize: ") + cudaGetErrorString(status));
}

// Lets the kernel have all shared memory of a block, and says how much of it matrices of `rows` rows need.
template <typename T>
SharedMemory shared_for(const void* kernel, int rows) {
  int device = 0, limit = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  // always the same value, because another thread of the host may set it between this call and the launch
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit));
  return SharedMemory(rows, sizeof(T), limit);
}

}  // namespace

template <typename T>
void launch_tiny(const TinyTask<T>* tasks, int count, Stream stream) {
  tiny_kernel<T><<<count, kTinyThreads, kTinyShared * sizeof(T), stream>>>(tasks);
  check(cudaGetLastError());
}

template <typename T>
void launch_whole(const Task<T>* tasks, int count, int rows, Stream stream) {
  const auto shared = shared_for<T>(reinterpret_cast<const void*>(&matrix_kernel<T>), rows);
  matrix_kernel<T><<<count, kThreads, shared.bytes, stream>>>(tasks, shared.resident_rows);
  check(cudaGetLastError());
}

template <typename T>
void launch_step(const Task<T>* tasks, int count, int rows, PanelStep now, int most, Stream stream) {
  const auto shared = shared_for<T>(reinterpret_cast<const void*>(&step_kernel<T>), rows);
  const size_t bytes = now.step == Step::kFactor ? shared.bytes : kTileScratch * sizeof(T);
  step_kernel<T><<<dim3(count, most), kThreads, bytes, stream>>>(tasks, now.step, now.i_panel, shared.resident_rows);
  check(cudaGetLastError());
}

template void launch_tiny(const TinyTask<float>*, int, Stream);
template void launch_tiny(const TinyTask<double>*, int, Stream);
template void launch_whole(const Task<float>*, int, int, Stream);
template void launch_whole(const Task<double>*, int, int, Stream);
template void launch_step(const Task<float>*, int, int, PanelStep, int, Stream);
template void launch_step(const Task<double>*, int, int, PanelStep, int, Stream);

}  // namespace nasfast::cuda
