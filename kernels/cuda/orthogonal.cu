// The kernel of orthogonalize. csrc/orthogonal/householder.h has the work of a block of threads.

#include "orthogonal.h"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace nasfast::cuda {
namespace {

using namespace orthogonal;

// Blocks on one multiprocessor that the compiler reserves registers for; a double takes two registers.
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
__global__ void __launch_bounds__(kThreads, kBlocksPerSm<T>) step_kernel(const Task<T>* tasks, Step step, int i_panel) {
  __shared__ __align__(16) T shared[kShared];
  const Task<T> task = tasks[blockIdx.x];  // a copy: the compiler need not read it again after each store
  const int tile = static_cast<int>(blockIdx.y);
  if (tile < tiles(task, step, i_panel)) run_step(ThreadBlock{}, task, step, i_panel, tile, shared);
}

}  // namespace

template <typename T>
void launch_step(const Task<T>* tasks, int count, Step step, int i_panel, int most, CUstream_st* stream) {
  step_kernel<T><<<dim3(count, most), kThreads, 0, stream>>>(tasks, step, i_panel);
  if (const cudaError_t status = cudaGetLastError(); status != cudaSuccess) {
    throw std::runtime_error(std::string("orthogonalize: ") + cudaGetErrorString(status));
  }
}

template void launch_step(const Task<float>*, int, Step, int, int, CUstream_st*);
template void launch_step(const Task<double>*, int, Step, int, int, CUstream_st*);

}  // namespace nasfast::cuda
