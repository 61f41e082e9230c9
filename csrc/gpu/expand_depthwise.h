// Expansion, BatchNorm, activation and depthwise convolution in one kernel. The hidden tensor is only in shared memory,
// two rows at a time: tensor cores make it from x, in 16 bits and through BatchNorm and activation, and the stencils of
// the threads read it.
#pragma once

#include <type_traits>

#include "expansion.h"

namespace nasfast::gpu {

// Blocks of a multiprocessor: with 4 a thread has 128 registers, with 3 it has 168, which the sums of a larger stencil
// need (84 for a 7 x 7).
NASFAST_ANYWHERE constexpr int expand_blocks(int kernel) { return kernel == 3 ? 4 : 3; }

// The columns of x that a part of the map needs, and how its rows of the hidden tensor lie in shared memory.
template <int kKernel, int kStride>
struct HiddenRows {
  static constexpr int kPad = kKernel / 2;
  int side;            // number of images
  int pitch;           // pixels of a row, with zeros outside of the image
  int first, columns;  // first column of x, and number of columns
  int lead;            // pixels of a row in front of these columns

  NASFAST_ANYWHERE HiddenRows(const Cut& cut, int width, int column) : side(cut.side) {
    pitch = cut.strips * kStrip * kStride + kKernel - kStride;
    const int begin = column * kStride - kPad, end = begin + pitch;
    first = begin > 0 ? begin : 0;
    columns = (end < width ? end : width) - first;
    lead = first - begin;
  }
  // pixels in a row of all images; in two rows, rounded up to whole tiles of 16
  NASFAST_ANYWHERE int row_pixels() const { return side * columns; }
  NASFAST_ANYWHERE int pixels() const { return (2 * row_pixels() + 15) / 16 * 16; }
};

// Where the arrays of a block lie in shared memory.
struct ExpandForwardMemory {
  int x, hidden, filters, folds, from, to, bytes;

  template <class Rows>
  ExpandForwardMemory(const ExpandTile& tile, const Rows& rows, int taps) {
    const int pixels = rows.pixels(), hidden_pixels = 2 * rows.side * rows.pitch;
    x = tile.bytes(kChunk);
    hidden = x + tile.bytes(pixels);
    filters = hidden + (hidden_pixels + 1) * kChunk * 2;  // one pixel more, for results that nothing reads
    folds = filters + taps * kChunk * 4;
    from = folds + kChunk * 8;
    to = from + pixels * 4;
    bytes = to + pixels * 4;
    const int scratch = kStrips * kChunk * static_cast<int>(sizeof(Moments));
    if (bytes < scratch) bytes = scratch;
  }
};

struct ExpandForwardArgs {
  ExpandForward stage;
  Cut cut;
  ExpandTile tile;
  ExpandForwardMemory memory;
};

template <class Format, int kKernel, int kStride>
struct ExpandForwardKernel {
  using Stencil = std::conditional_t<kStride == 1, Stencil1<kKernel>, Stencil2<kKernel>>;
  static constexpr int kThreads = kExpandThreads;
  static constexpr int kBlocks = expand_blocks(kKernel);
  static constexpr int kPad = kKernel / 2;
  // kBefore: rows of x that a part needs in front of its own. kLate: by how many rows of the map a result comes later
  // than the row of x in its middle.
  static constexpr int kBefore = kStride == 1 ? kPad : 2 * ((kPad + 1) / 2), kLate = kStride == 1 ? kPad : kKernel / 4;
  using Args = ExpandForwardArgs;
  using Rows = HiddenRows<kKernel, kStride>;

  struct Thread {
    Stencil stencil;
    Sums sums[2];
    float pivot[2];
    uint16_t* y;        // where the next row of the strip goes
    const uint16_t* x;  // the thread's piece of the first pixel of the next turn
    int from;           // where its strip of the hidden tensor begins, or -1 if this thread has nothing to do
    int columns;        // columns of the strip that are in the map
  };

