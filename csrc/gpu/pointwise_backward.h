// Backward of a pointwise stage: `in` is dy = a dz + b y + c, and the result is dz of the stage before, or of the chain
// before it, with its two sums; or only the gradient of the chain's input.
#pragma once

#include "product_result.h"

namespace nasfast::gpu::pointwise {

struct BackwardSource {
  static constexpr int kInputs = 2, kPlanes = 5;
  static constexpr bool kWritesInput = false;
  const uint16_t* in[kInputs];  // grad and y
  const Interval* mask;
  const Back* back;

  static NASFAST_DEVICE bool has(int) { return true; }
  template <int kThreads>
  NASFAST_DEVICE void prepare(int thread, int depth, float* planes) const {
    for (int c = thread; c < depth; c += kThreads) {
      const Back f = back[c];
      planes[c] = f.a;
      planes[depth + c] = f.b;
      planes[2 * depth + c] = f.c;
      if (mask == nullptr) continue;
      planes[3 * depth + c] = mask[c].low;
      planes[4 * depth + c] = mask[c].high;
    }
  }
  // Converts pieces in place, of channels c to c + 7.
  template <class Format, int kPieces>
  NASFAST_DEVICE void convert(Vec4 (&raw)[kPieces][2], const float* planes, int depth, int c) const {
    if (mask == nullptr) {
      apply<false, Format>(raw, planes, depth, c);
    } else {
      apply<true, Format>(raw, planes, depth, c);
    }
  }

 private:
  template <bool kMask, class Format, int kPieces>
  static NASFAST_DEVICE void apply(Vec4 (&raw)[kPieces][2], const float* planes, int depth, int c) {
    NASFAST_UNROLL
    for (int half = 0; half < 2; ++half) {
      Floats plane[kMask ? 5 : 3];  // a, b, c, low, high
      NASFAST_UNROLL
      for (int i = 0; i < (kMask ? 5 : 3); ++i) {
        plane[i] = *reinterpret_cast<const Floats*>(planes + i * depth + c + 4 * half);
      }
      const auto gradient = [&](float dz, float y, int i) {
        if (kMask && !(plane[kMask ? 3 : 0].v[i] < y && y < plane[kMask ? 4 : 0].v[i])) dz = 0;
        return fma(plane[0].v[i], dz, fma(plane[1].v[i], y, plane[2].v[i]));
      };
      NASFAST_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        NASFAST_UNROLL
        for (int j = 0; j < 2; ++j) {
          uint32_t& v = raw[i][0].v[2 * half + j];
          const uint32_t y = raw[i][1].v[2 * half + j];
          v = Format::pack(gradient(Format::first(v), Format::first(y), 2 * j),
                           gradient(Format::second(v), Format::second(y), 2 * j + 1));
        }
      }
    }
  }
};

struct BackwardArgs {
  Factor factor;
  BackwardSource source;
  uint16_t* dx;
  const uint16_t* previous_y;
  const Interval* interval;
  NormGradient gradient;
  const uint16_t* added;
  PrecomputedGradients precomputed;
};

template <class Format, class Tile>
struct PointwiseBackward {
  static constexpr int kThreads = Tile::kThreads, kBlocks = Tile::kBlocks;
  using Shared = Memory<Tile, true>;
  static constexpr int kColumnPlanes = 3;  // low, high, mean
  using Args = BackwardArgs;

