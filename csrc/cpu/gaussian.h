// The interface between the launcher of gaussian_ (gaussian.cpp) and its kernels (gaussian_kernels.cpp, compiled once per
// instruction set).
#pragma once

#include <cstdint>

namespace nasfast::cpu {

// Both fill z with what torch.randn draws in float64 from a CPU generator of this seed.
struct GaussianKernels {
  void (*fill_float)(float* z, int64_t count, uint32_t seed);
  void (*fill_double)(double* z, int64_t count, uint32_t seed);
};

}  // namespace nasfast::cpu