  template <class Block>
  static NASFAST_DEVICE void run(const Block& block, const Args& args, unsigned char* shared) {
    const ForwardStage& stage = args.stage.depthwise;
    const Geometry& g = stage.geometry;
    const Cut& cut = args.cut;
    const int channel = block.x * kChunk;
    const Part part = cut.part(block.y);
    const Rows rows(cut, g.width, part.column);
    const ExpandForwardMemory& at = args.memory;
    uint16_t* const x = reinterpret_cast<uint16_t*>(shared + at.x);
    const int* const from = reinterpret_cast<const int*>(shared + at.from);
    Local<Thread> state(block);
    prepare(block, args, part, rows, channel, shared);
    block.wait_for_kernels();
    begin(block, args, part, rows, channel, state, shared);
    block.sync();

    // turn i has the rows 2 i and 2 i + 1 of x, counted from the first that the part needs
    const int first = part.row * kStride - kBefore, begin = first > 0 ? first : 0;
    const int last = (part.row + part.rows - 1) * kStride + kPad + 1, end = last < g.height ? last : g.height;
    const int turns = kStride == 1 ? (end - begin + 1) / 2 : part.row + part.rows + kLate - begin / 2;
    block.each([&](int thread) {
      state[thread].x =
          stage.x + (int64_t{part.image} * g.height + begin) * g.width * args.tile.channels + args.tile.piece(thread);
    });
    const int half = rows.row_pixels(), turn_step = 2 * g.width * args.tile.channels;
    const auto fetch = [&](int row) {
      if (row >= end) return;
      block.each([&](int thread) {
        fetch_pixels(block, args.tile, state[thread].x, from, 0, row + 1 < end ? 2 * half : half, x, thread);
        state[thread].x += turn_step;
      });
      block.commit();
    };
    fetch(begin);
    block.template wait<0>();
    block.sync();
    NASFAST_NO_UNROLL
    for (int turn = 0; turn < turns; ++turn) {
      const int row = begin + 2 * turn;
      if (row < end) expand(block, args, rows, shared);
      block.sync();
      fetch(row + 2);
      stencils(block, args, part, rows, row, end, state, shared);
      block.template wait<0>();
      block.sync();
    }
    if constexpr (kStride == 1) drain(block, args, part, end, state);
    finish(block, args, channel, part, state, shared);
  }

 private:
  // What depends on weights and places only.
  template <class Block>
  static NASFAST_DEVICE void prepare(const Block& block, const Args& args, const Part& part, const Rows& rows,
                                     int channel, unsigned char* shared) {
    const ForwardStage& stage = args.stage.depthwise;
    const Geometry& g = stage.geometry;
    const ExpandForwardMemory& at = args.memory;
    uint16_t* const hidden = reinterpret_cast<uint16_t*>(shared + at.hidden);
    int* const from = reinterpret_cast<int*>(shared + at.from);
    int* const to = reinterpret_cast<int*>(shared + at.to);
    block.each([&](int thread) {
      fill_expansion<Format>(args.tile, args.stage.expansion, channel, g.out_channels,
                             reinterpret_cast<uint16_t*>(shared), thread);
      fill_filters<Format, kKernel>(stage.weight, channel, g.out_channels, false,
                                    reinterpret_cast<float*>(shared + at.filters), thread);
      clear_pixels(args.tile, rows.pixels(), reinterpret_cast<uint16_t*>(shared + at.x), thread);
      for (int i = thread; i < 2 * rows.side * rows.pitch * kChunk / 8; i += kThreads) {
        reinterpret_cast<Vec4*>(hidden)[i] = Vec4{0, 0, 0, 0};
      }
      // a turn has the first row of all images and then the second
      each_pixel(2 * rows.side, rows.columns, thread, [&](int m, int line, int column) {
        const int row = line >= rows.side, image = line - row * rows.side;
        // what nothing reads is copied from elsewhere
        from[m] = image < part.images ? ((image * g.height + row) * g.width + rows.first + column) * args.tile.channels
                                      : rows.first * args.tile.channels;
        to[m] = (line * rows.pitch + rows.lead + column) * kChunk;
      });
      for (int m = 2 * rows.row_pixels() + thread; m < rows.pixels(); m += kThreads) {
        to[m] = 2 * rows.side * rows.pitch * kChunk;
      }
    });
  }

