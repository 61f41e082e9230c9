// Forward of the dense 3 x 3 stage of a stem: padding 1, stride 1 or 2, at most 3 input channels, rows of the image in
// multiples of 8 numbers. It is the first stage of its chain, and backward ends behind it.
//
// In NHWC the numbers below a row of a filter are neighbours. So a patch is three runs of 3 * channels numbers, together
// at most 27 of the 32 that are the depth of two matrix products. A block brings a band of the image to shared memory,
// with zeros around the image, and its lanes gather the patches from there.
#pragma once

#include "depthwise_jobs.h"

namespace nasfast::gpu {

constexpr int kDenseInput = 3;  // most input channels
constexpr int kDenseDepth = 32;
constexpr int kDenseTiles = 5;                // of 8 output channels, in a block: stems have 32 or 40
constexpr int kDenseGroup = 8 * kDenseTiles;  // output channels of a block
constexpr int kDensePitch = kDenseDepth + 8;  // of the weights in shared memory, so that rows begin on other banks
constexpr int kDenseThreads = 128;
static_assert(9 * kDenseInput <= kDenseDepth, "the depth has a place for every number of a patch");

// How blocks share the map of the output. A band is some rows of one image, and all of their columns or a part of them.
struct Bands {
  int images, out_height, out_width;
  int rows, columns;     // of a band; columns: a multiple of 16
  int turns;             // bands that a block does one after the other
  Divisor down, across;  // bands of an image below each other, and side by side
  Divisor tiles;         // of 16 columns, in a row of a band
  int in_rows, pitch;    // of the input of a band in shared memory

  struct Band {
    int image, begin, end, column, width;  // rows begin to end - 1, `width` columns from `column` on
  };

  NASFAST_ANYWHERE int count() const { return images * down.by * across.by; }
  NASFAST_ANYWHERE int blocks() const { return divide_up(count(), turns); }

  NASFAST_DEVICE Band band(int index) const {
    const int line = across(index), image = down(line), begin = (line - image * down.by) * rows;
    const int column = (index - line * across.by) * columns;
    return {image, begin, smaller(out_height, begin + rows), column, smaller(columns, out_width - column)};
  }
  // Numbers per channel of a block.
  NASFAST_DEVICE float numbers(int block) const {
    return static_cast<float>(numbers_before(smaller(count(), (block + 1) * turns)) - numbers_before(block * turns));
  }

 private:
  NASFAST_DEVICE unsigned numbers_before(int index) const {
    const Band at = band(index);
    return static_cast<unsigned>(at.image * out_height + at.begin) * out_width + at.column * (at.end - at.begin);
  }
};

inline Bands bands_of(const Geometry& g) {
  constexpr int kMostColumns = 128, kTilesOfBand = 28, kEnoughBlocks = 1024;
  const int parts = divide_up(g.out_width, kMostColumns);
  const int tiles = divide_up(divide_up(g.out_width, parts), 16), columns = 16 * tiles;
  const int segments = divide_up(g.out_height, larger(1, kTilesOfBand / tiles)),
            rows = divide_up(g.out_height, segments);
  Bands bands{g.images, g.out_height, g.out_width, rows, columns, 1, Divisor(divide_up(g.out_height, rows)),
              Divisor(divide_up(g.out_width, columns)), Divisor(tiles), g.stride * (rows - 1) + 3,
              // 8 numbers in front of the first column, of which the last ones are the column before it
              8 + divide_up((g.stride * (columns - 1) + 2) * g.in_channels, 8) * 8};
  bands.turns = divide_up(bands.count(), kEnoughBlocks);
  return bands;
}

// One lane. Of every tile of 16 columns it has the columns lane / 4 and + 8, and in these 10 output channels of the
// block: with t = lane % 4 these are 8 t to 8 t + 7, and 32 + 2 t and + 1.
struct DenseLane {
  static constexpr int kChannels = 2 * kDenseTiles;
  int offset[8];  // bytes from the first number of a patch to others
  float pivot[kChannels], sum[kChannels], square[kChannels];
  int count;  // numbers of a channel that the warp has

  static NASFAST_DEVICE int channel(int t, int j) { return j < 8 ? 8 * t + j : 32 + 2 * t + j - 8; }
};

template <class Format>
struct DenseForward {
  static constexpr int kThreads = kDenseThreads, kWarps = kThreads / 32, kBlocks = 4;
  static constexpr size_t kWeights = sizeof(uint16_t) * kDenseGroup * kDensePitch;
  struct Args {
    ForwardStage stage;
    Bands bands;
  };

  static size_t shared(const Bands& bands) {
    const size_t band = sizeof(uint16_t) * bands.in_rows * bands.pitch, sums = sizeof(Share) * kWarps * kDenseGroup;
    return kWeights + (band > sums ? band : sums);
  }

