// Statistics of a channel: how a kernel carries them, and how the last block of a launch completes them.
//
// Every block leaves one row of partial results for its channels. The blocks that share channels count themselves, and
// the last one adds the rows in their order. So the order in which blocks end does not change a bit of the result, and
// a launch leaves finished coefficients: the next kernel reads a few numbers per channel and reduces nothing.
#pragma once

#include "portable.h"

namespace nasfast::gpu {

// z = scale y + shift is BatchNorm of a convolution's output y. Two numbers per channel.
struct Fold {
  float scale, shift;
};

// Where the activation behind BatchNorm lets the gradient through: low < y < high. `mean` is that of y.
struct alignas(16) Interval {
  float low, high, mean, unused;
};

// The gradient of BatchNorm: dy = a dz + b y + c.
struct alignas(16) Back {
  float a, b, c, unused;
};

enum class Act : int { kIdentity, kRelu, kRelu6 };  // the order of ACTIVATIONS in nasfast/ops/reference.py

// Mean, and sum of the squared distances to it, of `count` numbers.
struct Moments {
  float count, mean, m2;

  // Chan, Golub, LeVeque 1983: of both sets of numbers together.
  NASFAST_DEVICE void merge(const Moments& other) {
    const float total = count + other.count;
    if (!(total > 0)) return;
    const float delta = other.mean - mean, share = other.count / total;
    mean = fma(delta, share, mean);
    m2 += other.m2 + delta * delta * count * share;
    count = total;
  }
};

// Sums of numbers around a pivot, which is one of them or close to their mean: two instructions for each number, and no
// digits are lost where the mean is large.
struct Sums {
  float sum = 0, square = 0;

  NASFAST_DEVICE void add(float distance) {
    sum += distance;
    square = fma(distance, distance, square);
  }
  NASFAST_DEVICE Moments moments(float pivot, float count) const {
    const float mean = count > 0 ? sum / count : 0;
    const float m2 = fma(-mean, sum, square);
    return {count, pivot + mean, m2 > 0 ? m2 : (m2 == m2 ? 0.f : m2)};
  }
};

// Sums of dz and of dz (y - mean).
struct GradientSums {
  float sum = 0, product = 0;

  NASFAST_DEVICE void add(float dz, float distance) {
    sum += dz;
    product = fma(dz, distance, product);
  }
};

// Two sums for each of the 8 neighbouring channels that a lane has.
struct ChannelSums {
  float first[8], second[8];
};

// Adds the sums of the lanes of a warp that have the same channels, which are those with the same lane % 4. Then calls
// store(warp, lane, j, first, second) with the result for channel j of each of the lanes 0 to 3.
template <class Block, class Store>
NASFAST_DEVICE void gather(const Block& block, Local<ChannelSums>& sums, const Store& store) {
  block.warps([&](const Warp& warp) {
    const auto at = [&](int lane) -> auto& { return sums[32 * warp.index + lane]; };
    NASFAST_UNROLL
    for (int j = 0; j < 8; ++j) {
      warp.add_lanes([&](int lane) -> float& { return at(lane).first[j]; }, 4);
      warp.add_lanes([&](int lane) -> float& { return at(lane).second[j]; }, 4);
    }
    warp.each([&](int lane) {
      if (lane >= 4) return;
      NASFAST_UNROLL
      for (int j = 0; j < 8; ++j) store(warp.index, lane, j, at(lane).first[j], at(lane).second[j]);
    });
  });
  block.sync();
}

// A sum in twice the precision of a float.
struct TwoFloats {
  float high = 0, low = 0;

