// The interface between the launchers of mixed_bn (mixed_bn.cpp) and its kernels (mixed_bn_kernels.cpp, compiled once
// per instruction set).
#pragma once

#include <cstdint>

#include "params.h"

namespace nasfast::cpu {

// All tensors are NHWC. The kernels treat them as `rows` rows of `width` elements: a row is `phases` pixels, so that a
// few channels fill whole vectors too. The last row may be shorter. The work is divided into items of `item_rows` rows,
// in a way that does not depend on the number of threads.
struct MixedBnParams {
  bool bfloat16;  // type of all tensors: bfloat16 or float
  bool streams;   // whether dx is written past the caches
  int64_t count;  // number of tensors
  int64_t channels;
  int64_t phases;
  int64_t width;       // phases * channels
  int64_t rows;        // including the last row
  int64_t last_width;  // width of the last row
  int64_t item_rows;
  int64_t items;
  const void* const* xs;
  void* const* dxs;         // null: not wanted
  const char* in_sums;      // mixed_bn_bwd_reduce, one flag per tensor: whether its moment is wanted
  const char* normalize;    // one flag per tensor; where it is not set, dx = scale * grad
  const int64_t* measured;  // mixed_bn_stats: indices of the tensors, in the order of `partial`
  // for each tensor, coefficients [width]; shift of the first tensor is the sum over all tensors
  const BnFold* folds;
  const void* grad;
  void* y;
  // mixed_bn_stats: [measured][item][2][channel]: the mean, and the sum of squared distances to it;
  // mixed_bn_bwd_reduce: [item][1 + count][channel]: the sum of grad, then for each tensor that of grad * (x - center)
  double* partial;
};

// A phase does the items [begin, end). mixed_bn_stats has the items of all measured tensors, one tensor after the
// other.
using MixedBnPhase = void (*)(const MixedBnParams& params, int64_t begin, int64_t end);

struct MixedBnKernels {
  MixedBnPhase mixed_bn_stats;
  MixedBnPhase mixed_bn_fwd;
  MixedBnPhase mixed_bn_bwd_reduce;
  MixedBnPhase mixed_bn_bwd;
};

}  // namespace nasfast::cpu