  template <class Block>
  static NASFAST_DEVICE void run(const Block& block, const Args& args, unsigned char* shared) {
    const Bands& bands = args.bands;
    const int first = kDenseGroup * block.y,
              channel_count = smaller(kDenseGroup, args.stage.geometry.out_channels - first);
    auto* weights = reinterpret_cast<uint16_t*>(shared);
    auto* input = reinterpret_cast<uint16_t*>(shared + kWeights);
    share_weights(block, args.stage, first, channel_count, weights);
    Local<DenseLane> lanes(block);
    block.each([&](int thread) { begin(args.stage.geometry.in_channels, bands.pitch, thread % 4, lanes[thread]); });
    NASFAST_NO_UNROLL
    for (int i = 0; i < bands.turns; ++i) {
      const int index = block.x * bands.turns + i;
      if (index >= bands.count()) break;
      const Bands::Band band = bands.band(index);
      load(block, args, band, input);
      multiply(block, args, band, first, channel_count, weights, input, lanes);
      block.sync();
    }
    write_moments(block, args.stage.norm.reduction, first, channel_count, lanes, reinterpret_cast<Share*>(input));
    finish_norm<kThreads>(block, args.stage.norm, block.x, block.y, first, channel_count,
                          [&](int row) { return bands.numbers(row); });
  }

 private:
  // [column of the product][place of the depth]; column n of tile j is channel 8 (n / 2) + 2 j + n % 2, or 32 + n in
  // the last tile. So a lane has neighbouring channels. Places without a number are 0.
  template <class Block>
  static NASFAST_DEVICE void share_weights(const Block& block, const ForwardStage& stage, int first, int channel_count,
                                           uint16_t* to) {
    static_assert(kWarps == 4, "a warp has two columns of each tile");
    constexpr int kEach = 2 * kDenseTiles;
    const int channels = stage.geometry.in_channels;
    block.each([&](int thread) {
      const int k = thread % 32, row = (k >= 3 * channels) + (k >= 6 * channels), rest = k - 3 * channels * row;
      const int column = (rest >= channels) + (rest >= 2 * channels), warp = thread / 32;
      const int tap = 9 * (rest - channels * column) + 3 * row + column;
      const auto each = [&](const auto& load) {
        uint32_t w[kEach];
        NASFAST_UNROLL
        for (int i = 0; i < kEach; ++i) {  // column 4 (i % 2) + warp of tile i / 2
          const int channel = i < 8 ? 16 * (i % 2) + i / 2 * 2 + warp / 2 * 8 + warp % 2 : 4 * i + warp;
          w[i] = k < 9 * channels && channel < channel_count ? load((first + channel) * 9 * channels + tap) : 0;
        }
        NASFAST_UNROLL
        for (int i = 0; i < kEach; ++i) to[(4 * i + warp) * kDensePitch + k] = static_cast<uint16_t>(w[i]);
      };
      if (stage.weight.is_float) {
        each([&](int at) { return Format::pack(static_cast<const float*>(stage.weight.data)[at], 0); });
      } else {
        each([&](int at) { return uint32_t{static_cast<const uint16_t*>(stage.weight.data)[at]}; });
      }
    });
  }

  static NASFAST_DEVICE void begin(int channels, int pitch, int t, DenseLane& lane) {
    NASFAST_UNROLL
    for (int i = 0; i < 8; ++i) {
      const int k = 2 * (t + i / 2 * 4) + i % 2, row = (k >= 3 * channels) + (k >= 6 * channels);
      // behind the patch, where the weights are 0, any number of the patch will do
      lane.offset[i] = k < 9 * channels ? 2 * (row * pitch + k - 3 * channels * row) : 0;
      keep(lane.offset[i]);
    }
    NASFAST_UNROLL
    for (int j = 0; j < DenseLane::kChannels; ++j) lane.pivot[j] = lane.sum[j] = lane.square[j] = 0;
    lane.count = 0;
  }

  // Brings the input of a band to shared memory; the first column of the band begins at place 8 of a row.
  template <class Block>
  static NASFAST_DEVICE void load(const Block& block, const Args& args, const Bands::Band& band, uint16_t* to) {
    const Geometry& g = args.stage.geometry;
    const int width = g.width * g.in_channels, from = g.stride * band.column * g.in_channels - 8;
    const int top = g.stride * band.begin - 1;
    block.each([&](int thread) {
      NASFAST_NO_UNROLL
      for (int row = thread / 32; row < args.bands.in_rows; row += kWarps) {
        const bool inside = static_cast<unsigned>(top + row) < static_cast<unsigned>(g.height);
        const uint16_t* x = args.stage.x + (int64_t{band.image} * g.height + (inside ? top + row : 0)) * width;
        for (int at = thread % 32 * 8; at < args.bands.pitch; at += 32 * 8) {
          const bool valid = inside && static_cast<unsigned>(from + at) < static_cast<unsigned>(width);
          block.copy(to + row * args.bands.pitch + at, x + (valid ? from + at : 0), valid);
        }
      }
    });
    block.commit();
    block.template wait<0>();
    block.sync();
  }

