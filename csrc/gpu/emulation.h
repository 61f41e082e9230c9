// A GPU on the host: runs the blocks of a launch one after the other. For tests on machines without a GPU.
#pragma once

#include <numeric>
#include <random>

#include "stages.h"

namespace nasfast::gpu {

struct Emulation {
  int multiprocessors = 2;
  size_t shared_memory = 99 * 1024 - kReserved;  // bytes that a launch can have on sm_86
  bool backwards = false;                        // order of the warps of a block and of their lanes
  uint64_t block_order = 0;                      // 0: ascending, 1: descending, otherwise the seed of a permutation
  static constexpr bool panels = true;

  void launched(const char*, const Geometry&) const {}

  // Runs kernel K on a grid of count_x by count_y blocks.
  template <class K>
  void launch(int count_x, int count_y, size_t shared, const typename K::Args& args) const {
    std::vector<int> order(static_cast<size_t>(count_x) * count_y);
    std::iota(order.begin(), order.end(), 0);
    if (block_order == 1) std::reverse(order.begin(), order.end());
    if (block_order > 1) std::shuffle(order.begin(), order.end(), std::mt19937_64(block_order));
    static_assert(K::kThreads % 32 == 0, "blocks are whole warps");
    WarpScheduler scheduler(K::kThreads / 32, backwards);
    for (const int i : order) {
      // of the exact size, so that a sanitizer sees every access outside; every float in it is NaN
      std::vector<Vec4> memory((shared + sizeof(Vec4) - 1) / sizeof(Vec4));
      if (!memory.empty()) memset(static_cast<void*>(memory.data()), 0xff, memory.size() * sizeof(Vec4));
      scheduler.run([&](int warp) {
        const Block block{i % count_x, i / count_x, count_x, count_y, {warp, backwards}, &scheduler};
        K::run(block, args, reinterpret_cast<unsigned char*>(memory.data()));
      });
    }
  }
};

}  // namespace nasfast::gpu
