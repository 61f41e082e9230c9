// Runs a chain of convolutions, BatchNorms and activations: forward a kernel for every stage and one that applies the
// last BatchNorm, backward one that reduces the gradient to the sums of this BatchNorm and then a kernel for every
// stage, last to first. A chain may defer its last BatchNorm to the chain that reads the result, whose first kernel
// applies it if it is pointwise, and whose last kernel of backward completes its sums if it can. No launch waits for
// the host, so a chain can be captured in a CUDA graph.
#pragma once

#include <algorithm>

#include "call.h"

namespace nasfast::gpu {

template <class Machine>
Grid forward_grid(const Shapes& chain, size_t i, const Machine& machine) {
  const Geometry& geometry = chain.stages[i];
  if (geometry.dense()) return dense_forward_grid(geometry, machine);
  return geometry.kernel == 1 ? pointwise_forward_grid(geometry, machine) : depthwise_forward_grid(geometry, machine);
}

template <class Machine>
Grid backward_grid(const Shapes& chain, size_t i, const Machine& machine) {
  const Geometry& geometry = chain.stages[i];
  return geometry.kernel == 1 ? pointwise_backward_grid(geometry, machine) : depthwise_backward_grid(geometry, machine);
}

// The grids of the stages of a chain in one direction, and the most that one of its launches needs: they run one after
// the other.
struct Grids {
  std::vector<Grid> stages;
  Grid result_sums{}, input_sums{};  // of the launches of `reduce` before and behind those of the stages of backward
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
  const Geometry &first = chain.stages[0], &last = chain.stages.back();
  grids.result_sums = grids.add(reduce_grid(last.out_rows(), last.out_channels, machine), last.out_channels);
  for (size_t i = 0; i < chain.stages.size(); ++i) {
    const Geometry& g = chain.stages[i];
    grids.stages.push_back(g.dense() ? Grid{} : grids.add(backward_grid(chain, i, machine), g.in_channels));
  }
  if (first.dense()) return grids;
  grids.input_sums = grids.add(reduce_grid(first.in_rows(), first.in_channels, machine), first.in_channels);
  return grids;
}

// The grid of a launch of `reduce` alone.
template <class Machine>
Grids reduce_grids(const Tensor& grad, const Machine& machine) {
  Grids grids;
  const int channels = static_cast<int>(grad.size(1));
  grids.result_sums = grids.add(reduce_grid(grad.numel() / channels, channels, machine), channels);
  return grids;
}

// Counters that a chain needs in forward or in backward, whichever needs more; without a plan, those of `reduce`.
template <class Machine>
int64_t count_counters(const Tensor& x, const std::vector<int64_t>& plan, const Machine& machine) {
  if (plan.empty()) return reduce_grids(x, machine).counters;
  const Shapes chain(plan);
  return std::max(forward_grids(chain, machine).counters, backward_grids(chain, machine).counters);
}

// The input of a convolution as the geometry of a kernel that goes over it.
inline Geometry map_of(const Geometry& g) {
  return {g.images, g.height, g.width, g.height, g.width, g.in_channels, g.in_channels, 1, 1};
}
inline Geometry map_of(const Tensor& x) {
  const auto size = [&](int dimension) { return static_cast<int>(x.size(dimension)); };
  return map_of(Geometry{size(0), size(2), size(3), 0, 0, size(1), 0, 0, 0});
}

template <class Format, class Machine>
void run_reduce(const Machine& machine, ReduceArgs args, const Workspace& workspace, const Grid& grid,
                const Geometry& map) {
  args.gradient.reduction = workspace.reduction(grid, args.channels);
  reduce<Format>(machine, grid, args);
  machine.launched("reduce", map);
}

template <class Format, class Machine>
void run_forward(const Machine& machine, const ForwardCall& call, const Workspace& workspace, const Grids& grids) {
  const bool deferred_input = call.input.y != nullptr;
  if (deferred_input && call.stages[0].geometry.kernel != 1) {
    apply<Format>(machine, call.input);
    machine.launched("apply", map_of(call.stages[0].geometry));
  }
  for (size_t i = 0; i < call.stages.size(); ++i) {
    ForwardStage stage = call.stages[i];
    const Geometry& g = stage.geometry;
    const Grid& grid = grids.stages[i];
    stage.norm.reduction = workspace.reduction(grid, g.out_channels);
    if (g.dense()) {
      dense_forward<Format>(machine, grid, stage);
      machine.launched("dense_forward", g);
    } else if (g.kernel == 1) {
      if (i == 0 && deferred_input) {
        pointwise_forward_deferred<Format>(machine, grid, stage, call.input);
      } else {
        pointwise_forward<Format>(machine, grid, stage);
      }
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
  if (call.result_sums.grad != nullptr) {
    run_reduce<Format>(machine, call.result_sums, workspace, grids.result_sums, chain.stages.back());
  }
  size_t i = chain.stages.size();
  for (BackwardStage stage : call.stages) {
    --i;
    const Geometry& g = stage.geometry;
    const Grid& grid = grids.stages[i];
    stage.gradient.reduction = workspace.reduction(grid, g.in_channels);
    if (g.kernel == 1) {
      pointwise_backward<Format>(machine, grid, stage);
      machine.launched("pointwise_backward", g);
    } else {
      depthwise_backward<Format>(machine, grid, stage);
      machine.launched("depthwise_backward", g);
    }
  }
  if (call.input_sums.grad != nullptr) {
    run_reduce<Format>(machine, call.input_sums, workspace, grids.input_sums, map_of(chain.stages[0]));
  }
}

// The operators of csrc/library.cpp on the machine that machine_of(tensor) gives.
template <auto machine_of>
struct ChainOperators {
  static int64_t counters(const Tensor& x, std::vector<int64_t> plan) { return count_counters(x, plan, machine_of(x)); }

  static void forward(const Tensor& x, std::vector<Tensor> conv_weights, std::vector<Tensor> bn_weights,
                      std::vector<Tensor> bn_biases, std::optional<Tensor> added, Tensor y, Tensor saved,
                      Tensor statistics, Tensor counters, std::vector<Tensor> deferred_input,
                      std::vector<Tensor> deferred_norm, std::vector<int64_t> plan, std::vector<double> eps) {
    const auto& machine = machine_of(x);
    const ForwardCall call(x, conv_weights, bn_weights, bn_biases, added, y, saved, statistics, deferred_input,
                           deferred_norm, plan, eps);
    const Shapes chain(plan);
    const Grids grids = forward_grids(chain, machine);
    const Workspace workspace(x, grids.pairs, counters, grids.counters);
    call.bfloat16 ? run_forward<Bf16>(machine, call, workspace, grids)
                  : run_forward<Fp16>(machine, call, workspace, grids);
  }

  // Writes x by itself.
  static void apply(const Tensor& x, std::vector<Tensor> deferred_input) {
    const auto& machine = machine_of(x);
    const ApplyArgs args = apply_args(x, deferred_input);
    x.scalar_type() == torch::headeronly::ScalarType::BFloat16 ? gpu::apply<Bf16>(machine, args)
                                                               : gpu::apply<Fp16>(machine, args);
    machine.launched("apply", map_of(x));
  }

  // Computes the gradients of a deferred BatchNorm by itself.
  static void reduce(const Tensor& grad, std::vector<Tensor> deferred_norm, Tensor counters) {
    const auto& machine = machine_of(grad);
    const ReduceArgs args = reduce_args(grad, deferred_norm);
    const Grids grids = reduce_grids(grad, machine);
    const Workspace workspace(grad, grids.pairs, counters, grids.counters);
    grad.scalar_type() == torch::headeronly::ScalarType::BFloat16
        ? run_reduce<Bf16>(machine, args, workspace, grids.result_sums, map_of(grad))
        : run_reduce<Fp16>(machine, args, workspace, grids.result_sums, map_of(grad));
  }

  static void backward(const Tensor& grad, const Tensor& saved, const Tensor& statistics,
                       std::vector<Tensor> conv_weights, std::vector<Tensor> bn_weights, bool add_input,
                       std::optional<Tensor> dx, std::vector<Tensor> dweights, std::vector<Tensor> dbiases,
                       Tensor counters, std::vector<Tensor> input_norm, std::vector<Tensor> deferred_norm,
                       std::vector<int64_t> plan, std::vector<double> eps) {
    const auto& machine = machine_of(grad);
    const BackwardCall call(grad, saved, statistics, conv_weights, bn_weights, add_input, dx, dweights, dbiases,
                            input_norm, deferred_norm, plan, eps);
    const Shapes chain(plan);
    const Grids grids = backward_grids(chain, machine);
    const Workspace workspace(grad, grids.pairs, counters, grids.counters);
    call.bfloat16 ? run_backward<Bf16>(machine, call, workspace, chain, grids)
                  : run_backward<Fp16>(machine, call, workspace, chain, grids);
  }
};

}  // namespace nasfast::gpu