  template <class Block>
  static NASFAST_DEVICE void multiply(const Block& block, const Args& args, const Bands::Band& band, int first,
                                      int channel_count, const uint16_t* weights, const uint16_t* input,
                                      Local<DenseLane>& lanes) {
    const Geometry& g = args.stage.geometry;
    const Bands& bands = args.bands;
    const int64_t pixel = (int64_t{band.image} * g.out_height + band.begin) * g.out_width + band.column;
    uint16_t* const y = args.stage.y + first + pixel * g.out_channels;
    block.warps([&](const Warp& warp) {
      bool fresh = true;  // whether this is the first tile of the warp in the band
      NASFAST_NO_UNROLL
      for (int tile = warp.index; tile < (band.end - band.begin) * bands.tiles.by; tile += kWarps) {
        const int row = bands.tiles(tile), column = 16 * (tile - row * bands.tiles.by),
                  columns_left = band.width - column;
        if (columns_left <= 0) continue;
        const uint16_t* at =
            input + g.stride * row * bands.pitch + 8 - g.in_channels + g.stride * g.in_channels * column;
        const TileOfMap here{
            y + (row * g.out_width + column) * g.out_channels, at, weights, channel_count, columns_left, fresh};
        columns_left >= 16 ? multiply_tile<true>(warp, g, here, lanes) : multiply_tile<false>(warp, g, here, lanes);
        fresh = false;
      }
    });
  }

  // 16 columns of a row of the output.
  struct TileOfMap {
    uint16_t* y;
    const uint16_t *input, *weights;  // the first patch; the product's right side
    int channel_count, columns_left;  // channels of the block; columns that are there
    bool fresh;
  };

  // kFull: whether all columns are there.
  template <bool kFull>
  static NASFAST_DEVICE void multiply_tile(const Warp& warp, const Geometry& g, const TileOfMap& tile,
                                           Local<DenseLane>& lanes) {
    const auto state_of = [&](int lane) -> auto& { return lanes[32 * warp.index + lane]; };
    const int step = g.stride * g.in_channels;  // from the patch of a column to that of the next
    Local<uint32_t[2][4]> patches(warp), packed(warp);
    warp.each([&](int lane) {
      const char* at = reinterpret_cast<const char*>(tile.input + step * (lane / 4));
      NASFAST_UNROLL
      for (int i = 0; i < 8; ++i) {  // of both columns the pairs at 2 t, 2 t + 8, ...
        const auto number = [&](int e) {
          return *reinterpret_cast<const uint16_t*>(at + i % 2 * 16 * step + state_of(lane).offset[i / 2 * 2 + e]);
        };
        patches[lane][i / 4][i % 4] = number(0) | uint32_t{number(1)} << 16;
      }
    });
    NASFAST_UNROLL
    for (int j = 0; j < kDenseTiles; ++j) {
      if (j == 4 && tile.channel_count <= 32) break;
      Local<uint32_t[4]> b(warp);
      Local<float[4]> acc(warp);
      warp.load_matrices([&](int lane) -> auto& { return b[lane]; },
                         [&](int lane) { return tile.weights + (8 * j + lane % 8) * kDensePitch + lane / 8 * 8; });
      warp.each([&](int lane) {
        NASFAST_UNROLL
        for (int i = 0; i < 4; ++i) acc[lane][i] = 0;
      });
      NASFAST_UNROLL
      for (int k = 0; k < 2; ++k) {
        warp.template multiply_16<Format>([&](int lane) -> auto& { return acc[lane]; },
                                          [&](int lane) -> auto& { return patches[lane][k]; },
                                          [&](int lane) { return b[lane] + 2 * k; });
      }
      if (tile.fresh) choose_pivots(warp, j, acc, state_of);
      warp.each([&](int lane) {
        const int columns_left = kFull ? 16 : tile.columns_left - lane / 4;
        add(acc[lane], j, columns_left, state_of(lane), packed[lane]);
        if (j < 3) return;
        store(tile.y + lane / 4 * g.out_channels, g.out_channels, j, lane % 4, columns_left, tile.channel_count,
              packed[lane]);
      });
    }
    warp.each([&](int lane) { state_of(lane).count += kFull ? 16 : tile.columns_left; });
  }

