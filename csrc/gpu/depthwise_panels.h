// Kernels of a depthwise stage on tensor cores; on_tensor_cores() of depthwise.h says which stages these are.
#pragma once

#include <type_traits>

#include "depthwise_matrices_backward.h"
#include "depthwise_matrices_forward.h"

namespace nasfast::gpu {

// A type as a value.
template <class T>
struct Type {
  using Is = T;
};

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
Grid panels_forward_grid(const Geometry& g, const Machine& machine) {
  return matrices_grid<DepthwiseForwardMatrices>(g, machine);
}

template <class Machine>
Grid panels_backward_grid(const Geometry& g, const Machine& machine) {
  return matrices_grid<DepthwiseBackwardMatrices>(g, machine);
}

template <class Format, class Machine>
void panels_forward(const Machine& machine, const Grid& grid, const ForwardStage& stage) {
  launch_matrices<DepthwiseForwardMatrices, Format>(machine, grid, stage);
}

template <class Format, class Machine>
void panels_backward(const Machine& machine, const Grid& grid, const BackwardStage& stage) {
  launch_matrices<DepthwiseBackwardMatrices, Format>(machine, grid, stage);
}

}  // namespace nasfast::gpu
