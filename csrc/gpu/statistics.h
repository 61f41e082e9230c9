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
// leave(warp, lane, j, first, second) with the result for channel j of each of the lanes 0 to 3.
template <class Block, class Leave>
NASFAST_DEVICE void gather(const Block& block, Local<ChannelSums>& sums, const Leave& leave) {
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
      for (int j = 0; j < 8; ++j) leave(warp.index, lane, j, at(lane).first[j], at(lane).second[j]);
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
  NASFAST_DEVICE double value() const { return static_cast<double>(high) + low; }
};

// Rows of partial results that one block adds. With more rows, the last block of each kGroup rows adds these, and the
// last of those blocks adds the results: no block then reads more than a few dozen rows.
constexpr int kGroup = 32;
constexpr int kOneLevel = 48;
constexpr int kMostRows = 64 * kGroup;

// Counters that a launch needs for each of its groups of channels.
NASFAST_ANYWHERE int counters_of(int rows) { return rows <= kOneLevel ? 1 : 1 + (rows + kGroup - 1) / kGroup; }
// Rows of the table of partial results, for `rows` blocks.
NASFAST_ANYWHERE int partial_rows(int rows) { return rows <= kOneLevel ? rows : rows + (rows + kGroup - 1) / kGroup; }

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
  // For the chain behind, if that one begins backward through this BatchNorm; otherwise null.
  double* left_statistics;  // [2][channels]: mean, and biased variance + eps
  float* left_gamma;        // [channels]
};

// The gradient through that BatchNorm. `statistics` and eps are those of Norm, or left_statistics and 0.
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

// Adds rows of pairs of one channel. A pair is the mean and the m2 of numbers[row - begin] numbers with kMoments, and two
// sums without. The mean of the first row is subtracted from every mean. So one pass over the rows is enough: a sum of
// squared means would be so large that m2 lost its digits.
template <bool kMoments>
NASFAST_DEVICE RowTotal add_rows(const Vec2* at, int stride, int begin, int end, const float* numbers) {
  constexpr int kAhead = 16;  // loads that are under way at once
  TwoFloats first, second;
  float count = 0, pivot = 0;
  NASFAST_NO_UNROLL
  for (int row = begin; row < end; row += kAhead) {
    Vec2 pair[kAhead];
    NASFAST_UNROLL
    for (int i = 0; i < kAhead; ++i) pair[i] = row + i < end ? load_fresh(at + int64_t{row + i} * stride) : Vec2{0, 0};
    if (row == begin) pivot = as_float(pair[0].v[0]);
    NASFAST_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const float a = as_float(pair[i].v[0]), b = as_float(pair[i].v[1]);
      if (kMoments) {
        const float weight = row + i < end ? numbers[row + i - begin] : 0.f;
        const float distance = a - pivot, weighted = weight * distance;
        count += weight;
        first.add(weighted);
        second.add(fma(weighted, distance, b));
      } else {
        first.add(a);
        second.add(b);
      }
    }
  }
  const double sum = first.value(), square = second.value();
  if (!kMoments) return {sum, square};
  // the sum of squares around pivot + shift; a shift that is rounded changes it by the square of its error only
  const float shift = count > 0 ? static_cast<float>(sum) / count : 0;
  const double m2 = square - shift * (2 * sum - static_cast<double>(count) * shift);
  return {static_cast<double>(pivot) + shift, m2 > 0 ? m2 : (m2 == m2 ? 0. : m2)};
}

// Fills numbers[i] with how many numbers of a channel row i has or, with more than kOneLevel rows, the rows of group i.
template <int kThreads, class Block, class Count>
NASFAST_DEVICE void count_numbers(const Block& block, int rows, const Count& count, float* numbers) {
  if (rows <= kOneLevel) {
    block.each([&](int thread) {
      for (int i = thread; i < rows; i += kThreads) numbers[i] = count(i);
    });
    return;
  }
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
}