  template <class Block>
  static NASFAST_DEVICE void begin(const Block& block, const Args& args, const Part& part, const Rows& rows,
                                   int channel, Local<Thread>& state, unsigned char* shared) {
    const ForwardStage& stage = args.stage.depthwise;
    const Geometry& g = stage.geometry;
    Fold* const folds = reinterpret_cast<Fold*>(shared + args.memory.folds);
    block.each([&](int thread) {
      for (int i = thread; i < kChunk; i += kThreads) {
        folds[i] = channel + i < g.out_channels ? stage.fold[channel + i] : Fold{0, 0};
      }
      Thread& s = state[thread];
      const float zero[2] = {0, 0};
      s.stencil.reset(zero);
      s.sums[0] = s.sums[1] = Sums{};
      s.pivot[0] = s.pivot[1] = 0;
      const int slot = thread / kPairs, image = slot / args.cut.strips, column = slot % args.cut.strips * kStrip;
      const int left = part.columns - column, c = channel + 2 * (thread % kPairs);
      const bool there = image < part.images && left > 0 && c < g.out_channels;
      s.columns = there ? (left < kStrip ? left : kStrip) : 0;
      s.from = there ? (image * rows.pitch + column * kStride) * kChunk + c - channel : -1;
      s.y = stage.y +
            (((int64_t{part.image} + image) * g.out_height + part.row) * g.out_width + part.column + column) *
                g.out_channels +
            c;
    });
  }

  // Computes two rows of the hidden tensor, behind BatchNorm and activation, from x.
  template <class Block>
  static NASFAST_DEVICE void expand(const Block& block, const Args& args, const Rows& rows, unsigned char* shared) {
    const ExpandForwardMemory& at = args.memory;
    const uint16_t* const weights = reinterpret_cast<const uint16_t*>(shared);
    const uint16_t* const x = reinterpret_cast<const uint16_t*>(shared + at.x);
    uint16_t* const hidden = reinterpret_cast<uint16_t*>(shared + at.hidden);
    const float* const folds = reinterpret_cast<const float*>(shared + at.folds);
    const int* const to = reinterpret_cast<const int*>(shared + at.to);
    const uint32_t most = args.stage.depthwise.act == Act::kRelu6 ? Format::kSixes : Format::pack(INFINITY, INFINITY);
    const float zeros[4] = {0, 0, 0, 0};
    block.warps([&](const Warp& warp) {
      Local<float[4][4]> acc(warp);
      NASFAST_NO_UNROLL
      for (int m = 16 * warp.index; m < rows.pixels(); m += 16 * kExpandWarps) {
        expand_pixels<Format>(
            warp, args.tile, x + m * args.tile.pitch, weights, [&](int lane) -> auto& { return acc[lane]; },
            [&](int, int) { return zeros; });
        warp.each([&](int lane) {
          Vec4 a[2];
          NASFAST_UNROLL
          for (int i = 0; i < 4; ++i) {
            float fold[4];  // of two channels
            load_again(folds + 4 * (lane % 4 * 4 + i), fold);
            const float (&y)[4] = acc[lane][i];
            NASFAST_UNROLL
            for (int h = 0; h < 2; ++h) {
              a[h].v[i] = Format::at_most(
                  Format::pack_relu(fma(y[2 * h], fold[0], fold[1]), fma(y[2 * h + 1], fold[2], fold[3])), most);
            }
          }
          NASFAST_UNROLL
          for (int h = 0; h < 2; ++h) {
            *reinterpret_cast<Vec4*>(hidden + to[m + 8 * h + lane / 4] + 8 * (lane % 4)) = a[h];
          }
        });
      }
    });
  }

  static NASFAST_DEVICE void load(const uint16_t* from, float (&to)[Stencil::kIn][2]) {
    NASFAST_UNROLL
    for (int j = 0; j < Stencil::kIn; ++j) {
      const uint32_t pair = *reinterpret_cast<const uint32_t*>(from + j * kChunk);
      to[j][0] = Format::first(pair);
      to[j][1] = Format::second(pair);
    }
  }

