// The interface between the launchers of pool_3x3 (pool_3x3.cpp) and its kernels (pool_3x3_kernels.cpp, compiled once
// per instruction set). All tensors are NHWC. Formula: nasfast/ops/reference.py, pool_3x3.
#pragma once

#include <cstdint>

namespace nasfast::cpu {

// Items are strips of strip_rows rows of one image: rows of y forward, and rows of dx backward.
struct Pool3x3Params {
  bool bfloat16;  // type of x, y, grad and dx: bfloat16 or float
  bool max;       // the maximum of each window; otherwise its mean
  int64_t stride, channels;
  int64_t height, width, out_height, out_width;
  int64_t strips, strip_rows;
  const void* x;
  void* y;
  uint8_t* index;  // max: 3 * row + column of the maximum in its window; may be null forward
  const void* grad;
  void* dx;
};

// Both do the items [begin, end).
struct Pool3x3Kernels {
  void (*fwd)(const Pool3x3Params& params, int64_t begin, int64_t end);
  void (*bwd)(const Pool3x3Params& params, int64_t begin, int64_t end);
};

}  // namespace nasfast::cpu
