// The gradient through a depthwise convolution, the activation and the BatchNorm of the expansion in front of it, in
// one kernel. Each turn makes two rows of dz, the gradient in front of that BatchNorm:
//
//   fill      dy of the depthwise convolution from its dz and its output, once for every element
//   stencils  the transposed convolution
//   expand    y1 again from x by tensor cores, for the activation and for the sums
//
// dz is stored as it is, in 16 bits, and the input gradient multiplies by weights that have the factor of BatchNorm.
// So no element is rounded twice, and a gradient of fp16 keeps the range that the caller has given it.
#pragma once

#include "expand_depthwise.h"

namespace nasfast::gpu {

// Rows of dy and of x that belong to a part of the smaller map.
template <int kKernel, int kStride>
struct DyRows {
  // rows, and columns, of dy that reach one row of the result, or two with stride 2, and how many of them are before
  static constexpr int kReach = kStride == 1 ? kKernel : Gather2<kKernel>::kRows;
  static constexpr int kBefore = kStride == 1 ? kKernel / 2 : Gather2<kKernel>::kBefore;
  static constexpr int kTurnRows = 2 / kStride;  // of dy
  int side;                                      // images
  int pitch;                                     // pixels of a row of dy, with zeros outside of the image
  int first, columns, lead;                      // of dy: first column, columns, pixels of a row in front of them
  int x_first, x_columns;

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
  // of a turn; those of x in whole tiles of 16
  NASFAST_ANYWHERE int pixels() const { return kTurnRows * row_pixels(); }
  NASFAST_ANYWHERE int x_pixels() const { return (2 * x_row_pixels() + 15) / 16 * 16; }
  NASFAST_ANYWHERE int places() const { return kTurnRows * side * pitch; }
};

// Where the arrays of a block lie in shared memory.
struct ExpandBackwardMemory {
  int x, dy, y, dz, filters, back, interval, mask, sums, from, to, x_from, bytes;

  template <class Rows>
  ExpandBackwardMemory(const ExpandTile& tile, const Rows& rows, int taps) {
    x = tile.bytes(kChunk);
    dy = x + tile.bytes(rows.x_pixels());
    y = dy + rows.places() * kChunk * 2;
    dz = y + rows.pixels() * kChunk * 2;
    filters = dz + rows.x_pixels() * kChunk * 2;
    back = filters + taps * kChunk * 4;
    interval = back + kChunk * 16;
    mask = interval + kChunk * 16;
    sums = mask + kChunk * 16;
    from = sums + kExpandThreads * 8 * 8;
    to = from + rows.pixels() * 4;
    x_from = to + rows.pixels() * 4;
    bytes = x_from + rows.x_pixels() * 4;
  }
};

struct ExpandBackwardArgs {
  ExpandBackward stage;
  Cut cut;
  ExpandTile tile;
  ExpandBackwardMemory memory;
};

template <class Format, int kKernel, int kStride>
struct ExpandBackwardKernel {
  using Stencil = std::conditional_t<kStride == 1, Stencil1<kKernel>, Gather2<kKernel>>;
  using Rows = DyRows<kKernel, kStride>;
  static constexpr int kThreads = kExpandThreads;
  static constexpr int kBlocks = kKernel == 7 && kStride == 1 ? 2 : 3;         // 255 or 168 registers of a thread
  static constexpr int kWarm = kStride == 1 ? kKernel / 2 : Rows::kReach - 1;  // turns before the first result
  static constexpr int kPieces = kChunk / 8;                                   // of 16 bytes of a pixel
  using Args = ExpandBackwardArgs;

  struct Thread {
    Stencil stencil;
    int from, to;  // places of its strip in the rows of dy and of the result; -1 if this thread has nothing to do
    int columns;   // of the result that it makes
  };

