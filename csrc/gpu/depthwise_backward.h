// Backward of a depthwise stage: the gradient of its input, in front of the BatchNorm of the stage before.
#pragma once

#include "depthwise_jobs.h"

namespace nasfast::gpu {

// Rows of dy = a dz + b y + c. A row is loaded before the row before it is used.
template <class Format, int kBefore, int kAfter>
struct GradientRows {
  using Inside = Columns<kBefore, kStrip, kAfter>;
  static constexpr int kIn = Inside::kCount;

  const BackwardStage& stage;
  const int channel, step;  // step: channel pairs per pixel
  Inside inside;
  const uint32_t *grad, *y;
  uint32_t ahead_grad[kIn], ahead_y[kIn];

  NASFAST_DEVICE GradientRows(const BackwardStage& stage, int channel)
      : stage(stage), channel(channel), step(stage.geometry.out_channels / 2) {}

  NASFAST_DEVICE void place(int image, int row, int column) {
    const Geometry& g = stage.geometry;
    inside.place(column, g.out_width);
    const int64_t at = ((int64_t{image} * g.out_height + row) * g.out_width + inside.first) * step + channel / 2;
    grad = reinterpret_cast<const uint32_t*>(stage.grad) + at;
    y = reinterpret_cast<const uint32_t*>(stage.y) + at;
    load();
  }

  // The next row, which has been loaded. more: there is one behind it, which is loaded now.
  NASFAST_DEVICE void next(float (&to)[kIn][2], bool more) {
    make(to);
    if (more) load();
  }

 private:
  NASFAST_DEVICE void load() {
    inside.each([&](int j, bool in_image) {
      ahead_grad[j] = ahead_y[j] = 0;
      if (in_image) ahead_grad[j] = grad[j * step], ahead_y[j] = y[j * step];
    });
    grad += stage.geometry.out_width * step;
    y += stage.geometry.out_width * step;
  }

  NASFAST_DEVICE void make(float (&to)[kIn][2]) {
    if (stage.mask != nullptr) close();
    NASFAST_UNROLL
    for (int v = 0; v < 2; ++v) {
      const Back back = stage.back[channel + v];  // read again for every row, because registers are short
      // zero where the columns before and after the strip are outside
      const float before = inside.before ? back.c : 0, after = inside.after || inside.ragged ? back.c : 0;
      NASFAST_UNROLL
      for (int j = 0; j < kIn; ++j) {
        const float dz = v == 0 ? Format::first(ahead_grad[j]) : Format::second(ahead_grad[j]);
        const float y = v == 0 ? Format::first(ahead_y[j]) : Format::second(ahead_y[j]);
        to[j][v] = fma(dz, back.a, fma(y, back.b, j < kBefore ? before : j < kBefore + kStrip ? back.c : after));
      }
    }
    if (inside.ragged) {
      inside.each([&](int j, bool in_image) {
        if (!in_image) to[j][0] = to[j][1] = 0;
      });
    }
  }

  // The gradient behind the activation of this stage becomes that in front of it.
  NASFAST_DEVICE void close() {
    const Interval first = stage.mask[channel], second = stage.mask[channel + 1];
    NASFAST_UNROLL
    for (int j = 0; j < kIn; ++j) {
      const float y0 = Format::first(ahead_y[j]), y1 = Format::second(ahead_y[j]);
      if (!(first.low < y0 && y0 < first.high)) ahead_grad[j] &= 0xffff0000u;
      if (!(second.low < y1 && y1 < second.high)) ahead_grad[j] &= 0xffffu;
    }
  }
};

// Rows of the result, of kColumns columns: through the activation of the stage before, if there is one.
template <class Format, int kColumns>
struct ResultRows {
  const BackwardStage& stage;
  const int channel, step;
  GradientSums sums[2];
  int column;              // column of the first result
  const uint32_t* beside;  // the output of the stage before, or what is added, or null
  uint32_t* dx = nullptr;
  uint32_t ahead[kColumns];

  NASFAST_DEVICE ResultRows(const BackwardStage& stage, int channel)
      : stage(stage), channel(channel), step(stage.geometry.in_channels / 2) {}

