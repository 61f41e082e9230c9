// The depthwise stencil with stride 1 on tensor cores: how a block lays out its work, and the products.
//
// For one channel, 16 rows by 8 columns of the result are a sum over the rows ky of the filter:
//
//   D[row][j] = sum over i of X[row + ky][i] B[i][j],   B[i][j] = w[ky][i - j - kShift],   0 <= i < 16
//
// B has a row of the filter along its diagonals and zeros elsewhere: of its 16 x 8 numbers 8 k are no zeros, and still a
// result takes k / 4 instructions of products where a thread by itself takes k^2 of them.
//
// A block has 32 channels and a panel of 16 rows at a time. Pixels come from memory as 8 channels of a lane, and a
// transposition of 8 x 8 numbers makes of them 2 pixels of one channel. In shared memory every channel is an image. The
// results take its place, and come back as 8 channels of a lane by the opposite transposition. The order of channels in
// shared memory, the slots, is the one for which this takes no other step.
//
// Two images of a small map are one panel. Each has 8 of the 16 rows of a product, and its own rows of zeros around it.
#pragma once

#include "depthwise_jobs.h"

namespace nasfast::gpu {

constexpr int kMatrixWarps = 8, kMatrixThreads = 32 * kMatrixWarps;
constexpr int kSlots = 32;        // channels of a block
constexpr int kMatrixBlocks = 2;  // of a multiprocessor: a thread has 128 registers
constexpr int kPanelRows = 14;    // rows that a block makes at a time; they divide 14, 28 and 56
constexpr int kSmallRows = kPanelRows / 2, kSmallColumns = 8;  // the largest map of which two images are a panel
constexpr int kMatrixColumns = 56;                             // the widest map: 7 tiles of 8 columns

// Whether the GPUs for which this is compiled ever run these kernels: not those of on_tensor_cores() in depthwise.h, nor
// has the Gpu of kernels/cuda/gpu.h `panels` for them. The kernels then end the program, because a return would leave
// results that nobody wrote.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890)
constexpr bool kMatricesRun = false;
#else
constexpr bool kMatricesRun = true;
#endif

// The channel, within those of the block, that is in a slot.
NASFAST_DEVICE int channel_of_slot(int slot) { return slot % 8 / 2 * 8 + slot / 8 * 2 + slot % 2; }
NASFAST_DEVICE int slot_of_channel(int c) { return c % 8 / 2 * 8 + c / 8 * 2 + c % 2; }

// Rows begin to begin + rows - 1 of a picture.
struct Unit {
  int picture, begin, rows;
};

// Divides the pictures into units of equal height, and these among blocks. A picture is an image, or two small ones, of
// which the last picture may have only one.
struct Units {
  int pictures, height, width, channels;
  int all;           // rows of all images
  int rows;          // of a unit, or fewer in the last one of a picture
  int each;          // units of a block
  Divisor segments;  // units of a picture

  NASFAST_ANYWHERE int count() const { return pictures * segments.by; }
  NASFAST_ANYWHERE int blocks() const { return divide_up(count(), each); }  // that share channels
  NASFAST_ANYWHERE int groups() const { return divide_up(channels, kSlots); }
  // pair: whether a picture is two images; then it is one unit.
  NASFAST_DEVICE Unit unit(int index, bool pair) const {
    if (pair) return {index, 0, smaller(height, all - index * height)};
    const int picture = segments(index), begin = (index - picture * segments.by) * rows;
    return {picture, begin, smaller(rows, height - begin)};
  }
  // Numbers per channel of a block.
  NASFAST_DEVICE float numbers(int block) const {
    return static_cast<float>((rows_before(smaller(count(), (block + 1) * each)) - rows_before(block * each)) * width);
  }

