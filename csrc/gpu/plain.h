// Convolutions as plain loops, correct and very slow: what chain.h runs until pointwise.h is there.
#pragma once

#include "stages.h"

namespace nasfast::gpu {

template <class Format>
NASFAST_DEVICE float plain_value(const uint16_t* at) {
  return Format::first(*at);
}

template <class Format>
NASFAST_DEVICE float plain_weight(const Weight& weight, int64_t at) {
  return weight.is_float ? static_cast<const float*>(weight.data)[at]
                         : plain_value<Format>(static_cast<const uint16_t*>(weight.data) + at);
}

struct PlainShare {
  int64_t begin, end;

  NASFAST_DEVICE PlainShare(int block, int blocks, int64_t rows)
      : begin(rows * block / blocks), end(rows * (block + 1) / blocks) {}
  NASFAST_DEVICE float count() const { return static_cast<float>(end - begin); }
};

template <class Format>
struct PlainForward {
  static constexpr int kThreads = 64, kBlocks = 1;
  using Args = ForwardStage;

  static NASFAST_DEVICE float input(const Args& s, int64_t row, int c) {
    float z = plain_value<Format>(s.x + row * s.geometry.in_channels + c);
    if (s.fold == nullptr) return z;
    z = fma(s.fold[c].scale, z, s.fold[c].shift);
    if (s.act != Act::kIdentity && z < 0) z = 0;
    return s.act == Act::kRelu6 && z > 6 ? 6 : z;
  }

  static NASFAST_DEVICE float output(const Args& s, int64_t row, int o) {
    const Geometry& g = s.geometry;
    float sum = 0;
    if (g.kernel == 1) {
      for (int c = 0; c < g.in_channels; ++c) {
        sum += plain_weight<Format>(s.weight, int64_t{o} * g.in_channels + c) * input(s, row, c);
      }
      return sum;
    }
    const int ox = static_cast<int>(row % g.out_width), oy = static_cast<int>(row / g.out_width % g.out_height);
    const int64_t image = row / g.out_width / g.out_height;
    for (int ky = 0; ky < g.kernel; ++ky) {
      for (int kx = 0; kx < g.kernel; ++kx) {
        const int y = oy * g.stride + ky - g.kernel / 2, x = ox * g.stride + kx - g.kernel / 2;
        if (y < 0 || y >= g.height || x < 0 || x >= g.width) continue;
        sum += plain_weight<Format>(s.weight, (int64_t{o} * g.kernel + ky) * g.kernel + kx) *
               input(s, (image * g.height + y) * g.width + x, o);
      }
    }
    return sum;
  }

  template <class Block>
  static NASFAST_DEVICE void run(const Block& block, const Args& s, unsigned char*) {
    const int channels = s.geometry.out_channels;
    const PlainShare share(block.x, block.count_x, s.geometry.out_rows());
    block.each([&](int thread) {
      for (int o = thread; o < channels; o += kThreads) {
        float pivot = 0;
        Sums sums;
        for (int64_t row = share.begin; row < share.end; ++row) {
          const uint32_t stored = Format::pack(output(s, row, o), 0);
          s.y[row * channels + o] = static_cast<uint16_t>(stored);
          if (row == share.begin) pivot = Format::first(stored);
          sums.add(Format::first(stored) - pivot);
        }
        const Moments moments = sums.moments(pivot, share.count());
        s.norm.reduction.partial[int64_t{block.x} * channels + o] = {as_bits(moments.mean), as_bits(moments.m2)};
      }
    });
    finish_norm<kThreads>(block, s.norm, block.x, 0, 0, channels,
                          [&](int row) { return PlainShare(row, block.count_x, s.geometry.out_rows()).count(); });
  }
};

template <class Format>
struct PlainBackward {
  static constexpr int kThreads = 64, kBlocks = 1;
  using Args = BackwardStage;

  static NASFAST_DEVICE float output_gradient(const Args& s, int64_t row, int o) {
    const int64_t at = row * s.geometry.out_channels + o;
    const float y = plain_value<Format>(s.y + at);
    float dz = plain_value<Format>(s.grad + at);
    if (s.mask != nullptr && !(s.mask[o].low < y && y < s.mask[o].high)) dz = 0;
    return fma(s.back[o].a, dz, fma(s.back[o].b, y, s.back[o].c));
  }