  NASFAST_DEVICE void place(int image, int row, int first) {
    const Geometry& g = stage.geometry;
    column = first;
    const int64_t at = ((int64_t{image} * g.height + row) * g.width + first) * step + channel / 2;
    if (stage.dx != nullptr) dx = reinterpret_cast<uint32_t*>(stage.dx) + at;
    const uint16_t* from = stage.previous_y != nullptr ? stage.previous_y : stage.added;
    beside = from == nullptr ? nullptr : reinterpret_cast<const uint32_t*>(from) + at;
  }

  NASFAST_DEVICE void load() {
    if (beside == nullptr) return;
    each_column<kColumns>(stage.geometry.width - column, [&](int t) { ahead[t] = beside[t * step]; });
    beside += stage.geometry.width * step;
  }

  NASFAST_DEVICE void finish(const float (&out)[kColumns][2]) {
    if (stage.previous_y != nullptr) {
      // read again for every row, because registers are short
      const Interval interval[2] = {stage.interval[channel], stage.interval[channel + 1]};
      each_column<kColumns>(stage.geometry.width - column, [&](int t) {
        float dz[2];
        NASFAST_UNROLL
        for (int v = 0; v < 2; ++v) {
          const float y = v == 0 ? Format::first(ahead[t]) : Format::second(ahead[t]);
          dz[v] = interval[v].low < y && y < interval[v].high ? out[t][v] : 0;
          sums[v].add(dz[v], y - interval[v].mean);
        }
        ahead[t] = Format::pack(dz[0], dz[1]);
      });
      if (stage.dx == nullptr) return;
      each_column<kColumns>(stage.geometry.width - column, [&](int t) { dx[t * step] = ahead[t]; });
    } else {
      each_column<kColumns>(stage.geometry.width - column, [&](int t) {
        const bool more = beside != nullptr;
        dx[t * step] = Format::pack(more ? out[t][0] + Format::first(ahead[t]) : out[t][0],
                                    more ? out[t][1] + Format::second(ahead[t]) : out[t][1]);
      });
    }
    dx += stage.geometry.width * step;
  }
};

// Blocks of a multiprocessor, which share its registers: 168 and 255 for a thread.
constexpr int backward_blocks(int kernel) { return kernel == 7 ? 2 : 3; }

template <class Format, int kKernel, int kStride>
struct DepthwiseBackward {
  static constexpr int kThreads = kDepthwiseThreads, kBlocks = backward_blocks(kKernel);
  using Weights = Taps<kKernel, kKernel == 3 && kStride == 1>;
  struct Args {
    BackwardStage stage;
    Jobs jobs;
  };
  struct PairSums {
    GradientSums of[2];
  };

  template <class Block>
  static NASFAST_DEVICE void run(const Block& block, const Args& args, unsigned char* shared) {
    constexpr int kTaps = kKernel * kKernel;
    const Jobs& jobs = args.jobs;
    const int first = 2 * jobs.pairs * block.x, channel_count = smaller(2 * jobs.pairs, jobs.channels - first);
    auto* weights = reinterpret_cast<float*>(shared);
    share_weights<Format, kTaps>(block, args.stage.weight, first, channel_count, kStride == 1, 1, weights);
    block.sync();
    Local<PairSums> sums(block);
    block.each([&](int thread) {
      const int pair = thread % jobs.pairs, slot = thread / jobs.pairs;
      if (2 * pair >= channel_count || slot >= jobs.slots) return;
      const Weights taps(weights + 2 * kTaps * pair);
      ResultRows<Format, kStride * kStrip> result(args.stage, first + 2 * pair);
      const int begin = block.y * jobs.slots * jobs.turns + slot;
      NASFAST_NO_UNROLL
      for (int i = 0; i < jobs.turns; ++i) {
        if (begin + i * jobs.slots >= jobs.count()) break;
        const Job job = jobs.job(begin + i * jobs.slots);
        if constexpr (kStride == 1) {
          down(args.stage, first + 2 * pair, job, taps, result);
        } else {
          down_by_two(args.stage, first + 2 * pair, job, taps, result);
        }
      }
      sums[thread].of[0] = result.sums[0], sums[thread].of[1] = result.sums[1];
    });
    if (args.stage.previous_y == nullptr) return;
    block.sync();
    auto* table = reinterpret_cast<PairSums*>(shared);  // [slots][pairs], where the weights were
    block.each([&](int thread) {
      if (thread < jobs.slots * jobs.pairs) table[thread] = sums[thread];
    });
    block.sync();
    const NormGradient& gradient = args.stage.gradient;
    block.each([&](int thread) {
      for (int c = thread; c < channel_count; c += kThreads) {
        GradientSums total = table[c / 2].of[c % 2];
        for (int slot = 1; slot < jobs.slots; ++slot) {
          const GradientSums& other = table[slot * jobs.pairs + c / 2].of[c % 2];
          total.sum += other.sum, total.product += other.product;
        }
        gradient.reduction.partial[int64_t{block.y} * jobs.channels + first + c] = {as_bits(total.sum),
                                                                                    as_bits(total.product)};
      }
    });
    finish_gradient<kThreads>(block, gradient, block.y, block.x, first, channel_count);
  }