  template <class Block>
  static NASFAST_DEVICE void run(const Block& block, const Args& args, unsigned char* shared) {
    const BackwardStage& stage = args.stage.depthwise;
    const Geometry& g = stage.geometry;
    const Cut& cut = args.cut;
    const int channel = block.x * kChunk;
    const Part part = cut.part(block.y);
    const Rows rows(cut, g.width, part.column);
    const ExpandBackwardMemory& at = args.memory;
    uint16_t* const x = reinterpret_cast<uint16_t*>(shared + at.x);
    const int* const x_from = reinterpret_cast<const int*>(shared + at.x_from);
    Local<Thread> state(block);
    prepare(block, args, part, rows, channel, state, shared);
    block.sync();

    // Turn i takes kTurnRows rows of dy from `begin` on, and makes rows of x. The last turns have no row of dy.
    const int first = part.row - Rows::kBefore, past = part.row + part.rows - 1 + Rows::kReach - Rows::kBefore;
    int begin = first, end = past;
    if constexpr (kStride == 1) {
      begin = first > 0 ? first : 0;
      end = past < g.out_height ? past : g.out_height;
      begin -= (end - begin) % 2;  // both rows of every other turn are in the image, or neither
    }
    fetch(block, args, part, rows, channel, begin, shared);
    const auto turn = [&](int row, auto inside) {
      // rows of x of this turn: all with stride 2
      const int x_row = kStride == 1 ? row - Rows::kBefore : 2 * (row - Rows::kReach + 1 + Rows::kBefore);
      const int x_end = kStride == 1 ? part.row + part.rows : g.height;
      const int half = rows.x_row_pixels(), x_begin = x_row >= part.row * kStride ? 0 : half;
      const int x_count = x_row + 1 < part.row * kStride ? 0 : x_row + 1 < x_end ? 2 * half : x_row < x_end ? half : 0;
      const int64_t x_at = (int64_t{part.image} * g.height + x_row) * g.width;
      block.template wait<0>();
      if (inside.value) fill(block, args, rows, row, shared);
      block.sync();
      block.each([&](int thread) {
        fetch_pixels(block, args.tile, args.stage.x + x_at * args.tile.channels, x_from, x_begin, x_count, x, thread);
      });
      block.commit();
      stencils(block, args, rows, row, x_count > 0, inside, state, shared);
      block.template wait<0>();
      block.sync();
      if (row + Rows::kTurnRows < end) fetch(block, args, part, rows, channel, row + Rows::kTurnRows, shared);
      if (x_count > 0) expand(block, args, channel, x_at, x_begin, x_count, shared);
    };
    int row = begin;
    NASFAST_NO_UNROLL
    for (; row < end; row += Rows::kTurnRows) turn(row, std::true_type{});
    if constexpr (kStride == 1) {
      NASFAST_NO_UNROLL
      for (; row < past; row += Rows::kTurnRows) turn(row, std::false_type{});
    }
    block.sync();
    finish(block, args, channel, shared);
  }

