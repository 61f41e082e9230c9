// What the launchers of mixed_bn (mixed_bn.cpp) and its kernels (mixed_bn_kernels.cpp, once per instruction set) share.
#pragma once

#include <cstdint>

#include "params.h"

namespace nasfast::cpu {

// All tensors are NHWC, seen as `rows` rows of `width` elements: `phases` pixels, so that few channels fill whole vectors too.
// The last row may be shorter. Work is cut into items of `item_rows` rows, which do not depend on the number of threads.
struct MixedBnParams {
  bool bfloat16;  // type of all tensors: bfloat16 or float
  bool streams;   // dx goes past the caches
  int64_t count;  // tensors
  int64_t channels;
  int64_t phases;
  int64_t width;       // phases * channels
  int64_t rows;        // the last one included
  int64_t last_width;  // of the last row
  int64_t item_rows;
  int64_t items;
  const void* const* xs;
  void* const* dxs;         // null: not wanted
  const char* in_sums;      // flags of mixed_bn_bwd_reduce: whose moment is wanted
  const char* normalize;    // flags; otherwise dx = scale * grad
  const int64_t* measured;  // mixed_bn_stats: which tensors, in the order of `partial`
  // of each tensor, coefficients [width]; those of the first tensor's shift are the sum of all
  const BnFold* folds;
  const void* grad;
  void* y;
  // mixed_bn_stats: [measured][item][2][channel], mean and sum of squared distances to it;
  // mixed_bn_bwd_reduce: [item][1 + count][channel], sum of grad, and of grad * (x - center) for each tensor
  double* partial;
};

// Each phase does items [begin, end); mixed_bn_stats those of all measured tensors, one tensor after the other.
using MixedBnPhase = void (*)(const MixedBnParams& params, int64_t begin, int64_t end);

struct MixedBnKernels {
  MixedBnPhase mixed_bn_stats;
  MixedBnPhase mixed_bn_fwd;
  MixedBnPhase mixed_bn_bwd_reduce;
  MixedBnPhase mixed_bn_bwd;
};

}  // namespace nasfast::cpu
