// Launchers of depthwise_conv2d on the CPU and their registration.

#include "depthwise_conv2d.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "launch.h"

namespace nasfast::cpu {

namespace {

// Most partial sums of the weight gradient: so few that their memory is small beside the tensors.
constexpr int64_t kMaxSums = 32;

const std::string kOp = "depthwise_conv2d";

struct Convolution {
  DepthwiseConv2dParams params{};
  ScalarType type;
  std::vector<int64_t> shape, result_shape;
  const float* filter;
  bool subsamples;  // only every second pixel of x is read

  Convolution(const std::vector<int64_t>& shape, ScalarType type, const Tensor& weight, int64_t stride,
              int64_t dilation)
      : type(type), shape(shape) {
    check_image_type(kOp, type);
    STD_TORCH_CHECK(shape.size() == 4, kOp, ": x must be 4-d");
    for (int64_t size : shape) STD_TORCH_CHECK(size > 0, kOp, ": x must not be empty");
    STD_TORCH_CHECK((stride == 1 || stride == 2) && (dilation == 1 || dilation == 2), kOp,
                    ": stride and dilation must be 1 or 2");
    const int64_t kernel = weight.dim() == 4 ? weight.size(2) : 0;
    STD_TORCH_CHECK((kernel == 3 || kernel == 5 || kernel == 7) && weight.size(3) == kernel &&
                        weight.size(0) == shape[1] && weight.size(1) == 1 && weight.is_contiguous() &&
                        weight.scalar_type() == ScalarType::Float,
                    kOp, ": weight must be a contiguous float32 (C, 1, k, k), k 3, 5 or 7");
    filter = float_data(weight);
    subsamples = stride == 2 && dilation == 2;
    params.bfloat16 = type == ScalarType::BFloat16;
    params.batch = shape[0];
    params.channels = shape[1];
    params.kernel = kernel;
    params.stride = subsamples ? 1 : stride;
    params.dilation = subsamples ? 1 : dilation;
    params.images = std::min(params.batch, std::max<int64_t>(1, kernels().depthwise_conv2d.lanes / params.channels));
    result_shape = {shape[0], shape[1], (shape[2] - 1) / stride + 1, (shape[3] - 1) / stride + 1};
  }

  PixelGrid grid(const void* data, const std::vector<int64_t>& of, int64_t every) const {
    const int64_t row = of[3] * of[1];
    return {const_cast<void*>(data),
            (of[2] - 1) / every + 1,
            (of[3] - 1) / every + 1,
            every * of[1],
            every * row,
            of[2] * row};
  }
  void set_x(const void* data) { params.x = grid(data, shape, subsamples ? 2 : 1); }
  void set_y(const void* data) { params.y = grid(data, result_shape, 1); }

  AlignedFloats packed(bool flipped) const {
    return pack_filter(filter, params.channels, params.kernel, flipped, params.images);
  }

  // Divides the work on results of this size into units.
  void cut(const PixelGrid& result) {
    const int64_t groups = (params.batch + params.images - 1) / params.images;
    const Strips strips(groups, result.height);
    params.strips = strips.strips;
    params.strip_rows = strips.strip_rows;
    params.units = groups * strips.strips;
    params.units_per_item = 1;
  }

  int64_t items() const { return (params.units + params.units_per_item - 1) / params.units_per_item; }

  void run(DepthwiseConv2dPhase phase, int64_t width) const {
    const int64_t unit_elements = params.strip_rows * width * params.images * params.channels;
    run_items(items(), params.units_per_item * unit_elements,
              [&](int64_t begin, int64_t end) { phase(params, begin, end); });
  }
};

Tensor depthwise_conv2d_fwd_cpu(const Tensor& x, const Tensor& weight, int64_t stride, int64_t dilation) {
  Convolution work(sizes_of(x), x.scalar_type(), weight, stride, dilation);
  check_image(kOp, "x", x, work.shape, work.type);
  Tensor y = channels_last_empty(work.result_shape, work.type);
  work.set_x(x.const_data_ptr());
  work.set_y(y.mutable_data_ptr());
  const AlignedFloats filter = work.packed(false);
  work.params.weight = filter.data();
  work.params.weight_ld = round_up(work.params.images * work.params.channels, kAlignment);
  work.cut(work.params.y);
  work.run(kernels().depthwise_conv2d.fwd, work.params.y.width);
  return y;
}

Tensor input_gradient(Convolution& work) {
  Tensor dx = channels_last_empty(work.shape, work.type);
  if (work.subsamples) {
    // the pixels that forward did not read have no gradient
    const int64_t image_bytes = work.shape[1] * work.shape[2] * work.shape[3] * (work.params.bfloat16 ? 2 : 4);
    char* data = static_cast<char*>(dx.mutable_data_ptr());
    run_items(work.shape[0], image_bytes / 4, [&](int64_t begin, int64_t end) {
      std::memset(data + begin * image_bytes, 0, (end - begin) * image_bytes);
    });
  }
  work.set_x(dx.mutable_data_ptr());
  const AlignedFloats filter = work.packed(work.params.stride == 1);
  work.params.weight = filter.data();
  work.params.weight_ld = round_up(work.params.images * work.params.channels, kAlignment);
  work.cut(work.params.x);
  work.run(kernels().depthwise_conv2d.bwd_x, work.params.x.width);
  return dx;
}

void weight_gradient(Convolution& work, const void* x, float* dweight) {
  DepthwiseConv2dParams& p = work.params;
  const int64_t taps = p.kernel * p.kernel;
  work.set_x(x);
  work.cut(p.y);
  p.units_per_item = (p.units + kMaxSums - 1) / kMaxSums;
  std::vector<double> partial(work.items() * taps * p.channels);
  p.partial = partial.data();
  work.run(kernels().depthwise_conv2d.bwd_weight, p.y.width);
  add_groups(partial.data(), work.items(), taps * p.channels);
  for (int64_t c = 0; c < p.channels; ++c) {
    for (int64_t t = 0; t < taps; ++t) dweight[c * taps + t] = static_cast<float>(partial[t * p.channels + c]);
  }
}

std::tuple<Tensor, Tensor> depthwise_conv2d_bwd_cpu(const Tensor& grad, const std::optional<Tensor>& x,
                                                    std::vector<int64_t> shape, const Tensor& weight, int64_t stride,
                                                    int64_t dilation, bool want_x, bool want_weight) {
  Convolution work(shape, grad.scalar_type(), weight, stride, dilation);
  check_image(kOp, "grad", grad, work.result_shape, work.type);
  work.set_y(grad.const_data_ptr());
  Tensor dx = want_x ? input_gradient(work) : empty_vector(grad, 0, work.type);
  if (!want_weight) return {dx, empty_vector(weight, 0, ScalarType::Float)};
  STD_TORCH_CHECK(x.has_value(), kOp, ": x must be given for the gradient of the weight");
  check_image(kOp, "x", *x, work.shape, work.type);
  Tensor dweight = torch::stable::new_empty(weight, {shape[1], 1, weight.size(2), weight.size(2)}, ScalarType::Float);
  weight_gradient(work, x->const_data_ptr(), static_cast<float*>(dweight.mutable_data_ptr()));
  return {dx, dweight};
}

}  // namespace
}  // namespace nasfast::cpu

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) {
  m.impl("depthwise_conv2d_fwd", TORCH_BOX(&nasfast::cpu::depthwise_conv2d_fwd_cpu));
  m.impl("depthwise_conv2d_bwd", TORCH_BOX(&nasfast::cpu::depthwise_conv2d_bwd_cpu));
}