 private:
  template <class Block>
  static NASFAST_DEVICE void prepare(const Block& block, const Args& args, const Part& part, const Rows& rows,
                                     int channel, Local<Thread>& state, unsigned char* shared) {
    const BackwardStage& stage = args.stage.depthwise;
    const Geometry& g = stage.geometry;
    const ExpandBackwardMemory& at = args.memory;
    Back* const back = reinterpret_cast<Back*>(shared + at.back);
    Interval* const interval = reinterpret_cast<Interval*>(shared + at.interval);
    Interval* const mask = reinterpret_cast<Interval*>(shared + at.mask);
    int* const from = reinterpret_cast<int*>(shared + at.from);
    int* const to = reinterpret_cast<int*>(shared + at.to);
    int* const x_from = reinterpret_cast<int*>(shared + at.x_from);
    block.each([&](int thread) {
      fill_expansion<Format>(args.tile, args.stage.expansion, channel, g.out_channels,
                             reinterpret_cast<uint16_t*>(shared), thread);
      fill_filters<Format, kKernel>(stage.weight, channel, g.out_channels, kStride == 1,
                                    reinterpret_cast<float*>(shared + at.filters), thread);
      clear_pixels(args.tile, rows.x_pixels(), reinterpret_cast<uint16_t*>(shared + at.x), thread);
      for (int i = thread; i < kChunk; i += kThreads) {
        const bool there = channel + i < g.out_channels;
        back[i] = there ? stage.back[channel + i] : Back{0, 0, 0, 0};
        interval[i] = there ? stage.interval[channel + i] : Interval{INFINITY, -INFINITY, 0, 0};
        if (stage.mask != nullptr) mask[i] = there ? stage.mask[channel + i] : Interval{0, 0, 0, 0};
      }
      for (int i = thread; i < rows.places() * kPieces; i += kThreads) {
        reinterpret_cast<Vec4*>(shared + at.dy)[i] = Vec4{0, 0, 0, 0};
      }
      // the rows of a turn: first row, then the images of it
      for (int m = thread; m < rows.pixels(); m += kThreads) {
        const int line = m / rows.columns, row = line / rows.side, image = line % rows.side;
        const int column = m - line * rows.columns;
        from[m] = image < part.images ? (image * g.out_height + row) * g.out_width + rows.first + column : -1;
        to[m] = (line * rows.pitch + rows.lead + column) * kChunk;
      }
      for (int m = thread; m < rows.x_pixels(); m += kThreads) {
        const int line = m / rows.x_columns, row = line / rows.side, image = line % rows.side;
        const bool there = m < 2 * rows.x_row_pixels() && image < part.images;
        x_from[m] = there ? (image * g.height + row) * g.width + rows.x_first + m - line * rows.x_columns : -1;
      }
      Thread& s = state[thread];
      if constexpr (kStride == 1) {
        const float zero[2] = {0, 0};
        s.stencil.reset(zero);
      }
      NASFAST_UNROLL
      for (int i = 0; i < 4; ++i) reinterpret_cast<Vec4*>(shared + at.sums)[i * kThreads + thread] = Vec4{0, 0, 0, 0};
      const int slot = thread / kPairs, image = slot / args.cut.strips, strip = slot % args.cut.strips;
      const int wide = kStrip * kStride, left = rows.x_columns - strip * wide, pair = 2 * (thread % kPairs);
      const bool there = image < part.images && left > 0;
      s.columns = there ? (left < wide ? left : wide) : 0;
      s.from = there ? (image * rows.pitch + strip * kStrip) * kChunk + pair : -1;
      s.to = (image * rows.x_columns + strip * wide) * kChunk + pair;
    });
  }

  // Whether the row of dy in which pixel m of a turn is lies in the image.
  static NASFAST_DEVICE bool inside(const Geometry& g, const Rows& rows, int row, int m) {
    const int at = row + (kStride == 1 && m >= rows.row_pixels());
    return at >= 0 && at < g.out_height;
  }

  // Begins to copy dz and the output of the depthwise convolution: the rows from `row` on.
  template <class Block>
  static NASFAST_DEVICE void fetch(const Block& block, const Args& args, const Part& part, const Rows& rows,
                                   int channel, int row, unsigned char* shared) {
    const BackwardStage& stage = args.stage.depthwise;
    const Geometry& g = stage.geometry;
    const ExpandBackwardMemory& at = args.memory;
    uint16_t* const dy = reinterpret_cast<uint16_t*>(shared + at.dy);
    uint16_t* const y = reinterpret_cast<uint16_t*>(shared + at.y);
    const int* const from = reinterpret_cast<const int*>(shared + at.from);
    const int* const to = reinterpret_cast<const int*>(shared + at.to);
    const int64_t first = int64_t{part.image} * g.out_height * g.out_width + int64_t{row} * g.out_width;
    block.each([&](int thread) {
      const int piece = 8 * (thread % kPieces);
      NASFAST_NO_UNROLL
      for (int m = thread / kPieces; m < rows.pixels(); m += kThreads / kPieces) {
        if (!inside(g, rows, row, m)) continue;
        const bool there = from[m] >= 0 && channel + piece < g.out_channels;
        const int64_t place = there ? (first + from[m]) * g.out_channels + channel + piece : 0;
        block.copy(dy + to[m] + piece, stage.grad + place, there);
        block.copy(y + m * kChunk + piece, stage.y + place, there);
      }
    });
    block.commit();
  }

