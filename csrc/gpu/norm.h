// The two kernels at the end of a chain: `apply` makes the result from the output of the last convolution, and `reduce`
// begins backward with the sums that the last BatchNorm needs.
#pragma once

#include "stages.h"

namespace nasfast::gpu {

// What a thread does in either kernel: `each` is called for rows of the tensor and offsets of 8 channels.
struct Share {
  int channel;          // the first of 8 channels, or -1 if the thread is idle
  int row;              // index among the rows that the block reads at once
  int64_t first, step;  // the first row of the tensor, and the distance to the next

  NASFAST_DEVICE Share(const Lanes& lanes, int thread, int block, int blocks, int group, int channels) {
    row = thread / lanes.vectors;
    channel = 8 * (group * lanes.vectors + thread % lanes.vectors);
    if (row >= lanes.rows || channel >= channels) channel = -1;
    first = int64_t{block} * lanes.rows + row;
    step = int64_t{blocks} * lanes.rows;
  }
};

// Blocks that share the rows of a group: as many as run at once, but none without work for each of its threads.
template <class Machine>
int row_blocks(const Lanes& lanes, int64_t rows, int per_multiprocessor, const Machine& machine) {
  const int64_t needed = (rows + lanes.rows - 1) / lanes.rows;
  const int64_t at_once = machine.multiprocessors * per_multiprocessor / lanes.groups;
  return static_cast<int>(needed < at_once ? needed : at_once > 0 ? at_once : 1);
}

template <class Format>
NASFAST_DEVICE void unpack(const Vec4& from, float (&to)[8]) {
  NASFAST_UNROLL
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = Format::first(from.v[i]);
    to[2 * i + 1] = Format::second(from.v[i]);
  }
}

// out = act(scale y + shift) + added.
template <class Format>
struct ApplyKernel {
  static constexpr int kThreads = Lanes::kThreads, kBlocks = 3;
  static constexpr int kAhead = 4;  // rows that a thread loads before it uses the first
  using Args = ApplyArgs;

  // Not a number stays what it is.
  static NASFAST_DEVICE float activate(Act act, float z) {
    if (act == Act::kIdentity) return z;
    const float positive = z < 0 ? 0 : z;
    return act == Act::kRelu6 && positive > 6 ? 6 : positive;
  }

  template <class Block>
  static NASFAST_DEVICE void run(const Block& block, const Args& args, unsigned char*) {
    block.each([&](int thread) {
      const Share share(args.lanes, thread, block.x, block.count_x, block.y, args.channels);
      if (share.channel < 0) return;
      Fold fold[8];
      NASFAST_UNROLL
      for (int i = 0; i < 8; ++i) fold[i] = args.fold[share.channel + i];
      NASFAST_NO_UNROLL
      for (int64_t row = share.first; row < args.rows; row += kAhead * share.step) {
        Vec4 y[kAhead], added[kAhead];
        NASFAST_UNROLL
        for (int j = 0; j < kAhead; ++j) {
          const int64_t here = row + j * share.step, at = here * args.channels + share.channel;
          y[j] = added[j] = Vec4{0, 0, 0, 0};
          if (here < args.rows) y[j] = *reinterpret_cast<const Vec4*>(args.y + at);
          if (here < args.rows && args.added != nullptr) added[j] = *reinterpret_cast<const Vec4*>(args.added + at);
        }
        NASFAST_UNROLL
        for (int j = 0; j < kAhead; ++j) {
          const int64_t here = row + j * share.step;
          if (here >= args.rows) break;
          float value[8], plus[8];
          unpack<Format>(y[j], value);
          unpack<Format>(added[j], plus);
          NASFAST_UNROLL
          for (int i = 0; i < 8; ++i) {
            value[i] = activate(args.act, fma(fold[i].scale, value[i], fold[i].shift)) + plus[i];
          }
          Vec4 packed;
          NASFAST_UNROLL
          for (int i = 0; i < 4; ++i) packed.v[i] = Format::pack(value[2 * i], value[2 * i + 1]);
          *reinterpret_cast<Vec4*>(args.out + here * args.channels + share.channel) = packed;
        }
      }
    });
  }
};

