// How a kernel of csrc/gpu becomes a function of the GPU.
#pragma once

#include "../../csrc/gpu/portable.h"

namespace nasfast::gpu {

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    run_kernel(const __grid_constant__ typename Kernel::Args args) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Block block{static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y), static_cast<int>(gridDim.x),
                    static_cast<int>(gridDim.y)};
  Kernel::run(block, args, shared);
}

}  // namespace nasfast::gpu
