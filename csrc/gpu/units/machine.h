// The machine for which a unit compiles its kernels.
#pragma once

#ifdef __CUDACC__
#include "../../../kernels/cuda/gpu.h"
#else
#include "../emulation.h"
#endif

namespace nasfast::gpu {

#ifdef __CUDACC__
using Machine = Gpu;
#else
using Machine = Emulation;
#endif

}  // namespace nasfast::gpu
