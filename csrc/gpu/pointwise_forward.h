// Forward of a pointwise stage: `in` is x, through BatchNorm and activation if the stage before has them, and the
// result is y with its moments. The first stage of a chain may also write x, where
// the chain in front has deferred its last BatchNorm.
#pragma once

#include "product_result.h"

namespace nasfast::gpu::pointwise {

template <int kThreads>
NASFAST_DEVICE void prepare_fold(const Fold* fold, int thread, int depth, float* planes) {
  for (int c = thread; c < depth; c += kThreads) {
    planes[c] = fold[c].scale;
    planes[depth + c] = fold[c].shift;
  }
}

// Replaces every word of the first tensor's pieces, two channels y from channel c on, by pack(a, b, piece, word) with
// a and b = scale y + shift.
template <class Format, int kPieces, int kInputs, class Pack>
NASFAST_DEVICE void apply_fold(Vec4 (&raw)[kPieces][kInputs], const float* planes, int depth, int c, const Pack& pack) {
  NASFAST_UNROLL
  for (int half = 0; half < 2; ++half) {
    const Floats scale = *reinterpret_cast<const Floats*>(planes + c + 4 * half);
    const Floats shift = *reinterpret_cast<const Floats*>(planes + depth + c + 4 * half);
    NASFAST_UNROLL
    for (int i = 0; i < kPieces; ++i) {
      NASFAST_UNROLL
      for (int j = 0; j < 2; ++j) {
        uint32_t& v = raw[i][0].v[2 * half + j];
        v = pack(fma(Format::first(v), scale.v[2 * j], shift.v[2 * j]),
                 fma(Format::second(v), scale.v[2 * j + 1], shift.v[2 * j + 1]), i, 2 * half + j);
      }
    }
  }
}

struct ForwardSource {
  static constexpr int kInputs = 1, kPlanes = 2;
  static constexpr bool kWritesInput = false;
  const uint16_t* in[kInputs];  // x
  const Fold* fold;
  Act act;

  static NASFAST_DEVICE bool has(int) { return true; }
  template <int kThreads>
  NASFAST_DEVICE void prepare(int thread, int depth, float* planes) const {
    if (fold != nullptr) prepare_fold<kThreads>(fold, thread, depth, planes);
  }
  // Converts pieces in place, of channels c to c + 7.
  template <class Format, int kPieces>
  NASFAST_DEVICE void convert(Vec4 (&raw)[kPieces][1], const float* planes, int depth, int c) const {
    if (fold == nullptr) return;
    if (act == Act::kIdentity) {
      apply_fold<Format>(raw, planes, depth, c, [](float a, float b, int, int) { return Format::pack(a, b); });
    } else {
      const uint32_t most = act == Act::kRelu6 ? Format::kSixes : Format::pack(INFINITY, INFINITY);
      apply_fold<Format>(raw, planes, depth, c,
                         [most](float a, float b, int, int) { return Format::at_most(Format::pack_relu(a, b), most); });
    }
  }
};

// x = scale y + shift + added, as ApplyKernel computes it: the input that the chain in front has deferred.
struct DeferredSource {
  static constexpr int kInputs = 2, kPlanes = 2;
  static constexpr bool kWritesInput = true;
  const uint16_t* in[kInputs];  // y and added, which may be null
  const Fold* fold;
  uint16_t* x;

  NASFAST_DEVICE bool has(int n) const { return in[n] != nullptr; }
  template <int kThreads>
  NASFAST_DEVICE void prepare(int thread, int depth, float* planes) const {
    prepare_fold<kThreads>(fold, thread, depth, planes);
  }
  // Converts pieces in place, of channels c to c + 7.
  template <class Format, int kPieces>
  NASFAST_DEVICE void convert(Vec4 (&raw)[kPieces][2], const float* planes, int depth, int c) const {
    const auto apply = [&](const auto& added) {
      apply_fold<Format>(raw, planes, depth, c, [&](float a, float b, int piece, int word) {
        const uint32_t more = added(piece, word);
        return Format::pack(a + Format::first(more), b + Format::second(more));
      });
    };
    if (has(1)) {
      apply([&](int piece, int word) { return raw[piece][1].v[word]; });
    } else {
      apply([](int, int) { return 0u; });  // + 0 makes 0 of -0, as in ApplyKernel
    }
  }
};

template <class Source>
struct ForwardArgs {
  Factor factor;
  Source source;
  uint16_t* y;
  Norm norm;
};

template <class Format, class Tile, class Source>
struct PointwiseForward {
  static constexpr int kThreads = Tile::kThreads, kBlocks = Tile::kBlocks;
  using Shared = Memory<Tile, false>;
  static constexpr int kColumnPlanes = Tile::kRowWarps;  // a pivot for each of these warps
  using Args = ForwardArgs<Source>;

