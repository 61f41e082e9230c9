// Kernels of a depthwise stage: kernel 3, 5 or 7, padding kernel / 2, stride 1 or 2, channels in multiples of 2.
#pragma once

#include <type_traits>

#include "depthwise_backward.h"
#include "depthwise_forward.h"
#include "depthwise_matrices_backward.h"
#include "depthwise_matrices_forward.h"

namespace nasfast::gpu {

// A type as a value.
template <class T>
struct Type {
  using Is = T;
};

// f(kernel, stride) with both as constants.
template <class F>
void with_kernel_and_stride(const Geometry& g, const F& f) {
  const auto with_stride = [&](auto kernel) {
    g.stride == 1 ? f(kernel, std::integral_constant<int, 1>()) : f(kernel, std::integral_constant<int, 2>());
  };
  if (g.kernel == 3) with_stride(std::integral_constant<int, 3>());
  if (g.kernel == 5) with_stride(std::integral_constant<int, 5>());
  if (g.kernel == 7) with_stride(std::integral_constant<int, 7>());
}

inline Jobs depthwise_forward_jobs(const Geometry& g, int multiprocessors) {
  return divide(g, (g.kernel - 1) / g.stride, forward_blocks(g.kernel), multiprocessors);
}
inline Jobs depthwise_backward_jobs(const Geometry& g, int multiprocessors) {
  return divide(g, g.stride == 1 ? g.kernel - 1 : 1, backward_blocks(g.kernel), multiprocessors);
}

// Shared memory holds the weights and then what the threads have summed: two or three floats a channel.
inline Grid depthwise_grid(const Geometry& g, const Jobs& jobs) {
  const size_t weights = sizeof(float) * g.kernel * g.kernel * 2 * jobs.pairs;
  const size_t sums = sizeof(Moments) * 2 * jobs.slots * jobs.pairs;
  return {jobs.blocks(), jobs.groups(), weights > sums ? weights : sums};
}

// Whether the tensor cores take a stage. By the instruction model they are faster from kernel 5 on, and for pairs of small
// images with kernel 7. GPUs whose blocks have less shared memory than kMatrixShared (sm_86, sm_89) also take about four
// times as many cycles for a product.
template <class Machine>
bool on_tensor_cores(const Geometry& g, const Machine& machine) {
  constexpr size_t kMatrixShared = 128 * 1024;
  const bool wide = g.kernel >= 5 && g.width > kSmallColumns && g.width <= kMatrixColumns;
  const bool small = g.kernel == 7 && g.width <= kSmallColumns && g.height <= kSmallRows;
  return g.stride == 1 && (wide || small) && machine.shared_memory >= kMatrixShared;
}
// f(kernel, tiles of 8 columns) with both as constants.
template <class F>
void with_panel(const Geometry& g, const F& f) {
  const auto with_tiles = [&](auto kernel) {
    if constexpr (kernel.value == 7) {
      if (g.width <= kSmallColumns) return f(kernel, std::integral_constant<int, 1>());
    }
    if (g.width <= 16) return f(kernel, std::integral_constant<int, 2>());
    g.width <= 32 ? f(kernel, std::integral_constant<int, 4>()) : f(kernel, std::integral_constant<int, 7>());
  };
  g.kernel == 5 ? with_tiles(std::integral_constant<int, 5>()) : with_tiles(std::integral_constant<int, 7>());
}
// f(units, Type<the kernel>()).
template <template <class, int, int> class Kernel, class Format, class Machine, class F>
void with_matrices(const Geometry& g, const Machine& machine, const F& f) {
  with_panel(g, [&](auto kernel, auto tiles) {
    using Chosen = Kernel<Format, kernel.value, tiles.value>;
    f(divide_units(g, Chosen::Shape::kPair, Chosen::kBlocks, machine.multiprocessors), Type<Chosen>());
  });
}
template <template <class, int, int> class Kernel, class Machine>
Grid matrices_grid(const Geometry& g, const Machine& machine) {
  Grid grid{};
  with_matrices<Kernel, Bf16>(g, machine, [&](const Units& units, auto kernel) {
    grid = {units.blocks(), units.groups(), decltype(kernel)::Is::kShared};
  });
  return grid;
}
template <template <class, int, int> class Kernel, class Format, class Machine, class Stage>
void launch_matrices(const Machine& machine, const Grid& grid, const Stage& stage) {
  with_matrices<Kernel, Format>(stage.geometry, machine, [&](const Units& units, auto kernel) {
    machine.template launch<typename decltype(kernel)::Is>(grid.groups, grid.rows, grid.shared, {stage, units});
  });
}

template <class Machine>
Grid depthwise_forward_grid(const Geometry& g, const Machine& machine) {
  if (on_tensor_cores(g, machine)) return matrices_grid<DepthwiseForwardMatrices>(g, machine);
  return depthwise_grid(g, depthwise_forward_jobs(g, machine.multiprocessors));
}

template <class Machine>
Grid depthwise_backward_grid(const Geometry& g, const Machine& machine) {
  if (on_tensor_cores(g, machine)) return matrices_grid<DepthwiseBackwardMatrices>(g, machine);
  return depthwise_grid(g, depthwise_backward_jobs(g, machine.multiprocessors));
}

template <class Format, class Machine>
void depthwise_forward(const Machine& machine, const Grid& grid, const ForwardStage& stage) {
  if (on_tensor_cores(stage.geometry, machine)) {
    return launch_matrices<DepthwiseForwardMatrices, Format>(machine, grid, stage);
  }
  const Jobs jobs = depthwise_forward_jobs(stage.geometry, machine.multiprocessors);
  with_kernel_and_stride(stage.geometry, [&](auto kernel, auto stride) {
    if (stage.fold != nullptr && stage.act == Act::kRelu6) {
      machine.template launch<DepthwiseForward<Format, kernel.value, stride.value, true>>(grid.groups, grid.rows,
                                                                                          grid.shared, {stage, jobs});
    } else {
      machine.template launch<DepthwiseForward<Format, kernel.value, stride.value, false>>(grid.groups, grid.rows,
                                                                                           grid.shared, {stage, jobs});
    }
  });
}

template <class Format, class Machine>
void depthwise_backward(const Machine& machine, const Grid& grid, const BackwardStage& stage) {
  if (on_tensor_cores(stage.geometry, machine)) {
    return launch_matrices<DepthwiseBackwardMatrices, Format>(machine, grid, stage);
  }
  const Jobs jobs = depthwise_backward_jobs(stage.geometry, machine.multiprocessors);
  with_kernel_and_stride(stage.geometry, [&](auto kernel, auto stride) {
    machine.template launch<DepthwiseBackward<Format, kernel.value, stride.value>>(grid.groups, grid.rows, grid.shared,
                                                                                   {stage, jobs});
  });
}

}  // namespace nasfast::gpu
