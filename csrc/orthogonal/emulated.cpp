// orthogonalize_emulated runs the CUDA kernels of orthogonalize on the host, for tests on machines without a GPU.

#include <torch/csrc/stable/library.h>

#include "plan.h"

namespace nasfast::cpu {
namespace {

using namespace orthogonal;

// Bytes of shared memory that sm_86 has for one block.
constexpr size_t kSharedMemory = 99 * 1024;

// Runs the threads of a phase one after the other. Their order must not matter, so tests use both directions.
struct EmulatedBlock {
  int threads;
  bool backwards;

  template <typename F>
  void each(const F& f) const {
    for (int i = 0; i < threads; ++i) f(backwards ? threads - 1 - i : i);
  }
};

template <typename T>
void emulate(const std::vector<Matrices<T>>& all, bool backwards) {
  Plan<T> plan(all);
  // torch's allocator aligns memory, as it does on the GPU
  const Tensor workspace = torch::stable::empty({static_cast<int64_t>(plan.workspace)}, scalar_type<T>());
  plan.place(static_cast<T*>(workspace.mutable_data_ptr()));
  // the vectors have the exact size, so that a sanitizer sees every access outside
  std::vector<T> tiny_memory(kTinyShared);
  for (const TinyTask<T>& task : plan.tiny) {
    run_tiny(EmulatedBlock{kTinyThreads, backwards}, task, tiny_memory.data());
  }
  const EmulatedBlock block{kThreads, backwards};
  for (const auto* tasks : {&plan.small, &plan.medium}) {
    const SharedMemory shared(Plan<T>::rows(*tasks), sizeof(T), kSharedMemory);
    std::vector<T> memory(shared.bytes / sizeof(T));
    for (const Task<T>& task : *tasks) run_matrix(block, task, shared.resident_rows, memory.data());
  }
  const SharedMemory shared(Plan<T>::rows(plan.large), sizeof(T), kSharedMemory);
  std::vector<T> memory(shared.bytes / sizeof(T));
  for (int i = 0; i < step_count(plan.most_panels()); ++i) {
    const PanelStep now = step_at(plan.most_panels(), i);
    for (const Task<T>& task : plan.large) {
      // the blocks of a step may run in any order
      for (int tile = tiles(task, now.step, now.i_panel) - 1; tile >= 0; --tile) {
        run_step(block, task, now.step, now.i_panel, tile, shared.resident_rows, memory.data());
      }
    }
  }
}

std::vector<Tensor> orthogonalize_emulated_cpu(const std::vector<Tensor>& matrices, bool backwards) {
  Work work(matrices);
  emulate(work.of_type<float>(), backwards);
  emulate(work.of_type<double>(), backwards);
  return work.results;
}

}  // namespace
}  // namespace nasfast::cpu

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) {
  m.impl("orthogonalize_emulated", TORCH_BOX(&nasfast::cpu::orthogonalize_emulated_cpu));
}
