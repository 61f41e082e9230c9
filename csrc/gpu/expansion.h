// What the kernels share that compute an expansion on the way to or from a depthwise convolution: how a launch divides
// images and channels, and the product of a few pixels of x with the weights of the expansion.
//
// A block has 32 hidden channels and goes down the rows of a part of one or a few images. A thread has two channels of
// a strip of columns. Rows of the hidden tensor are in shared memory without gaps between pixels: then neither the
// 16 bytes of a lane nor the pairs of two neighbouring strips meet in a bank.
#pragma once

#include "stages.h"
#include "stencil.h"

namespace nasfast::gpu {

constexpr int kChunk = 32;                        // hidden channels of a block
constexpr int kStrips = 8;                        // strips of a block
constexpr int kPairs = kChunk / 2;                // threads of a strip
constexpr int kExpandThreads = kPairs * kStrips;  // 128
constexpr int kExpandWarps = kExpandThreads / 32;
constexpr int kMaxExpandDepth = 64;  // channels of x
// Hidden channels: the weights of all of them are in the 99 KB of shared memory that a block can have on sm_86.
constexpr int kMaxExpandHidden = 512;

// The part that a block computes of the smaller one of the two maps of the depthwise convolution.
struct Part {
  int image, images;
  int row, rows;
  int column, columns;
};

// How the smaller map is divided among blocks.
struct Cut {
  int images, height, width;    // of the map
  int strips;                   // strips in a row of a block
  int side;                     // images of a block, side by side
  int rows;                     // rows of a block
  int tiles, segments, sets;    // numbers of blocks in the direction of columns, of rows and of images
  int chunks;                   // number of chunks of channels
  float per_segment, per_tile;  // 1 / segments, 1 / tiles

  NASFAST_ANYWHERE int parts() const { return tiles * segments * sets; }
  // a / b from 1 / b. The last block asks for the sizes of all parts, and a division of integers would take longer than
  // the sums. The result is exact, because there are fewer than 2^21 parts.
  static NASFAST_DEVICE int quotient(int a, float inverse) {
    return static_cast<int>((static_cast<float>(a) + 0.5f) * inverse);
  }
  NASFAST_DEVICE Part part(int index) const {
    const auto least = [](int a, int b) { return a < b ? a : b; };
    const int line = quotient(index, per_tile), set = quotient(line, per_segment);
    Part p;
    p.column = (index - line * tiles) * strips * kStrip;
    p.columns = least(strips * kStrip, width - p.column);
    p.row = (line - set * segments) * rows;
    p.rows = least(rows, height - p.row);
    p.image = set * side;
    p.images = least(side, images - p.image);
    return p;
  }
  NASFAST_DEVICE float count(int index) const {  // numbers of a channel
    const Part p = part(index);
    return static_cast<float>(p.images) * static_cast<float>(p.rows * p.columns);
  }
};

// Divides the map. Block (x, y) of the grid has chunk x and part y, so blocks that read the same x run at the same time.
// `resident`: blocks that a multiprocessor holds. `around`: how many more rows a block reads than it makes.
template <class Machine>
Cut cut_of(const Geometry& g, const Machine& machine, int resident, int around) {
  Cut cut{};
  cut.images = g.images;
  cut.height = g.out_height;
  cut.width = g.out_width;
  cut.chunks = (g.out_channels + kChunk - 1) / kChunk;
  const int all = (cut.width + kStrip - 1) / kStrip;
  cut.tiles = (all + kStrips - 1) / kStrips;
  cut.strips = (all + cut.tiles - 1) / cut.tiles;
  cut.tiles = (all + cut.strips - 1) / cut.strips;
  cut.side = cut.tiles > 1 ? 1 : kStrips / cut.strips;
  if (cut.side > cut.images) cut.side = cut.images;
  // places within a block have 32 bits
  const int64_t image = int64_t{g.height} * g.width * g.out_channels;
  while (cut.side > 1 && cut.side * image > INT32_MAX) --cut.side;
  cut.sets = (cut.images + cut.side - 1) / cut.side;
  // rows of a block: those with which the busiest multiprocessor ends first
  constexpr int kMostSegments = 16;
  constexpr int kPrologue = 3;  // what a block costs besides its rows, in rows
  constexpr int kFewest = 3;    // blocks of a multiprocessor, below which the time is that of a single one
  int64_t best = -1;
  for (int segments = 1; segments <= kMostSegments && segments <= cut.height; ++segments) {
    const int rows = (cut.height + segments - 1) / segments;
    const int64_t parts = int64_t{cut.sets} * cut.tiles * ((cut.height + rows - 1) / rows), blocks = parts * cut.chunks;
    if (segments > 1 && parts > kMostRows) break;
    const int64_t busiest = (blocks + machine.multiprocessors - 1) / machine.multiprocessors;
    const auto together = [](int64_t count) { return count == 0 || count > kFewest ? count : kFewest; };
    const int64_t rounds = busiest / resident * together(resident) + together(busiest % resident);
    const int64_t time = rounds * (rows + around + kPrologue);
    if (best >= 0 && time >= best) continue;
    best = time;
    cut.rows = rows;
  }
  cut.segments = (cut.height + cut.rows - 1) / cut.rows;
  cut.per_segment = 1.f / static_cast<float>(cut.segments);
  cut.per_tile = 1.f / static_cast<float>(cut.tiles);
  return cut;
}

// How the weights of a chunk and the pixels of x lie in shared memory. A row has 16 `steps` channels and a gap; there are
// zeros behind the last channel.
struct ExpandTile {
  int channels, steps, pitch;
  int lane_bits;  // logarithm of the number of threads that load a pixel

