// One call of conv_bn_act_chain on a GPU or on its emulation: the stages of its plan with the tensors that they use.
// csrc/gpu/chain.h runs them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "stages.h"

namespace nasfast::gpu {

using torch::stable::Tensor;

// The convolutions of a plan, which is refused if it has something that the kernels cannot do.
struct Shapes {
  std::vector<Geometry> stages;

  explicit Shapes(const std::vector<int64_t>& plan);
};

// How x is made from what the chain before has left: y and the fold of its last convolution, and perhaps a tensor to add.
ApplyArgs making(const Tensor& x, const std::vector<Tensor>& before);

// The sums with which the backward of what a chain has left begins, without `reduction`; before: see Left of call.cpp.
ReduceArgs beginning(const Tensor& grad, const std::vector<Tensor>& before);

// What a launch does not know before its grid: `reduction` of every stage, except its channels.
struct ForwardCall {
  bool bfloat16;
  ApplyArgs begin;  // makes x; y is null if x is there
  std::vector<ForwardStage> stages;
  ApplyArgs result;            // y is null if this is left to the chain that reads it
  std::vector<Tensor> memory;  // holds the outputs that are not kept for backward

  ForwardCall(const Tensor& x, const std::vector<Tensor>& conv_weights, const std::vector<Tensor>& bn_weights,
              const std::vector<Tensor>& bn_biases, const std::optional<Tensor>& added, const Tensor& y,
              const Tensor& saved, const Tensor& statistics, const std::vector<Tensor>& before,
              const std::vector<Tensor>& left, const std::vector<int64_t>& plan, const std::vector<double>& eps);
};

struct BackwardCall {
  bool bfloat16;
  ReduceArgs begin;                   // grad is null if the chain behind has begun
  std::vector<BackwardStage> stages;  // in the order in which they run, the last stage of the chain first
  ReduceArgs end;                     // begins for the chain before; grad is null if no launch of its own has to
  std::vector<Tensor> memory;         // holds dz between the stages, and the coefficients of BatchNorm

  // before: what the chain before has left, if its backward has to be begun. left: what this chain has left.
  BackwardCall(const Tensor& grad, const Tensor& saved, const Tensor& statistics,
               const std::vector<Tensor>& conv_weights, const std::vector<Tensor>& bn_weights, bool add_input,
               const std::optional<Tensor>& dx, const std::vector<Tensor>& dweights, const std::vector<Tensor>& dbiases,
               const std::vector<Tensor>& before, const std::vector<Tensor>& left, const std::vector<int64_t>& plan,
               const std::vector<double>& eps);
};

// Memory for partial results, and the counters, which the caller has made.
struct Workspace {
  Tensor partial;
  int* counters;

  // counters: of which there must be so many.
  Workspace(const Tensor& like, int64_t pairs, const Tensor& counters, int64_t needed);
  Reduction reduction(const Grid& grid, int channels) const;
};

}  // namespace nasfast::gpu
