// What the launchers of depthwise_conv2d (depthwise_conv2d.cpp) and its kernels (depthwise_conv2d_kernels.cpp, once per
// instruction set) share. Formula: nasfast/ops/reference.py, depthwise_conv2d.
#pragma once

#include <cstdint>

namespace nasfast::cpu {

// Pixels of NHWC images, perhaps every second one of both dimensions; steps in elements.
struct PixelGrid {
  void* data;
  int64_t height, width;
  int64_t pixel_step, row_step, image_step;
};

// Padding (kernel / 2) * dilation. Stride 2 with dilation 2 reads every second pixel of x only: there x is the grid of these,
// and stride and dilation are 1.
//
// With few channels, `images` images lie side by side in a vector. A unit of work is a strip of strip_rows rows of so many
// images: of y forward and for the weight gradient, of dx backward. An item is units_per_item units one after the other.
struct DepthwiseConv2dParams {
  bool bfloat16;  // type of x, y, grad and dx: bfloat16 or float
  int64_t batch, channels;
  int64_t kernel, stride, dilation;
  int64_t images;
  int64_t strips, strip_rows, units, units_per_item;
  PixelGrid x;  // dx for depthwise_conv2d_bwd_x
  PixelGrid y;  // its gradient backward
  // [kernel^2][ld]: the channels for each of the images, then zeros up to whole vectors; for dx at stride 1 flipped
  const float* weight;
  int64_t weight_ld;
  double* partial;  // depthwise_conv2d_bwd_weight: [item][kernel^2][channel]
};

// Each phase does items [begin, end).
using DepthwiseConv2dPhase = void (*)(const DepthwiseConv2dParams& params, int64_t begin, int64_t end);

struct DepthwiseConv2dKernels {
  int64_t lanes;  // floats in a vector
  DepthwiseConv2dPhase fwd;
  DepthwiseConv2dPhase bwd_x;
  DepthwiseConv2dPhase bwd_weight;
};

}  // namespace nasfast::cpu
