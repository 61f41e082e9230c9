// The interface between the launchers of orthogonalize and fill_orthogonal on the CPU (cpu.cpp) and their kernels
// (cpu_kernels.cpp, compiled once per instruction set). The kernels do tiny matrices, one in each lane of a vector, and
// draw Gaussian numbers.
#pragma once

#include <cstdint>

namespace nasfast::cpu {

// Matrices of one shape, one after the other in memory. rows and columns are those of the tall form.
struct TinyParams {
  const void* in;
  void* out;
  int rows, columns;
  bool wide;
};

using TinyPhase = void (*)(const TinyParams&, int64_t begin, int64_t end);

// Draws what torch.randn(count, dtype=torch.float64) draws from a CPU generator with this seed, up to rounding.
using Gaussians = void (*)(uint32_t seed, double* to, int64_t count);

// Writes scale times `from` as float or double.
using StoreScaled = void (*)(const double* from, double scale, void* to, int64_t count);

struct OrthogonalKernels {
  TinyPhase tiny_float;
  TinyPhase tiny_double;
  Gaussians gaussians;
  StoreScaled store_float;
  StoreScaled store_double;
};

}  // namespace nasfast::cpu
