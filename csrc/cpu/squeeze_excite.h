// The interface between the launchers of squeeze_excite (squeeze_excite.cpp) and its kernels
// (squeeze_excite_kernels.cpp, compiled once per instruction set). Tensors with pixels are NHWC; sums, scale and shift
// are [image][channel]. Formula: nasfast/ops/reference.py, squeeze_excite.
#pragma once

#include <cstdint>

namespace nasfast::cpu {

// Channels of an item of sums.
constexpr int64_t kSumChannels = 64;

// Sums over the pixels of each image, of x or of x * y. Items are blocks of kSumChannels channels of one image.
struct ImageSumsParams {
  bool bfloat16;  // type of x and y: bfloat16 or float
  int64_t pixels, channels, blocks;
  const void* x;
  const void* y;  // null: sums of x
  float* sums;
};

// out = x * scale + shift. Items are strips of strip_pixels pixels of one image.
struct ImageScaleParams {
  bool bfloat16;  // type of x and out: bfloat16 or float
  int64_t pixels, channels, strips, strip_pixels;
  const void* x;
  const float* scale;
  const float* shift;  // null: none
  void* out;
};

// Both do the items [begin, end).
struct SqueezeExciteKernels {
  void (*sums)(const ImageSumsParams& params, int64_t begin, int64_t end);
  void (*scale)(const ImageScaleParams& params, int64_t begin, int64_t end);
};

}  // namespace nasfast::cpu
