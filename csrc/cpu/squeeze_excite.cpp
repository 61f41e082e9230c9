// Launchers of squeeze_excite on the CPU and their registration.

#include "squeeze_excite.h"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>

#include "kernels.h"
#include "launch.h"

namespace nasfast::cpu {

namespace {

// Refuse what would corrupt memory. nasfast/ops checks the same before, with explanations for the user.
void check_map(const std::string& op, const char* name, const Tensor& tensor, const Tensor& like) {
  check_image_type(op, like.scalar_type());
  check_image(op, name, tensor, sizes_of(like), like.scalar_type());
  STD_TORCH_CHECK(tensor.numel() > 0, op, ": ", name, " must not be empty");
}

void check_factors(const std::string& op, const char* name, const Tensor& factors, const Tensor& x) {
  const bool fits = factors.dim() == 2 && factors.size(0) == x.size(0) && factors.size(1) == x.size(1) &&
                    factors.is_contiguous() && factors.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(fits, op, ": ", name, " must be contiguous float32 of shape (N, C)");
}

Tensor squeeze_excite_sums_cpu(const Tensor& x, std::optional<Tensor> y) {
  check_map("squeeze_excite_sums", "x", x, x);
  if (y) check_map("squeeze_excite_sums", "y", *y, x);
  Tensor sums = torch::stable::new_empty(x, {x.size(0), x.size(1)}, ScalarType::Float);
  ImageSumsParams params{};
  params.bfloat16 = x.scalar_type() == ScalarType::BFloat16;
  params.pixels = x.size(2) * x.size(3);
  params.channels = x.size(1);
  params.blocks = (params.channels + kSumChannels - 1) / kSumChannels;
  params.x = x.const_data_ptr();
  params.y = y ? y->const_data_ptr() : nullptr;
  params.sums = static_cast<float*>(sums.mutable_data_ptr());
  run_items(x.size(0) * params.blocks, params.pixels * kSumChannels,
            [&](int64_t begin, int64_t end) { kernels().squeeze_excite.sums(params, begin, end); });
  return sums;
}

Tensor squeeze_excite_scale_cpu(const Tensor& x, const Tensor& scale, std::optional<Tensor> shift) {
  check_map("squeeze_excite_scale", "x", x, x);
  check_factors("squeeze_excite_scale", "scale", scale, x);
  if (shift) check_factors("squeeze_excite_scale", "shift", *shift, x);
  Tensor out = pool_empty_like(x);
  const Strips strips(x.size(0), x.size(2));
  ImageScaleParams params{};
  params.bfloat16 = x.scalar_type() == ScalarType::BFloat16;
  params.pixels = x.size(2) * x.size(3);
  params.channels = x.size(1);
  params.strips = strips.strips;
  params.strip_pixels = strips.strip_rows * x.size(3);
  params.x = x.const_data_ptr();
  params.scale = float_data(scale);
  params.shift = shift ? float_data(*shift) : nullptr;
  params.out = out.mutable_data_ptr();
  run_items(x.size(0) * params.strips, params.strip_pixels * params.channels,
            [&](int64_t begin, int64_t end) { kernels().squeeze_excite.scale(params, begin, end); });
  return out;
}

}  // namespace
}  // namespace nasfast::cpu

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) {
  m.impl("squeeze_excite_sums", TORCH_BOX(&nasfast::cpu::squeeze_excite_sums_cpu));
  m.impl("squeeze_excite_scale", TORCH_BOX(&nasfast::cpu::squeeze_excite_scale_cpu));
}
