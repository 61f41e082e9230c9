// The operator empty_nhwc.

#include <torch/csrc/stable/library.h>

#include "launch.h"

namespace nasfast::cpu {
namespace {

Tensor empty_nhwc_cpu(const Tensor& like, std::vector<int64_t> shape) {
  STD_TORCH_CHECK(shape.size() == 4, "empty_nhwc: the shape must have 4 dimensions, got ", shape.size());
  check_image_type("empty_nhwc", like.scalar_type());
  for (int64_t size : shape) STD_TORCH_CHECK(size >= 0, "empty_nhwc: a size must not be negative, got ", size);
  return channels_last_empty(shape, like.scalar_type());
}

}  // namespace
}  // namespace nasfast::cpu

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) { m.impl("empty_nhwc", TORCH_BOX(&nasfast::cpu::empty_nhwc_cpu)); }
