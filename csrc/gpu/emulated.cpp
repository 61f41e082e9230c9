// The CUDA kernels of conv_bn_act_chain for CPU tensors: their emulation on the host, slow, for tests on machines
// without a GPU.

#include "emulated.h"

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/Exception.h>

#include "chain.h"
#include "emulation.h"

namespace nasfast::gpu {
namespace {

// What chain.h asks of a machine, beside what the kernels ask.
struct Host : Emulation {
  void launched(const char*, const Geometry&) const {}
};

Host host;

int64_t counters_cpu(const Tensor&, std::vector<int64_t> plan) { return count_counters(plan, host); }

void forward_cpu(const Tensor& x, std::vector<Tensor> conv_weights, std::vector<Tensor> bn_weights,
                 std::vector<Tensor> bn_biases, std::optional<Tensor> added, Tensor y, Tensor saved, Tensor statistics,
                 Tensor counters, std::vector<int64_t> plan, std::vector<double> eps) {
  chain_forward(host, x, conv_weights, bn_weights, bn_biases, added, y, saved, statistics, counters, plan, eps);
}

void backward_cpu(const Tensor& grad, std::optional<Tensor> x, const Tensor& saved, const Tensor& statistics,
                  std::vector<Tensor> conv_weights, std::vector<Tensor> bn_weights, bool add_input,
                  std::optional<Tensor> dx, std::vector<Tensor> dweights, std::vector<Tensor> dbiases, Tensor counters,
                  std::vector<int64_t> plan, std::vector<double> eps) {
  chain_backward(host, grad, x, saved, statistics, conv_weights, bn_weights, add_input, dx, dweights, dbiases, counters,
                 plan, eps);
}

}  // namespace

void set_emulation(int multiprocessors, bool backwards, uint64_t block_order) {
  STD_TORCH_CHECK(multiprocessors > 0, "a GPU has multiprocessors, got ", multiprocessors);
  host.multiprocessors = multiprocessors;
  host.backwards = backwards;
  host.block_order = block_order;
}

}  // namespace nasfast::gpu

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) {
  m.impl("conv_bn_act_chain_gpu_counters", TORCH_BOX(&nasfast::gpu::counters_cpu));
  m.impl("conv_bn_act_chain_gpu_fwd", TORCH_BOX(&nasfast::gpu::forward_cpu));
  m.impl("conv_bn_act_chain_gpu_bwd", TORCH_BOX(&nasfast::gpu::backward_cpu));
}
