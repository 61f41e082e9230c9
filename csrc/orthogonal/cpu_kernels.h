// The interface between the launcher of orthogonalize on the CPU (cpu.cpp) and its kernels (cpu_kernels.cpp, compiled
// once per instruction set). The kernels do tiny matrices, one in each lane of a vector.
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

struct OrthogonalKernels {
  TinyPhase tiny_float;
  TinyPhase tiny_double;
};

}  // namespace nasfast::cpu
