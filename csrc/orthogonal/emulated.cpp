// householder_emulated and gaussians_emulated run the CUDA kernels of orthogonalize on the host, for tests on machines
// without a GPU.

#include <torch/csrc/stable/library.h>

#include "draws.h"
#include "tasks.h"

namespace nasfast::orthogonal {
namespace {

// Runs the threads of a phase one after the other. Their order must not matter, so tests use both directions.
template <int threads, int slots>
struct EmulatedTeam {
  static constexpr int kThreads = threads, kSlots = slots;
  bool backwards;

  template <typename F>
  void each(const F& f) const {
    for (int i = 0; i < kThreads; ++i) f(backwards ? kThreads - 1 - i : i);
  }

  template <typename T, typename F, typename G>
  void each_sum(const F& f, const G& g) const {
    std::vector<Quad<T>> sums(kThreads, Quad<T>{});
    each([&](int thread) { f(thread, sums[thread]); });
    for (int offset = kQuads; offset < 32; offset *= 2) {
      for (int i = 0; i < kThreads; ++i) {
        if (i & offset) continue;  // both threads of a pair get its sum
        for (int c = 0; c < kQuad; ++c) sums[i].of[c] = sums[i | offset].of[c] += sums[i].of[c];
      }
    }
    each([&](int thread) {
      if (thread % 32 < kQuads) g(thread, sums[thread]);
    });
  }
};

// Bytes of shared memory that every GPU has for a block which asks for them.
constexpr int64_t kSharedBytes = 99 * 1024;

// Memory of the exact size, so that a sanitizer sees every access outside, and of what is no number.
template <typename T>
std::vector<T> shared_memory(int64_t elements) {
  return std::vector<T>(elements, std::numeric_limits<T>::quiet_NaN());
}

template <typename T>
void emulate(const Given& given, bool backwards) {
  using Warp = EmulatedTeam<32, kWarpSlots>;
  using Block = EmulatedTeam<kBlockThreads, kBlockSlots<T>>;
  const Work<T> work = work_of<T, Warp>(given);
  for (const Item& item : work.small) {
    run_steps(Warp{backwards}, work.of(item).at(item.n), shared_memory<T>(work.small_elements).data());
  }
  const int64_t limit = kSharedBytes / static_cast<int64_t>(sizeof(T));
  run_launches<T, Block>(work, limit, [&](Step step, int i_panel, int count, int most, int64_t elements) {
    // the blocks of a launch may run in any order
    for (int i = 0; i < count * most; ++i) {
      const int i_block = backwards ? count * most - 1 - i : i, tile = i_block / count;
      const Item& item = work.large[i_block % count];
      const Task<T> task = work.of(item).at(item.n);
      if (tile >= tiles(task, step, i_panel, Block::kSlots)) continue;
      run_step(Block{backwards}, task, step, i_panel, tile, limit, shared_memory<T>(elements).data());
    }
  });
}

void householder_emulated(const std::vector<Tensor>& z, const std::vector<Tensor>& q, const std::vector<Tensor>& v,
                          const std::vector<Tensor>& tau, const std::vector<double>& scales, bool backwards) {
  const Given given{z, q, v, tau, scales};
  check(given);
  emulate<float>(given, backwards);
  emulate<double>(given, backwards);
}

void gaussians_emulated(const std::vector<Tensor>& zs, const std::vector<int64_t>& seeds, bool backwards) {
  const auto emulate = [&](const auto& draws) {
    for (const auto& draw : draws) {
      DrawMemory memory;
      run(EmulatedTeam<kBlockThreads, 0>{backwards}, draw, memory);
    }
  };
  emulate(draws_of<float>(zs, seeds));
  emulate(draws_of<double>(zs, seeds));
}

}  // namespace
}  // namespace nasfast::orthogonal

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) {
  m.impl("householder_emulated", TORCH_BOX(&nasfast::orthogonal::householder_emulated));
  m.impl("gaussians_emulated", TORCH_BOX(&nasfast::orthogonal::gaussians_emulated));
}
