// Launches of orthogonalize on the GPU. Needs no torch.
#pragma once

#include "../../csrc/orthogonal/draws.h"
#include "../../csrc/orthogonal/householder.h"

struct CUstream_st;

namespace nasfast::cuda {

using orthogonal::Draw;
using orthogonal::Item;
using orthogonal::Step;
using orthogonal::Task;

// The teams: threads, and panels of columns that a thread of an update has.
template <int threads, int slots>
struct Team {
  static constexpr int kThreads = threads, kSlots = slots;

#ifdef __CUDACC__
  template <typename F>
  __device__ __forceinline__ void each(const F& f) const {
    f(static_cast<int>(threadIdx.x) % kThreads);
    wait();
  }
  template <typename T, typename F, typename G>
  __device__ __forceinline__ void each_sum(const F& f, const G& g) const {
    const int thread = static_cast<int>(threadIdx.x) % kThreads;
    orthogonal::Quad<T> sum{};
    f(thread, sum);
    NASFAST_UNROLL for (int offset = orthogonal::kQuads; offset < 32; offset *= 2) {
      NASFAST_UNROLL for (int c = 0; c < orthogonal::kQuad; ++c) {
        sum.of[c] += __shfl_xor_sync(~0u, sum.of[c], offset);
      }
    }
    if (thread % 32 < orthogonal::kQuads) g(thread, sum);
    wait();
  }
  __device__ __forceinline__ void wait() const {
    if constexpr (kThreads == 32) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }
#endif
};

using Warp = Team<32, orthogonal::kWarpSlots>;
template <typename T>
using Block = Team<orthogonal::kBlockThreads, orthogonal::kBlockSlots<T>>;

// Elements of shared memory that a block can have on the current device.
template <typename T>
int64_t shared_limit();

// All functions launch on the current device, where the memory is that they are given, and raise if the launch fails.
// T: float or double.

template <typename T>
void launch_draws(const Draw<T>* draws, int count, CUstream_st* stream);

// Does `count` matrices, each by a warp with this much shared memory.
template <typename T>
void launch_small(const Task<T>* batches, const Item* items, int count, int64_t elements, CUstream_st* stream);

// Does one step of `count` matrices, each by up to `most` blocks with this much shared memory.
template <typename T>
void launch_step(const Task<T>* batches, const Item* items, int count, Step step, int i_panel, int most, int64_t limit,
                 int64_t elements, CUstream_st* stream);

}  // namespace nasfast::cuda
