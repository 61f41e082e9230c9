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

#include "expand_depthwise_backward_memory.h"

namespace nasfast::gpu {

template <class Format, int kKernel, int kStride>
struct ExpandBackwardKernel {
  using Stencil = std::conditional_t<kStride == 1, Stencil1<kKernel>, Gather2<kKernel>>;
  using Rows = DyRows<kKernel, kStride>;
  static constexpr int kThreads = kExpandThreads;
  static constexpr int kBlocks = kKernel == 7 && kStride == 1 ? 2 : 3;  // 255 or 168 registers of a thread
  static constexpr int kPieces = kChunk / 8;                            // of 16 bytes of a pixel
  // kLoads: pieces of dy that a thread loads for a turn. kEarly: how many of them it loads a phase earlier; all would need
  // too many registers.
  static constexpr int kLoads = Rows::kLoaded * kPieces / kThreads, kEarly = kKernel == 3 ? kLoads : kLoads / 2;
  using Args = ExpandBackwardArgs;

  struct Thread {
    Stencil stencil;
    GradientSums sums[8];                // of its channels in expand()
    Vec4 grad[kLoads], y[kLoads];        // of the next turn
    const uint16_t *next_grad, *next_y;  // the thread's piece of the first pixel of that turn
    const uint16_t* x;                   // the same of x
    uint16_t* dx;                        // the same of dx, for the thread's channels in expand()
    int from, to;  // places of its strip in the rows of dy and of the result; -1 if this thread has nothing to do
    int columns;   // columns of the result that it makes
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
    block.wait_for_kernels();
    load_channels(block, args, channel, shared);

    // Turn i takes kTurnRows rows of dy from `begin` on, and makes rows of x. The last turns have no row of dy.
    const int first = part.row - Rows::kBefore, past = part.row + part.rows - 1 + Rows::kReach - Rows::kBefore;
    int begin = first, end = past;
    if constexpr (kStride == 1) {
      begin = first > 0 ? first : 0;
      end = past < g.out_height ? past : g.out_height;
      begin -= (end - begin) % 2;  // both rows of every other turn are in the image, or neither
    }
    // rows of x of a turn: all of them are made with stride 2
    const auto row_of_x = [](int row) {
      return kStride == 1 ? row - Rows::kBefore : 2 * (row - Rows::kReach + 1 + Rows::kBefore);
    };
    block.each([&](int thread) { begin_turns(args, part, channel, begin, row_of_x(begin), thread, state[thread]); });
    block.sync();
    load<0, kEarly>(block, args, rows, begin, state, shared);
    const auto turn = [&](int row, auto inside) {
      const int x_row = row_of_x(row), half = rows.x_row_pixels(), x_begin = x_row >= part.row * kStride ? 0 : half;
      const int x_end = kStride == 1 ? part.row + part.rows : g.height;
      const int x_count = x_row + 1 < part.row * kStride ? 0 : x_row + 1 < x_end ? 2 * half : x_row < x_end ? half : 0;
      if (inside.value) {
        if constexpr (kEarly < kLoads) load<kEarly, kLoads>(block, args, rows, row, state, shared);
        stage.mask == nullptr ? fill<false>(block, args, state, shared) : fill<true>(block, args, state, shared);
      }
      block.sync();
      block.each([&](int thread) {
        fetch_pixels(block, args.tile, state[thread].x, x_from, x_begin, x_count, x, thread);
        state[thread].x += 2 * g.width * args.tile.channels;
      });
      block.commit();
      stencils(block, args, rows, row, x_count > 0, inside, state, shared);
      block.template wait<0>();
      block.sync();
      if (row + Rows::kTurnRows < end) load<0, kEarly>(block, args, rows, row + Rows::kTurnRows, state, shared);
      if (x_count > 0) expand(block, args, channel, x_begin, x_count, state, shared);
      block.each([&](int thread) { state[thread].dx += 2 * g.width * g.out_channels; });
    };
    int row = begin;
    NASFAST_NO_UNROLL
    for (; row < end; row += Rows::kTurnRows) turn(row, std::true_type{});
    if constexpr (kStride == 1) {
      NASFAST_NO_UNROLL
      for (; row < past; row += Rows::kTurnRows) turn(row, std::false_type{});
    }
    block.sync();
    finish(block, args, channel, state, shared);
  }

