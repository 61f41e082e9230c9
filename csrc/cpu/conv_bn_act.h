// The interface between the launcher of conv_bn_act chains (conv_bn_act.cpp) and its kernels (pointwise_kernels.cpp and
// depthwise_kernels.cpp, compiled once per instruction set). All tensors are NHWC. Formulas: docs/method.md 6 and
// nasfast/ops/reference.py.
#pragma once

#include <cstdint>

#include "params.h"

namespace nasfast::cpu {

// Input of a stage: a tensor to which the BatchNorm and activation of the stage before are applied when it is read.
struct StageInput {
  const void* data;
  bool folded;  // whether to apply bn; the input of the chain is read as it is
  BnFold bn;
};

// Result of a stage: the output of its convolution; or, finished, what BatchNorm, activation and residual make of it.
struct StageOutput {
  void* data;
  int64_t ld;  // distance between rows of data: channels, or more in a wider tensor
  bool finished;
  BnFold bn;
  const void* residual;  // finished: added after the activation, dense; or null
};

// Where the gradient of a stage's input goes. Folded: it passes the activation of the stage before, becomes dz of that
// stage, and is added to its sums. Otherwise it is the gradient of the chain's input.
struct StageInputGrad {
  void* data;
  bool folded;
  const void* y;  // folded: output of the convolution of the stage before
  BnFold bn;
  double* partial;    // folded: [item][2][channel]: sum dz and sum dz * (y - center)
  const void* added;  // not folded: gradient of the residual, which is added; or null
};

// The gradient that enters a stage in backward: that of its result (then bn.act is the stage's activation), or dz
// itself (then bn.act is the identity).
struct StageGrad {
  const void* data;
  int64_t ld;  // distance between rows of data: channels, or more in a wider tensor
  const void* y;
  BnFold bn;
};

// Pointwise convolution, or a dense convolution on gathered patches. Items are blocks of item_rows rows; a row is one
// pixel of the output.
struct PointwiseParams {
  bool bfloat16;
  bool streams;  // whether results are written past the caches
  int64_t rows, item_rows;
  int64_t in_channels, out_channels;
  int64_t kernel, stride, padding;  // kernel 1: a row of the input is a row of the output
  int64_t height, width, out_height, out_width;
  const void* weight;  // packed: in x out forward (dense: kernel^2 * in x out), out x in backward
  // forward
  StageInput x;
  StageOutput y;
  double* partial;  // [item][2][channel], mean and m2; or null
  // backward
  StageGrad grad;
  StageInputGrad dx;
};

// The expansion before a depthwise convolution, which is computed again wherever its result is read:
// xhat = weight (x - center) + bias, z = xhat * bn.scale + bn.shift.
struct Expansion {
  int64_t in_channels;  // 0: there is no expansion
  const void* x;
  const float* center;
  const void* weight;  // packed in x hidden, times 1 / sqrt(var + eps)
  const float* bias;
  BnFold bn;
  // backward: v = weight_bwd dz
  const void* weight_bwd;  // packed hidden x in, times gamma / sqrt(var + eps)
  void* v;                 // null: not wanted
};

// Depthwise convolution with padding kernel / 2. Items are strips of strip_rows rows of one image: rows of y forward,
// and rows of dx backward.
struct DepthwiseParams {
  bool bfloat16;
  bool streams;  // whether results are written past the caches
  int64_t channels, kernel, stride;
  int64_t height, width, out_height, out_width;
  int64_t strips, strip_rows;
  const float* weight;  // [kernel^2][channels padded to vectors]; backward at stride 1: flipped
  int64_t weight_ld;
  StageInput x;
  StageOutput y;
  double* partial;
  StageGrad grad;
  StageInputGrad dx;
  Expansion expansion;
};

// First and second moments of the rows of x around center: partial sums [item][in] and [item][in][in], of which the
// upper triangle is written.
struct CovarianceParams {
  bool bfloat16;
  int64_t rows, item_rows, channels;
  const void* x;
  const float* center;
  double* second;
  double* first;
};

// dx = v + bias - weight (x - center) (+ added), where dx holds v before; without a weight dx = v + added
struct CorrectionParams {
  bool bfloat16;
  int64_t rows, item_rows, channels;
  const void* x;
  const float* center;
  const void* weight;  // packed channels x channels, or null
  const float* bias;
  const void* added;
  void* dx;
};

// ShuffleNetV2's channel shuffle and split: the even channels of `whole`, [rows][2 * channels], are `left`, the odd
// ones are `right`; each has its own distance between rows. shuffle_split reads whole, shuffle_merge writes it.
struct ShuffleParams {
  bool bfloat16;
  int64_t rows, item_rows, channels;
  int64_t ld_left, ld_right;
  const void* source_whole;
  const void *source_left, *source_right;
  void* whole;
  void *left, *right;
};

struct ConvKernels {
  int64_t (*packed_bytes)(bool bfloat16, int64_t depth, int64_t columns);
  int64_t (*panel_count)(int64_t columns);
  // packs the panels [begin, end) of a weight
  void (*pack)(bool bfloat16, const float* w, int64_t depth, int64_t columns, int64_t stride_k, int64_t stride_n,
               const float* scale_k, const float* scale_n, void* packed, int64_t begin, int64_t end);
  void (*pointwise_fwd)(const PointwiseParams& params, int64_t begin, int64_t end);
  void (*pointwise_bwd)(const PointwiseParams& params, int64_t begin, int64_t end);
  void (*covariance)(const CovarianceParams& params, int64_t begin, int64_t end);
  void (*correction)(const CorrectionParams& params, int64_t begin, int64_t end);
  void (*shuffle_split)(const ShuffleParams& params, int64_t begin, int64_t end);
  void (*shuffle_merge)(const ShuffleParams& params, int64_t begin, int64_t end);
};

struct DepthwiseKernels {
  void (*depthwise_fwd)(const DepthwiseParams& params, int64_t begin, int64_t end);
  void (*depthwise_bwd)(const DepthwiseParams& params, int64_t begin, int64_t end);
};

}  // namespace nasfast::cpu
