// Kernels of a depthwise stage: kernel 3, 5 or 7, padding kernel / 2, stride 1 or 2, channels in multiples of 2.
#pragma once

#include <type_traits>

#include "depthwise_backward.h"
#include "depthwise_forward.h"
#include "depthwise_matrices.h"

namespace nasfast::gpu {

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
// times as many cycles for a product; code for them has no such kernels, and a machine that took it says so.
template <class Machine>
bool on_tensor_cores(const Geometry& g, const Machine& machine) {
  constexpr size_t kMatrixShared = 128 * 1024;
  const bool wide = g.kernel >= 5 && g.width > kSmallColumns && g.width <= kMatrixColumns;
  const bool small = g.kernel == 7 && g.width <= kSmallColumns && g.height <= kSmallRows;
  return g.stride == 1 && (wide || small) && machine.panels && machine.shared_memory >= kMatrixShared;
}
template <class Machine>
Grid depthwise_forward_grid(const Geometry& g, const Machine& machine) {
  if (on_tensor_cores(g, machine)) return panels_forward_grid(g, machine);
  return depthwise_grid(g, depthwise_forward_jobs(g, machine.multiprocessors));
}

template <class Machine>
Grid depthwise_backward_grid(const Geometry& g, const Machine& machine) {
  if (on_tensor_cores(g, machine)) return panels_backward_grid(g, machine);
  return depthwise_grid(g, depthwise_backward_jobs(g, machine.multiprocessors));
}

template <class Format, class Machine>
void depthwise_forward(const Machine& machine, const Grid& grid, const ForwardStage& stage) {
  if (on_tensor_cores(stage.geometry, machine)) return panels_forward<Format>(machine, grid, stage);
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
  if (on_tensor_cores(stage.geometry, machine)) return panels_backward<Format>(machine, grid, stage);
  const Jobs jobs = depthwise_backward_jobs(stage.geometry, machine.multiprocessors);
  with_kernel_and_stride(stage.geometry, [&](auto kernel, auto stride) {
    machine.template launch<DepthwiseBackward<Format, kernel.value, stride.value>>(grid.groups, grid.rows, grid.shared,
                                                                                   {stage, jobs});
  });
}

}  // namespace nasfast::gpu
