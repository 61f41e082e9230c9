// Depthwise stencils of one thread: a pair of channels and a strip of columns, going down the rows.
//
// Sums of rows that are not complete stay in registers. `w(ky, kx, to)` brings the weights of a tap for the pair.
#pragma once

#include "portable.h"

namespace nasfast::gpu {

// Columns of a strip on the smaller of the two maps. It divides 112, 56, 28, 14 and 7.
constexpr int kStrip = 7;

// The weights of a thread, from shared memory: [kernel * kernel][2]. kKept: they stay in registers. Otherwise they are
// read again for every row.
template <int kKernel, bool kKept>
struct Taps {
  const float* from;

  NASFAST_DEVICE explicit Taps(const float* shared) : from(shared) {}
  NASFAST_DEVICE void operator()(int ky, int kx, float (&to)[2]) const {
    load_again(from + 2 * (ky * kKernel + kx), to);
  }
};
template <int kKernel>
struct Taps<kKernel, true> {
  float kept[kKernel * kKernel][2];

  NASFAST_DEVICE explicit Taps(const float* shared) {
    NASFAST_UNROLL
    for (int i = 0; i < kKernel * kKernel; ++i) {
      const Vec2 pair = reinterpret_cast<const Vec2*>(shared)[i];
      kept[i][0] = as_float(pair.v[0]), kept[i][1] = as_float(pair.v[1]);
    }
  }
  NASFAST_DEVICE void operator()(int ky, int kx, float (&to)[2]) const {
    to[0] = kept[kKernel * ky + kx][0], to[1] = kept[kKernel * ky + kx][1];
  }
};

// Stride 1: a row of the input completes the output row kernel / 2 above it.
template <int kKernel>
struct Stencil1 {
  static constexpr int kIn = kStrip + kKernel - 1, kLive = kKernel - 1;
  float sum[kLive][kStrip][2];

  NASFAST_DEVICE void reset(const float (&start)[2]) {
    NASFAST_UNROLL
    for (int i = 0; i < kLive; ++i) {
      NASFAST_UNROLL
      for (int t = 0; t < kStrip; ++t) sum[i][t][0] = start[0], sum[i][t][1] = start[1];
    }
  }

  template <class Weights>
  NASFAST_DEVICE void row(const float (&x)[kIn][2], const Weights& w, const float (&start)[2],
                          float (&out)[kStrip][2]) {
    NASFAST_UNROLL
    for (int i = -1; i < kLive; ++i) {  // the row that completes, then those below it
      float tap[kKernel][2];
      NASFAST_UNROLL
      for (int kx = 0; kx < kKernel; ++kx) w(kKernel - 2 - i, kx, tap[kx]);
      NASFAST_UNROLL
      for (int t = 0; t < kStrip; ++t) {
        NASFAST_UNROLL
        for (int v = 0; v < 2; ++v) {
          // the first product moves the sum one place up
          float s = i + 1 < kLive ? sum[i + 1 < kLive ? i + 1 : 0][t][v] : start[v];
          NASFAST_UNROLL
          for (int kx = 0; kx < kKernel; ++kx) s = fma(tap[kx][v], x[t + kx][v], s);
          (i < 0 ? out[t][v] : sum[i < 0 ? 0 : i][t][v]) = s;
        }
      }
    }
  }

  // A row of zeros below the image.
  NASFAST_DEVICE void zero_row(const float (&start)[2], float (&out)[kStrip][2]) {
    NASFAST_UNROLL
    for (int t = 0; t < kStrip; ++t) {
      NASFAST_UNROLL
      for (int v = 0; v < 2; ++v) {
        out[t][v] = sum[0][t][v];
        NASFAST_UNROLL
        for (int i = 0; i + 1 < kLive; ++i) sum[i][t][v] = sum[i + 1][t][v];
        sum[kLive - 1][t][v] = start[v];
      }
    }
  }
};

// Stride 2: the rows 2 u and 2 u + 1 of the input complete the output row u - kernel / 4.
template <int kKernel>
struct Stencil2 {
  static constexpr int kIn = 2 * kStrip + kKernel - 2, kLive = (kKernel - 1) / 2;
  float sum[kLive][kStrip][2];

