// nasfast._C: information about this build and this machine. Loading the module also registers the operators.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <torch/csrc/stable/ops.h>

#include <utility>

#include "cpu/isa.h"
#include "cpu/pool.h"

#ifdef NASFAST_EMULATION
#include "gpu/emulated.h"
#endif
#ifdef NASFAST_WITH_CUDA
#include "../kernels/cuda/device_info.h"
#endif
#ifdef NASFAST_CUDA_OPERATORS
#include "../kernels/cuda/gpu.h"
#endif

namespace py = pybind11;

namespace {

py::dict build_info() {
  py::dict info;
  info["compiler"] = NASFAST_COMPILER;
  info["flags"] = NASFAST_FLAGS;
  info["torch_version"] = NASFAST_TORCH_VERSION;
  info["torch_target"] = NASFAST_TORCH_TARGET;
  info["isas"] = nasfast::cpu::compiled_isas();
#ifdef NASFAST_WITH_CUDA
  info["cuda"] = true;
  info["cuda_version"] = NASFAST_CUDA_VERSION;
  info["cuda_archs"] = NASFAST_CUDA_ARCHS;
#else
  info["cuda"] = false;
  info["cuda_version"] = py::none();
  info["cuda_archs"] = py::none();
#endif
#ifdef NASFAST_CUDA_OPERATORS
  info["cuda_operators"] = true;
#else
  info["cuda_operators"] = false;
#endif
  return info;
}

py::dict cuda_device_info([[maybe_unused]] int device) {
  py::dict result;
#ifdef NASFAST_WITH_CUDA
  const auto info = nasfast::cuda::device_info(device);
  result["count"] = info.count;
  result["kernels_run"] = info.kernels_run;
  result["binary_version"] = info.binary_version;
  result["ptx_version"] = info.ptx_version;
  result["old_driver"] = info.old_driver;
  result["error"] = info.error;
#else
  result["count"] = 0;
  result["kernels_run"] = false;
  result["binary_version"] = 0;
  result["ptx_version"] = 0;
  result["old_driver"] = false;
  result["error"] = "built without CUDA";
#endif
  return result;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("build_info", &build_info);
  m.def("isa", [] { return nasfast::cpu::isa_name(nasfast::cpu::current_isa()); });
  m.def("usable_isas", &nasfast::cpu::usable_isas);
  m.def("empty_cache", &nasfast::cpu::pool_empty_cache);
  m.def("poison_pool", &nasfast::cpu::pool_poison);
  m.def("pool_bytes", [] {
    const auto use = nasfast::cpu::pool_use();
    return std::make_pair(use.used, use.reached);
  });
  m.def("num_threads", [] { return torch::stable::get_num_threads(); });
  m.def("cuda_device_info", &cuda_device_info, py::arg("device") = 0);
#ifdef NASFAST_CUDA_OPERATORS
  m.def("set_early_launches", &nasfast::gpu::set_early_launches);
#endif
#ifdef NASFAST_EMULATION
  m.def("set_emulation", &nasfast::gpu::set_emulation, py::arg("multiprocessors") = 2, py::arg("backwards") = false,
        py::arg("block_order") = 0, py::arg("shared_memory") = 99);
#endif
}