 private:
  NASFAST_DEVICE int rows_before(int index) const {
    const int picture = segments(index);
    return smaller(all, picture * height + smaller(height, (index - picture * segments.by) * rows));
  }
};

// How a channel lies in shared memory. kTiles: of 8 columns, in a row of the map; a panel of one tile has two images.
template <int kKernel_, int kTiles_>
struct Panel {
  static constexpr int kKernel = kKernel_, kTiles = kTiles_;
  static constexpr int kPad = kKernel / 2;
  // Columns before the first one of the image, an even number, because pixels move in pairs.
  static constexpr int kLead = (kPad + 1) / 2 * 2, kShift = kLead - kPad;
  static constexpr bool kPair = kTiles == 1;
  static constexpr int kLines = (kPair ? 2 : 1) * (kKernel - 1) + kPanelRows;
  // Lines from the first 8 rows of a product to the other 8.
  static constexpr int kHalf = kPair ? kLines / 2 : 8;
  // Numbers from line to line, and from channel to channel: both are an odd number of 16 bytes, so that neither 8 lines
  // nor 8 channels meet in a bank. The last rows of a product read lines of the next channel, and nothing reads their
  // results.
  static constexpr int kPitch = 8 * ((kTiles + 1) | 1), kChannel = 8 * (kLines * kPitch / 8 | 1);
  // Words of the bands: for every channel and row of the filter 4 words of zeros and the filter, and both once more with
  // the filter one place further, so that a pair of numbers is a word wherever it begins. The zeros behind a row are
  // those in front of the next.
  static constexpr int kBand = 16, kBands = kSlots * kKernel * kBand + 4;
  static constexpr size_t kBytes = sizeof(uint16_t) * kSlots * kChannel + sizeof(uint32_t) * kBands;
  // A warp loads and stores one tile of columns, and every kStep-th row.
  static constexpr int kStep = kMatrixWarps / kTiles;

