// Runs a chain of convolutions, BatchNorms and activations: forward a kernel for every stage and one for the result,
// backward one that begins and then a kernel for every stage, last to first. A chain may leave its result to the chain
// that reads it, whose first kernel makes it if it is pointwise. No launch waits for the host, so a chain can be captured
// in a CUDA graph.
#pragma once

#include <algorithm>

#include "call.h"
#include "depthwise.h"
#include "expand_depthwise_backward.h"
#include "expansion_gradient.h"
#include "pointwise.h"

namespace nasfast::gpu {

template <class Machine>
Grid forward_grid(const Shapes& chain, size_t i, const Machine& machine) {
  const Geometry& geometry = chain.stages[i];
  if (chain.fused(i)) return expand_depthwise_forward_grid(geometry, chain.channels(), machine);
  return geometry.kernel == 1 ? pointwise_forward_grid(geometry, machine) : depthwise_forward_grid(geometry, machine);
}

template <class Machine>
Grid backward_grid(const Shapes& chain, size_t i, const Machine& machine) {
  const Geometry& geometry = chain.stages[i];
  if (chain.fused(i)) return expand_depthwise_backward_grid(geometry, chain.channels(), machine);
  return geometry.kernel == 1 ? pointwise_backward_grid(geometry, machine) : depthwise_backward_grid(geometry, machine);
}

// The grids of the stages of a chain in one direction, and the most that one of its launches needs, which come one after
// the other. An expansion that is computed again has no kernel of its own backward that adds anything up, and no grid.
struct Grids {
  std::vector<Grid> stages;
  Grid begin{};  // grid of backward's first launch, which comes before those of the stages
  int64_t pairs = 0, counters = 0;

  const Grid& add(const Grid& grid, int channels) {
    pairs = std::max(pairs, int64_t{partial_rows(grid.rows)} * channels);
    counters = std::max(counters, int64_t{grid.groups} * counters_of(grid.rows));
    return grid;
  }
};

template <class Machine>
Grids forward_grids(const Shapes& chain, const Machine& machine) {
  Grids grids;
  for (size_t i = 0; i < chain.stages.size(); ++i) {
    grids.stages.push_back(grids.add(forward_grid(chain, i, machine), chain.stages[i].out_channels));
  }
  return grids;
}

template <class Machine>
Grids backward_grids(const Shapes& chain, const Machine& machine) {
  Grids grids;
  const Geometry& last = chain.stages.back();
  grids.begin = grids.add(reduce_grid(last.out_rows(), last.out_channels, machine), last.out_channels);
  for (size_t i = 0; i < chain.stages.size(); ++i) {
    const bool alone = i == 0 && chain.recompute;
    grids.stages.push_back(alone ? Grid{} : grids.add(backward_grid(chain, i, machine), chain.stages[i].in_channels));
  }
  return grids;
}

// Counters that a chain needs in forward or in backward, whichever needs more.
template <class Machine>
int64_t count_counters(const std::vector<int64_t>& plan, const Machine& machine) {
  const Shapes chain(plan);
  return std::max(forward_grids(chain, machine).counters, backward_grids(chain, machine).counters);
}

// The input of a convolution as the geometry of a kernel that goes over it.
inline Geometry map_of(const Geometry& g) {
  return {g.images, g.height, g.width, g.height, g.width, g.in_channels, g.in_channels, 1, 1};
}

template <class Format, class Machine>
void run_forward(const Machine& machine, const ForwardCall& call, const Workspace& workspace, const Shapes& chain,
                 const Grids& grids) {
  const ApplyArgs* making = call.begin.y != nullptr ? &call.begin : nullptr;
  if (making != nullptr && call.stages[0].geometry.kernel != 1) {
    apply<Format>(machine, *making);
    machine.launched("apply", map_of(call.stages[0].geometry));
    making = nullptr;
  }
  for (size_t i = 0; i < call.stages.size(); ++i) {
    ForwardStage stage = call.stages[i];
    const Geometry& g = stage.geometry;
    const Grid& grid = grids.stages[i];
    stage.norm.reduction = workspace.reduction(grid, g.out_channels);
    if (chain.fused(i)) {
      expand_depthwise_forward<Format>(machine, grid, {stage, call.stages[0].weight, chain.channels()});
      machine.launched("expand_depthwise_forward", g);
    } else if (g.kernel == 1) {
      pointwise_forward<Format>(machine, grid, stage, i == 0 ? making : nullptr);
      machine.launched("pointwise_forward", g);
    } else {
      depthwise_forward<Format>(machine, grid, stage);
      machine.launched("depthwise_forward", g);
    }
  }
  if (call.result.y == nullptr) return;
  apply<Format>(machine, call.result);
  machine.launched("apply", call.stages.back().geometry);
}

template <class Format, class Machine>
void run_backward(const Machine& machine, const BackwardCall& call, const Workspace& workspace, const Shapes& chain,
                  const Grids& grids) {
  ReduceArgs args = call.begin;
  args.gradient.reduction = workspace.reduction(grids.begin, args.channels);
  reduce<Format>(machine, grids.begin, args);
  machine.launched("reduce", chain.stages.back());
  size_t i = chain.stages.size();
  for (BackwardStage stage : call.stages) {
    --i;
    const Geometry& g = stage.geometry;
    if (i == 0 && chain.recompute) {
      const ExpansionGradient last{g.in_rows(), g.in_channels,  g.out_channels, call.x,  stage.grad,
                                   stage.back,  call.expansion, stage.added,    stage.dx};
      expansion_gradient<Format>(machine, expansion_gradient_grid(last, machine), last);
      machine.launched("expansion_gradient", g);
      continue;
    }
    const Grid& grid = grids.stages[i];
    stage.gradient.reduction = workspace.reduction(grid, g.in_channels);
    if (chain.fused(i)) {
      expand_depthwise_backward<Format>(machine, grid, {stage, call.x, call.expansion, chain.channels()});
      machine.launched("expand_depthwise_backward", g);
    } else if (g.kernel == 1) {
      pointwise_backward<Format>(machine, grid, stage);
      machine.launched("pointwise_backward", g);
    } else {
      depthwise_backward<Format>(machine, grid, stage);
      machine.launched("depthwise_backward", g);
    }
  }
}

// The operators of csrc/library.cpp on the machine that machine_of(tensor) gives.
template <auto machine_of>
struct ChainOperators {
  static int64_t counters(const Tensor& x, std::vector<int64_t> plan) { return count_counters(plan, machine_of(x)); }

