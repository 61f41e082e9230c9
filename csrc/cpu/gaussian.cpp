// Launcher of gaussian_ on the CPU and its registration.

#include "gaussian.h"

#include <torch/csrc/stable/library.h>

#include "kernels.h"
#include "launch.h"

namespace nasfast::cpu {
namespace {

void gaussian_cpu(const Tensor& z, int64_t seed) {
  STD_TORCH_CHECK(z.is_contiguous(), "gaussian_: z must be contiguous");
  const auto start = static_cast<uint32_t>(seed);
  if (z.scalar_type() == ScalarType::Double) {
    kernels().gaussian.fill_double(static_cast<double*>(z.mutable_data_ptr()), z.numel(), start);
  } else {
    STD_TORCH_CHECK(z.scalar_type() == ScalarType::Float, "gaussian_: z must be float32 or float64");
    kernels().gaussian.fill_float(static_cast<float*>(z.mutable_data_ptr()), z.numel(), start);
  }
}

}  // namespace
}  // namespace nasfast::cpu

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) { m.impl("gaussian_", TORCH_BOX(&nasfast::cpu::gaussian_cpu)); }