  // Where a row of the panel is in a channel, those around it included; of a pair, a row of the first image.
  static NASFAST_DEVICE int line(int row) { return (kPad + row) * kPitch; }
  // How much further a row is if it is of the second image. height: that of an image.
  static NASFAST_DEVICE int further(int row, int height) {
    return kPair && row >= height ? (kHalf - height) * kPitch : 0;
  }
};

// Brings the filters of `channel_count` channels to shared memory, rounded to the type of the tensors.
template <class Format, class Panel, class Block>
NASFAST_DEVICE void share_bands(const Block& block, const Weight& weight, int first, int channel_count, bool flipped,
                                uint32_t* to) {
  constexpr int kKernel = Panel::kKernel, kTaps = kKernel * kKernel;
  block.each([&](int thread) {
    for (int i = thread; i < kSlots * kKernel; i += kMatrixThreads) {
      const int ky = i % kKernel, c = channel_of_slot(i / kKernel);
      float row[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      if (c < channel_count) {
        NASFAST_UNROLL
        for (int kx = 0; kx < kKernel; ++kx) {
          const int tap = kKernel * ky + kx;
          const int64_t at = int64_t{first + c} * kTaps + (flipped ? kTaps - 1 - tap : tap);
          row[kx] = weight.is_float ? static_cast<const float*>(weight.data)[at]
                                    : Format::first(static_cast<const uint16_t*>(weight.data)[at]);
        }
      }
      Vec4* const band = reinterpret_cast<Vec4*>(to) + i * (Panel::kBand / 4);
      Vec4 even, odd;
      NASFAST_UNROLL
      for (int j = 0; j < 4; ++j) {
        even.v[j] = Format::pack(row[2 * j], row[2 * j + 1]);
        odd.v[j] = Format::pack(j == 0 ? 0.f : row[2 * j - 1], row[2 * j]);
      }
      band[0] = band[2] = Vec4{0, 0, 0, 0};
      band[1] = even, band[3] = odd;
    }
    if (thread == 0) reinterpret_cast<Vec4*>(to)[Panel::kBands / 4 - 1] = Vec4{0, 0, 0, 0};
  });
}

// The results of a channel for 16 rows, in the layout of a product; x: the channel; bands: its filter.
template <class Format, class Panel, class Acc>
NASFAST_DEVICE void multiply_bands(const Warp& warp, const uint16_t* x, const uint32_t* bands, Acc& acc) {
  constexpr int kTiles = Panel::kTiles;
  NASFAST_UNROLL
  for (int ky = 0; ky < Panel::kKernel; ++ky) {
    Local<uint32_t[2]> b(warp);
    warp.each([&](int lane) {
      const int i = 2 * (lane % 4) - lane / 4 - Panel::kShift, odd = i & 1;
      const uint32_t* const from = bands + 8 * odd + (i + 8 + odd) / 2 + Panel::kBand * ky;
      b[lane][0] = from[0], b[lane][1] = from[4];
    });
    NASFAST_UNROLL
    for (int two = 0; two <= kTiles; two += 2) {
      Local<uint32_t[4]> a(warp);  // the 8 columns from 8 two on, and the next 8
      warp.load_matrices([&](int lane) -> auto& { return a[lane]; },
                         [&](int lane) {
                           const int line = Panel::kPair ? lane % 8 + lane / 8 % 2 * Panel::kHalf : lane % 16;
                           return x + line * Panel::kPitch + lane / 16 * 8 + ky * Panel::kPitch + 8 * two;
                         });
      const auto filter = [&](int lane) -> auto& { return b[lane]; };
      const auto sums = [&](int tile) { return [&acc, tile](int lane) -> auto& { return acc[lane][tile]; }; };
      if (two < kTiles)
        warp.template multiply_16<Format>(sums(two), [&](int lane) -> auto& { return a[lane]; }, filter);
      // a tile between reads the second half of these columns and the first half of the next
      if (two > 0) {
        warp.template multiply_8<Format>(
            sums(two - 1), [&](int lane) -> auto& { return a[lane]; }, [&](int lane) { return b[lane] + 1; });
      }
      if (two + 1 < kTiles) {
        warp.template multiply_8<Format>(sums(two + 1), [&](int lane) { return a[lane] + 2; }, filter);
      }
    }
  }
}

// Replaces the pixels of a channel by its results in `rows` rows. first: how many of the first 8 rows of a product are
// of the panel.
template <class Format, class Panel>
NASFAST_DEVICE void convolve_channel(const Warp& warp, uint16_t* x, const uint32_t* bands, int first, int rows) {
  Local<float[Panel::kTiles][4]> acc(warp);
  warp.each([&](int lane) {
    NASFAST_UNROLL
    for (int i = 0; i < 4 * Panel::kTiles; ++i) acc[lane][i / 4][i % 4] = 0;
  });
  multiply_bands<Format, Panel>(warp, x, bands, acc);
  warp.sync();
  warp.each([&](int lane) {
    uint16_t* const to = x + Panel::line(lane / 4) + 2 * (lane % 4);
    NASFAST_UNROLL
    for (int h = 0; h < 2; ++h) {
      if (lane / 4 >= first || lane / 4 + first * h >= rows) continue;
      NASFAST_UNROLL
      for (int i = 0; i < Panel::kTiles; ++i) {
        *reinterpret_cast<uint32_t*>(to + h * Panel::kHalf * Panel::kPitch + 8 * i) =
            Format::pack(acc[lane][i][2 * h], acc[lane][i][2 * h + 1]);
      }
    }
  });
}

// Divides the map. pair: whether two images are a picture. resident: blocks that a multiprocessor holds.
inline Units divide_units(const Geometry& g, bool pair, int resident, int multiprocessors) {
  constexpr int kEnoughRows = 1024;
  const double prologue = pair ? 6 : 25;  // what a block costs besides its panels, in results of a thread
  constexpr double kFewest = 3;           // with fewer warps per scheduler, the time is that of a single warp
  const int height = pair ? 2 * g.out_height : g.out_height, all = g.images * g.out_height;
  Units best{divide_up(all, height), height, g.out_width, g.out_channels, all, 0, 0, {}};
  best.rows = divide_up(height, divide_up(height, kPanelRows));
  best.segments = Divisor(divide_up(height, best.rows));
  const double panel = static_cast<double>(best.rows) * g.out_width * kSlots / kMatrixThreads;
  double least = INFINITY;
  for (int each = divide_up(best.count(), kEnoughRows); each <= best.count(); ++each) {
    Units units = best;
    units.each = each;
    const int blocks = divide_up(units.blocks() * units.groups(), multiprocessors);  // on the busiest multiprocessor
    const auto time = [](int together) {  // the time of blocks that run at once
      const double warps = together * kMatrixWarps / 4.;
      return together == 0 ? 0 : warps > kFewest ? warps : kFewest;
    };
    const double cost = (each * panel + prologue) * (blocks / resident * time(resident) + time(blocks % resident));
    if (cost < least) least = cost, best = units;
  }
  return best;
}

// The steps of a block. Source: what the kernel reads and writes, in pieces of 8 channels of a pixel.
template <class Format, class Panel, class Source>
struct Panels {
  const Units& units;
  int first, channel_count;  // channels of the block
  uint16_t* pixels;
  uint32_t* bands;

  NASFAST_DEVICE Panels(const Units& units, int group, unsigned char* shared)
      : units(units),
        first(group * kSlots),
        channel_count(smaller(kSlots, units.channels - group * kSlots)),
        pixels(reinterpret_cast<uint16_t*>(shared)),
        bands(reinterpret_cast<uint32_t*>(shared + sizeof(uint16_t) * kSlots * Panel::kChannel)) {}

  // Brings the filters to shared memory, and zeros to what no pixel is ever stored to: the columns behind the image, and
  // lines outside of it.
  template <class Block>
  NASFAST_DEVICE void begin(const Block& block, const Weight& weight, bool flipped) const {
    share_bands<Format, Panel>(block, weight, first, channel_count, flipped, bands);
    block.each([&](int thread) {
      for (int i = thread; i < kSlots * Panel::kChannel / 8; i += kMatrixThreads) {
        reinterpret_cast<Vec4*>(pixels)[i] = Vec4{0, 0, 0, 0};
      }
    });
  }

  // Goes over the panels of a block. prepare_results() is called behind the products of the first one.
  template <class Block, class PrepareResults, class State>
  NASFAST_DEVICE void run(const Block& block, const Source& source, const PrepareResults& prepare_results,
                          State& state) const {
    const int begin = block.y * units.each, end = smaller(units.count(), begin + units.each);
    NASFAST_NO_UNROLL
    for (int index = begin; index < end; ++index) {
      const Unit unit = units.unit(index, Panel::kPair);
      clear(block, unit);
      // a loop of its own for either way to convert, because a branch on it for every pixel costs more than the conversion
      source.simple() ? fill<true>(block, source, unit) : fill<false>(block, source, unit);
      block.sync();
      block.warps([&](const Warp& warp) {
        NASFAST_NO_UNROLL
        for (int slot = warp.index; slot < kSlots; slot += kMatrixWarps) {
          if (channel_of_slot(slot) >= channel_count) continue;
          convolve_channel<Format, Panel>(warp, pixels + slot * Panel::kChannel,
                                          bands + slot * Panel::kKernel * Panel::kBand, Panel::kPair ? height() : 8,
                                          unit.rows);
        }
      });
      block.sync();
      if (index == begin) prepare_results();
      source.sums() ? write_results<true>(block, source, unit, state)
                    : write_results<false>(block, source, unit, state);
      block.sync();
    }
  }

 private:
  // Rows of an image.
  NASFAST_DEVICE int height() const { return Panel::kPair ? units.height / 2 : units.height; }

  // Zeros around the image where another panel has left something: in front of its columns results, and in lines outside
  // of it pixels.
  template <class Block>
  NASFAST_DEVICE void clear(const Block& block, const Unit& unit) const {
    block.each([&](int thread) {
      NASFAST_UNROLL
      for (int row = thread / kSlots; row < kPanelRows; row += kMatrixThreads / kSlots) {
        if (Panel::kPair && row >= unit.rows) continue;
        uint16_t* const to =
            pixels + thread % kSlots * Panel::kChannel + Panel::line(row) + Panel::further(row, height());
        if (Panel::kLead == 2) {
          *reinterpret_cast<uint32_t*>(to) = 0;
        } else {
          *reinterpret_cast<Vec2*>(to) = Vec2{0, 0};
        }
      }
    });
    if (units.segments.by == 1) return;
    if (unit.begin < Panel::kPad) clear_lines(block, -Panel::kPad, -unit.begin);
    const int left = units.height - unit.begin;
    if (left < unit.rows + Panel::kPad) clear_lines(block, left, unit.rows + Panel::kPad);
  }
  template <class Block>
  NASFAST_DEVICE void clear_lines(const Block& block, int from, int to) const {
    constexpr int kPieces = Panel::kPitch / 8;
    block.each([&](int thread) {
      for (int i = thread; i < (to - from) * kPieces * kSlots; i += kMatrixThreads) {
        uint16_t* const line = pixels + i % kSlots * Panel::kChannel + Panel::line(from);
        reinterpret_cast<Vec4*>(line)[i / kSlots] = Vec4{0, 0, 0, 0};
      }
    });
  }

  // What a lane moves: from the piece at `at` on, every kStep-th row. The pieces are `step` apart.
  struct Column {
    int64_t at, step;
    bool in_image;
  };
  NASFAST_DEVICE Column column(int lane, int tile, const Unit& unit, int row) const {
    const int column = 8 * tile + lane / 4, c = 8 * (lane % 4);
    const int64_t pixel = (int64_t{unit.picture} * units.height + row) * units.width + column;
    return {pixel * units.channels + first + c, int64_t{Panel::kStep} * units.width * units.channels,
            column < units.width && c < channel_count};
  }

  // Brings the pixels of a unit, and those around it, to shared memory.
  template <bool kSimple, class Block>
  NASFAST_DEVICE void fill(const Block& block, const Source& source, const Unit& unit) const {
    constexpr int kAhead = Source::kAhead, kStep = Panel::kStep;
    const int begin = larger(0, unit.begin - Panel::kPad);
    const int end = Panel::kPair ? unit.rows : smaller(units.height, unit.begin + unit.rows + Panel::kPad);
    block.warps([&](const Warp& warp) {
      const int tile = warp.index % Panel::kTiles, share = warp.index / Panel::kTiles;
      if (share >= kStep) return;
      Local<typename Source::Constants> constants(warp);
      Local<Column> columns(warp);
      warp.each([&](int lane) {
        source.prepare(lane, constants[lane]);
        columns[lane] = column(lane, tile, unit, begin + share);
      });
      uint16_t* to = pixels + Panel::line(begin + share - unit.begin) + Panel::kLead + 8 * tile;
      NASFAST_NO_UNROLL
      for (int row = begin + share; row < end; row += kAhead * kStep, to += kAhead * kStep * Panel::kPitch) {
        Local<typename Source::Raw[kAhead]> raw(warp);
        Local<Vec4[kAhead]> made(warp);
        warp.each([&](int lane) {
          Column& own = columns[lane];
          NASFAST_UNROLL
          for (int n = 0; n < kAhead; ++n) {
            if (own.in_image && row + n * kStep < end) source.load(own.at, raw[lane][n]);
            own.at += own.step;
          }
          NASFAST_UNROLL
          for (int n = 0; n < kAhead; ++n) {
            made[lane][n] = Vec4{0, 0, 0, 0};
            if (own.in_image) made[lane][n] = source.template convert<kSimple>(constants[lane], raw[lane][n]);
          }
        });
        NASFAST_UNROLL
        for (int n = 0; n < kAhead; ++n) {
          if (row + n * kStep >= end) break;
          NASFAST_UNROLL
          for (int j = 0; j < 4; ++j) {
            warp.transpose([&](int lane) -> auto& { return made[lane][n].v[j]; });
          }
          warp.each([&](int lane) {
            uint16_t* const here = to + lane / 4 * Panel::kChannel + 2 * (lane % 4) + n * kStep * Panel::kPitch +
                                   Panel::further(row + n * kStep, height());
            NASFAST_UNROLL
            for (int j = 0; j < 4; ++j) {
              *reinterpret_cast<uint32_t*>(here + 8 * j * Panel::kChannel) = made[lane][n].v[j];
            }
          });
        }
      }
    });
  }

  // Gives the results of a unit to source.take.
  template <bool kSums, class Block, class State>
  NASFAST_DEVICE void write_results(const Block& block, const Source& source, const Unit& unit, State& state) const {
    constexpr int kAhead = Source::kAhead, kStep = Panel::kStep;
    block.warps([&](const Warp& warp) {
      const int tile = warp.index % Panel::kTiles, share = warp.index / Panel::kTiles;
      if (share >= kStep) return;
      Local<typename Source::Beside> beside(warp);
      Local<Column> columns(warp);
      warp.each([&](int lane) {
        source.prepare_beside(lane, beside[lane]);
        columns[lane] = column(lane, tile, unit, unit.begin + share);
      });
      const uint16_t* from = pixels + Panel::line(share) + 8 * tile;
      NASFAST_NO_UNROLL
      for (int row = share; row < unit.rows; row += kAhead * kStep, from += kAhead * kStep * Panel::kPitch) {
        Local<Vec4[kAhead]> more(warp);
        warp.each([&](int lane) {
          const Column& own = columns[lane];
          NASFAST_UNROLL
          for (int n = 0; n < kAhead; ++n) {
            if (own.in_image && row + n * kStep < unit.rows) source.load_beside(own.at + n * own.step, more[lane][n]);
          }
        });
        NASFAST_UNROLL
        for (int n = 0; n < kAhead; ++n) {
          if (row + n * kStep >= unit.rows) break;
          Local<uint32_t[4]> result(warp);
          warp.load_transposed([&](int lane) -> auto& { return result[lane]; },
                               [&](int lane) {
                                 return from + lane * Panel::kChannel + n * kStep * Panel::kPitch +
                                        Panel::further(row + n * kStep, height());
                               });
          warp.each([&](int lane) {
            Column& own = columns[lane];
            if (own.in_image) {
              source.template take<kSums>(own.at, result[lane], more[lane][n], beside[lane],
                                          state[32 * warp.index + lane]);
            }
            own.at += own.step;
          });
        }
      }
    });
  }
};

// Writes the sums of the lanes to `to`, [warp][channel of the block].
template <class Block>
NASFAST_DEVICE void gather_by_warp(const Block& block, Local<ChannelSums>& sums, Vec2* to) {
  gather(block, sums, [&](int warp, int lane, int j, float first, float second) {
    to[warp * kSlots + 8 * lane + j] = {as_bits(first), as_bits(second)};
  });
}
// The sums of channel c of the block over its warps.
NASFAST_DEVICE GradientSums over_warps(const Vec2* sums, int c) {
  GradientSums total;
  NASFAST_UNROLL
  for (int w = 0; w < kMatrixWarps; ++w) {
    total.sum += as_float(sums[w * kSlots + c].v[0]);
    total.product += as_float(sums[w * kSlots + c].v[1]);
  }
  return total;
}

}  // namespace nasfast::gpu