  // Stores a complete row of the map, and adds it to the sums.
  static NASFAST_DEVICE void leave(const float (&out)[kStrip][2], bool first, int row_step, int channels, Thread& s) {
    if (first) s.pivot[0] = out[0][0], s.pivot[1] = out[0][1];
    const auto put = [&](int t) {
      s.sums[0].add(out[t][0] - s.pivot[0]);
      s.sums[1].add(out[t][1] - s.pivot[1]);
      *reinterpret_cast<uint32_t*>(s.y + t * channels) = Format::pack(out[t][0], out[t][1]);
    };
    if (s.columns == kStrip) {
      NASFAST_UNROLL
      for (int t = 0; t < kStrip; ++t) put(t);
    } else {
      NASFAST_UNROLL
      for (int t = 0; t < kStrip; ++t) {
        if (t < s.columns) put(t);
      }
    }
    s.y += row_step;
  }

  // Takes the rows `row` and `row` + 1 of the hidden tensor, if they are before `end`, into the stencils.
  template <class Block>
  static NASFAST_DEVICE void stencils(const Block& block, const Args& args, const Part& part, const Rows& rows, int row,
                                      int end, Local<Thread>& state, unsigned char* shared) {
    const Geometry& g = args.stage.depthwise.geometry;
    const ExpandForwardMemory& at = args.memory;
    const uint16_t* const hidden = reinterpret_cast<const uint16_t*>(shared + at.hidden);
    const float* const filters = reinterpret_cast<const float*>(shared + at.filters);
    const int row_step = g.out_width * g.out_channels, next = rows.side * rows.pitch * kChunk;
    block.each([&](int thread) {
      Thread& s = state[thread];
      if (s.from < 0) return;
      const Taps<kKernel, kKernel == 3> w(filters + thread % kPairs * 2 * kKernel * kKernel);
      const uint16_t* const from = hidden + s.from;
      const float zero[2] = {0, 0};
      float in[Stencil::kIn][2], out[kStrip][2];
      if constexpr (kStride == 1) {
        NASFAST_NO_UNROLL
        for (int r = 0; r < 2 && row + r < end; ++r) {
          load(from + r * next, in);
          s.stencil.row(in, w, zero, out);
          const int made = row + r - kLate - part.row;
          if (made >= 0) leave(out, made == 0, row_step, g.out_channels, s);
        }
      } else {
        s.stencil.advance(zero, out);
        if (row < end) {
          load(from, in);
          s.stencil.template row<0>(in, w, out);
        }
        if (row + 1 < end) {
          load(from + next, in);
          s.stencil.template row<1>(in, w, out);
        }
        const int made = row / 2 - kLate - part.row;
        if (made >= 0) leave(out, made == 0, row_step, g.out_channels, s);
      }
    });
  }

  // Makes the last rows of the map, whose lower neighbours are outside of the image.
  template <class Block>
  static NASFAST_DEVICE void drain(const Block& block, const Args& args, const Part& part, int end,
                                   Local<Thread>& state) {
    const Geometry& g = args.stage.depthwise.geometry;
    block.each([&](int thread) {
      Thread& s = state[thread];
      if (s.from < 0) return;
      NASFAST_NO_UNROLL
      for (int row = end; row < part.row + part.rows + kLate; ++row) {
        const float zero[2] = {0, 0};
        float out[kStrip][2];
        s.stencil.zero_row(zero, out);
        const int made = row - kLate - part.row;
        if (made >= 0) leave(out, made == 0, g.out_width * g.out_channels, g.out_channels, s);
      }
    });
  }