  // Stores what a lane has of the channels of the first four tiles, or of the last tile.
  static NASFAST_DEVICE void store(uint16_t* y, int channels, int j, int t, int columns_left, int channel_count,
                                   const uint32_t (&packed)[2][4]) {
    const int channel = j == 3 ? 8 * t : 32 + 2 * t;
    if (channel >= channel_count) return;
    NASFAST_UNROLL
    for (int h = 0; h < 2; ++h) {
      if (8 * h >= columns_left) continue;
      uint16_t* to = y + 8 * h * channels + channel;
      if (j == 3) {
        store_vector(to, {packed[h][0], packed[h][1], packed[h][2], packed[h][3]});
      } else {
        *reinterpret_cast<uint32_t*>(to) = packed[h][0];
      }
    }
  }

  // The pivots of a warp are the first column that it has, as it is stored.
  template <class Acc, class State>
  static NASFAST_DEVICE void choose_pivots(const Warp& warp, int j, Acc& acc, const State& state_of) {
    Local<bool> fresh(warp);
    warp.each([&](int lane) { fresh[lane] = state_of(lane).count == 0; });
    NASFAST_UNROLL
    for (int e = 0; e < 2; ++e) {
      Local<float> pivot(warp);
      warp.each([&](int lane) { pivot[lane] = Format::first(Format::pack(acc[lane][e], 0)); });
      warp.from_lane([&](int lane) -> float& { return pivot[lane]; }, [](int lane) { return lane % 4; });
      warp.each([&](int lane) {
        if (fresh[lane]) state_of(lane).pivot[2 * j + e] = pivot[lane];
      });
    }
  }

  // Packs the results of a tile of channels, and adds those of the columns that are there. columns_left: such columns
  // from that of the lane on.
  static NASFAST_DEVICE void add(const float (&acc)[4], int j, int columns_left, DenseLane& lane,
                                 uint32_t (&packed)[2][4]) {
    NASFAST_UNROLL
    for (int h = 0; h < 2; ++h) {
      const uint32_t pair = Format::pack(acc[2 * h], acc[2 * h + 1]);
      packed[h][j % 4] = pair;
      if (8 * h >= columns_left) continue;
      NASFAST_UNROLL
      for (int e = 0; e < 2; ++e) {
        const float distance = (e == 0 ? Format::first(pair) : Format::second(pair)) - lane.pivot[2 * j + e];
        lane.sum[2 * j + e] += distance;
        lane.square[2 * j + e] = fma(distance, distance, lane.square[2 * j + e]);
      }
    }
  }

  // What a warp has of a channel.
  struct Share {
    Sums sums;
    float pivot, count;
  };

  // Writes the moments of a block's channels.
  template <class Block>
  static NASFAST_DEVICE void write_moments(const Block& block, const Reduction& reduction, int first, int channel_count,
                                           Local<DenseLane>& lanes, Share* table) {
    block.warps([&](const Warp& warp) {
      const auto state_of = [&](int lane) -> auto& { return lanes[32 * warp.index + lane]; };
      NASFAST_UNROLL
      for (int j = 0; j < DenseLane::kChannels; ++j) {
        warp.add_lanes([&](int lane) -> float& { return state_of(lane).sum[j]; }, 4);
        warp.add_lanes([&](int lane) -> float& { return state_of(lane).square[j]; }, 4);
      }
      warp.each([&](int lane) {
        if (lane >= 4) return;
        const DenseLane& own = state_of(lane);
        NASFAST_UNROLL
        for (int j = 0; j < DenseLane::kChannels; ++j) {
          table[warp.index * kDenseGroup + DenseLane::channel(lane, j)] = {
              {own.sum[j], own.square[j]}, own.pivot[j], static_cast<float>(own.count)};
        }
      });
    });
    block.sync();
    block.each([&](int thread) {
      if (thread >= channel_count) return;
      Moments all{0, 0, 0};
      for (int warp = 0; warp < kWarps; ++warp) {
        const Share& share = table[warp * kDenseGroup + thread];
        all.merge(share.sums.moments(share.pivot, share.count));
      }
      reduction.partial[int64_t{block.x} * reduction.channels + first + thread] = {as_bits(all.mean), as_bits(all.m2)};
    });
  }
};

template <class Machine>
Grid dense_forward_grid(const Geometry& g, const Machine&) {
  const Bands bands = bands_of(g);
  return {bands.blocks(), divide_up(g.out_channels, kDenseGroup), DenseForward<Bf16>::shared(bands)};
}

template <class Format, class Machine>
void dense_forward(const Machine& machine, const Grid& grid, const ForwardStage& stage) {
  machine.template launch<DenseForward<Format>>(grid.rows, grid.groups, grid.shared, {stage, bands_of(stage.geometry)});
}

}  // namespace nasfast::gpu
