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

const std::string kOp = "pool_3x3";

struct Pooling {
  Pool3x3Params params{};
  int64_t batch;

  Pooling(ScalarType type, const std::vector<int64_t>& shape, const std::string& kind, int64_t stride) {
    check_image_type(kOp, type);
    STD_TORCH_CHECK(kind == "max" || kind == "avg", kOp, ": kind must be max or avg, got ", kind);
    STD_TORCH_CHECK(stride == 1 || stride == 2, kOp, ": stride must be 1 or 2, got ", stride);
    STD_TORCH_CHECK(shape.size() == 4, kOp, ": the shape must have 4 dimensions, got ", shape.size());
    for (int64_t size : shape) STD_TORCH_CHECK(size > 0, kOp, ": the input must not be empty");
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
  Pooling work(x.scalar_type(), sizes_of(x), kind, stride);
  check_image(kOp, "x", x, sizes_of(x), x.scalar_type());
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
  Pooling work(grad.scalar_type(), shape, kind, stride);
  check_image(kOp, "grad", grad, work.result_shape(), grad.scalar_type());
  if (work.params.max) {
    check_image(kOp, "index", index, work.result_shape(), ScalarType::Byte);
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