 private:
  // The stencil with its filters turned around.
  template <class Result>
  static NASFAST_DEVICE void down(const BackwardStage& stage, int channel, const Job& job, const Weights& taps,
                                  Result& result) {
    constexpr int kPad = kKernel / 2;
    GradientRows<Format, kPad, kPad> source(stage, channel);
    const int first = larger(0, job.begin - kPad), last = smaller(stage.geometry.height, job.end + kPad);
    source.place(job.image, first, job.column);
    result.place(job.image, job.begin, job.column);
    Stencil1<kKernel> stencil;
    const float start[2] = {0, 0};
    stencil.reset(start);
    float out[kStrip][2];
    NASFAST_NO_UNROLL
    for (int row = first; row < last; ++row) {
      float in[decltype(source)::kIn][2];
      const bool complete = row >= job.begin + kPad;
      if (complete) result.load();
      source.next(in, row + 1 < last);
      stencil.row(in, taps, start, out);
      if (complete) result.finish(out);
    }
    NASFAST_NO_UNROLL
    for (int row = last; row < job.end + kPad; ++row) {
      stencil.zero_row(start, out);
      if (row < job.begin + kPad) continue;
      result.load();
      result.finish(out);
    }
  }

  // Pairs of rows of the result, each from a few rows of dy that stay in registers.
  template <class Result>
  static NASFAST_DEVICE void down_by_two(const BackwardStage& stage, int channel, const Job& job, const Weights& taps,
                                         Result& result) {
    using Gather = Gather2<kKernel>;
    constexpr int kBehind = Gather::kRows - 1 - Gather::kBefore;
    GradientRows<Format, Gather::kBefore, kBehind> source(stage, channel);
    const int rows = stage.geometry.out_height;
    const int first = larger(0, job.begin - Gather::kBefore), last = smaller(rows, job.end + kBehind);
    source.place(job.image, first, job.column);
    result.place(job.image, 2 * job.begin, 2 * job.column);
    Gather gather;
    NASFAST_UNROLL
    for (int i = 0; i < Gather::kRows; ++i) {
      NASFAST_UNROLL
      for (int j = 0; j < Gather::kIn; ++j) gather.dy[i][j][0] = gather.dy[i][j][1] = 0;
    }
    NASFAST_NO_UNROLL
    for (int row = first; row < job.end + kBehind; ++row) {
      gather.advance();
      if (row < last) {
        source.next(gather.dy[Gather::kRows - 1], row + 1 < last);
      } else {
        NASFAST_UNROLL
        for (int j = 0; j < Gather::kIn; ++j)
          gather.dy[Gather::kRows - 1][j][0] = gather.dy[Gather::kRows - 1][j][1] = 0;
      }
      const int u = row - kBehind;
      if (u < job.begin) continue;
      float out[2 * kStrip][2];
      result.load();
      gather.template row<0>(taps, out);
      result.finish(out);
      if (2 * u + 1 >= stage.geometry.height) continue;
      result.load();
      gather.template row<1>(taps, out);
      result.finish(out);
    }
  }
};

}  // namespace nasfast::gpu