 private:
  // What depends on weights and places only.
  template <class Block>
  static NASFAST_DEVICE void prepare(const Block& block, const Args& args, const Part& part, const Rows& rows,
                                     int channel, Local<Thread>& state, unsigned char* shared) {
    const BackwardStage& stage = args.stage.depthwise;
    const Geometry& g = stage.geometry;
    const ExpandBackwardMemory& at = args.memory;
    int* const from = reinterpret_cast<int*>(shared + at.from);
    int* const to = reinterpret_cast<int*>(shared + at.to);
    int* const x_from = reinterpret_cast<int*>(shared + at.x_from);
    int* const x_to = reinterpret_cast<int*>(shared + at.x_to);
    block.each([&](int thread) {
      fill_expansion<Format>(args.tile, args.stage.expansion, channel, g.out_channels,
                             reinterpret_cast<uint16_t*>(shared + at.weights), thread);
      fill_filters<Format, kKernel>(stage.weight, channel, g.out_channels, kStride == 1,
                                    reinterpret_cast<float*>(shared + at.filters), thread);
      clear_pixels(args.tile, rows.x_pixels(), reinterpret_cast<uint16_t*>(shared + at.x), thread);
      for (int i = thread; i < rows.places() * kPieces; i += kThreads) {
        reinterpret_cast<Vec4*>(shared + at.dy)[i] = Vec4{0, 0, 0, 0};
      }
      // a turn has the first row of all images and then the second
      each_pixel(Rows::kTurnRows * rows.side, rows.columns, thread, [&](int m, int line, int column) {
        const int row = line >= rows.side, image = line - row * rows.side;
        const int pixel = (image * g.out_height + row) * g.out_width + rows.first + column;
        from[m] = (image < part.images ? pixel : rows.first) * g.out_channels;
        to[m] = (line * rows.pitch + rows.lead + column) * kChunk;
      });
      for (int m = rows.pixels() + thread; m < Rows::kLoaded; m += kThreads) {
        from[m] = ((Rows::kTurnRows - 1) * g.out_width + rows.first) * g.out_channels;  // always in the image
        to[m] = rows.places() * kChunk;
      }
      each_pixel(2 * rows.side, rows.x_columns, thread, [&](int m, int line, int column) {
        const int row = line >= rows.side, image = line - row * rows.side;
        const int pixel = (image * g.height + row) * g.width + rows.x_first + column;
        // what nothing reads is copied from elsewhere
        x_from[m] = (image < part.images ? pixel : rows.x_first) * args.tile.channels;
        x_to[m] = image < part.images ? pixel * g.out_channels : -1;
      });
      for (int m = 2 * rows.x_row_pixels() + thread; m < rows.x_pixels(); m += kThreads) x_to[m] = -1;
      Thread& s = state[thread];
      if constexpr (kStride == 1) {
        const float zero[2] = {0, 0};
        s.stencil.reset(zero);
      }
      NASFAST_UNROLL
      for (int i = 0; i < 8; ++i) s.sums[i] = GradientSums{};
      const int slot = thread / kPairs, image = slot / args.cut.strips, strip = slot % args.cut.strips;
      const int wide = kStrip * kStride, left = rows.x_columns - strip * wide, pair = 2 * (thread % kPairs);
      const bool there = image < part.images && left > 0;
      s.columns = there ? (left < wide ? left : wide) : 0;
      s.from = there ? (image * rows.pitch + strip * kStrip) * kChunk + pair : -1;
      s.to = (image * rows.x_columns + strip * wide) * kChunk + pair;
    });
  }

  // What the BatchNorms around the depthwise convolution have for each channel.
  template <class Block>
  static NASFAST_DEVICE void load_channels(const Block& block, const Args& args, int channel, unsigned char* shared) {
    const BackwardStage& stage = args.stage.depthwise;
    const int channels = stage.geometry.out_channels;
    Back* const back = reinterpret_cast<Back*>(shared + args.memory.back);
    Open& open = *reinterpret_cast<Open*>(shared + args.memory.open);
    Interval* const mask = reinterpret_cast<Interval*>(shared + args.memory.mask);
    block.each([&](int thread) {
      for (int i = thread; i < kChunk; i += kThreads) {
        const int c = channel + i;
        const bool there = c < channels;
        back[i] = there ? stage.back[c] : Back{0, 0, 0, 0};
        if (there) {
          open.set(i, stage.interval[c], stage.gradient.statistics[channels + c], stage.gradient.share);
        } else {
          open.set(i, 0, 0);
        }
        if (stage.mask != nullptr) mask[i] = there ? stage.mask[c] : Interval{0, 0, 0, 0};
      }
    });
  }