  // Adds up the strips and images of the block in their order, and then the blocks.
  template <class Block>
  static NASFAST_DEVICE void finish(const Block& block, const Args& args, int channel, const Part& part,
                                    Local<Thread>& state, unsigned char* shared) {
    const Norm& norm = args.stage.depthwise.norm;
    const Cut& cut = args.cut;
    Moments* const scratch = reinterpret_cast<Moments*>(shared);  // [strips][channels]
    block.each([&](int thread) {
      Thread& s = state[thread];
      const float count = static_cast<float>(s.columns) * part.rows;
      NASFAST_UNROLL
      for (int v = 0; v < 2; ++v) {
        scratch[thread / kPairs * kChunk + thread % kPairs * 2 + v] = s.sums[v].moments(s.pivot[v], count);
      }
    });
    block.sync();
    const int channels = args.stage.depthwise.geometry.out_channels;
    const int mine = channels - channel < kChunk ? channels - channel : kChunk;
    block.each([&](int thread) {
      for (int c = thread; c < mine; c += kThreads) {
        Moments total{0, 0, 0};
        for (int i = 0; i < kStrips; ++i) total.merge(scratch[i * kChunk + c]);
        norm.reduction.partial[int64_t{block.y} * channels + channel + c] = {as_bits(total.mean), as_bits(total.m2)};
      }
    });
    finish_norm<kThreads>(block, norm, block.y, block.x, channel, mine, [&](int i) { return cut.count(i); });
  }
};

// Calls f with the kernel of this size: f(std::integral_constant<int, k>, std::integral_constant<int, stride>).
template <class F>
void with_stencil(const Geometry& g, const F& f) {
  const auto with_stride = [&](auto kernel) {
    g.stride == 1 ? f(kernel, std::integral_constant<int, 1>{}) : f(kernel, std::integral_constant<int, 2>{});
  };
  if (g.kernel == 3) with_stride(std::integral_constant<int, 3>{});
  if (g.kernel == 5) with_stride(std::integral_constant<int, 5>{});
  if (g.kernel == 7) with_stride(std::integral_constant<int, 7>{});
}

template <class Machine>
Cut expand_cut(const Geometry& g, const Machine& machine) {
  return cut_of(g, machine, expand_blocks(g.kernel), g.stride == 1 ? g.kernel - 1 : g.kernel / 2);
}

// The layout of shared memory in the block that needs most of it. Rows: HiddenRows or DyRows.
template <class Memory, class Rows>
Memory largest_memory(const Geometry& g, const Cut& cut, const ExpandTile& tile) {
  Memory largest(tile, Rows(cut, g.width, 0), g.kernel * g.kernel);
  for (int i = 1; i < cut.tiles; ++i) {
    const Memory memory(tile, Rows(cut, g.width, i * cut.strips * kStrip), g.kernel * g.kernel);
    if (memory.bytes > largest.bytes) largest = memory;
  }
  return largest;
}

// The grid of the forward or backward kernel.
template <class Memory, template <int, int> class Rows, class Machine>
Grid expand_depthwise_grid(const Geometry& g, int channels, const Machine& machine) {
  const Cut cut = expand_cut(g, machine);
  Grid grid{cut.parts(), cut.chunks, 0};
  with_stencil(g, [&](auto kernel, auto stride) {
    grid.shared = largest_memory<Memory, Rows<kernel, stride>>(g, cut, ExpandTile(channels)).bytes;
  });
  return grid;
}

// Launches the forward or backward kernel.
template <template <class, int, int> class Kernel, class Memory, class Format, class Machine, class Stage>
void launch_expand_depthwise(const Machine& machine, const Grid& grid, const Stage& stage) {
  const Geometry& g = stage.depthwise.geometry;
  const Cut cut = expand_cut(g, machine);
  const ExpandTile tile(stage.channels);
  with_stencil(g, [&](auto kernel, auto stride) {
    using Chosen = Kernel<Format, kernel, stride>;
    const auto memory = largest_memory<Memory, typename Chosen::Rows>(g, cut, tile);
    machine.template launch<Chosen>(grid.groups, grid.rows, grid.shared, {stage, cut, tile, memory});
  });
}

template <class Machine>
Grid expand_depthwise_forward_grid(const Geometry& g, int channels, const Machine& machine) {
  return expand_depthwise_grid<ExpandForwardMemory, HiddenRows>(g, channels, machine);
}

template <class Format, class Machine>
void expand_depthwise_forward(const Machine& machine, const Grid& grid, const ExpandForward& stage) {
  launch_expand_depthwise<ExpandForwardKernel, ExpandForwardMemory, Format>(machine, grid, stage);
}

}  // namespace nasfast::gpu