  static NASFAST_DEVICE float input_gradient(const Args& s, int64_t row, int c) {
    const Geometry& g = s.geometry;
    float sum = 0;
    if (g.kernel == 1) {
      for (int o = 0; o < g.out_channels; ++o) {
        sum += plain_weight<Format>(s.weight, int64_t{o} * g.in_channels + c) * output_gradient(s, row, o);
      }
      return sum;
    }
    const int x = static_cast<int>(row % g.width), y = static_cast<int>(row / g.width % g.height);
    const int64_t image = row / g.width / g.height;
    for (int ky = 0; ky < g.kernel; ++ky) {
      for (int kx = 0; kx < g.kernel; ++kx) {
        const int oy = y + g.kernel / 2 - ky, ox = x + g.kernel / 2 - kx;
        if (oy < 0 || ox < 0 || oy % g.stride || ox % g.stride) continue;
        if (oy / g.stride >= g.out_height || ox / g.stride >= g.out_width) continue;
        sum += plain_weight<Format>(s.weight, (int64_t{c} * g.kernel + ky) * g.kernel + kx) *
               output_gradient(s, (image * g.out_height + oy / g.stride) * g.out_width + ox / g.stride, c);
      }
    }
    return sum;
  }

  template <class Block>
  static NASFAST_DEVICE void run(const Block& block, const Args& s, unsigned char*) {
    const int channels = s.geometry.in_channels;
    const PlainShare share(block.x, block.count_x, s.geometry.in_rows());
    block.each([&](int thread) {
      for (int c = thread; c < channels; c += kThreads) {
        GradientSums sums;
        for (int64_t row = share.begin; row < share.end; ++row) {
          const int64_t at = row * channels + c;
          float dx = input_gradient(s, row, c);
          if (s.added != nullptr) dx += plain_value<Format>(s.added + at);
          if (s.before != nullptr) {
            const Interval& interval = s.interval[c];
            const float y = plain_value<Format>(s.before + at);
            if (!(interval.low < y && y < interval.high)) dx = 0;
            dx = Format::first(Format::pack(dx, 0));
            sums.add(dx, y - interval.mean);
          }
          s.dx[at] = static_cast<uint16_t>(Format::pack(dx, 0));
        }
        if (s.before == nullptr) continue;
        s.gradient.reduction.partial[int64_t{block.x} * channels + c] = {as_bits(sums.sum), as_bits(sums.product)};
      }
    });
    if (s.before != nullptr) finish_gradient<kThreads>(block, s.gradient, block.x, 0, 0, channels);
  }
};

template <class Machine>
Grid plain_grid(int64_t rows, const Machine& machine) {
  return {static_cast<int>(rows < 8 * machine.multiprocessors ? rows : 8 * machine.multiprocessors), 1, 0};
}

#define NASFAST_PLAIN(NAME)                                                                    \
  template <class Machine>                                                                     \
  Grid NAME##_forward_grid(const Geometry& geometry, const Machine& machine) {                 \
    return plain_grid(geometry.out_rows(), machine);                                           \
  }                                                                                            \
  template <class Machine>                                                                     \
  Grid NAME##_backward_grid(const Geometry& geometry, const Machine& machine) {                \
    return plain_grid(geometry.in_rows(), machine);                                            \
  }                                                                                            \
  template <class Format, class Machine>                                                       \
  void NAME##_forward(const Machine& machine, const Grid& grid, const ForwardStage& stage) {   \
    machine.template launch<PlainForward<Format>>(grid.rows, 1, 0, stage);                     \
  }                                                                                            \
  template <class Format, class Machine>                                                       \
  void NAME##_backward(const Machine& machine, const Grid& grid, const BackwardStage& stage) { \
    machine.template launch<PlainBackward<Format>>(grid.rows, 1, 0, stage);                    \
  }
#if !__has_include("pointwise.h")
NASFAST_PLAIN(pointwise)
#endif
#undef NASFAST_PLAIN

}  // namespace nasfast::gpu