  NASFAST_ANYWHERE explicit ExpandTile(int channels)
      : channels(channels),
        steps((channels + 15) / 16),
        pitch(16 * ((channels + 15) / 16) + 8),
        lane_bits(channels > 32   ? 3
                  : channels > 16 ? 2
                                  : 1) {}
  NASFAST_ANYWHERE int bytes(int rows) const { return rows * pitch * 2; }
  NASFAST_DEVICE int piece(int thread) const { return 8 * (thread & ((1 << lane_bits) - 1)); }
};

// A weight, rounded to the type of the tensors.
template <class Format>
NASFAST_DEVICE uint16_t rounded_weight(const Weight& weight, int64_t at) {
  if (!weight.is_float) return static_cast<const uint16_t*>(weight.data)[at];
  return static_cast<uint16_t>(Format::pack(static_cast<const float*>(weight.data)[at], 0));
}
template <class Format>
NASFAST_DEVICE float float_weight(const Weight& weight, int64_t at) {
  return weight.is_float ? static_cast<const float*>(weight.data)[at]
                         : Format::first(static_cast<const uint16_t*>(weight.data)[at]);
}

// The column that channel c has in the product of 32 channels. With this order the results of a lane are 8 neighbouring
// channels.
NASFAST_DEVICE int column_of(int c) { return c % 8 / 2 * 8 + c / 8 * 2 + c % 2; }

// 8 neighbouring weights, rounded to the type of the tensors.
template <class Format>
NASFAST_DEVICE Vec4 rounded_weights(const Weight& weight, int64_t at) {
  if (!weight.is_float) return *reinterpret_cast<const Vec4*>(static_cast<const uint16_t*>(weight.data) + at);
  const Vec4* const from = reinterpret_cast<const Vec4*>(static_cast<const float*>(weight.data) + at);
  Vec4 rounded;
  NASFAST_UNROLL
  for (int i = 0; i < 4; ++i) {
    rounded.v[i] = Format::pack(as_float(from[i / 2].v[i % 2 * 2]), as_float(from[i / 2].v[i % 2 * 2 + 1]));
  }
  return rounded;
}

// Copies a chunk of the expansion's weights, [hidden][channels], to shared memory.
template <class Format>
NASFAST_DEVICE void fill_expansion(const ExpandTile& tile, const Weight& weight, int first, int hidden, uint16_t* to,
                                   int thread) {
  const int c = thread % kChunk;
  for (int k = thread / kChunk * 8; k < 16 * tile.steps; k += kExpandThreads / kChunk * 8) {
    Vec4 v{0, 0, 0, 0};
    if (first + c < hidden && k < tile.channels) {
      v = rounded_weights<Format>(weight, int64_t{first + c} * tile.channels + k);
    }
    *reinterpret_cast<Vec4*>(to + column_of(c) * tile.pitch + k) = v;
  }
}

// Copies the filters, [hidden][k][k], to shared memory as floats, [pair of channels][k * k][2]. `flipped` turns each
// filter round.
template <class Format, int kKernel>
NASFAST_DEVICE void fill_filters(const Weight& weight, int first, int hidden, bool flipped, float* to, int thread) {
  constexpr int kTaps = kKernel * kKernel;
  for (int i = thread; i < kChunk * kTaps; i += kExpandThreads) {
    const int c = i / kTaps, tap = i - c * kTaps;
    const int at = c / 2 * 2 * kTaps + 2 * (flipped ? kTaps - 1 - tap : tap) + c % 2;
    to[at] = first + c < hidden ? float_weight<Format>(weight, int64_t{first + c} * kTaps + tap) : 0.f;
  }
}

// Calls f(m, line, column) for every pixel m of a few lines that lie one behind the other. It needs no division.
template <class F>
NASFAST_DEVICE void each_pixel(int lines, int columns, int thread, const F& f) {
  NASFAST_NO_UNROLL
  for (int line = thread / 32; line < lines; line += kExpandWarps) {
    NASFAST_NO_UNROLL
    for (int column = thread % 32; column < columns; column += 32) f(line * columns + column, line, column);
  }
}

// Begins to copy the pixels from `begin` to `end` of a turn to shared memory. x is the piece of this thread of the first
// pixel, and from[m] the distance to that of pixel m.
template <class Block>
NASFAST_DEVICE void fetch_pixels(const Block& block, const ExpandTile& tile, const uint16_t* x, const int* from,
                                 int begin, int end, uint16_t* to, int thread) {
  const int step = kExpandThreads >> tile.lane_bits, piece = tile.piece(thread);
  if (piece >= tile.channels) return;
  int m = begin + (thread >> tile.lane_bits);
  to += m * tile.pitch + piece;
  NASFAST_NO_UNROLL
  for (; m < end; m += step, to += step * tile.pitch) block.copy(to, x + from[m]);
}

// Fills `count` pixels with zeros, because no copy writes the channels behind the last. Pixels to which nothing is copied
// are then finite too, and so is their expansion.
NASFAST_DEVICE void clear_pixels(const ExpandTile& tile, int count, uint16_t* to, int thread) {
  Vec4* const pieces = reinterpret_cast<Vec4*>(to);
  for (int i = thread; i < count * tile.pitch / 8; i += kExpandThreads) pieces[i] = Vec4{0, 0, 0, 0};
}

// Expands 16 pixels to 32 channels by one warp, and adds a number to each channel. acc(lane)[j][2 h + e] is the result for
// pixel 8 h + lane / 4 and channel 8 (lane % 4) + 2 j + e, and start(lane, j)[2 h + e] is what is added to it.
template <class Format, class Acc, class Start>
NASFAST_DEVICE void expand_pixels(const Warp& warp, const ExpandTile& tile, const uint16_t* x, const uint16_t* weights,
                                  const Acc& acc, const Start& start) {
  Local<uint32_t[4]> a(warp);
  Local<uint32_t[2][4]> b(warp);
  NASFAST_UNROLL
  for (int k = 0; k < kMaxExpandDepth / 16; ++k) {
    if (k >= tile.steps) break;
    warp.load_matrices([&](int lane) -> auto& { return a[lane]; },
                       [&](int lane) { return x + lane % 16 * tile.pitch + lane / 16 * 8 + 16 * k; });
    NASFAST_UNROLL
    for (int j = 0; j < 2; ++j) {
      // matrices (2 j, k), (2 j, k + 8), (2 j + 1, k), (2 j + 1, k + 8)
      warp.load_matrices([&](int lane) -> auto& { return b[lane][j]; },
                         [&](int lane) {
                           const int n = 16 * j + lane / 16 * 8 + lane % 8;
                           return weights + n * tile.pitch + lane / 8 % 2 * 8 + 16 * k;
                         });
    }
    NASFAST_UNROLL
    for (int j = 0; j < 4; ++j) {
      const auto to = [&](int lane) -> auto& { return acc(lane)[j]; };
      const auto pixels = [&](int lane) -> auto& { return a[lane]; };
      const auto channels = [&](int lane) { return b[lane][j / 2] + 2 * (j % 2); };
      if (k == 0) {
        warp.template multiply_16<Format>(to, pixels, channels, [&](int lane) { return start(lane, j); });
      } else {
        warp.template multiply_16<Format>(to, pixels, channels);
      }
    }
  }
}

}  // namespace nasfast::gpu
