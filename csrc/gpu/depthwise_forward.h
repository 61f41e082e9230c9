// Forward of a depthwise stage: reads the output of the stage before through its BatchNorm and activation.
#pragma once

#include "depthwise_jobs.h"

namespace nasfast::gpu {

// One thread. kSaturate: the activation before is relu6. Then a sixth of it is one instruction, and the weights in
// shared memory are six times as large.
template <class Format, int kKernel, int kStride, bool kSaturate>
struct ForwardThread {
  static constexpr int kPad = kKernel / 2;
  using Inside = Columns<kPad, kStride * kStrip, kKernel - 1 - kPad - (kStride - 1)>;
  static constexpr int kIn = Inside::kCount;

  const ForwardStage& stage;
  const Taps<kKernel, kKernel == 3> taps;
  const int channel, step;  // step: channel pairs per pixel
  float scale[2], shift[2], start[2], low;
  uint32_t outside;  // read outside of the image: BatchNorm and an activation with a lower bound make it zero

  Inside inside;
  int valid;  // number of columns of the strip that lie in the image
  const uint32_t* x;
  uint32_t* y;
  uint32_t ahead[kIn];
  bool empty = false;  // whether the row ahead lies below the image and is zero

  bool fresh = true;
  float pivot[2] = {0, 0}, numbers = 0;
  Sums sums[2];

  NASFAST_DEVICE ForwardThread(const ForwardStage& stage, int channel, const float* weights)
      : stage(stage), taps(weights), channel(channel), step(stage.geometry.in_channels / 2) {
    NASFAST_UNROLL
    for (int v = 0; v < 2; ++v) {
      const Fold fold = stage.fold == nullptr ? Fold{1, 0} : stage.fold[channel + v];
      scale[v] = kSaturate ? fold.scale / 6 : fold.scale;
      shift[v] = kSaturate ? fold.shift / 6 : fold.shift;
      // saturate() hides a NaN, which the statistics of the stage before have then put into the fold as well
      start[v] = 0 * (fold.scale + fold.shift);
    }
    low = stage.fold == nullptr || stage.act == Act::kIdentity ? -INFINITY : 0;
    outside = kSaturate ? Format::pack(scale[0] > 0 ? -INFINITY : INFINITY, scale[1] > 0 ? -INFINITY : INFINITY) : 0;
  }

  NASFAST_DEVICE void load() {
    inside.each([&](int j, bool in_image) {
      ahead[j] = outside;
      if (in_image) ahead[j] = x[j * step];
    });
    x += stage.geometry.width * step;
  }

  NASFAST_DEVICE void make(float (&to)[kIn][2]) const {
    NASFAST_UNROLL
    for (int j = 0; j < kIn; ++j) {
      NASFAST_UNROLL
      for (int v = 0; v < 2; ++v) {
        const float z = fma(v == 0 ? Format::first(ahead[j]) : Format::second(ahead[j]), scale[v], shift[v]);
        to[j][v] = kSaturate ? saturate(z) : (z < low ? low : z);  // a NaN stays one
      }
    }
    if (!kSaturate) {
      inside.each([&](int j, bool in_image) {
        if (!in_image || empty) to[j][0] = to[j][1] = 0;
      });
    }
  }

  // Stores a row of the output, as it is stored in its statistics.
  NASFAST_DEVICE void finish(const float (&out)[kStrip][2]) {
    if (fresh) {
      const uint32_t pair = Format::pack(out[0][0], out[0][1]);
      pivot[0] = Format::first(pair), pivot[1] = Format::second(pair);
      fresh = false;
    }
    each_column<kStrip>(valid, [&](int t) {
      const uint32_t pair = Format::pack(out[t][0], out[t][1]);
      y[t * step] = pair;
      sums[0].add(Format::first(pair) - pivot[0]);
      sums[1].add(Format::second(pair) - pivot[1]);
    });
    y += stage.geometry.out_width * step;
  }

  NASFAST_DEVICE void run(const Job& job) {
    const Geometry& g = stage.geometry;
    inside.place(kStride * job.column, g.width);
    valid = smaller(kStrip, g.out_width - job.column);
    const int reached = larger(0, kStride * job.begin - kPad), first = reached - reached % kStride;
    const int last = smaller(g.height, kStride * (job.end - 1) + kPad + 1);
    x = reinterpret_cast<const uint32_t*>(stage.x) +
        ((int64_t{job.image} * g.height + first) * g.width + inside.first) * step + channel / 2;
    y = reinterpret_cast<uint32_t*>(stage.y) +
        ((int64_t{job.image} * g.out_height + job.begin) * g.out_width + job.column) * step + channel / 2;
    numbers += static_cast<float>(valid * (job.end - job.begin));
    load();
    empty = false;
    if constexpr (kStride == 1) {
      down(job, first, last);
    } else {
      down_by_two(job, first, last);
    }
  }