template <class Format, class Machine>
void apply(const Machine& machine, const ApplyArgs& args) {
  const int blocks = row_blocks(args.lanes, args.rows, ApplyKernel<Format>::kBlocks, machine);
  machine.template launch<ApplyKernel<Format>>(blocks, args.lanes.groups, 0, args);
}

// The sums of dz and of dz (y - mean), where dz is the gradient in front of the activation.
template <class Format>
struct ReduceKernel {
  static constexpr int kThreads = Lanes::kThreads, kBlocks = 2;
  using Args = ReduceArgs;

  template <class Block>
  static NASFAST_DEVICE void run(const Block& block, const Args& args, unsigned char* shared) {
    const Lanes& lanes = args.lanes;
    const int width = 8 * lanes.vectors, begin = block.y * width;
    const int channel_count = args.channels - begin < width ? args.channels - begin : width;
    GradientSums* sums = reinterpret_cast<GradientSums*>(shared);  // [rows at once][width]
    block.each([&](int thread) {
      const Share share(lanes, thread, block.x, block.count_x, block.y, args.channels);
      if (share.channel < 0) return;
      GradientSums own[8];
      add_own(args, share, own);
      NASFAST_UNROLL
      for (int i = 0; i < 8; ++i) sums[share.row * width + share.channel - begin + i] = own[i];
    });
    block.sync();
    block.each([&](int thread) {
      for (int c = thread; c < channel_count; c += kThreads) {
        GradientSums total;
        for (int row = 0; row < lanes.rows; ++row) {
          total.sum += sums[row * width + c].sum;
          total.product += sums[row * width + c].product;
        }
        args.gradient.reduction.partial[int64_t{block.x} * args.channels + begin + c] = {as_bits(total.sum),
                                                                                         as_bits(total.product)};
      }
    });
    finish_gradient<kThreads>(block, args.gradient, block.x, block.y, begin, channel_count);
  }

 private:
  static NASFAST_DEVICE void add_own(const Args& args, const Share& share, GradientSums (&own)[8]) {
    Interval interval[8];
    NASFAST_UNROLL
    for (int i = 0; i < 8; ++i) interval[i] = args.interval[share.channel + i];
    NASFAST_NO_UNROLL
    for (int64_t row = share.first; row < args.rows; row += 2 * share.step) {
      Vec4 grad[2], y[2];
      NASFAST_UNROLL
      for (int j = 0; j < 2; ++j) {
        const int64_t here = row + j * share.step, at = here * args.channels + share.channel;
        grad[j] = y[j] = Vec4{0, 0, 0, 0};  // a gradient of 0 adds nothing
        if (here >= args.rows) continue;
        grad[j] = *reinterpret_cast<const Vec4*>(args.grad + at);
        y[j] = *reinterpret_cast<const Vec4*>(args.y + at);
      }
      NASFAST_UNROLL
      for (int j = 0; j < 2; ++j) {
        float dz[8], value[8];
        unpack<Format>(grad[j], dz);
        unpack<Format>(y[j], value);
        NASFAST_UNROLL
        for (int i = 0; i < 8; ++i) {
          const bool open = interval[i].low < value[i] && value[i] < interval[i].high;
          own[i].add(open ? dz[i] : 0.f, value[i] - interval[i].mean);
        }
      }
    }
  }
};

template <class Machine>
Grid reduce_grid(int64_t rows, int channels, const Machine& machine) {
  const Lanes lanes = lanes_of(channels);
  return {row_blocks(lanes, rows, ReduceKernel<Bf16>::kBlocks, machine), lanes.groups,
          sizeof(GradientSums) * lanes.rows * lanes.vectors * 8};
}

template <class Format, class Machine>
void reduce(const Machine& machine, const Grid& grid, const ReduceArgs& args) {
  machine.template launch<ReduceKernel<Format>>(grid.rows, grid.groups, grid.shared, args);
}

}  // namespace nasfast::gpu