  NASFAST_DEVICE void add(float x) {  // Knuth's two-sum
    const float s = high + x, t = s - high;
    low += (high - (s - t)) + (x - t);
    high = s;
  }
  NASFAST_DEVICE void add(const TwoFloats& other) {
    add(other.high);
    low += other.low;
  }
  NASFAST_DEVICE double value() const { return static_cast<double>(high) + low; }
};

// Rows of partial results that one block adds. With more rows, the last block of each kGroup rows adds these, and the
// last of those blocks adds the results: no block then reads more than a few dozen rows.
constexpr int kGroup = 32;
constexpr int kOneLevel = 48;
constexpr int kMostRows = 64 * kGroup;
// The fewest channels of which a warp adds rows: the fewer it has, the more lanes share the rows of a channel.
constexpr int kFewestChannels = 4;
// With more rows than kOneLevel there is also one level only if this many lanes can add them, one row after another.
constexpr int kOneLevelLanes = 28 * 32;
// Numbers in shared memory: of the rows that one block adds.
constexpr int kNumbers = kOneLevelLanes / kFewestChannels;
static_assert(kNumbers >= kOneLevel && kNumbers >= kMostRows / kGroup, "a number for each row of one level");

// Counters that a launch needs for each of its groups of channels.
NASFAST_ANYWHERE int counters_of(int rows) { return rows <= kOneLevel ? 1 : 1 + divide_up(rows, kGroup); }
// Rows of the table of partial results, for `rows` blocks.
NASFAST_ANYWHERE int partial_rows(int rows) { return rows <= kOneLevel ? rows : rows + divide_up(rows, kGroup); }

// What every reduction needs.
struct Reduction {
  Vec2* partial;  // [partial_rows(rows)][channels]
  int* counters;  // [groups of channels][counters_of(rows)], zeros before and after the launch
  int rows;       // blocks that share channels
  int channels;   // channels of the tensor
};

// BatchNorm behind a convolution.
struct Norm {
  Reduction reduction;
  const float *gamma, *beta;
  double* statistics;  // [2][channels]: mean and biased variance
  Fold* fold;          // [channels]
  Interval* interval;  // [channels]
  float eps;
  Act act;
  double share;  // 1 / numbers per channel
  // Where this BatchNorm is deferred: for the chain that reads the result. Otherwise null.
  double* deferred_statistics;  // [2][channels]: mean, and biased variance + eps
  float* deferred_gamma;        // [channels]
};

// The gradient through that BatchNorm. `statistics` and eps are those of Norm, or deferred_statistics and 0.
struct NormGradient {
  Reduction reduction;
  const float* gamma;
  const double* statistics;
  Back* back;             // [channels]
  float *dgamma, *dbeta;  // [channels], or null
  float eps;
  double share;  // 1 / numbers per channel
};

NASFAST_DEVICE Interval interval_of(Act act, float scale, float shift, float mean) {
  const float infinity = INFINITY;
  if (act == Act::kIdentity) return {-infinity, infinity, mean, 0};
  if (scale == 0) {
    // z is the same for all y: the gradient goes through everywhere or nowhere
    const bool open = shift > 0 && (act == Act::kRelu || shift < 6);
    return {open ? -infinity : infinity, open ? infinity : -infinity, mean, 0};
  }
  const float zero = -shift / scale, six = act == Act::kRelu ? (scale > 0 ? infinity : -infinity) : (6 - shift) / scale;
  return scale > 0 ? Interval{zero, six, mean, 0} : Interval{six, zero, mean, 0};
}

// What rows of pairs add up to in one channel: mean and m2 of all numbers, or two sums.
struct RowTotal {
  double first, second;
};

// What a thread adds up of the rows of one channel; first and second are relative to the pivot with kMoments.
struct RowSums {
  TwoFloats first, second;
  TwoFloats count;  // a float has no odd numbers above 2^24
  float pivot = 0;

  NASFAST_DEVICE void add(const RowSums& other) {
    first.add(other.first);
    second.add(other.second);
    count.add(other.count);
  }
  template <bool kMoments>
  NASFAST_DEVICE RowTotal total() const {
    const double sum = first.value(), square = second.value();
    if (!kMoments) return {sum, square};
    // the sum of squares around pivot + shift; a shift that is rounded changes it by the square of its error only
    const float shift = count.high > 0 ? static_cast<float>(sum) / count.high : 0;
    const double m2 = square - shift * (2 * sum - count.value() * shift);
    return {static_cast<double>(pivot) + shift, m2 > 0 ? m2 : (m2 == m2 ? 0. : m2)};
  }
};

// Rows [begin, end) of the table of partial results, of which a thread adds every `step`-th one, from begin + `from` on.
struct RowRange {
  int begin, end, from, step;
};

// Adds rows of pairs of one channel. A pair is the mean and the m2 of numbers[row - begin] numbers with kMoments, and two
// sums without. The mean of the first row is subtracted from every mean. So one pass over the rows is enough: a sum of
// squared means would be so large that m2 lost its digits.
template <bool kMoments>
NASFAST_DEVICE RowSums add_rows(const Vec2* at, int stride, const RowRange& range, const float* numbers) {
  constexpr int kAhead = 8;  // loads that are under way at once
  RowSums sums;
  if (kMoments) sums.pivot = as_float(load_fresh(at + int64_t{range.begin} * stride).v[0]);
  at += int64_t{range.begin + range.from} * stride;
  numbers += range.from;
  int remaining = range.end - range.begin - range.from;
  const int step = range.step * stride;
  NASFAST_NO_UNROLL
  for (; remaining > 0; remaining -= kAhead * range.step) {
    Vec2 pair[kAhead];
    NASFAST_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      pair[i] = i * range.step < remaining ? load_fresh(at + i * step) : Vec2{0, 0};
    }
    NASFAST_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const float a = as_float(pair[i].v[0]), b = as_float(pair[i].v[1]);
      if (kMoments) {
        const float weight = i * range.step < remaining ? numbers[i * range.step] : 0.f;
        const float distance = a - sums.pivot, weighted = weight * distance;
        sums.count.add(weight);
        sums.first.add(weighted);
        sums.second.add(fma(weighted, distance, b));
      } else {
        sums.first.add(a);
        sums.second.add(b);
      }
    }
    at += kAhead * step;
    numbers += kAhead * range.step;
  }
  return sums;
}

