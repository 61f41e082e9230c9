// The kernels of orthogonalize. csrc/orthogonal has the work of a team of threads.

#include "orthogonal.h"

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace nasfast::cuda {
namespace {

using namespace orthogonal;

constexpr int kWarps = 4;  // of a block, each with a matrix of its own

template <typename T>
__device__ T* shared_memory() {
  extern __shared__ __align__(16) unsigned char shared[];
  return reinterpret_cast<T*>(shared);
}

template <typename T>
__global__ void __launch_bounds__(kBlockThreads) draw_kernel(const Draw<T>* draws) {
  __shared__ DrawMemory memory;
  run(Block<T>{}, draws[blockIdx.x], memory);
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
    step_kernel(const Task<T>* batches, const Item* items, Step step, int i_panel, int64_t limit) {
  const Item item = items[blockIdx.x];
  const Task<T> task = batches[item.i_batch].at(item.n);  // a copy: the compiler need not read it after each store
  const int tile = static_cast<int>(blockIdx.y);
  if (tile >= tiles(task, step, i_panel, Block<T>::kSlots)) return;
  run_step(Block<T>{}, task, step, i_panel, tile, limit, shared_memory<T>());
}

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(std::string("orthogonalize: ") + cudaGetErrorString(status));
}

template <typename Kernel>
void allow(Kernel kernel, int64_t bytes) {
  constexpr int64_t kAlways = 48 * 1024;  // what a block gets without being asked for more
  if (bytes <= kAlways) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

}  // namespace

template <typename T>
int64_t shared_limit() {
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes / static_cast<int64_t>(sizeof(T));
}

template <typename T>
void launch_draws(const Draw<T>* draws, int count, CUstream_st* stream) {
  draw_kernel<T><<<count, kBlockThreads, 0, stream>>>(draws);
  check(cudaGetLastError());
}

template <typename T>
void launch_small(const Task<T>* batches, const Item* items, int count, int64_t elements, CUstream_st* stream) {
  const int64_t bytes = kWarps * elements * static_cast<int64_t>(sizeof(T));
  allow(small_kernel<T>, bytes);
  const int blocks = (count + kWarps - 1) / kWarps;
  small_kernel<T><<<blocks, kWarps * 32, static_cast<size_t>(bytes), stream>>>(batches, items, count, elements);
  check(cudaGetLastError());
}

template <typename T>
void launch_step(const Task<T>* batches, const Item* items, int count, Step step, int i_panel, int most, int64_t limit,
                 int64_t elements, CUstream_st* stream) {
  const int64_t bytes = elements * static_cast<int64_t>(sizeof(T));
  allow(step_kernel<T>, bytes);
  step_kernel<T>
      <<<dim3(count, most), kBlockThreads, static_cast<size_t>(bytes), stream>>>(batches, items, step, i_panel, limit);
  check(cudaGetLastError());
}

#define NASFAST_LAUNCHES(T)                                                            \
  template int64_t shared_limit<T>();                                                  \
  template void launch_draws(const Draw<T>*, int, CUstream_st*);                       \
  template void launch_small(const Task<T>*, const Item*, int, int64_t, CUstream_st*); \
  template void launch_step(const Task<T>*, const Item*, int, Step, int, int, int64_t, int64_t, CUstream_st*);
NASFAST_LAUNCHES(float)
NASFAST_LAUNCHES(double)

}  // namespace nasfast::cuda