  template <class Block>
  static NASFAST_DEVICE void run(const Block& block, const Args& args, unsigned char* shared) {
    const Factor& factor = args.factor;
    const Result<Tile> result(factor, block.y * Tile::kColumns, block.count_x);
    const Shared memory(factor.depth, BackwardSource::kPlanes, kColumnPlanes);
    float* planes = reinterpret_cast<float*>(shared + memory.columns_at);
    const int channel_count = smaller(Tile::kColumns, factor.columns - result.first_column);
    Local<ChannelSums> sums(block);
    Local<Vec4[2 * Tile::kTiles]> other(block);  // rows of `previous_y` or of `added`
    const auto prepare_results = [&] {
      if (block.x == 0 && block.y == 0) args.precomputed.template copy<kThreads>(block, factor.depth);
      block.each([&](int thread) {
        sums[thread] = {};
        if (args.previous_y == nullptr) return;
        for (int c = thread; c < channel_count; c += kThreads) {
          const Interval f = args.interval[result.first_column + c];
          planes[c] = f.low;
          planes[Tile::kColumns + c] = f.high;
          planes[2 * Tile::kColumns + c] = f.mean;
        }
      });
    };
    const auto ahead = [&](int tile, int rows) {
      const uint16_t* from = args.previous_y != nullptr ? args.previous_y : args.added;
      if (from == nullptr) return;
      const uint16_t* tile_from = from + result.from(tile);
      block.each([&](int thread) {
        result.each_row(thread / 32, thread % 32, rows, [&](int i, int h, int64_t at) {
          other[thread][2 * i + h] = *reinterpret_cast<const Vec4*>(tile_from + at);
        });
      });
    };
    const auto write = [&](const Warp& warp, int tile, int rows, auto& acc) {
      uint16_t* dx = args.dx + result.from(tile);
      warp.each([&](int lane) {
        const int thread = 32 * warp.index + lane;
        if (args.previous_y != nullptr) {
          if (args.added != nullptr)
            add_to(acc[thread], args.added + result.from(tile), result, warp.index, lane, rows);
          mask(result, planes, warp.index, lane, rows, acc[thread], other[thread], sums[thread], dx);
        } else {
          add(result, args.added != nullptr, warp.index, lane, rows, acc[thread], other[thread], dx);
        }
      });
    };
    const RowProduct<Format, Tile, true, BackwardSource> product{
        factor, args.source, memory, shared, {factor, result.first_column}};
    product.run(block, prepare_results, ahead, write);
    if (args.previous_y == nullptr) return;

    Vec2* parts = reinterpret_cast<Vec2*>(shared);
    gather(block, sums, [&](int warp, int lane, int j, float sum, float product) {
      parts[result.part(warp, lane) + j] = {as_bits(sum), as_bits(product)};
    });
    const Reduction& reduction = args.gradient.reduction;
    block.each([&](int thread) {
      for (int c = thread; c < channel_count; c += kThreads) {
        float sum = 0, product = 0;
        for (int w = 0; w < Tile::kRowWarps; ++w) {
          const Vec2 part = parts[w * Tile::kColumns + c];
          sum += as_float(part.v[0]);
          product += as_float(part.v[1]);
        }
        reduction.partial[int64_t{block.x} * reduction.channels + result.first_column + c] = {as_bits(sum),
                                                                                              as_bits(product)};
      }
    });
    finish_gradient<kThreads>(block, args.gradient, block.x, block.y, result.first_column, channel_count);
  }

 private:
  using Acc = float[Tile::kTiles][4][4];
  using Other = Vec4[2 * Tile::kTiles];

  // The registers have no room to load these rows earlier.
  static NASFAST_DEVICE void add_to(Acc& acc, const uint16_t* added, const Result<Tile>& result, int warp, int lane,
                                    int rows) {
    result.each_row(warp, lane, rows, [&](int i, int h, int64_t at) {
      const Vec4 more = *reinterpret_cast<const Vec4*>(added + at);
      NASFAST_UNROLL
      for (int j = 0; j < 4; ++j) {
        acc[i][j][2 * h] += Format::first(more.v[j]);
        acc[i][j][2 * h + 1] += Format::second(more.v[j]);
      }
    });
  }
  // dz of the stage before, and its sums.
  static NASFAST_DEVICE void mask(const Result<Tile>& result, const float* planes, int warp, int lane, int rows,
                                  const Acc& acc, Other& other, ChannelSums& sums, uint16_t* dx) {
    NASFAST_UNROLL
    for (int half = 0; half < 2; ++half) {
      Floats plane[3];
      NASFAST_UNROLL
      for (int i = 0; i < 3; ++i) {
        plane[i] = *reinterpret_cast<const Floats*>(planes + i * Tile::kColumns + result.column(warp, lane) + 4 * half);
      }
      const auto dz = [&](float gradient, float y, int j) {
        const float v = plane[0].v[j] < y && y < plane[1].v[j] ? gradient : 0.f;
        const int c = 4 * half + j;
        sums.first[c] += v;
        sums.second[c] = fma(v, y - plane[2].v[j], sums.second[c]);
        return v;
      };
      result.each_row(warp, lane, rows, [&](int i, int h, int64_t at) {
        Vec4& v = other[2 * i + h];
        NASFAST_UNROLL
        for (int j = 0; j < 2; ++j) {
          const auto& both = acc[i][2 * half + j];
          const uint32_t y = v.v[2 * half + j];
          const float first = dz(both[2 * h], Format::first(y), 2 * j);
          v.v[2 * half + j] = Format::pack(first, dz(both[2 * h + 1], Format::second(y), 2 * j + 1));
        }
        if (half == 1) store_vector(dx + at, v);
      });
    }
  }
  // The gradient of the chain's input.
  static NASFAST_DEVICE void add(const Result<Tile>& result, bool added, int warp, int lane, int rows, const Acc& acc,
                                 const Other& other, uint16_t* dx) {
    result.each_row(warp, lane, rows, [&](int i, int h, int64_t at) {
      Vec4 v;
      NASFAST_UNROLL
      for (int j = 0; j < 4; ++j) {
        const uint32_t more = added ? other[2 * i + h].v[j] : 0;
        v.v[j] = Format::pack(acc[i][j][2 * h] + Format::first(more), acc[i][j][2 * h + 1] + Format::second(more));
      }
      store_vector(dx + at, v);
    });
  }
};

}  // namespace nasfast::gpu::pointwise