  NASFAST_DEVICE void reset(const float (&start)[2]) {
    NASFAST_UNROLL
    for (int i = 0; i < kLive; ++i) {
      NASFAST_UNROLL
      for (int t = 0; t < kStrip; ++t) sum[i][t][0] = start[0], sum[i][t][1] = start[1];
    }
  }

  // Before a pair of rows: out takes the oldest sums, and the others move up.
  NASFAST_DEVICE void advance(const float (&start)[2], float (&out)[kStrip][2]) {
    NASFAST_UNROLL
    for (int t = 0; t < kStrip; ++t) {
      NASFAST_UNROLL
      for (int v = 0; v < 2; ++v) {
        out[t][v] = sum[0][t][v];
        NASFAST_UNROLL
        for (int i = 0; i + 1 < kLive; ++i) sum[i][t][v] = sum[i + 1][t][v];
        sum[kLive - 1][t][v] = start[v];
      }
    }
  }

  // Row kRow (0 or 1) of the pair.
  template <int kRow, class Weights>
  NASFAST_DEVICE void row(const float (&x)[kIn][2], const Weights& w, float (&out)[kStrip][2]) {
    constexpr int kPad = kKernel / 2;
    NASFAST_UNROLL
    for (int i = 0; i <= kLive; ++i) {
      const int ky = 2 * (kPad / 2) + kPad - 2 * i + kRow;
      if (ky < 0 || ky >= kKernel) continue;
      float tap[kKernel][2];
      NASFAST_UNROLL
      for (int kx = 0; kx < kKernel; ++kx) w(ky, kx, tap[kx]);
      NASFAST_UNROLL
      for (int t = 0; t < kStrip; ++t) {
        NASFAST_UNROLL
        for (int v = 0; v < 2; ++v) {
          float& to = i == 0 ? out[t][v] : sum[i == 0 ? 0 : i - 1][t][v];
          NASFAST_UNROLL
          for (int kx = 0; kx < kKernel; ++kx) to = fma(tap[kx][v], x[2 * t + kx][v], to);
        }
      }
    }
  }
};

// Gradient of the input of a stencil with stride 2. The rows 2 u and 2 u + 1 of the result, twice as many columns as a
// strip, gather from kRows rows of the gradient dy: those from u - kBefore on. The columns are likewise.
template <int kKernel>
struct Gather2 {
  static constexpr int kPad = kKernel / 2, kBefore = kPad / 2, kRows = (kPad + 1) / 2 + kBefore + 1;
  static constexpr int kIn = kStrip - 1 + kRows;
  float dy[kRows][kIn][2];

  // The oldest row leaves. The caller fills the last one.
  NASFAST_DEVICE void advance() {
    NASFAST_UNROLL
    for (int i = 0; i + 1 < kRows; ++i) {
      NASFAST_UNROLL
      for (int j = 0; j < kIn; ++j) dy[i][j][0] = dy[i + 1][j][0], dy[i][j][1] = dy[i + 1][j][1];
    }
  }

  // Row kRow (0 or 1) of the pair. Only the taps reach it whose parity is that of the row and of the column.
  template <int kRow, class Weights>
  NASFAST_DEVICE void row(const Weights& w, float (&out)[2 * kStrip][2]) const {
    NASFAST_UNROLL
    for (int t = 0; t < 2 * kStrip; ++t) out[t][0] = out[t][1] = 0;
    NASFAST_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int ky = kRow + kPad - 2 * (i - kBefore);
      if (ky < 0 || ky >= kKernel) continue;
      NASFAST_UNROLL
      for (int kx = 0; kx < kKernel; ++kx) {
        float tap[2];
        w(ky, kx, tap);
        NASFAST_UNROLL
        for (int t = (kx + kPad) % 2; t < 2 * kStrip; t += 2) {
          const int from = (t + kPad - kx) / 2 + kBefore;  // exact: the difference is even
          NASFAST_UNROLL
          for (int v = 0; v < 2; ++v) out[t][v] = fma(tap[v], dy[i][from][v], out[t][v]);
        }
      }
    }
  }
};

}  // namespace nasfast::gpu