// Threads that share the rows of a channel are in one warp, which then has fewer channels: as many as this. The warps of
// a block together have all channels of the block, if they have so many threads.
template <int kThreads>
NASFAST_DEVICE int channels_of_warp(int channel_count) {
  int channels = 32;
  while (channels > kFewestChannels && kThreads / 32 * (channels / 2) >= channel_count) channels /= 2;
  return channels;
}

// Adds the rows [begin, end) of channel_count channels from `first` on, and calls finish.complete() for each channel.
template <int kThreads, bool kMoments, class Block, class Finish>
NASFAST_DEVICE void add_channels(const Block& block, const Reduction& r, int first, int channel_count, int begin,
                                 int end, const float* numbers, const Finish& finish) {
  const int width = channels_of_warp<kThreads>(channel_count);
  block.warps([&](const Warp& warp) {
    Local<RowSums> sums(warp), partner(warp);
    Local<typename Finish::Constants> constants(warp);
    NASFAST_NO_UNROLL
    for (int base = warp.index * width; base < channel_count; base += kThreads / 32 * width) {
      warp.each([&](int lane) {
        const int c = base + lane % width;
        if (c >= channel_count) return;
        constants[lane] = finish.load(first + c);
        sums[lane] =
            add_rows<kMoments>(r.partial + first + c, r.channels, {begin, end, lane / width, 32 / width}, numbers);
      });
      NASFAST_NO_UNROLL
      for (int bit = width; bit < 32; bit *= 2) {
        const auto partner_lane = [&](int lane) { return lane ^ bit; };
        warp.each([&](int lane) { partner[lane] = sums[lane]; });
        warp.from_lane([&](int lane) -> float& { return partner[lane].first.high; }, partner_lane);
        warp.from_lane([&](int lane) -> float& { return partner[lane].first.low; }, partner_lane);
        warp.from_lane([&](int lane) -> float& { return partner[lane].second.high; }, partner_lane);
        warp.from_lane([&](int lane) -> float& { return partner[lane].second.low; }, partner_lane);
        if (kMoments) {
          warp.from_lane([&](int lane) -> float& { return partner[lane].count.high; }, partner_lane);
          warp.from_lane([&](int lane) -> float& { return partner[lane].count.low; }, partner_lane);
        }
        warp.each([&](int lane) { sums[lane].add(partner[lane]); });
      }
      warp.each([&](int lane) {
        const int c = base + lane;
        if (lane < width && c < channel_count)
          finish.complete(first + c, constants[lane], sums[lane].template total<kMoments>());
      });
    }
  });
}

// Writes what a group of rows adds up to, in a row behind those of all blocks.
struct GroupFinish {
  struct Constants {};
  const Reduction& r;
  int row;

  NASFAST_DEVICE Constants load(int) const { return {}; }
  NASFAST_DEVICE void complete(int c, const Constants&, const RowTotal& t) const {
    r.partial[int64_t{row} * r.channels + c] = {as_bits(static_cast<float>(t.first)),
                                                as_bits(static_cast<float>(t.second))};
  }
};

// Fills numbers[i] with how many numbers of a channel row i has.
template <int kThreads, class Block, class Count>
NASFAST_DEVICE void count_rows(const Block& block, int rows, const Count& count, float* numbers) {
  block.each([&](int thread) {
    for (int i = thread; i < rows; i += kThreads) numbers[i] = count(i);
  });
  block.sync();
}
// Fills numbers[i] with how many the rows of group i have.
template <int kThreads, class Block, class Count>
NASFAST_DEVICE void count_groups(const Block& block, int rows, const Count& count, float* numbers) {
  static_assert(kGroup == 32, "a lane has a row of a group");
  block.warps([&](const Warp& warp) {
    Local<float> sum(warp);
    NASFAST_NO_UNROLL
    for (int begin = kGroup * warp.index; begin < rows; begin += kGroup * (kThreads / 32)) {
      warp.each([&](int lane) { sum[lane] = begin + lane < rows ? count(begin + lane) : 0.f; });
      warp.add_lanes([&](int lane) -> float& { return sum[lane]; }, 1);
      warp.each([&](int lane) {
        if (lane == 0) numbers[begin / kGroup] = sum[lane];
      });
    }
  });
  block.sync();
}

