// What the launchers of bn_act (bn_act.cpp) and its kernels (bn_act_kernels.cpp, once per instruction set) share.
#pragma once

#include <cstdint>

#include "params.h"

namespace nasfast::cpu {

// Work is cut into items that do not depend on the number of threads. NHWC: an item is a block of `item_rows` rows (a row is
// the C channels of one pixel). NCHW: an item is one plane, item = n * C + c. Partial sums are [group][2][channel] with one
// group per row block or per image, and are added over groups afterwards, always in the same order.
struct BnActParams {
  bool bfloat16;       // type of x, y, residual, grad and dx: bfloat16 or float
  bool channels_last;  // NHWC or NCHW, for all five
  int64_t channels;
  int64_t rows;       // N * H * W
  int64_t plane;      // H * W
  int64_t item_rows;  // NHWC only
  int64_t ldy, ldgrad;  // NHWC only: distance between rows of y and of grad, channels unless they lie in a wider tensor
  const void* x;
  const void* residual;  // added after the activation; may be null
  const void* grad;
  void* y;
  void* dx;
  BnFold bn;
  // bn_stats: mean and sum of squared distances to it of the group; bn_act_bwd_reduce: sum dz and sum dz * (x - center)
  double* partial;
};

// Each phase does items [begin, end).
using BnActPhase = void (*)(const BnActParams& params, int64_t begin, int64_t end);

struct BnActKernels {
  BnActPhase bn_stats;
  BnActPhase bn_act_fwd;
  BnActPhase bn_act_bwd_reduce;
  BnActPhase bn_act_bwd;
};

}  // namespace nasfast::cpu
