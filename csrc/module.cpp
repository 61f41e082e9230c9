// nasfast._C: information about this build and this machine. Loading the module also registers the operators.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <torch/csrc/stable/ops.h>

#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

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

// The two functions below read the state that nasfast/fusion compares before every fused chain. Between the convolutions
// of a model most of it is in no cache. Their reads do not depend on one another, so that the processor waits for many
// of them at once.

// What is in memory at these places, each given by an address and a number of bytes of 64 bits.
py::bytes memory_at(const py::bytes& places) {
  struct Place {
    uint64_t address, size;
  };
  const auto given = std::string_view(places);
  if (given.size() % sizeof(Place) != 0) throw py::value_error("memory_at: places are pairs of numbers of 64 bits");
  std::vector<Place> all(given.size() / sizeof(Place));
  if (!all.empty()) std::memcpy(all.data(), given.data(), given.size());
  size_t bytes = 0;
  for (const auto& place : all) bytes += place.size;
  auto result = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, bytes));
  if (!result) throw py::error_already_set();
  char* to = PyBytes_AS_STRING(result.ptr());
  for (const auto& place : all) {
    std::memcpy(to, reinterpret_cast<const void*>(place.address), place.size);
    to += place.size;
  }
  return result;
}

#if PY_VERSION_HEX < 0x030D0000

// The version of every dictionary, which changes with each change of it, and the type of every object.
py::bytes versions(const py::list& dictionaries, const py::list& objects) {
  const auto n = dictionaries.size(), m = objects.size();
  auto result = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, (n + m) * sizeof(uint64_t)));
  if (!result) throw py::error_already_set();
  char* to = PyBytes_AS_STRING(result.ptr());
  const auto put = [&to](uint64_t value) {
    std::memcpy(to, &value, sizeof value);
    to += sizeof value;
  };
  for (size_t i = 0; i < n; ++i) {
    PyObject* dictionary = PyList_GET_ITEM(dictionaries.ptr(), i);
    if (!PyDict_Check(dictionary)) throw py::type_error("versions: the first list has dictionaries only");
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"  // since Python 3.12, which still has it
    put(reinterpret_cast<PyDictObject*>(dictionary)->ma_version_tag);
#pragma GCC diagnostic pop
  }
  for (size_t i = 0; i < m; ++i) put(reinterpret_cast<uint64_t>(Py_TYPE(PyList_GET_ITEM(objects.ptr(), i))));
  return result;
}

#endif

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
  m.def("memory_at", &memory_at);
#if PY_VERSION_HEX < 0x030D0000
  m.def("versions", &versions);
#endif
#ifdef NASFAST_EMULATION
  m.def("set_emulation", &nasfast::gpu::set_emulation, py::arg("multiprocessors") = 2, py::arg("backwards") = false,
        py::arg("block_order") = 0, py::arg("shared_memory") = 99);
#endif
}
