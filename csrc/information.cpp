// Operators without tensors: what this build is and how it runs here. nasfast/ops/_native.py names their results.

#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "cpu/isa.h"
#include "cpu/pool.h"

#ifdef NASFAST_WITH_CUDA
#include "../kernels/cuda/device_info.h"
#endif

namespace nasfast {
namespace {

std::vector<std::string> build_info() {
#ifdef NASFAST_WITH_CUDA
  const std::string version = NASFAST_CUDA_VERSION, archs = NASFAST_CUDA_ARCHS;
#else
  const std::string version, archs;
#endif
  return {NASFAST_COMPILER, NASFAST_FLAGS, NASFAST_TORCH_VERSION, NASFAST_TORCH_TARGET, version, archs};
}

bool has_cuda_operators() {
#ifdef NASFAST_CUDA_OPERATORS
  return true;
#else
  return false;
#endif
}

std::tuple<bool, int64_t, int64_t, bool, std::string> cuda_device_info([[maybe_unused]] int64_t device) {
#ifdef NASFAST_WITH_CUDA
  const auto info = cuda::device_info(static_cast<int>(device));
  return {info.kernels_run, info.binary_version, info.ptx_version, info.old_driver, info.error};
#else
  return {false, 0, 0, false, "built without CUDA"};
#endif
}

std::string isa() { return cpu::isa_name(cpu::current_isa()); }

std::tuple<int64_t, int64_t> pool_bytes() {
  const auto use = cpu::pool_use();
  return {use.used, use.reached};
}

}  // namespace
}  // namespace nasfast

STABLE_TORCH_LIBRARY_FRAGMENT(nasfast, m) {
  m.def("build_info() -> str[]");
  m.def("has_cuda_operators() -> bool");
  m.def("compiled_isas() -> str[]");
  m.def("usable_isas() -> str[]");
  m.def("isa() -> str");
  m.def("cuda_device_info(int device) -> (bool, int, int, bool, str)");
  m.def("empty_cache() -> ()");
  m.def("poison_pool(bool on) -> ()");
  m.def("pool_bytes() -> (int used, int reached)");
}

STABLE_TORCH_LIBRARY_IMPL(nasfast, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&nasfast::build_info));
  m.impl("has_cuda_operators", TORCH_BOX(&nasfast::has_cuda_operators));
  m.impl("compiled_isas", TORCH_BOX(&nasfast::cpu::compiled_isas));
  m.impl("usable_isas", TORCH_BOX(&nasfast::cpu::usable_isas));
  m.impl("isa", TORCH_BOX(&nasfast::isa));
  m.impl("cuda_device_info", TORCH_BOX(&nasfast::cuda_device_info));
  m.impl("empty_cache", TORCH_BOX(&nasfast::cpu::pool_empty_cache));
  m.impl("poison_pool", TORCH_BOX(&nasfast::cpu::pool_poison));
  m.impl("pool_bytes", TORCH_BOX(&nasfast::pool_bytes));
}