  static void forward(const Tensor& x, std::vector<Tensor> conv_weights, std::vector<Tensor> bn_weights,
                      std::vector<Tensor> bn_biases, std::optional<Tensor> added, Tensor y, Tensor saved,
                      Tensor statistics, Tensor counters, std::vector<Tensor> before, std::vector<Tensor> left,
                      std::vector<int64_t> plan, std::vector<double> eps) {
    const auto& machine = machine_of(x);
    const ForwardCall call(x, conv_weights, bn_weights, bn_biases, added, y, saved, statistics, before, left, plan,
                           eps);
    const Shapes chain(plan);
    const Grids grids = forward_grids(chain, machine);
    const Workspace workspace(x, grids.pairs, counters, grids.counters);
    call.bfloat16 ? run_forward<Bf16>(machine, call, workspace, chain, grids)
                  : run_forward<Fp16>(machine, call, workspace, chain, grids);
  }

  static void make(const Tensor& x, std::vector<Tensor> before) {
    const auto& machine = machine_of(x);
    const ApplyArgs args = making(x, before);
    x.scalar_type() == torch::headeronly::ScalarType::BFloat16 ? apply<Bf16>(machine, args)
                                                               : apply<Fp16>(machine, args);
    const auto size = [&](int dimension) { return static_cast<int>(x.size(dimension)); };
    machine.launched("apply", map_of({size(0), size(2), size(3), 0, 0, size(1), 0, 0, 0}));
  }

  static void backward(const Tensor& grad, std::optional<Tensor> x, const Tensor& saved, const Tensor& statistics,
                       std::vector<Tensor> conv_weights, std::vector<Tensor> bn_weights, bool add_input,
                       std::optional<Tensor> dx, std::vector<Tensor> dweights, std::vector<Tensor> dbiases,
                       Tensor counters, std::optional<Tensor> left, std::vector<int64_t> plan,
                       std::vector<double> eps) {
    const auto& machine = machine_of(grad);
    const BackwardCall call(grad, x, saved, statistics, conv_weights, bn_weights, add_input, dx, dweights, dbiases,
                            left, plan, eps);
    const Shapes chain(plan);
    const Grids grids = backward_grids(chain, machine);
    const Workspace workspace(grad, grids.pairs, counters, grids.counters);
    call.bfloat16 ? run_backward<Bf16>(machine, call, workspace, chain, grids)
                  : run_backward<Fp16>(machine, call, workspace, chain, grids);
  }
};

}  // namespace nasfast::gpu