  // Sets where the first turn reads and writes: from row `row` of dy and row `x_row` of x on.
  static NASFAST_DEVICE void begin_turns(const Args& args, const Part& part, int channel, int row, int x_row,
                                         int thread, Thread& s) {
    const BackwardStage& stage = args.stage.depthwise;
    const Geometry& g = stage.geometry;
    const int mine = channel + 8 * (thread % kPieces), last = g.out_channels - 8;
    const int first = kStride == 1 || row > 0 ? row : 0;
    const int64_t place =
        (int64_t{part.image} * g.out_height + first) * g.out_width * g.out_channels + (mine < last ? mine : last);
    const int64_t x_pixel = (int64_t{part.image} * g.height + x_row) * g.width;
    s.next_grad = stage.grad + place;
    s.next_y = stage.y + place;
    s.x = args.stage.x + x_pixel * args.tile.channels + args.tile.piece(thread);
    s.dx = stage.dx + x_pixel * g.out_channels + mine;
  }

  // Loads pieces of dz and of the output of the depthwise convolution for the turn that begins at `row` of dy. For what
  // is outside of the image or has no channel something else is loaded, because nothing reads what is made of it.
  template <int kFrom, int kTo, class Block>
  static NASFAST_DEVICE void load(const Block& block, const Args& args, const Rows& rows, int row, Local<Thread>& state,
                                  unsigned char* shared) {
    const Geometry& g = args.stage.depthwise.geometry;
    const int* const from = reinterpret_cast<const int*>(shared + args.memory.from);
    const int row_step = g.out_width * g.out_channels;
    // with stride 1 only the first row of all can be outside, and the later pieces are never in the first of two rows
    const int outside = kFrom == 0 && kStride == 1 && row < 0 ? rows.row_pixels() : 0;
    const int step = kStride == 1 ? 2 * row_step : row >= 0 && row + 1 < g.out_height ? row_step : 0;
    block.each([&](int thread) {
      Thread& s = state[thread];
      NASFAST_UNROLL
      for (int i = kFrom; i < kTo; ++i) {
        const int m = thread / kPieces + i * (kThreads / kPieces), place = from[m] + (m < outside ? row_step : 0);
        s.grad[i] = *reinterpret_cast<const Vec4*>(s.next_grad + place);
        s.y[i] = *reinterpret_cast<const Vec4*>(s.next_y + place);
      }
      if (kTo == kLoads) s.next_grad += step, s.next_y += step;
    });
  }

  // Computes dy = a dz + b y + c into shared memory. kMasked: what was loaded as dz is the gradient behind the activation.
  template <bool kMasked, class Block>
  static NASFAST_DEVICE void fill(const Block& block, const Args& args, Local<Thread>& state, unsigned char* shared) {
    const ExpandBackwardMemory& at = args.memory;
    uint16_t* const dy = reinterpret_cast<uint16_t*>(shared + at.dy);
    const int* const to = reinterpret_cast<const int*>(shared + at.to);
    block.each([&](int thread) {
      Thread& s = state[thread];
      const int piece = 8 * (thread % kPieces);
      const Interval* const mask = reinterpret_cast<const Interval*>(shared + at.mask) + piece;
      NASFAST_UNROLL
      for (int part = 0; part < kLoads; part += kEarly) {
        // one pair of channels after the other, because all at once would need too many registers
        NASFAST_UNROLL
        for (int i = 0; i < 4; ++i) {
          const Back* const both = reinterpret_cast<const Back*>(shared + at.back) + piece + 2 * i;
          const Back back[2] = {both[0], both[1]};
          NASFAST_UNROLL
          for (int j = part; j < part + kEarly; ++j) {
            const float y[2] = {Format::first(s.y[j].v[i]), Format::second(s.y[j].v[i])};
            float dz[2] = {Format::first(s.grad[j].v[i]), Format::second(s.grad[j].v[i])};
            NASFAST_UNROLL
            for (int e = 0; e < 2; ++e) {
              if (kMasked) dz[e] = mask[2 * i + e].low < y[e] && y[e] < mask[2 * i + e].high ? dz[e] : 0.f;
              dz[e] = fma(back[e].a, dz[e], fma(back[e].b, y[e], back[e].c));
            }
            s.grad[j].v[i] = Format::pack(dz[0], dz[1]);
          }
        }
        NASFAST_UNROLL
        for (int j = part; j < part + kEarly; ++j) {
          *reinterpret_cast<Vec4*>(dy + to[thread / kPieces + j * (kThreads / kPieces)] + piece) = s.grad[j];
        }
      }
    });
  }

