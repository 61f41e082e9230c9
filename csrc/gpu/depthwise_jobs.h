// How the threads of a depthwise kernel divide its work.
//
// The smaller of the two maps (that of the output) is divided. A job is a strip of kStrip columns in a segment of the
// rows of one image, for a pair of channels. A block has a group of channels, and several jobs side by side.
#pragma once

#include "stages.h"
#include "stencil.h"

namespace nasfast::gpu {

constexpr int kDepthwiseThreads = 128;

// Division by a number that the host knows, without a division.
struct Divisor {
  int by = 1;
  uint64_t inverse = 0;  // 2^64 / by, rounded up

  Divisor() = default;
  explicit Divisor(int by) : by(by), inverse(by == 1 ? 0 : ~uint64_t{0} / by + 1) {}
  // n / by for 0 <= n < 2^31. The inverse is too large by less than one, which does not reach the quotient.
  NASFAST_DEVICE int operator()(int n) const {
    const uint64_t low = (inverse & 0xffffffffu) * n >> 32, high = (inverse >> 32) * n;
    return by == 1 ? n : static_cast<int>((high + low) >> 32);
  }
};

// What one thread does at a time: rows begin to end - 1 and the columns from `column` on.
struct Job {
  int image, begin, end, column;
};

struct Jobs {
  int images, rows, columns, channels;  // sizes of the map that is divided
  int pairs;                            // channel pairs per block
  int slots;                            // jobs per block and channel pair that run side by side
  int turns;                            // jobs that a thread does one after the other
  Divisor strips, segments;             // their numbers per image
  int height;                           // rows per segment

  NASFAST_ANYWHERE int count() const { return images * segments.by * strips.by; }
  NASFAST_ANYWHERE int blocks() const { return divide_up(count(), slots * turns); }  // that share channels
  NASFAST_ANYWHERE int groups() const { return divide_up(channels, 2 * pairs); }

  NASFAST_DEVICE Job job(int index) const {
    const int line = strips(index), image = segments(line), begin = (line - image * segments.by) * height;
    return {image, begin, smaller(rows, begin + height), (index - line * strips.by) * kStrip};
  }

  // Numbers per channel of a block.
  NASFAST_DEVICE float numbers(int block) const {
    const int from = block * slots * turns, to = smaller(count(), from + slots * turns);
    if (strips.by * kStrip == columns && segments.by * height == rows) {
      return static_cast<float>((to - from) * (height * kStrip));
    }
    return static_cast<float>(numbers_before(to) - numbers_before(from));
  }

