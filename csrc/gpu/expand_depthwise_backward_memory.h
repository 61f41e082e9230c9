// What a block of expand_depthwise_backward.h has in shared memory, and what it is called with.
#pragma once

#include "expand_depthwise.h"

namespace nasfast::gpu {

// The rows of dy and of x for a block's part of the map of dy.
template <int kKernel, int kStride>
struct DyRows {
  // Number of rows, and of columns, of dy from which one row or column of the result is made, or two with stride 2; and
  // how many of them come before it.
  static constexpr int kReach = kStride == 1 ? kKernel : Gather2<kKernel>::kRows;
  static constexpr int kBefore = kStride == 1 ? kKernel / 2 : Gather2<kKernel>::kBefore;
  static constexpr int kTurnRows = 2 / kStride;  // of dy
  static constexpr int kLoaded = 128 / kStride;  // the most pixels of dy in a turn, rounded up to whole threads
  int side;                                      // images of the block, side by side
  int pitch;                                     // pixels of a row of dy in shared memory, with the zeros around it
  int first, columns, lead;                      // of dy: first column that exists, columns, zeros in front of them
  int x_first, x_columns;                        // of x: first column and columns

  NASFAST_ANYWHERE DyRows(const Cut& cut, int width, int column) : side(cut.side) {
    const int wide = cut.strips * kStrip, begin = column - kBefore;
    pitch = wide + kReach - 1;
    const int end = begin + pitch;
    first = begin > 0 ? begin : 0;
    columns = (end < cut.width ? end : cut.width) - first;
    lead = first - begin;
    x_first = column * kStride;
    x_columns = wide * kStride < width - x_first ? wide * kStride : width - x_first;
  }
  NASFAST_ANYWHERE int row_pixels() const { return side * columns; }
  NASFAST_ANYWHERE int x_row_pixels() const { return side * x_columns; }
  // pixels that a turn loads; those of x fill tiles of 16
  NASFAST_ANYWHERE int pixels() const { return kTurnRows * row_pixels(); }
  NASFAST_ANYWHERE int x_pixels() const { return (2 * x_row_pixels() + 15) / 16 * 16; }
  // pixels of dy in shared memory
  NASFAST_ANYWHERE int places() const { return kTurnRows * side * pitch; }
};

// Where the activation lets the gradient through: abs(y + shift) < half, where -shift is the middle of the interval. The
// product that makes y begins with the shift, and the sums take y + shift, so this costs one comparison.
struct alignas(16) Open {
  float shift[kChunk / 2][4];  // of two channels, for two rows of a product
  float half[kChunk];

  // A bound may be infinite, and the interval would then have no middle. No number of a channel is farther from the mean
  // than the root of variance / share, where 1 / share is how many numbers there are. So bounds are moved to a little
  // beyond this distance, where they let the same numbers through. 1.01 and the second term are for roundings.
  NASFAST_DEVICE void set(int channel, const Interval& interval, double variance, double share) {
    const float distance = sqrtf(static_cast<float>(variance) / static_cast<float>(share));
    const float reach = 1.01f * distance + 1e-3f * fabsf(interval.mean) + 1e-30f;
    const float least = interval.mean - reach, most = interval.mean + reach;
    const float low = interval.low > least ? interval.low : least, high = interval.high < most ? interval.high : most;
    const bool some = low < high;  // not if the interval is empty, nor if the mean is NaN, which then reaches the sums
    set(channel, some ? -0.5f * low - 0.5f * high : -interval.mean, some ? 0.5f * high - 0.5f * low : 0.f);
  }
  NASFAST_DEVICE void set(int channel, float by, float distance) {
    shift[channel / 2][channel % 2] = shift[channel / 2][channel % 2 + 2] = by;
    half[channel] = distance;
  }
};

// Where the arrays of a block lie in shared memory.
struct ExpandBackwardMemory {
  int weights, x, dy, dz, filters, back, open, mask, from, to, x_from, x_to, bytes;

  template <class Rows>
  ExpandBackwardMemory(const ExpandTile& tile, const Rows& rows, int taps) {
    open = 0;
    weights = open + static_cast<int>(sizeof(Open));
    x = weights + tile.bytes(kChunk);
    dy = x + tile.bytes(rows.x_pixels());
    dz = dy + (rows.places() + 1) * kChunk * 2;  // and one for pixels that nothing reads
    filters = dz + rows.x_pixels() * kChunk * 2;
    back = filters + taps * kChunk * 4;
    mask = back + kChunk * 16;
    from = mask + kChunk * 16;
    to = from + Rows::kLoaded * 4;
    x_from = to + Rows::kLoaded * 4;
    x_to = x_from + rows.x_pixels() * 4;
    bytes = x_to + rows.x_pixels() * 4;
    // the sums of all threads in the end, behind `open`
    const int sums = weights + kExpandThreads * 8 * 8;
    if (bytes < sums) bytes = sums;
  }
};

struct ExpandBackwardArgs {
  ExpandBackward stage;
  Cut cut;
  ExpandTile tile;
  ExpandBackwardMemory memory;
};

}  // namespace nasfast::gpu
