// householder_emulated runs the CUDA kernels of orthogonalize on the host, for tests on machines without a GPU.

#include <torch/csrc/stable/library.h>

#include "tasks.h"

namespace nasfast::orthogonal {
namespace {

// Runs the threads of a phase one after the other. Their order must not matter, so tests use both directions.
struct EmulatedBlock {
  bool backwards;

  template <typename F>
  void each(const F& f) const {
    for (int i = 0; i < kThreads; ++i) f(backwards ? kThreads - 1 - i : i);
  }
};

template <typename T>
void emulate(const std::vector<Task<T>>& tasks, bool backwards) {
  std::vector<T> shared(kShared);  // of the exact size, so that a sanitizer sees every access outside
  run_steps(tasks, [&](Step step, int i_panel, int count, int most) {
    for (int i = 0; i < count; ++i) {
      // the blocks of a step may run in any order
      for (int tile = std::min(most, tiles(tasks[i], step, i_panel)) - 1; tile >= 0; --tile) {
        run_step(EmulatedBlock{backwards}, tasks[i], step, i_panel, tile, shared.data());
      }
    }
  });
}

void householder_emulated(const std::vector<Tensor>& vs, const std::vector<Tensor>& qs, const std::vector<Tensor>& ts,
                          bool backwards) {
  emulate(tasks_of<float>(vs, qs, ts), backwards);
  emulate(tasks_of<double>(vs, qs, ts), backwards);
}

}  // namespace
}  // namespace nasfast::orthogonal

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) {
  m.impl("householder_emulated", TORCH_BOX(&nasfast::orthogonal::householder_emulated));
}