  template <int kCount>
  static NASFAST_DEVICE void unpack_row(const uint16_t* from, float (&to)[kCount][2]) {
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
            if (row + r < 0) continue;
            float in[Stencil::kIn][2];
            unpack_row(from + r * next, in);
            s.stencil.row(in, w, zero, out);
          } else {
            s.stencil.zero_row(zero, out);
          }
          if (made) leave(out, to + r * x_next, s.columns);
        }
      } else {
        s.stencil.advance();
        auto& last = s.stencil.dy[Stencil::kRows - 1];
        if (row >= 0 && row < args.stage.depthwise.geometry.out_height) {
          unpack_row(from, last);
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

  // Stores a row of a strip, of which the first `columns` pixels are in the image.
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

  // Turns the gradient behind the activation into dz, for the pixels from `begin` to `end` of a turn.
  template <class Block>
  static NASFAST_DEVICE void expand(const Block& block, const Args& args, int channel, int begin, int end,
                                    Local<Thread>& state, unsigned char* shared) {
    const int channels = args.stage.depthwise.geometry.out_channels;
    const ExpandBackwardMemory& at = args.memory;
    const uint16_t* const weights = reinterpret_cast<const uint16_t*>(shared + at.weights);
    const uint16_t* const x = reinterpret_cast<const uint16_t*>(shared + at.x);
    const uint16_t* const grad = reinterpret_cast<const uint16_t*>(shared + at.dz);
    const int* const to = reinterpret_cast<const int*>(shared + at.x_to);
    const Open& open = *reinterpret_cast<const Open*>(shared + at.open);
    block.warps([&](const Warp& warp) {
      Local<float[4][4]> acc(warp);
      NASFAST_NO_UNROLL
      for (int m = begin / 16 * 16 + 16 * warp.index; m < end; m += 16 * kExpandWarps) {
        warp.each([&](int lane) {
          NASFAST_UNROLL
          for (int i = 0; i < 4; ++i) load_again(open.shift[lane % 4 * 4 + i], acc[lane][i]);
        });
        expand_pixels<Format>(
            warp, args.tile, x + m * args.tile.pitch, weights, [&](int lane) -> auto& { return acc[lane]; },
            [&](int lane, int j) { return acc[lane][j]; });
        warp.each([&](int lane) {
          Thread& s = state[32 * warp.index + lane];
          const int piece = 8 * (lane % 4);
          float half[2][4];
          load_again(open.half + piece, half[0]);
          load_again(open.half + piece + 4, half[1]);
          NASFAST_UNROLL
          for (int h = 0; h < 2; ++h) {
            const int here = m + 8 * h + lane / 4;
            const int place = here >= begin && here < end ? to[here] : -1;
            Vec4 v{0, 0, 0, 0};  // a gradient of 0 adds nothing
            if (place >= 0) v = *reinterpret_cast<const Vec4*>(grad + here * kChunk + piece);
            NASFAST_UNROLL
            for (int i = 0; i < 4; ++i) {
              float dz[2] = {Format::first(v.v[i]), Format::second(v.v[i])};
              NASFAST_UNROLL
              for (int e = 0; e < 2; ++e) {
                const float distance = acc[lane][i][2 * h + e];
                dz[e] = fabsf(distance) < half[i / 2][i % 2 * 2 + e] ? dz[e] : 0.f;
                s.sums[2 * i + e].add(dz[e], distance);
              }
              v.v[i] = Format::pack(dz[0], dz[1]);
            }
            if (place >= 0 && channel + piece < channels) *reinterpret_cast<Vec4*>(s.dx + place) = v;
          }
        });
      }
    });
  }

  // Adds up the threads that have a channel in their order, and then the blocks.
  template <class Block>
  static NASFAST_DEVICE void finish(const Block& block, const Args& args, int channel, Local<Thread>& state,
                                    unsigned char* shared) {
    const BackwardStage& stage = args.stage.depthwise;
    const NormGradient& gradient = stage.gradient;
    const int channels = stage.geometry.out_channels;
    const int mine = channels - channel < kChunk ? channels - channel : kChunk;
    const Open& open = *reinterpret_cast<const Open*>(shared + args.memory.open);
    Vec2* const kept = reinterpret_cast<Vec2*>(shared + args.memory.weights);  // [8][threads]
    block.each([&](int thread) {
      NASFAST_UNROLL
      for (int i = 0; i < 8; ++i) {
        kept[i * kThreads + thread] = {as_bits(state[thread].sums[i].sum), as_bits(state[thread].sums[i].product)};
      }
    });
    block.sync();
    block.each([&](int thread) {
      for (int c = thread; c < mine; c += kThreads) {
        GradientSums total;
        for (int i = c / 8; i < kThreads; i += kPieces) {
          const Vec2 v = kept[c % 8 * kThreads + i];
          total.sum += as_float(v.v[0]);
          total.product += as_float(v.v[1]);
        }
        // the distances were taken to the middle, not to the mean
        total.product = fma(-open.shift[c / 2][c % 2] - stage.interval[channel + c].mean, total.sum, total.product);
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