 private:
  // Rows first to last - 1 of the input, and those of zeros below them. A loop for both would copy all sums.
  NASFAST_DEVICE void down(const Job& job, int first, int last) {
    Stencil1<kKernel> stencil;
    float out[kStrip][2];
    stencil.reset(start);
    NASFAST_NO_UNROLL
    for (int row = first; row < last; ++row) {
      float in[kIn][2];
      make(in);
      if (row + 1 < last) load();
      stencil.row(in, taps, start, out);
      if (row >= job.begin + kPad) finish(out);
    }
    NASFAST_NO_UNROLL
    for (int row = last; row < job.end + kPad; ++row) {
      stencil.zero_row(start, out);
      if (row >= job.begin + kPad) finish(out);
    }
  }

  // Pairs of rows. The second one of the last pair may not be there: then it is zeros, because a branch around it would
  // copy all sums.
  NASFAST_DEVICE void down_by_two(const Job& job, int first, int last) {
    Stencil2<kKernel> stencil;
    float out[kStrip][2], in[kIn][2];
    stencil.reset(start);
    int u = first / 2;
    NASFAST_NO_UNROLL
    for (; 2 * u < last; ++u) {
      stencil.advance(start, out);
      make(in);
      load_or_empty(2 * u + 1 < last);
      stencil.template row<0>(in, taps, out);
      make(in);
      load_or_empty(2 * u + 2 < last);
      stencil.template row<1>(in, taps, out);
      if (u - kKernel / 4 >= job.begin) finish(out);
    }
    NASFAST_NO_UNROLL
    for (; u < job.end + kKernel / 4; ++u) {
      stencil.advance(start, out);
      if (u - kKernel / 4 >= job.begin) finish(out);
    }
  }

  NASFAST_DEVICE void load_or_empty(bool has_row) {
    if (has_row) {
      load();
    } else {
      NASFAST_UNROLL
      for (int j = 0; j < kIn; ++j) ahead[j] = outside;
    }
    if (!kSaturate) empty = !has_row;
  }
};

// Blocks of a multiprocessor, which share its registers: 128, 168 and 255 for a thread.
constexpr int forward_blocks(int kernel) { return kernel == 3 ? 4 : kernel == 5 ? 3 : 2; }

template <class Format, int kKernel, int kStride, bool kSaturate>
struct DepthwiseForward {
  static constexpr int kThreads = kDepthwiseThreads, kBlocks = forward_blocks(kKernel);
  struct Args {
    ForwardStage stage;
    Jobs jobs;
  };
  struct PairMoments {
    Moments of[2];
  };

  template <class Block>
  static NASFAST_DEVICE void run(const Block& block, const Args& args, unsigned char* shared) {
    constexpr int kTaps = kKernel * kKernel;
    const Jobs& jobs = args.jobs;
    const int first = 2 * jobs.pairs * block.x, channel_count = smaller(2 * jobs.pairs, jobs.channels - first);
    auto* weights = reinterpret_cast<float*>(shared);
    share_weights<Format, kTaps>(block, args.stage.weight, first, channel_count, false, kSaturate ? 6 : 1, weights);
    block.sync();
    Local<PairMoments> moments(block);
    block.each([&](int thread) {
      const int pair = thread % jobs.pairs, slot = thread / jobs.pairs;
      if (2 * pair >= channel_count || slot >= jobs.slots) return;
      ForwardThread<Format, kKernel, kStride, kSaturate> own(args.stage, first + 2 * pair, weights + 2 * kTaps * pair);
      const int begin = block.y * jobs.slots * jobs.turns + slot;
      NASFAST_NO_UNROLL
      for (int i = 0; i < jobs.turns; ++i) {
        if (begin + i * jobs.slots < jobs.count()) own.run(jobs.job(begin + i * jobs.slots));
      }
      NASFAST_UNROLL
      for (int v = 0; v < 2; ++v) moments[thread].of[v] = own.sums[v].moments(own.pivot[v], own.numbers);
    });
    block.sync();
    auto* table = reinterpret_cast<PairMoments*>(shared);  // [slots][pairs], where the weights were
    block.each([&](int thread) {
      if (thread < jobs.slots * jobs.pairs) table[thread] = moments[thread];
    });
    block.sync();
    const Norm& norm = args.stage.norm;
    block.each([&](int thread) {
      for (int c = thread; c < channel_count; c += kThreads) {
        Moments total = table[c / 2].of[c % 2];
        for (int slot = 1; slot < jobs.slots; ++slot) total.merge(table[slot * jobs.pairs + c / 2].of[c % 2]);
        norm.reduction.partial[int64_t{block.y} * jobs.channels + first + c] = {as_bits(total.mean), as_bits(total.m2)};
      }
    });
    finish_norm<kThreads>(block, norm, block.y, block.x, first, channel_count,
                          [&](int row) { return jobs.numbers(row); });
  }
};

}  // namespace nasfast::gpu