// Completes the reduction of channel_count channels from `first` on. Every block calls it once, after it has written
// its row to partial[row * channels + first ...]; no barrier is needed in between.
//   group: the number of this group of channels; each group has counters of its own.
//   count(row): how many numbers of a channel that block has, for moments.
//   finish: for each channel, one thread of the last block calls finish.complete(channel, constants, total) with what
//     finish.load(channel) gave to every thread of the channel while the rows were on their way.
template <int kThreads, bool kMoments, class Block, class Count, class Finish>
NASFAST_DEVICE void reduce_rows(const Block& block, const Reduction& r, int row, int group, int first,
                                int channel_count, const Count& count, const Finish& finish) {
  int* counters = r.counters + group * counters_of(r.rows);
  float* numbers = block.template shared_floats<kNumbers>();
  if (r.rows <= kOneLevel || r.rows * channels_of_warp<kThreads>(channel_count) <= kOneLevelLanes) {
    if (!block.comes_last(counters, r.rows)) return;
    if (kMoments) count_rows<kThreads>(block, r.rows, count, numbers);
    add_channels<kThreads, kMoments>(block, r, first, channel_count, 0, r.rows, numbers, finish);
    return;
  }
  const int groups = divide_up(r.rows, kGroup), i_group = row / kGroup, from = i_group * kGroup;
  const int rows = r.rows - from < kGroup ? r.rows - from : kGroup;
  if (!block.comes_last(counters + 1 + i_group, rows)) return;
  if (kMoments) count_rows<kThreads>(block, rows, [&](int i) { return count(from + i); }, numbers);
  add_channels<kThreads, kMoments>(block, r, first, channel_count, from, from + rows, numbers,
                                   GroupFinish{r, r.rows + i_group});
  if (!block.comes_last(counters, groups)) return;
  if (kMoments) count_groups<kThreads>(block, r.rows, count, numbers);
  add_channels<kThreads, kMoments>(block, r, first, channel_count, r.rows, r.rows + groups, numbers, finish);
}

struct NormFinish {
  struct Constants {
    float gamma, beta;
  };
  const Norm& norm;

  NASFAST_DEVICE Constants load(int c) const { return {norm.gamma[c], norm.beta[c]}; }
  NASFAST_DEVICE void complete(int c, const Constants& constants, const RowTotal& total) const {
    const double mean = total.first, variance = total.second * norm.share;
    norm.statistics[c] = mean;
    norm.statistics[norm.reduction.channels + c] = variance;
    const float scale = constants.gamma / sqrtf(static_cast<float>(variance) + norm.eps);
    const float shift = fma(-static_cast<float>(mean), scale, constants.beta);
    norm.fold[c] = {scale, shift};
    norm.interval[c] = interval_of(norm.act, scale, shift, static_cast<float>(mean));
    if (norm.deferred_gamma == nullptr) return;
    norm.deferred_gamma[c] = constants.gamma;
    norm.deferred_statistics[c] = mean;
    norm.deferred_statistics[norm.reduction.channels + c] = static_cast<float>(variance) + norm.eps;
  }
};

// Forward: the partial rows are (mean, m2) of this block's numbers; leaves statistics, fold and interval.
template <int kThreads, class Block, class Count>
NASFAST_DEVICE void finish_norm(const Block& block, const Norm& norm, int row, int group, int first, int channel_count,
                                const Count& count) {
  reduce_rows<kThreads, true>(block, norm.reduction, row, group, first, channel_count, count, NormFinish{norm});
}

struct GradientFinish {
  struct Constants {
    double mean, variance;
    float gamma;
  };
  const NormGradient& g;

  NASFAST_DEVICE Constants load(int c) const {
    return {g.statistics[c], g.statistics[g.reduction.channels + c], g.gamma[c]};
  }
  NASFAST_DEVICE void complete(int c, const Constants& constants, const RowTotal& sums) const {
    const double mean = constants.mean;
    const float r = 1 / sqrtf(static_cast<float>(constants.variance) + g.eps);
    const double dbeta = sums.first;
    // the distances were taken to the rounded mean
    const double dgamma = r * (sums.second + dbeta * (static_cast<float>(mean) - mean));
    if (g.dgamma != nullptr) g.dgamma[c] = static_cast<float>(dgamma);
    if (g.dbeta != nullptr) g.dbeta[c] = static_cast<float>(dbeta);
    const float a = constants.gamma * r, b = static_cast<float>(-a * r * dgamma * g.share);
    g.back[c] = {a, b, static_cast<float>(-a * dbeta * g.share - b * mean), 0};
  }
};

// Backward: the partial rows are sums of dz and of dz (y - mean); leaves dgamma, dbeta and the coefficients of dy.
template <int kThreads, class Block>
NASFAST_DEVICE void finish_gradient(const Block& block, const NormGradient& g, int row, int group, int first,
                                    int channel_count) {
  const auto one = [](int) { return 1.f; };
  reduce_rows<kThreads, false>(block, g.reduction, row, group, first, channel_count, one, GradientFinish{g});
}

}  // namespace nasfast::gpu
