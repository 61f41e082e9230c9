// nasfast._emulation: the CUDA kernels for CPU tensors, by their emulation on the host, slow, for tests on machines
// without a GPU. Loading the module registers their operators.

#include <pybind11/pybind11.h>

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include "chain.h"
#include "emulation.h"

namespace nasfast::gpu {
namespace {

Emulation host;

const Emulation& host_of(const Tensor&) { return host; }

using Operators = ChainOperators<host_of>;

// For all launches from now on; see Emulation. Results must depend on multiprocessors and shared_memory alone, which is
// that of a block in KiB.
void set_emulation(int multiprocessors, bool backwards, uint64_t block_order, int shared_memory) {
  STD_TORCH_CHECK(multiprocessors > 0, "a GPU has multiprocessors, got ", multiprocessors);
  STD_TORCH_CHECK(shared_memory >= 48, "a block has at least 48 KiB of shared memory, got ", shared_memory);
  host.shared_memory = static_cast<size_t>(shared_memory) * 1024 - kReserved;
  host.multiprocessors = multiprocessors;
  host.backwards = backwards;
  host.block_order = block_order;
}

}  // namespace
}  // namespace nasfast::gpu

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) {
  m.impl("conv_bn_act_chain_gpu_counters", TORCH_BOX(&nasfast::gpu::Operators::counters));
  m.impl("conv_bn_act_chain_gpu_fwd", TORCH_BOX(&nasfast::gpu::Operators::forward));
  m.impl("conv_bn_act_chain_gpu_apply", TORCH_BOX(&nasfast::gpu::Operators::apply));
  m.impl("conv_bn_act_chain_gpu_reduce", TORCH_BOX(&nasfast::gpu::Operators::reduce));
  m.impl("conv_bn_act_chain_gpu_bwd", TORCH_BOX(&nasfast::gpu::Operators::backward));
}

PYBIND11_MODULE(_emulation, m) {
  namespace py = pybind11;
  m.def("set_emulation", &nasfast::gpu::set_emulation, py::arg("multiprocessors") = 2, py::arg("backwards") = false,
        py::arg("block_order") = 0, py::arg("shared_memory") = 99);
}