  // dy = a dz + b y + c in place of dz, by the threads that have copied it
  template <class Block>
  static NASFAST_DEVICE void fill(const Block& block, const Args& args, const Rows& rows, int row,
                                  unsigned char* shared) {
    const BackwardStage& stage = args.stage.depthwise;
    const ExpandBackwardMemory& at = args.memory;
    uint16_t* const dy = reinterpret_cast<uint16_t*>(shared + at.dy);
    const uint16_t* const y = reinterpret_cast<const uint16_t*>(shared + at.y);
    const int* const to = reinterpret_cast<const int*>(shared + at.to);
    block.each([&](int thread) {
      const int piece = 8 * (thread % kPieces);
      const Interval* const mask = reinterpret_cast<const Interval*>(shared + at.mask) + piece;
      Back back[8];
      NASFAST_UNROLL
      for (int i = 0; i < 8; ++i) back[i] = reinterpret_cast<const Back*>(shared + at.back)[piece + i];
      NASFAST_NO_UNROLL
      for (int m = thread / kPieces; m < rows.pixels(); m += kThreads / kPieces) {
        if (!inside(stage.geometry, rows, row, m)) continue;
        Vec4* const place = reinterpret_cast<Vec4*>(dy + to[m] + piece);
        Vec4 v = *place;
        const Vec4 out = *reinterpret_cast<const Vec4*>(y + m * kChunk + piece);
        NASFAST_UNROLL
        for (int i = 0; i < 4; ++i) {
          const float value[2] = {Format::first(out.v[i]), Format::second(out.v[i])};
          float dz[2] = {Format::first(v.v[i]), Format::second(v.v[i])};
          NASFAST_UNROLL
          for (int e = 0; e < 2; ++e) {
            if (stage.mask != nullptr) {
              const Interval open = mask[2 * i + e];
              dz[e] = open.low < value[e] && value[e] < open.high ? dz[e] : 0.f;
            }
            const Back& b = back[2 * i + e];
            dz[e] = fma(b.a, dz[e], fma(b.b, value[e], b.c));
          }
          v.v[i] = Format::pack(dz[0], dz[1]);
        }
        *place = v;
      }
    });
  }

  template <int kCount>
  static NASFAST_DEVICE void load(const uint16_t* from, float (&to)[kCount][2]) {
    NASFAST_UNROLL
    for (int j = 0; j < kCount; ++j) {
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(from + j * kChunk);
      to[j][0] = Format::first(pair);
      to[j][1] = Format::second(pair);
    }
  }

