// What a stage of a chain asks of its kernels, forward and backward; the launchers are in chain.h.
//
// A stage is a frozen convolution, BatchNorm and an activation. Its forward kernel reads the output y of the stage
// before through that stage's BatchNorm and activation, writes its own y and finishes its own statistics. Its backward
// kernel reads the gradient dz in front of its BatchNorm, writes that of the stage before, and finishes the sums that
// the BatchNorm of the stage before needs. All tensors are NHWC without gaps, of 16-bit numbers in one Format.
//
// Every family of kernels (pointwise.h, depthwise.h) has, for forward and for backward (dense_forward.h for forward
// alone, because backward ends behind it),
//
//   Grid pointwise_forward_grid(const Geometry&, const Machine&);
//   template <class Format, class Machine> void pointwise_forward(const Machine&, const Grid&, const ForwardStage&);
//
// A Machine is the GPU of kernels/cuda/chain.cu or the Emulation: it has `multiprocessors`, `shared_memory` (the bytes
// that a block can have) and `launch<Kernel>(count_x, count_y, shared, args)`.
#pragma once

#include "statistics.h"

namespace nasfast::gpu {

struct Geometry {
  int images;
  int height, width;          // size of the input
  int out_height, out_width;  // size of the output
  int in_channels, out_channels;
  int kernel, stride;

  // Not depthwise: the first convolution of a chain, whose few input channels are never as many as its output channels.
  NASFAST_ANYWHERE bool dense() const { return kernel > 1 && in_channels != out_channels; }
  NASFAST_ANYWHERE int64_t in_rows() const { return int64_t{images} * height * width; }
  NASFAST_ANYWHERE int64_t out_rows() const { return int64_t{images} * out_height * out_width; }
};

// How a launch divides its work.
struct Grid {
  int rows;       // blocks that share channels, as in Reduction
  int groups;     // groups of channels; blocks of two groups have no channel in common
  size_t shared;  // bytes of shared memory per block
};

// A convolution's weights, (out, in / groups, k, k) without gaps, in the Format of the tensors or in float.
struct Weight {
  const void* data;
  bool is_float;
};

struct ForwardStage {
  Geometry geometry;
  const uint16_t* x;  // the output of the convolution before, or the input of the chain
  const Fold* fold;   // the BatchNorm through which x is read, or null if x is the input of the chain
  Act act;            // the activation behind that BatchNorm
  Weight weight;
  uint16_t* y;  // null if only the statistics of a pointwise stage are wanted
  Norm norm;
};

// The gradients of a BatchNorm's gamma and beta, if the chain behind has computed them. The first kernel of backward
// copies them to where they are wanted.
struct Handed {
  const float* from;      // [2][channels], or null
  float *dgamma, *dbeta;  // [channels], or null

  // For all threads of one block.
  template <int kThreads, class Block>
  NASFAST_DEVICE void copy(const Block& block, int channels) const {
    if (from == nullptr) return;
    block.each([&](int thread) {
      for (int c = thread; c < channels; c += kThreads) {
        if (dgamma != nullptr) dgamma[c] = from[c];
        if (dbeta != nullptr) dbeta[c] = from[channels + c];
      }
    });
  }
};

// The first stage of a chain has no stage before, but perhaps a chain that has left it the output of its last
// convolution. Then `before`, `interval` and `gradient` are those of that chain's last stage.
struct BackwardStage {
  Geometry geometry;
  const uint16_t* grad;  // dz, or with a mask the gradient behind this stage's activation
  const Interval* mask;  // this stage's, or null if grad is dz
  const uint16_t* y;     // the output of this stage's convolution
  const Back* back;      // this stage's: dy = a dz + b y + c
  Weight weight;
  uint16_t* dx;            // dz of the stage before, or null if only its sums are wanted; or the gradient of the input
  const uint16_t* before;  // the output of the convolution before, or null
  const Interval* interval;  // the interval of the stage before
  NormGradient gradient;     // the BatchNorm of the stage before
  const uint16_t* added;     // what is added to dx in the first stage, or null; depthwise, only if `before` is null
  Handed handed;             // of this stage; only the last stage of a chain has it, if it is pointwise
};

// The two stages of an expansion and the depthwise convolution behind it, when the output y1 of the expansion is in no
// memory: every kernel computes from the input x of the chain what it needs of y1. expand_depthwise.h,
// expand_depthwise_backward.h and expansion_gradient.h have these kernels.
struct ExpandForward {
  ForwardStage depthwise;  // x is the input of the chain; fold and act are those of the expansion
  Weight expansion;
  int channels;  // channels of x
};

// Makes dz of the expansion in depthwise.dx, if that is not null, and finishes the sums that its BatchNorm needs.
// `before` is null.
struct ExpandBackward {
  BackwardStage depthwise;
  const uint16_t* x;
  Weight expansion;
  int channels;  // channels of x
};

// The gradient of the input of the chain from dz of the expansion. With dy = a dz + b y1 + c and y1 = W x it is
// (a W)^T dz + W^T diag(b) W x + W^T c, in which no y1 is left. If the chain before has left the output of its last
// convolution, which no activation follows, the kernel also finishes the sums that its BatchNorm needs.
struct ExpansionGradient {
  int64_t rows;
  int channels, hidden;  // channels of x, and of y1
  const uint16_t *x, *dz;
  const Back* back;
  Weight expansion;
  const uint16_t* added;  // what is added to dx, or null
  uint16_t* dx;
  const uint16_t* before;  // what the chain before has left, or null
  const Interval* interval;
  NormGradient gradient;
};

}  // namespace nasfast::gpu