  template <class Block>
  static NASFAST_DEVICE void run(const Block& block, const Args& args, unsigned char* shared) {
    const Factor& factor = args.factor;
    const Result<Tile> result(factor, block.y * Tile::kColumns, block.count_x);
    const Shared memory(factor.depth, Source::kPlanes, kColumnPlanes);
    float* const planes = reinterpret_cast<float*>(shared + memory.columns_at);
    const auto pivot_of = [&](int warp, int lane) {
      return planes + warp / Tile::kColumnWarps * Tile::kColumns + result.column(warp, lane);
    };
    Local<ChannelSums> sums(block);
    block.each([&](int thread) { sums[thread] = {}; });
    const auto write = [&](const Warp& warp, int tile, int rows, auto& acc) {
      const auto at = [&](int lane) { return 32 * warp.index + lane; };
      if (tile == block.x) {
        // the pivot is the first row of the warp, as it is stored
        warp.each([&](int lane) {
          if (lane >= 4) return;
          NASFAST_UNROLL
          for (int j = 0; j < 8; ++j) {
            const float v = acc[at(lane)][0][j / 2][j % 2];
            pivot_of(warp.index, lane)[j] = Format::first(Format::pack(v, v));
          }
        });
        warp.sync();
      }
      uint16_t* const y = args.y + result.from(tile);
      warp.each([&](int lane) {
        const auto& v = acc[at(lane)];
        const Floats* pivot = reinterpret_cast<const Floats*>(pivot_of(warp.index, lane));
        const Floats low = pivot[0], high = pivot[1];
        result.each_row(warp.index, lane, rows, [&](int i, int h, int64_t to) {
          Vec4 packed;
          NASFAST_UNROLL
          for (int j = 0; j < 4; ++j) {
            const Floats& near = j < 2 ? low : high;
            packed.v[j] = Format::pack(v[i][j][2 * h], v[i][j][2 * h + 1]);
            add(sums[at(lane)], 2 * j, Format::first(packed.v[j]) - near.v[2 * j % 4]);
            add(sums[at(lane)], 2 * j + 1, Format::second(packed.v[j]) - near.v[2 * j % 4 + 1]);
          }
          store_vector(y + to, packed);
        });
      });
    };
    const RowProduct<Format, Tile, false, Source> product{
        factor, args.source, memory, shared, {factor, result.first_column}};
    product.run(block, [] {}, [](int, int) {}, write);

    Vec2* parts = reinterpret_cast<Vec2*>(shared);
    gather(block, sums, [&](int warp, int lane, int j, float sum, float square) {
      const float count = result.count(block.x, block.count_x, warp / Tile::kColumnWarps, false);
      const Moments m = Sums{sum, square}.moments(count > 0 ? pivot_of(warp, lane)[j] : 0, count);
      parts[result.part(warp, lane) + j] = {as_bits(m.mean), as_bits(m.m2)};
    });
    const int channel_count = smaller(Tile::kColumns, factor.columns - result.first_column);
    const Reduction& reduction = args.norm.reduction;
    block.each([&](int thread) {
      for (int c = thread; c < channel_count; c += kThreads) {
        Moments all{0, 0, 0};
        for (int w = 0; w < Tile::kRowWarps; ++w) {
          const Vec2 part = parts[w * Tile::kColumns + c];
          all.merge({result.count(block.x, block.count_x, w, false), as_float(part.v[0]), as_float(part.v[1])});
        }
        reduction.partial[int64_t{block.x} * reduction.channels + result.first_column + c] = {as_bits(all.mean),
                                                                                              as_bits(all.m2)};
      }
    });
    finish_norm<kThreads>(block, args.norm, block.x, block.y, result.first_column, channel_count,
                          [&](int row) { return result.count(row, block.count_x, 0, true); });
  }

 private:
  static NASFAST_DEVICE void add(ChannelSums& s, int j, float distance) {
    s.first[j] += distance;
    s.second[j] = fma(distance, distance, s.second[j]);
  }
};

}  // namespace nasfast::gpu::pointwise
