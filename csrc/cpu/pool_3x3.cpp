// Launchers of pool_3x3 on the CPU and their registration.

#include "pool_3x3.h"

#include <torch/csrc/stable/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "launch.h"

namespace nasfast::cpu {

namespace {

// Refuses what would corrupt memory. nasfast/ops/checks.py checks the same before, with explanations for the user.
void check_map(const char* name, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.dim() == 4 && is_channels_last(tensor), "pool_3x3: ", name, " must be 4-d and channels_last");
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float || tensor.scalar_type() == ScalarType::BFloat16,
                  "pool_3x3: ", name, " must be float32 or bfloat16");
}

struct Pooling {
  Pool3x3Params params{};
  int64_t batch;

  Pooling(ScalarType type, const std::vector<int64_t>& shape, const std::string& kind, int64_t stride) {
    STD_TORCH_CHECK(kind == "max" || kind == "avg", "pool_3x3: kind must be max or avg, got ", kind);
    STD_TORCH_CHECK(stride == 1 || stride == 2, "pool_3x3: stride must be 1 or 2, got ", stride);
    STD_TORCH_CHECK(shape.size() == 4, "pool_3x3: the shape must have 4 dimensions, got ", shape.size());
    for (int64_t size : shape) STD_TORCH_CHECK(size > 0, "pool_3x3: the input must not be empty");
    batch = shape[0];
    params.bfloat16 = type == ScalarType::BFloat16;
    params.max = kind == "max";
    params.stride = stride;
    params.channels = shape[1];
    params.height = shape[2];
    params.width = shape[3];
    params.out_height = (shape[2] - 1) / stride + 1;
    params.out_width = (shape[3] - 1) / stride + 1;
  }

  std::vector<int64_t> result_shape() const { return {batch, params.channels, params.out_height, params.out_width}; }

  template <typename Phase>
  void run(const Phase& phase, int64_t height, int64_t width) {
    const Strips strips(batch, height);
    params.strips = strips.strips;
    params.strip_rows = strips.strip_rows;
    run_items(batch * strips.strips, strips.strip_rows * width * params.channels,
              [&](int64_t begin, int64_t end) { phase(params, begin, end); });
  }
};

std::tuple<Tensor, Tensor> pool_3x3_fwd_cpu(const Tensor& x, std::string kind, int64_t stride, bool keep) {
  check_map("x", x);
  Pooling work(x.scalar_type(), {x.size(0), x.size(1), x.size(2), x.size(3)}, kind, stride);
  Tensor y = channels_last_empty(work.result_shape(), x.scalar_type());
  Tensor index = keep && work.params.max ? channels_last_empty(work.result_shape(), ScalarType::Byte)
                                         : empty_vector(x, 0, ScalarType::Byte);
  work.params.x = x.const_data_ptr();
  work.params.y = y.mutable_data_ptr();
  if (index.numel() > 0) work.params.index = static_cast<uint8_t*>(index.mutable_data_ptr());
  work.run(kernels().pool_3x3.fwd, work.params.out_height, work.params.out_width);
  return {y, index};
}

Tensor pool_3x3_bwd_cpu(const Tensor& grad, const Tensor& index, std::vector<int64_t> shape, std::string kind,
                        int64_t stride) {
  check_map("grad", grad);
  Pooling work(grad.scalar_type(), shape, kind, stride);
  const std::vector<int64_t> expected = work.result_shape();
  for (int64_t dim = 0; dim < 4; ++dim) {
    STD_TORCH_CHECK(grad.size(dim) == expected[dim], "pool_3x3: grad must have the shape of the result");
  }
  if (work.params.max) {
    bool same = index.dim() == 4 && index.scalar_type() == ScalarType::Byte && is_channels_last(index);
    for (int64_t dim = 0; same && dim < 4; ++dim) same = index.size(dim) == grad.size(dim);
    STD_TORCH_CHECK(same, "pool_3x3: index must be the one that forward returned");
    work.params.index = static_cast<uint8_t*>(const_cast<void*>(index.const_data_ptr()));
  }
  Tensor dx = channels_last_empty(shape, grad.scalar_type());
  work.params.grad = grad.const_data_ptr();
  work.params.dx = dx.mutable_data_ptr();
  work.run(kernels().pool_3x3.bwd, work.params.height, work.params.width);
  return dx;
}

}  // namespace
}  // namespace nasfast::cpu

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) {
  m.impl("pool_3x3_fwd", TORCH_BOX(&nasfast::cpu::pool_3x3_fwd_cpu));
  m.impl("pool_3x3_bwd", TORCH_BOX(&nasfast::cpu::pool_3x3_bwd_cpu));
}