  // `row` of dy is the first of this turn. `inside`: its rows are in the image, except that with stride 1 the first
  // turn may begin before, and with stride 2 any row may be outside. `made`: whether a result is complete.
  template <class Block, class Inside>
  static NASFAST_DEVICE void stencils(const Block& block, const Args& args, const Rows& rows, int row, bool made,
                                      Inside, Local<Thread>& state, unsigned char* shared) {
    const ExpandBackwardMemory& at = args.memory;
    const uint16_t* const dy = reinterpret_cast<const uint16_t*>(shared + at.dy);
    uint16_t* const dz = reinterpret_cast<uint16_t*>(shared + at.dz);
    const float* const filters = reinterpret_cast<const float*>(shared + at.filters);
    const int next = rows.side * rows.pitch * kChunk, x_next = rows.x_row_pixels() * kChunk;
    block.each([&](int thread) {
      Thread& s = state[thread];
      if (s.from < 0) return;
      const Taps<kKernel, kKernel == 3> w(filters + thread % kPairs * 2 * kKernel * kKernel);
      const uint16_t* const from = dy + s.from;
      uint16_t* const to = dz + s.to;
      if constexpr (kStride == 1) {
        const float zero[2] = {0, 0};
        NASFAST_NO_UNROLL
        for (int r = 0; r < 2; ++r) {
          float out[kStrip][2];
          if constexpr (Inside::value) {
            if (row + r < 0 || !has_row(args, row + r)) continue;
            float in[Stencil::kIn][2];
            load(from + r * next, in);
            s.stencil.row(in, w, zero, out);
          } else {
            s.stencil.zero_row(zero, out);
          }
          if (made) leave(out, to + r * x_next, s.columns);
        }
      } else {
        s.stencil.advance();
        auto& last = s.stencil.dy[Stencil::kRows - 1];
        if (row >= 0 && has_row(args, row)) {
          load(from, last);
        } else {
          NASFAST_UNROLL
          for (int j = 0; j < Stencil::kIn; ++j) last[j][0] = last[j][1] = 0;
        }
        if (!made) return;
        float out[2 * kStrip][2];
        s.stencil.template row<0>(w, out);
        leave(out, to, s.columns);
        s.stencil.template row<1>(w, out);
        leave(out, to + x_next, s.columns);
      }
    });
  }

  static NASFAST_DEVICE bool has_row(const Args& args, int row) {
    return row < args.stage.depthwise.geometry.out_height;
  }

  // A row of a strip, of which the first `columns` are in the image.
  template <int kCount>
  static NASFAST_DEVICE void leave(const float (&out)[kCount][2], uint16_t* to, int columns) {
    const auto put = [&](int t) { *reinterpret_cast<uint32_t*>(to + t * kChunk) = Format::pack(out[t][0], out[t][1]); };
    if (columns == kCount) {
      NASFAST_UNROLL
      for (int t = 0; t < kCount; ++t) put(t);
    } else {
      NASFAST_UNROLL
      for (int t = 0; t < kCount; ++t) {
        if (t < columns) put(t);
      }
    }
  }

