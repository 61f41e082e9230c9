// The operators of conv_bn_act_chain on a GPU. csrc/gpu has the text of their kernels, gpu.h launches them.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>

#include "../../csrc/gpu/chain.h"
#include "gpu.h"

namespace nasfast::gpu {
namespace {

Gpu gpu_of(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.device().index(), &stream));
  return Gpu(x.device().index(), stream);
}

using Operators = ChainOperators<gpu_of>;

}  // namespace
}  // namespace nasfast::gpu

STABLE_TORCH_LIBRARY_IMPL(nasfast, CUDA, m) {
  m.impl("conv_bn_act_chain_gpu_counters", TORCH_BOX(&nasfast::gpu::Operators::counters));
  m.impl("conv_bn_act_chain_gpu_fwd", TORCH_BOX(&nasfast::gpu::Operators::forward));
  m.impl("conv_bn_act_chain_gpu_apply", TORCH_BOX(&nasfast::gpu::Operators::apply));
  m.impl("conv_bn_act_chain_gpu_reduce", TORCH_BOX(&nasfast::gpu::Operators::reduce));
  m.impl("conv_bn_act_chain_gpu_bwd", TORCH_BOX(&nasfast::gpu::Operators::backward));
}
