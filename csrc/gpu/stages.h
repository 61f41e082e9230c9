// What a stage of a chain asks of its kernels, forward and backward; the launchers are in chain.h.
//
// A stage is a frozen convolution, BatchNorm and an activation. Its forward kernel reads the output y of the stage
// before through that stage's BatchNorm and activation, writes its own y and finishes its own statistics. Its backward
// kernel reads the gradient dz in front of its BatchNorm, writes that of the stage before, and finishes the sums that
// the BatchNorm of the stage before needs. All tensors are NHWC without gaps, of 16-bit numbers in one Format.
//
// At the end are the families of kernels: functions that launch one for a stage, and those that say how this launch
// divides its work. A header of each family defines them, and one of csrc/gpu/units compiles them, for a Machine: the Gpu
// of kernels/cuda/gpu.h or the Emulation. It has
//
//   multiprocessors, shared_memory  (the bytes that a block can have)
//   panels                          whether it was compiled with the kernels of depthwise_matrices.h
//   launch<Kernel>(count_x, count_y, shared, args)
//   launched(name, geometry)        called behind each launch; raises what has gone wrong
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
  uint16_t* y;
  Norm norm;
};

// The gradients of a deferred BatchNorm's gamma and beta, which the chain that reads its result has computed. The first
// kernel of backward copies them to where they are wanted.
struct PrecomputedGradients {
  const float* from;      // [2][channels], or null
  float *dgamma, *dbeta;  // [channels], or null

  // For all threads of one block.
  template <int kThreads, class Block>
  NASFAST_DEVICE void copy(const Block& block, int channels) const {
    if (from == nullptr) return;
    block.each([&](int thread) {
      for (int c = thread; c < channels; c += kThreads) {
        const float gamma = from[c], beta = from[channels + c];  // both loads before a store, which might be to `from`
        if (dgamma != nullptr) dgamma[c] = gamma;
        if (dbeta != nullptr) dbeta[c] = beta;
      }
    });
  }
};

// The first stage of a chain has no stage before, but the chain in front may have deferred its last BatchNorm. Then
// `previous_y`, `interval` and `gradient` are those of that BatchNorm.
struct BackwardStage {
  Geometry geometry;
  const uint16_t* grad;  // dz, or with a mask the gradient behind this stage's activation
  const Interval* mask;  // this stage's, or null if grad is dz
  const uint16_t* y;     // the output of this stage's convolution
  const Back* back;      // this stage's: dy = a dz + b y + c
  Weight weight;
  uint16_t* dx;  // dz of the stage before, or null if only its sums are wanted; or the gradient of the input
  const uint16_t* previous_y;  // the output of the convolution before, or null
  const Interval* interval;    // the interval of the stage before
  NormGradient gradient;       // the BatchNorm of the stage before
  const uint16_t* added;  // what is added to dx in the first stage, or null; depthwise, only if `previous_y` is null
  PrecomputedGradients precomputed;  // of this stage; only the last stage of a chain has them, if it is pointwise
};

// How the 256 threads of a block share rows of channels: 8 neighbouring channels for each thread, `rows` rows at once.
struct Lanes {
  int groups;   // groups of channels; no two groups have a channel in common
  int vectors;  // vectors of 8 channels per group; the last group may have fewer
  int rows;     // rows that a block reads at once

  static constexpr int kThreads = 256;
};

// As few groups as keep seven of eight threads busy, or else those that keep the most.
inline Lanes lanes_of(int channels) {
  constexpr int kTries = 8;
  const int all = channels / 8, fewest = (all + Lanes::kThreads - 1) / Lanes::kThreads;
  Lanes best{};
  int most = 0;
  for (int tried = fewest; tried < fewest + kTries && 8 * most < 7 * Lanes::kThreads; ++tried) {
    const int vectors = (all + tried - 1) / tried, rows = Lanes::kThreads / vectors;
    if (rows * vectors <= most) continue;
    most = rows * vectors;
    best = {(all + vectors - 1) / vectors, vectors, rows};
  }
  return best;
}

// out = act(scale y + shift) + added.
struct ApplyArgs {
  const uint16_t* y;  // [rows][channels]
  const Fold* fold;
  const uint16_t* added;  // shape of y, or null
  uint16_t* out;          // shape of y
  int64_t rows;
  int channels;
  Act act;
  Lanes lanes;
};

// The sums of dz and of dz (y - mean), with which backward begins.
struct ReduceArgs {
  const uint16_t* grad;  // [rows][channels]: gradient behind the activation
  const uint16_t* y;     // shape of grad
  const Interval* interval;
  int64_t rows;
  int channels;
  Lanes lanes;
  NormGradient gradient;
};

// ---- families of kernels

// The two kernels at the ends of a chain (norm.h).
template <class Machine>
Grid reduce_grid(int64_t rows, int channels, const Machine& machine);
template <class Format, class Machine>
void reduce(const Machine& machine, const Grid& grid, const ReduceArgs& args);
template <class Format, class Machine>
void apply(const Machine& machine, const ApplyArgs& args);

// The dense stage of a stem, behind which backward ends (dense_forward.h).
template <class Machine>
Grid dense_forward_grid(const Geometry& g, const Machine& machine);
template <class Format, class Machine>
void dense_forward(const Machine& machine, const Grid& grid, const ForwardStage& stage);

// pointwise.h. pointwise_forward_deferred runs the first stage of a chain whose input is deferred, and writes it.
template <class Machine>
Grid pointwise_forward_grid(const Geometry& g, const Machine& machine);
template <class Format, class Machine>
void pointwise_forward(const Machine& machine, const Grid& grid, const ForwardStage& stage);
template <class Format, class Machine>
void pointwise_forward_deferred(const Machine& machine, const Grid& grid, const ForwardStage& stage,
                                const ApplyArgs& input);
template <class Machine>
Grid pointwise_backward_grid(const Geometry& g, const Machine& machine);
template <class Format, class Machine>
void pointwise_backward(const Machine& machine, const Grid& grid, const BackwardStage& stage);

// depthwise.h, and depthwise_panels.h for the stages that run on tensor cores.
template <class Machine>
Grid depthwise_forward_grid(const Geometry& g, const Machine& machine);
template <class Format, class Machine>
void depthwise_forward(const Machine& machine, const Grid& grid, const ForwardStage& stage);
template <class Machine>
Grid depthwise_backward_grid(const Geometry& g, const Machine& machine);
template <class Format, class Machine>
void depthwise_backward(const Machine& machine, const Grid& grid, const BackwardStage& stage);
template <class Machine>
Grid panels_forward_grid(const Geometry& g, const Machine& machine);
template <class Format, class Machine>
void panels_forward(const Machine& machine, const Grid& grid, const ForwardStage& stage);
template <class Machine>
Grid panels_backward_grid(const Geometry& g, const Machine& machine);
template <class Format, class Machine>
void panels_backward(const Machine& machine, const Grid& grid, const BackwardStage& stage);

}  // namespace nasfast::gpu