 private:
  NASFAST_DEVICE unsigned numbers_before(int index) const {
    const Job at = job(index);
    return static_cast<unsigned>(at.image * rows + at.begin) * columns + at.column * (at.end - at.begin);
  }
};

// Lanes that work, as a share of those that there are, for blocks of `pairs` of the pairs of channels. Short runs of
// neighbouring channels share sectors of memory with other blocks.
inline double lanes_used(int all, int pairs) {
  const double shares = static_cast<double>(all) / (divide_up(all, pairs) * pairs);
  const double lanes = static_cast<double>(kDepthwiseThreads / pairs * pairs) / kDepthwiseThreads;
  return shares * lanes * (pairs == all ? 1 : pairs / (pairs + 2.));
}

// Divides the map of the output. extra: rows of it that a segment computes besides its own. resident: blocks that a
// multiprocessor runs at once.
inline Jobs divide(const Geometry& g, int extra, int resident, int multiprocessors) {
  constexpr int kMostPairs = 64, kEnoughRows = 1024;
  constexpr int kPrologue = 3;   // the cost of starting a job, in rows
  constexpr double kFewest = 3;  // with fewer warps per scheduler, the time is that of a single warp
  Jobs best{g.images, g.out_height, g.out_width, g.out_channels, 4, 0, 1, Divisor(divide_up(g.out_width, kStrip)), {},
            0};
  const int all = g.out_channels / 2;
  for (int pairs = 8; pairs <= smaller(all, kMostPairs); pairs += 4) {
    if (lanes_used(all, pairs) >= lanes_used(all, best.pairs)) best.pairs = pairs;
  }
  const int most = kDepthwiseThreads / best.pairs;
  double least = INFINITY;
  for (int segments = 1; segments <= g.out_height; ++segments) {
    Jobs jobs = best;
    jobs.height = divide_up(g.out_height, segments);
    jobs.segments = Divisor(divide_up(g.out_height, jobs.height));
    const int length = smaller(g.out_height, jobs.height + extra) + kPrologue;
    for (jobs.slots = smaller(most, jobs.count()); jobs.slots > 0; --jobs.slots) {
      jobs.turns = divide_up(jobs.count(), jobs.slots * kEnoughRows);
      const int blocks = divide_up(jobs.blocks() * jobs.groups(), multiprocessors);  // on the busiest multiprocessor
      const auto time = [&](int together) {  // the time of blocks that run at once
        const double warps = together * divide_up(jobs.slots * jobs.pairs, 32) / 4.;
        return together == 0 ? 0 : warps > kFewest ? warps : kFewest;
      };
      const double cost = length * jobs.turns * (blocks / resident * time(resident) + time(blocks % resident));
      if (cost < least) least = cost, best = jobs;
    }
  }
  return best;
}

// Of the input columns that a strip reads, kBefore lie before those below the strip itself, and kAfter behind them.
template <int kBefore, int kBelow, int kAfter>
struct Columns {
  static constexpr int kCount = kBefore + kBelow + kAfter;
  int first, width;    // first: the column of the image at place 0; width: that of the image
  bool before, after;  // whether the columns before the strip, and those behind it, lie in the image
  bool ragged;         // whether each column must be checked by itself

  NASFAST_DEVICE void place(int column, int of_width) {
    first = column - kBefore;
    width = of_width;
    before = first >= 0;
    after = first + kCount <= width;
    ragged = !after && first + kBefore + kBelow != width;
  }
  // f(j, whether column j is inside) for each j
  template <class F>
  NASFAST_DEVICE void each(const F& f) const {
    if (ragged) {
      NASFAST_UNROLL
      for (int j = 0; j < kCount; ++j) f(j, static_cast<unsigned>(first + j) < static_cast<unsigned>(width));
    } else {
      NASFAST_UNROLL
      for (int j = 0; j < kCount; ++j) f(j, j < kBefore ? before : j < kBefore + kBelow || after);
    }
  }
};

// f(t) for the first `count` of kMost columns.
template <int kMost, class F>
NASFAST_DEVICE void each_column(int count, const F& f) {
  if (count >= kMost) {
    NASFAST_UNROLL
    for (int t = 0; t < kMost; ++t) f(t);
  } else {
    NASFAST_UNROLL
    for (int t = 0; t < kMost; ++t) {
      if (t < count) f(t);
    }
  }
}

// Brings the weights of channel_count channels to shared memory: [pair][tap][2]. The odd number of taps keeps lanes
// with different pairs on different banks.
template <class Format, int kTaps, class Block>
NASFAST_DEVICE void share_weights(const Block& block, const Weight& weight, int first, int channel_count, bool flipped,
                                  float factor, float* to) {
  block.each([&](int thread) {
    for (int i = thread; i < channel_count * kTaps; i += kDepthwiseThreads) {
      const int64_t at = int64_t{first} * kTaps + i;
      const float w = weight.is_float ? static_cast<const float*>(weight.data)[at]
                                      : Format::first(static_cast<const uint16_t*>(weight.data)[at]);
      const int channel = i / kTaps, tap = i % kTaps;
      to[(channel / 2 * kTaps + (flipped ? kTaps - 1 - tap : tap)) * 2 + channel % 2] = w * factor;
    }
  });
}

}  // namespace nasfast::gpu
