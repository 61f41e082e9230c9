// Backward of a depthwise stage on tensor cores: the gradient of its input, in front of the BatchNorm of the stage before.
#pragma once

#include "depthwise_matrices.h"

namespace nasfast::gpu {

// kAhead: loads of a thread from each tensor that are under way at once.
template <class Format, int kAhead_>
struct MatrixBackwardSource {
  static constexpr int kAhead = kAhead_;
  const BackwardStage& stage;
  const Back* back;          // of the channels of the block, in shared memory
  const Interval* mask;      // of this stage
  const Interval* interval;  // of the stage before

  struct Constants {
    float a[8], b[8], c[8];
    const Interval* mask;
  };
  struct Beside {
    float low[8], high[8], mean[8];
  };
  struct Raw {
    Vec4 grad, y;
  };

  NASFAST_DEVICE void prepare(int lane, Constants& to) const {
    NASFAST_UNROLL
    for (int j = 0; j < 8; ++j) {
      const Back f = back[8 * (lane % 4) + j];
      to.a[j] = f.a, to.b[j] = f.b, to.c[j] = f.c;
    }
    to.mask = mask + 8 * (lane % 4);
  }
  NASFAST_DEVICE void load(int64_t at, Raw& to) const {
    to.grad = *reinterpret_cast<const Vec4*>(stage.grad + at);
    to.y = *reinterpret_cast<const Vec4*>(stage.y + at);
  }
  // Whether what is loaded as dz is that: otherwise it is the gradient behind the activation.
  NASFAST_DEVICE bool simple() const { return stage.mask == nullptr; }
  // dy = a dz + b y + c
  template <bool kSimple>
  NASFAST_DEVICE Vec4 convert(const Constants& f, const Raw& raw) const {
    Vec4 made;
    NASFAST_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float y[2] = {Format::first(raw.y.v[i]), Format::second(raw.y.v[i])};
      float dz[2] = {Format::first(raw.grad.v[i]), Format::second(raw.grad.v[i])};
      if (!kSimple) {
        NASFAST_UNROLL
        for (int e = 0; e < 2; ++e) {
          if (!(f.mask[2 * i + e].low < y[e] && y[e] < f.mask[2 * i + e].high)) dz[e] = 0;
        }
      }
      NASFAST_UNROLL
      for (int e = 0; e < 2; ++e) dz[e] = fma(f.a[2 * i + e], dz[e], fma(f.b[2 * i + e], y[e], f.c[2 * i + e]));
      made.v[i] = Format::pack(dz[0], dz[1]);
    }
    return made;
  }

  NASFAST_DEVICE void prepare_beside(int lane, Beside& to) const {
    NASFAST_UNROLL
    for (int j = 0; j < 8; ++j) {
      const Interval f = interval[8 * (lane % 4) + j];
      to.low[j] = f.low, to.high[j] = f.high, to.mean[j] = f.mean;
    }
  }
  NASFAST_DEVICE void load_beside(int64_t at, Vec4& to) const {
    const uint16_t* const from = stage.previous_y != nullptr ? stage.previous_y : stage.added;
    if (from != nullptr) to = *reinterpret_cast<const Vec4*>(from + at);
  }
  // Whether there is a BatchNorm before, whose sums are wanted.
  NASFAST_DEVICE bool sums() const { return stage.previous_y != nullptr; }
  template <bool kSums>
  NASFAST_DEVICE void take(int64_t at, const uint32_t (&result)[4], const Vec4& more, const Beside& beside,
                           ChannelSums& sums) const {
    Vec4 dx;
    NASFAST_UNROLL
    for (int i = 0; i < 4; ++i) {
      const float beside_it[2] = {Format::first(more.v[i]), Format::second(more.v[i])};
      float dz[2] = {Format::first(result[i]), Format::second(result[i])};
      NASFAST_UNROLL
      for (int e = 0; e < 2; ++e) {
        const int j = 2 * i + e;
        if (kSums) {
          dz[e] = beside.low[j] < beside_it[e] && beside_it[e] < beside.high[j] ? dz[e] : 0.f;
          sums.first[j] += dz[e];
          sums.second[j] = fma(dz[e], beside_it[e] - beside.mean[j], sums.second[j]);
        } else {
          dz[e] += stage.added != nullptr ? beside_it[e] : 0.f;
        }
      }
      dx.v[i] = Format::pack(dz[0], dz[1]);
    }
    if (!kSums || stage.dx != nullptr) store_vector(stage.dx + at, dx);
  }
};

template <class Format, int kKernel, int kTiles>
struct DepthwiseBackwardMatrices {
  using Shape = Panel<kKernel, kTiles>;
  using Source = MatrixBackwardSource<Format, 2>;
  static constexpr int kThreads = kMatrixThreads, kBlocks = kMatrixBlocks;
  static constexpr size_t kShared = Shape::kBytes + kSlots * (sizeof(Back) + 2 * sizeof(Interval));
  struct Args {
    BackwardStage stage;
    Units units;
  };

  template <class Block>
  static NASFAST_DEVICE void run(const Block& block, const Args& args, unsigned char* shared) {
    if constexpr (!kMatricesRun) return trap();
    const BackwardStage& stage = args.stage;
    Back* const back = reinterpret_cast<Back*>(shared + Shape::kBytes);
    Interval* const mask = reinterpret_cast<Interval*>(back + kSlots);
    Interval* const interval = mask + kSlots;
    const Panels<Format, Shape, Source> panels(args.units, block.x, shared);
    const int first = panels.first, channel_count = panels.channel_count;
    panels.begin(block, stage.weight, true);
    Local<ChannelSums> sums(block);
    block.each([&](int thread) {
      sums[thread] = {};
      if (thread >= channel_count) return;
      back[thread] = stage.back[first + thread];
      if (stage.mask != nullptr) mask[thread] = stage.mask[first + thread];
      if (stage.previous_y != nullptr) interval[thread] = stage.interval[first + thread];
    });
    block.sync();
    panels.run(block, Source{stage, back, mask, interval}, [] {}, sums);
    if (stage.previous_y == nullptr) return;

    Vec2* const parts = reinterpret_cast<Vec2*>(shared);
    gather_by_warp(block, sums, parts);
    const NormGradient& gradient = stage.gradient;
    block.each([&](int thread) {
      if (thread >= channel_count) return;
      const GradientSums total = over_warps(parts, thread);
      gradient.reduction.partial[int64_t{block.y} * args.units.channels + first + thread] = {as_bits(total.sum),
                                                                                             as_bits(total.product)};
    });
    finish_gradient<kThreads>(block, gradient, block.y, block.x, first, channel_count);
  }
};

}  // namespace nasfast::gpu
