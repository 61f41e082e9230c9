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

// Applies the BatchNorm that a chain with the result x has deferred, and so writes x. deferred_input: the tensors of
// DeferredResult in nasfast/ops/chain/deferred.py, which are the BatchNorm's y and fold, and perhaps a tensor to add.
ApplyArgs apply_args(const Tensor& x, const std::vector<Tensor>& deferred_input);

// Reduces the gradient of a result to the sums of its deferred BatchNorm; without `reduction`. deferred_norm: the
// fields of DeferredNorm there.
ReduceArgs reduce_args(const Tensor& grad, const std::vector<Tensor>& deferred_norm);

// What a launch does not know before its grid: `reduction` of every stage, except its channels.
struct ForwardCall {
  bool bfloat16;
  ApplyArgs input;  // writes x where it is deferred; otherwise y is null
  std::vector<ForwardStage> stages;
  ApplyArgs result;            // y is null if the last BatchNorm is deferred
  std::vector<Tensor> memory;  // holds the outputs that are not kept for backward

  ForwardCall(const Tensor& x, const std::vector<Tensor>& conv_weights, const std::vector<Tensor>& bn_weights,
              const std::vector<Tensor>& bn_biases, const std::optional<Tensor>& added, const Tensor& y,
              const Tensor& saved, const Tensor& statistics, const std::vector<Tensor>& deferred_input,
              const std::vector<Tensor>& deferred_norm, const std::vector<int64_t>& plan,
              const std::vector<double>& eps);
};

struct BackwardCall {
  bool bfloat16;
  ReduceArgs result_sums;  // of the last BatchNorm; grad is null if the chain that reads the result has computed them
  std::vector<BackwardStage> stages;  // in the order in which they run, the last stage of the chain first
  ReduceArgs input_sums;       // of a deferred BatchNorm in front of x; grad is null if there is none, or a stage sums
  std::vector<Tensor> memory;  // holds dz between the stages, and the coefficients of BatchNorm

  // input_norm: a deferred BatchNorm in front of x, if its sums are wanted. deferred_norm: that of this chain. Both may
  // be empty.
  BackwardCall(const Tensor& grad, const Tensor& saved, const Tensor& statistics,
               const std::vector<Tensor>& conv_weights, const std::vector<Tensor>& bn_weights, bool add_input,
               const std::optional<Tensor>& dx, const std::vector<Tensor>& dweights, const std::vector<Tensor>& dbiases,
               const std::vector<Tensor>& input_norm, const std::vector<Tensor>& deferred_norm,
               const std::vector<int64_t>& plan, const std::vector<double>& eps);
};

// Memory for partial results, and the counters of the caller.
struct Workspace {
  Tensor partial;
  int* counters;

  // zeros: the counters, of which so many are needed.
  Workspace(const Tensor& like, int64_t pairs, const Tensor& zeros, int64_t needed);
  Reduction reduction(const Grid& grid, int channels) const;
};

}  // namespace nasfast::gpu
