// One call of conv_bn_act_chain on a GPU or on its emulation: the stages of its plan with the tensors that they use.
// csrc/gpu/chain.h runs them.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "norm.h"

namespace nasfast::gpu {

using torch::stable::Tensor;

// The convolutions of a plan, which is refused if it has something that the kernels cannot do.
std::vector<Geometry> geometries(const std::vector<int64_t>& plan);

// What a launch does not know before its grid: `reduction` of every stage, except its channels.
struct ForwardCall {
  bool bfloat16;
  std::vector<ForwardStage> stages;
  ApplyArgs result;
  std::vector<Tensor> memory;  // of outputs that nothing keeps

  ForwardCall(const Tensor& x, const std::vector<Tensor>& conv_weights, const std::vector<Tensor>& bn_weights,
              const std::vector<Tensor>& bn_biases, const std::optional<Tensor>& added, const Tensor& y,
              const Tensor& saved, const Tensor& statistics, const std::vector<int64_t>& plan,
              const std::vector<double>& eps);
};

struct BackwardCall {
  bool bfloat16;
  ReduceArgs begin;
  std::vector<BackwardStage> stages;  // in the order in which they run: the last stage of the chain is the first
  std::vector<Tensor> memory;         // of dz between the stages and of the coefficients of BatchNorm

  BackwardCall(const Tensor& grad, const Tensor& saved, const Tensor& statistics,
               const std::vector<Tensor>& conv_weights, const std::vector<Tensor>& bn_weights, bool add_input,
               const std::optional<Tensor>& dx, const std::vector<Tensor>& dweights, const std::vector<Tensor>& dbiases,
               const std::vector<int64_t>& plan, const std::vector<double>& eps);
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
