// The interface between the launchers of bn_act (bn_act.cpp) and its kernels (bn_act_kernels.cpp, compiled once per
// instruction set).
#pragma once

#include <cstdint>

#include "params.h"

namespace nasfast::cpu {

// The work is divided into items in a way that does not depend on the number of threads. NHWC: an item is a block of
// `item_rows` rows; a row is the C channels of one pixel. NCHW: an item is one plane, item = n * C + c. Partial sums
// are [group][2][channel], with one group per block of rows or per image; they are added over the groups afterwards,
// always in the same order.
struct BnActParams {
  bool bfloat16;       // type of x, y, residual, grad and dx: bfloat16 or float
  bool channels_last;  // whether these five are NHWC; otherwise they are NCHW
  int64_t channels;
  int64_t rows;         // N * H * W
  int64_t plane;        // H * W
  int64_t item_rows;    // NHWC only
  int64_t ldy, ldgrad;  // NHWC only: distance between rows of y and of grad; `channels`, or more in a wider tensor
  const void* x;
  const void* residual;  // added after the activation; may be null
  const void* grad;
  void* y;
  void* dx;
  BnFold bn;
  // bn_stats: the mean of each group, and the sum of the squared distances to it;
  // bn_act_bwd_reduce: sum dz and sum dz * (x - center)
  double* partial;
};

// A phase does the items [begin, end).
using BnActPhase = void (*)(const BnActParams& params, int64_t begin, int64_t end);

struct BnActKernels {
  BnActPhase bn_stats;
  BnActPhase bn_act_fwd;
  BnActPhase bn_act_bwd_reduce;
  BnActPhase bn_act_bwd;
};

}  // namespace nasfast::cpu
