// householder_emulated and gaussians_emulated run the CUDA kernels of orthogonalize on the host, for tests on machines
// without a GPU.

#include <torch/csrc/stable/library.h>

#include "tasks.h"

namespace nasfast::orthogonal {
namespace {

// Runs the threads of a phase one after the other. Their order must not matter, so tests use both directions.
template <int threads, int columns>
struct EmulatedTeam {
  static constexpr int kThreads = threads, kColumns = columns, kTile = columns * kPanel;
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

// Memory of the exact size, so that a sanitizer sees every access outside, and of what is no number.
template <typename T>
std::vector<T> shared_memory(int64_t elements) {
  return std::vector<T>(elements, std::numeric_limits<T>::quiet_NaN());
}

template <typename T>
void emulate(const Operands& operands, bool backwards) {
  using Warp = EmulatedTeam<32, kWarpColumns>;
  using Block = EmulatedTeam<kBlockThreads, kBlockColumns<T>>;
  const Work<T> work = work_of<T, Warp>(operands);
  for (const Item& item : work.small) {
    run_steps(Warp{backwards}, work.of(item).at(item.n), shared_memory<T>(work.small_elements).data());
  }
  const int64_t limit = 99 * 1024 / sizeof(T);  // bytes that every GPU has for a block which asks for them
  run_launches<T, Block>(work, limit, [&](Step step, int count, int most, int64_t elements) {
    // the blocks of a launch may run in any order
    for (int i = 0; i < count * most; ++i) {
      const int i_block = backwards ? count * most - 1 - i : i, tile = i_block / count;
      const Item& item = work.large[i_block % count];
      const Task<T> task = work.of(item).at(item.n);
      if (tile >= tiles<T, Block>(task, step)) continue;
      run_tile(Block{backwards}, task, step, tile, limit, shared_memory<T>(elements).data());
    }
  });
}

void householder_emulated(const Tensors& z, const Tensors& q, const Tensors& v, const std::vector<double>& scales,
                          bool backwards) {
  const Operands operands{z, q, v, scales};
  operands.check();
  emulate<float>(operands, backwards);
  emulate<double>(operands, backwards);
}

void gaussians_emulated(const Tensors& zs, const std::vector<int64_t>& seeds, bool backwards) {
  for (const Draw& draw : draws_of(zs, seeds)) {
    DrawMemory memory;
    run(EmulatedTeam<kBlockThreads, 0>{backwards}, draw, memory);
  }
}

}  // namespace
}  // namespace nasfast::orthogonal

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) {
  m.impl("householder_emulated", TORCH_BOX(&nasfast::orthogonal::householder_emulated));
  m.impl("gaussians_emulated", TORCH_BOX(&nasfast::orthogonal::gaussians_emulated));
}