  // The gradient behind the activation -> dz, for the pixels from `begin` to `end` of a turn; `x_at` is the place of
  // its first row in x.
  template <class Block>
  static NASFAST_DEVICE void expand(const Block& block, const Args& args, int channel, int64_t x_at, int begin, int end,
                                    unsigned char* shared) {
    const BackwardStage& stage = args.stage.depthwise;
    const int channels = stage.geometry.out_channels;
    const ExpandBackwardMemory& at = args.memory;
    const uint16_t* const weights = reinterpret_cast<const uint16_t*>(shared);
    const uint16_t* const x = reinterpret_cast<const uint16_t*>(shared + at.x);
    const uint16_t* const grad = reinterpret_cast<const uint16_t*>(shared + at.dz);
    const int* const x_from = reinterpret_cast<const int*>(shared + at.x_from);
    Vec4* const kept = reinterpret_cast<Vec4*>(shared + at.sums);
    block.warps([&](const Warp& warp) {
      Local<float[4][4]> acc(warp);
      // between the turns the sums are in shared memory: the stencils need the registers
      Local<GradientSums[8]> sums(warp);
      warp.each([&](int lane) {
        NASFAST_UNROLL
        for (int i = 0; i < 4; ++i) {
          const Vec4 v = kept[i * kThreads + 32 * warp.index + lane];
          sums[lane][2 * i] = {as_float(v.v[0]), as_float(v.v[1])};
          sums[lane][2 * i + 1] = {as_float(v.v[2]), as_float(v.v[3])};
        }
      });
      NASFAST_NO_UNROLL
      for (int m = begin / 16 * 16 + 16 * warp.index; m < end; m += 16 * kExpandWarps) {
        expand_pixels<Format>(warp, args.tile, x + m * args.tile.pitch, weights,
                              [&](int lane) -> auto& { return acc[lane]; });
        warp.each([&](int lane) {
          const int piece = 8 * (lane % 4);
          const Interval* interval = reinterpret_cast<const Interval*>(shared + at.interval) + piece;
          Vec4 v[2];
          int pixel[2];  // of x
          NASFAST_UNROLL
          for (int h = 0; h < 2; ++h) {
            const int here = m + 8 * h + lane / 4;
            pixel[h] = here >= begin && here < end ? x_from[here] : -1;
            v[h] = Vec4{0, 0, 0, 0};  // a gradient of 0 adds nothing
            if (pixel[h] >= 0) v[h] = *reinterpret_cast<const Vec4*>(grad + here * kChunk + piece);
          }
          NASFAST_UNROLL
          for (int i = 0; i < 4; ++i) {
            const Interval open[2] = {interval[2 * i], interval[2 * i + 1]};
            NASFAST_UNROLL
            for (int h = 0; h < 2; ++h) {
              float dz[2] = {Format::first(v[h].v[i]), Format::second(v[h].v[i])};
              NASFAST_UNROLL
              for (int e = 0; e < 2; ++e) {
                const float y = acc[lane][i][2 * h + e];
                dz[e] = open[e].low < y && y < open[e].high ? dz[e] : 0.f;
                sums[lane][2 * i + e].add(dz[e], y - open[e].mean);
              }
              v[h].v[i] = Format::pack(dz[0], dz[1]);
            }
          }
          NASFAST_UNROLL
          for (int h = 0; h < 2; ++h) {
            if (pixel[h] < 0 || channel + piece >= channels) continue;
            *reinterpret_cast<Vec4*>(stage.dx + (x_at + pixel[h]) * channels + channel + piece) = v[h];
          }
        });
      }
      warp.each([&](int lane) {
        NASFAST_UNROLL
        for (int i = 0; i < 4; ++i) {
          const GradientSums &a = sums[lane][2 * i], &b = sums[lane][2 * i + 1];
          kept[i * kThreads + 32 * warp.index + lane] = {as_bits(a.sum), as_bits(a.product), as_bits(b.sum),
                                                         as_bits(b.product)};
        }
      });
    });
  }

  // the threads that have a channel one after the other, and then all blocks
  template <class Block>
  static NASFAST_DEVICE void finish(const Block& block, const Args& args, int channel, const unsigned char* shared) {
    const NormGradient& gradient = args.stage.depthwise.gradient;
    const int channels = args.stage.depthwise.geometry.out_channels;
    const int mine = channels - channel < kChunk ? channels - channel : kChunk;
    const ExpandBackwardMemory& at = args.memory;
    const Vec2* const kept = reinterpret_cast<const Vec2*>(shared + at.sums);
    block.each([&](int thread) {
      for (int c = thread; c < mine; c += kThreads) {
        GradientSums total;
        for (int i = c / 8; i < kThreads; i += 4) {
          const Vec2 v = kept[(c % 8 / 2 * kThreads + i) * 2 + c % 2];
          total.sum += as_float(v.v[0]);
          total.product += as_float(v.v[1]);
        }
        gradient.reduction.partial[int64_t{block.y} * channels + channel + c] = {as_bits(total.sum),
                                                                                 as_bits(total.product)};
      }
    });
    finish_gradient<kThreads>(block, gradient, block.y, block.x, channel, mine);
  }
};

template <class Machine>
Grid expand_depthwise_backward_grid(const Geometry& g, int channels, const Machine& machine) {
  return expand_depthwise_grid<ExpandBackwardMemory, DyRows>(g, channels, machine);
}

template <class Format, class Machine>
void expand_depthwise_backward(const Machine& machine, const Grid& grid, const ExpandBackward& stage) {
  launch_expand_depthwise<ExpandBackwardKernel, ExpandBackwardMemory, Format>(machine, grid, stage);
}

}  // namespace nasfast::gpu
