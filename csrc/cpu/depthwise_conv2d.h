// The interface between the launchers of depthwise_conv2d (depthwise_conv2d.cpp) and its kernels
// (depthwise_conv2d_kernels.cpp, compiled once per instruction set). Formula: nasfast/ops/reference.py,
// depthwise_conv2d.
#pragma once

#include <cstdint>

namespace nasfast::cpu {

// The pixels of NHWC images, or every second pixel of both dimensions. Steps are in elements.
struct PixelGrid {
  void* data;
  int64_t height, width;
  int64_t pixel_step, row_step, image_step;
};

// The padding is (kernel / 2) * dilation. Stride 2 with dilation 2 reads only every second pixel of x: then x is the
// grid of these pixels, and stride and dilation are 1.
//
// With few channels, `images` images lie side by side in a vector. A unit of work is a strip of strip_rows rows of this
// many images: rows of y forward and for the weight gradient, rows of dx for the input gradient. An item is
// units_per_item units one after the other.
struct DepthwiseConv2dParams {
  bool bfloat16;  // type of x, y, grad and dx: bfloat16 or float
  int64_t batch, channels;
  int64_t kernel, stride, dilation;
  int64_t images;
  int64_t strips, strip_rows, units, units_per_item;
  PixelGrid x;  // dx for depthwise_conv2d_bwd_x
  PixelGrid y;  // backward: the gradient of y
  // [kernel^2][ld]: the channels, repeated for each of the images, then zeros up to whole vectors. For dx at stride 1
  // the filter is flipped.
  const float* weight;
  int64_t weight_ld;
  double* partial;  // depthwise_conv2d_bwd_weight: [item][kernel^2][channel]
};

// A phase does the items [begin, end).
using DepthwiseConv2dPhase = void (*)(const DepthwiseConv2dParams& params, int64_t begin, int64_t end);

struct DepthwiseConv2dKernels {
  int64_t lanes;  // floats in a vector
  DepthwiseConv2dPhase fwd;
  DepthwiseConv2dPhase bwd_x;
  DepthwiseConv2dPhase bwd_weight;
};

}  // namespace nasfast::cpu
