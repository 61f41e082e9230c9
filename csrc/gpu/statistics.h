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
constexpr int kGroup = 16;
constexpr int kOneLevel = 48;
constexpr int kMostRows = 128 * kGroup;

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
  double count;  // numbers per channel
};

// The gradient through that BatchNorm.
struct NormGradient {
  Reduction reduction;
  const float* gamma;
  const double* statistics;
  Back* back;             // [channels]
  float *dgamma, *dbeta;  // [channels], or null
  float eps;
  double count;
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

// Adds rows of pairs of one channel. kMoments: a pair is mean and m2 of numbers[row - begin] numbers; otherwise two sums.
struct RowSum {
  TwoFloats first, second;
};

template <bool kMoments>
NASFAST_DEVICE RowSum add_rows(const Vec2* at, int stride, int begin, int end, const float* numbers) {
  constexpr int kAhead = 8;  // loads that are under way at once
  RowSum total;
  float count = 0;
  NASFAST_NO_UNROLL
  for (int row = begin; row < end; row += kAhead) {
    Vec2 pair[kAhead];
    NASFAST_UNROLL
    for (int i = 0; i < kAhead; ++i) pair[i] = row + i < end ? load_fresh(at + int64_t{row + i} * stride) : Vec2{0, 0};
    NASFAST_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const float first = as_float(pair[i].v[0]), second = as_float(pair[i].v[1]);
      if (kMoments) {
        const float weight = row + i < end ? numbers[row + i - begin] : 0.f;
        count += weight;
        total.first.add(weight * first);
      } else {
        total.first.add(first);
        total.second.add(second);
      }
    }
  }
  if (!kMoments) return total;
  // the second pass adds only what is not negative, so nothing cancels
  const float mean = count > 0 ? static_cast<float>(total.first.value() / count) : 0;
  NASFAST_NO_UNROLL
  for (int row = begin; row < end; row += kAhead) {
    Vec2 pair[kAhead];
    NASFAST_UNROLL
    for (int i = 0; i < kAhead; ++i) pair[i] = row + i < end ? load_fresh(at + int64_t{row + i} * stride) : Vec2{0, 0};
    NASFAST_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      if (row + i >= end) continue;
      const float distance = as_float(pair[i].v[0]) - mean;
      total.second.add(fma(numbers[row + i - begin] * distance, distance, as_float(pair[i].v[1])));
    }
  }
  return total;
}

// Completes the reduction of the `mine` channels from `first` on. Every block calls it once, behind a barrier-free
// point where it has written its row to partial[row * channels + first ...]. `finish(channel, RowSum)` runs in the last
// block, for every channel in one thread. count(row): numbers per channel in that block, for moments.
//
// group: which group of channels this is, of those that have counters of their own.
template <int kThreads, bool kMoments, class Block, class Count, class Finish>
NASFAST_DEVICE void reduce_rows(const Block& block, const Reduction& r, int row, int group, int first, int mine,
                                const Count& count, const Finish& finish) {
  int* counters = r.counters + group * counters_of(r.rows);
  float* numbers = block.template shared_floats<kMostRows / kGroup>();
  const auto rows_of = [&](int i) { return r.rows - i * kGroup < kGroup ? r.rows - i * kGroup : kGroup; };
  int begin = 0, end = r.rows;
  if (r.rows > kOneLevel) {
    const int groups = (r.rows + kGroup - 1) / kGroup, here = row / kGroup, from = here * kGroup;
    if (!block.comes_last(counters + 1 + here, rows_of(here))) return;
    if (kMoments) {
      block.each([&](int thread) {
        for (int i = thread; i < rows_of(here); i += kThreads) numbers[i] = count(from + i);
      });
      block.sync();
    }
    block.each([&](int thread) {
      for (int c = thread; c < mine; c += kThreads) {
        const RowSum s = add_rows<kMoments>(r.partial + first + c, r.channels, from, from + rows_of(here), numbers);
        double a = s.first.value();
        if (kMoments) {
          float total = 0;
          for (int i = 0; i < rows_of(here); ++i) total += numbers[i];
          a /= total;
        }
        r.partial[int64_t{r.rows + here} * r.channels + first + c] = {as_bits(static_cast<float>(a)),
                                                                      as_bits(static_cast<float>(s.second.value()))};
      }
    });
    begin = r.rows;
    end = r.rows + groups;
    if (!block.comes_last(counters, groups)) return;
  } else if (!block.comes_last(counters, r.rows)) {
    return;
  }
  if (kMoments) {
    block.each([&](int thread) {
      for (int i = thread; i < end - begin; i += kThreads) {
        float total = begin == 0 ? count(i) : 0;
        NASFAST_NO_UNROLL
        for (int j = 0; begin > 0 && j < rows_of(i); ++j) total += count(i * kGroup + j);
        numbers[i] = total;
      }
    });
    block.sync();
  }
  block.each([&](int thread) {
    for (int c = thread; c < mine; c += kThreads) {
      finish(first + c, add_rows<kMoments>(r.partial + first + c, r.channels, begin, end, numbers));
    }
  });
}

// Forward: the partial rows are (mean, m2) of this block's numbers; leaves statistics, fold and interval.
template <int kThreads, class Block, class Count>
NASFAST_DEVICE void finish_norm(const Block& block, const Norm& norm, int row, int group, int first, int mine,
                                const Count& count) {
  reduce_rows<kThreads, true>(block, norm.reduction, row, group, first, mine, count, [&](int c, const RowSum& sum) {
    const double mean = sum.first.value() / norm.count, variance = sum.second.value() / norm.count;
    norm.statistics[c] = mean;
    norm.statistics[norm.reduction.channels + c] = variance;
    const float scale = norm.gamma[c] / sqrtf(static_cast<float>(variance) + norm.eps);
    const float shift = fma(-static_cast<float>(mean), scale, norm.beta[c]);
    norm.fold[c] = {scale, shift};
    norm.interval[c] = interval_of(norm.act, scale, shift, static_cast<float>(mean));
  });
}

// Backward: the partial rows are sums of dz and of dz (y - mean); leaves dgamma, dbeta and the coefficients of dy.
template <int kThreads, class Block>
NASFAST_DEVICE void finish_gradient(const Block& block, const NormGradient& g, int row, int group, int first,
                                    int mine) {
  const auto one = [](int) { return 1.f; };
  reduce_rows<kThreads, false>(block, g.reduction, row, group, first, mine, one, [&](int c, const RowSum& sums) {
    const double mean = g.statistics[c], variance = g.statistics[g.reduction.channels + c];
    const float r = 1 / sqrtf(static_cast<float>(variance) + g.eps);
    const double dbeta = sums.first.value();
    // the distances were taken to the rounded mean
    const double dgamma = r * (sums.second.value() + dbeta * (static_cast<float>(mean) - mean));
    if (g.dgamma != nullptr) g.dgamma[c] = static_cast<float>(dgamma);
    if (g.dbeta != nullptr) g.dbeta[c] = static_cast<float>(dbeta);
    const float a = g.gamma[c] * r, b = static_cast<float>(-a * r * dgamma / g.count);
    g.back[c] = {a, b, static_cast<float>(-a * dbeta / g.count - b * mean), 0};
  });
}

}  // namespace nasfast::gpu