// Completes the reduction of the `mine` channels from `first` on. Every block calls it once, after it has written its row
// to partial[row * channels + first ...]; no barrier is needed in between.
//   group: the number of this group of channels; each group has counters of its own.
//   count(row): how many numbers of a channel that block has, for moments.
//   finish(channel): is called in the last block, for each channel by one thread. It loads what it needs while the rows
//     are on their way, and returns a function that gets their RowTotal.
template <int kThreads, bool kMoments, class Block, class Count, class Finish>
NASFAST_DEVICE void reduce_rows(const Block& block, const Reduction& r, int row, int group, int first, int mine,
                                const Count& count, const Finish& finish) {
  int* counters = r.counters + group * counters_of(r.rows);
  static_assert(kMostRows / kGroup >= kOneLevel, "a number for each row of one level");
  float* numbers = block.template shared_floats<kMostRows / kGroup>();
  int begin = 0, end = r.rows;
  if (r.rows > kOneLevel) {
    const int groups = (r.rows + kGroup - 1) / kGroup, here = row / kGroup, from = here * kGroup;
    const int rows = r.rows - from < kGroup ? r.rows - from : kGroup;
    if (!block.comes_last(counters + 1 + here, rows)) return;
    if (kMoments) {
      block.each([&](int thread) {
        for (int i = thread; i < rows; i += kThreads) numbers[i] = count(from + i);
      });
      block.sync();
    }
    block.each([&](int thread) {
      for (int c = thread; c < mine; c += kThreads) {
        const RowTotal t = add_rows<kMoments>(r.partial + first + c, r.channels, from, from + rows, numbers);
        r.partial[int64_t{r.rows + here} * r.channels + first + c] = {as_bits(static_cast<float>(t.first)),
                                                                      as_bits(static_cast<float>(t.second))};
      }
    });
    begin = r.rows;
    end = r.rows + groups;
    if (!block.comes_last(counters, groups)) return;
  } else if (!block.comes_last(counters, r.rows)) {
    return;
  }
  if (kMoments) {
    count_numbers<kThreads>(block, r.rows, count, numbers);
    block.sync();
  }
  block.each([&](int thread) {
    for (int c = thread; c < mine; c += kThreads) {
      const auto complete = finish(first + c);
      complete(add_rows<kMoments>(r.partial + first + c, r.channels, begin, end, numbers));
    }
  });
}

// Forward: the partial rows are (mean, m2) of this block's numbers; leaves statistics, fold and interval.
template <int kThreads, class Block, class Count>
NASFAST_DEVICE void finish_norm(const Block& block, const Norm& norm, int row, int group, int first, int mine,
                                const Count& count) {
  reduce_rows<kThreads, true>(block, norm.reduction, row, group, first, mine, count, [&norm](int c) {
    const float gamma = norm.gamma[c], beta = norm.beta[c];
    return [&norm, c, gamma, beta](const RowTotal& total) {
      const double mean = total.first, variance = total.second * norm.share;
      norm.statistics[c] = mean;
      norm.statistics[norm.reduction.channels + c] = variance;
      const float scale = gamma / sqrtf(static_cast<float>(variance) + norm.eps);
      const float shift = fma(-static_cast<float>(mean), scale, beta);
      norm.fold[c] = {scale, shift};
      norm.interval[c] = interval_of(norm.act, scale, shift, static_cast<float>(mean));
      if (norm.left_gamma == nullptr) return;
      norm.left_gamma[c] = gamma;
      norm.left_statistics[c] = mean;
      norm.left_statistics[norm.reduction.channels + c] = static_cast<float>(variance) + norm.eps;
    };
  });
}

// Backward: the partial rows are sums of dz and of dz (y - mean); leaves dgamma, dbeta and the coefficients of dy.
template <int kThreads, class Block>
NASFAST_DEVICE void finish_gradient(const Block& block, const NormGradient& g, int row, int group, int first,
                                    int mine) {
  const auto one = [](int) { return 1.f; };
  reduce_rows<kThreads, false>(block, g.reduction, row, group, first, mine, one, [&g](int c) {
    const double mean = g.statistics[c], variance = g.statistics[g.reduction.channels + c];
    const float gamma = g.gamma[c];
    return [&g, c, mean, variance, gamma](const RowTotal& sums) {
      const float r = 1 / sqrtf(static_cast<float>(variance) + g.eps);
      const double dbeta = sums.first;
      // the distances were taken to the rounded mean
      const double dgamma = r * (sums.second + dbeta * (static_cast<float>(mean) - mean));
      if (g.dgamma != nullptr) g.dgamma[c] = static_cast<float>(dgamma);
      if (g.dbeta != nullptr) g.dbeta[c] = static_cast<float>(dbeta);
      const float a = gamma * r, b = static_cast<float>(-a * r * dgamma * g.share);
      g.back[c] = {a, b, static_cast<float>(-a * dbeta * g.share - b * mean), 0};
    };
  });
}

}  // namespace nasfast::gpu
