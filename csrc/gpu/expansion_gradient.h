// The gradient of the input x of an expansion, without its output y1 (Fact 3 of docs/method.md 6). With
// dy = a dz + b y1 + c and y1 = W x,
//
//   dx = (a W)^T dz + A x + W^T c,    A = W^T diag(b) W.
//
// Every block makes A, once for all its pixels, by tensor cores. The second and the third term nearly cancel where the
// mean of x is large. So b W and A are each the sum of two numbers of 16 bits, scaled to their range, and x is exact:
// what is left of the difference has 16 bits and more. a W is rounded once, as eager PyTorch rounds a dz.
//
// A lane reads 16 bytes, 8 neighbouring channels of a pixel, which are four pairs of a fragment. So rows of a matrix in
// shared memory are in another order than the channels, and the columns are in the same one: channel c of 32 is at
// column_of(c). Then the results of a lane are 8 neighbouring channels too.
#pragma once

#include "expansion.h"

namespace nasfast::gpu {

constexpr int kGradientThreads = 256;
constexpr int kGradientWarps = kGradientThreads / 32;

// Tiles of 16 pixels of a warp: what 128 registers have room for.
NASFAST_ANYWHERE constexpr int gradient_row_tiles(int wide) { return wide > 32 ? 1 : 2; }

// Where the arrays of a block lie in shared memory. `wide`: channels of x, `hidden`: of y1, in whole groups of 32.
struct GradientMemory {
  int matrix, coefficients, constant, means, parts, bytes;
  int pitch;  // elements between two rows of a matrix

  NASFAST_ANYWHERE GradientMemory(int wide, int hidden) : pitch(wide + 8) {
    matrix = hidden * pitch * 2;                   // W, and then a W
    coefficients = matrix + 2 * wide * pitch * 2;  // both parts of A
    constant = coefficients + 3 * hidden * 4;      // a, b, c
    means = constant + wide * 4;                   // constant: W^T c; means: of what the chain before has left
    parts = means + wide * 4;
    bytes = parts + kGradientWarps * wide * 8;  // a number of each thread, or two sums of each channel and warp
  }
};

// The largest power of two, between 2^-60 and 2^60, that brings x >= 0 to at most 1; for 0, infinity and NaN it is 1.
NASFAST_DEVICE float power_below(float x) {
  if (!(x > 0) || x > 1e30f) return 1;
  const int exponent = static_cast<int>(as_bits(x) >> 23) - 126;  // x < 2^exponent
  const int bounded = exponent > 60 ? 60 : exponent < -60 ? -60 : exponent;
  return as_float(static_cast<uint32_t>(127 - bounded) << 23);
}

template <class Format, int kGroups>
struct ExpansionGradientKernel {
  static constexpr int kThreads = kGradientThreads, kBlocks = 2;
  static constexpr int kWide = 32 * kGroups, kTiles = kWide / 8, kPitch = kWide + 8;
  using Args = ExpansionGradient;
  static constexpr int kRowTiles = gradient_row_tiles(kWide), kRows = 16 * kRowTiles;
  using Acc = float[kRowTiles][kTiles][4];
  using Rows = Vec4[kRowTiles][2];  // 8 channels of the rows g and g + 8 of each tile
  using Sums = GradientSums[8 * kGroups];
  static_assert(kWide * 2 >= 32, "a number of each thread has room where the sums will be");

  template <class Block>
  static NASFAST_DEVICE void run(const Block& block, const Args& args, unsigned char* shared) {
    const GradientMemory at(kWide, (args.hidden + 31) / 32 * 32);
    const float scale = prepare(block, args, at, shared);
    const uint16_t* const weights = reinterpret_cast<const uint16_t*>(shared);
    const uint16_t* const matrix = reinterpret_cast<const uint16_t*>(shared + at.matrix);
    const float* const constant = reinterpret_cast<const float*>(shared + at.constant);
    block.warps([&](const Warp& warp) {
      Local<Sums> sums(warp);
      warp.each([&](int lane) {
        NASFAST_UNROLL
        for (int i = 0; i < 8 * kGroups; ++i) sums[lane][i] = {};
      });
      Local<Acc> acc(warp);
      Local<Rows> now(warp), next(warp);
      const int64_t step = int64_t{block.count_x} * kGradientWarps * kRows;
      NASFAST_NO_UNROLL
      for (int64_t row = (int64_t{block.x} * kGradientWarps + warp.index) * kRows; row < args.rows; row += step) {
        warp.each([&](int lane) {
          NASFAST_UNROLL
          for (int i = 0; i < 4 * kRowTiles * kTiles; ++i) acc[lane][i / 4 / kTiles][i / 4 % kTiles][i % 4] = 0;
        });
        NASFAST_UNROLL
        for (int group = 0; group < kGroups; ++group) {
          load(warp, args.x, args.rows, args.channels, row, group, now);
          multiply(warp, matrix + 32 * group * kPitch, now, acc);
          multiply(warp, matrix + (kWide + 32 * group) * kPitch, now, acc);
        }
        load(warp, args.dz, args.rows, args.hidden, row, 0, now);
        warp.each([&](int lane) {
          NASFAST_UNROLL
          for (int i = 0; i < 4 * kRowTiles * kTiles; ++i) {
            const int n = i / 4 % kTiles;
            float& sum = acc[lane][i / 4 / kTiles][n][i % 4];
            sum = fma(sum, scale, constant[n / 4 * 32 + 8 * (lane % 4) + 2 * (n % 4) + i % 2]);
          }
        });
        NASFAST_NO_UNROLL
        for (int group = 0; 32 * group < args.hidden; ++group) {
          load(warp, args.dz, args.rows, args.hidden, row, group + 1, next);
          multiply(warp, weights + 32 * group * kPitch, now, acc);
          warp.each([&](int lane) {
            NASFAST_UNROLL
            for (int i = 0; i < 2 * kRowTiles; ++i) now[lane][i / 2][i % 2] = next[lane][i / 2][i % 2];
          });
        }
        NASFAST_UNROLL
        for (int group = 0; group < kGroups; ++group) {
          store(warp, args, row, group, acc, now, next, reinterpret_cast<const float*>(shared + at.means), sums);
        }
      }
      if (args.before != nullptr) leave(warp, sums, reinterpret_cast<Vec2*>(shared + at.parts));
    });
    if (args.before != nullptr) finish(block, args, reinterpret_cast<const Vec2*>(shared + at.parts));
  }

 private:
  // 8 channels of a group of 32 for each lane; zeros outside
  static NASFAST_DEVICE void load(const Warp& warp, const uint16_t* from, int64_t rows, int channels, int64_t row,
                                  int group, Local<Rows>& to) {
    warp.each([&](int lane) {
      const int channel = 32 * group + 8 * (lane % 4);
      NASFAST_UNROLL
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        const int64_t here = row + 8 * i + lane / 4;
        Vec4& v = to[lane][i / 2][i % 2];
        v = Vec4{0, 0, 0, 0};
        if (here < rows && channel < channels) v = *reinterpret_cast<const Vec4*>(from + here * channels + channel);
      }
    });
  }

  // acc += the rows times 32 rows of a matrix
  static NASFAST_DEVICE void multiply(const Warp& warp, const uint16_t* matrix, Local<Rows>& in, Local<Acc>& acc) {
    Local<uint32_t[4]> a(warp);
    Local<uint32_t[kTiles / 2][4]> b(warp);
    NASFAST_UNROLL
    for (int step = 0; step < 2; ++step) {
      NASFAST_UNROLL
      for (int n = 0; n < kTiles / 2; ++n) {
        // matrices (k, n), (k + 8, n), (k, n + 8), (k + 8, n + 8)
        warp.load_transposed(
            [&](int lane) -> auto& { return b[lane][n]; },
            [&](int lane) { return matrix + (16 * step + lane % 16) * kPitch + 16 * n + lane / 16 * 8; });
      }
      NASFAST_UNROLL
      for (int tile = 0; tile < kRowTiles; ++tile) {
        warp.each([&](int lane) {
          NASFAST_UNROLL
          for (int i = 0; i < 4; ++i) a[lane][i] = in[lane][tile][i % 2].v[2 * step + i / 2];
        });
        NASFAST_UNROLL
        for (int n = 0; n < kTiles; ++n) {
          warp.template multiply_16<Format>([&](int lane) -> auto& { return acc[lane][tile][n]; },
                                            [&](int lane) -> auto& { return a[lane]; },
                                            [&](int lane) { return b[lane][n / 2] + n % 2 * 2; });
        }
      }
    }
  }

  // Stores a group of 32 channels of the result. `added` and `y` are what is added, and what the chain before has left.
  static NASFAST_DEVICE void store(const Warp& warp, const Args& args, int64_t row, int group, Local<Acc>& acc,
                                   Local<Rows>& added, Local<Rows>& y, const float* means, Local<Sums>& sums) {
    load(warp, args.added, args.added != nullptr ? args.rows : 0, args.channels, row, group, added);
    load(warp, args.before, args.before != nullptr ? args.rows : 0, args.channels, row, group, y);
    warp.each([&](int lane) {
      const int channel = 32 * group + 8 * (lane % 4);
      const int rows = args.rows - row < kRows ? static_cast<int>(args.rows - row) : kRows;
      uint16_t* const dx = args.dx + (row + lane / 4) * args.channels + channel;
      NASFAST_UNROLL
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        if (8 * i + lane / 4 >= rows || channel >= args.channels) continue;
        const Vec4 &more = added[lane][i / 2][i % 2], &left = y[lane][i / 2][i % 2];
        Vec4 result;
        NASFAST_UNROLL
        for (int j = 0; j < 4; ++j) {
          const float (&sum)[4] = acc[lane][i / 2][4 * group + j];
          result.v[j] =
              Format::pack(sum[i % 2 * 2] + Format::first(more.v[j]), sum[i % 2 * 2 + 1] + Format::second(more.v[j]));
        }
        *reinterpret_cast<Vec4*>(dx + 8 * i * args.channels) = result;
        if (args.before == nullptr) continue;
        NASFAST_UNROLL
        for (int j = 0; j < 4; ++j) {
          float mean[2];
          load_again(means + channel + 2 * j, mean);
          GradientSums* const to = sums[lane] + 8 * group + 2 * j;
          to[0].add(Format::first(result.v[j]), Format::first(left.v[j]) - mean[0]);
          to[1].add(Format::second(result.v[j]), Format::second(left.v[j]) - mean[1]);
        }
      }
    });
  }

  // Leaves the sums of a warp in shared memory, [warps][channels].
  static NASFAST_DEVICE void leave(const Warp& warp, Local<Sums>& sums, Vec2* parts) {
    NASFAST_UNROLL
    for (int i = 0; i < 8 * kGroups; ++i) {
      warp.add_lanes([&](int lane) -> float& { return sums[lane][i].sum; }, 4);
      warp.add_lanes([&](int lane) -> float& { return sums[lane][i].product; }, 4);
    }
    warp.each([&](int lane) {
      if (lane >= 4) return;
      NASFAST_UNROLL
      for (int i = 0; i < 8 * kGroups; ++i) {
        parts[warp.index * kWide + i / 8 * 32 + 8 * lane + i % 8] = {as_bits(sums[lane][i].sum),
                                                                     as_bits(sums[lane][i].product)};
      }
    });
  }

  // Adds up the warps in their order, and then the blocks.
  template <class Block>
  static NASFAST_DEVICE void finish(const Block& block, const Args& args, const Vec2* parts) {
    block.sync();
    block.each([&](int thread) {
      for (int c = thread; c < args.channels; c += kThreads) {
        GradientSums total;
        for (int warp = 0; warp < kGradientWarps; ++warp) {
          total.sum += as_float(parts[warp * kWide + c].v[0]);
          total.product += as_float(parts[warp * kWide + c].v[1]);
        }
        args.gradient.reduction.partial[int64_t{block.x} * args.channels + c] = {as_bits(total.sum),
                                                                                 as_bits(total.product)};
      }
    });
    finish_gradient<kThreads>(block, args.gradient, block.x, 0, 0, args.channels);
  }

  // The largest of one number of each thread, which is in parts[thread]. NaN may be lost.
  template <class Block>
  static NASFAST_DEVICE float largest(const Block& block, float* parts) {
    block.sync();
    block.each([&](int thread) {
      if (thread >= 16) return;
      float most = 0;
      for (int i = thread; i < kThreads; i += 16) most = parts[i] > most ? parts[i] : most;
      parts[thread] = most;
    });
    block.sync();
    float most = 0;
    for (int i = 0; i < 16; ++i) most = parts[i] > most ? parts[i] : most;
    block.sync();
    return most;
  }

  // Fills shared memory. Returns the factor of the product of x and the matrix.
  template <class Block>
  static NASFAST_DEVICE float prepare(const Block& block, const Args& args, const GradientMemory& at,
                                      unsigned char* shared) {
    const int hidden = (args.hidden + 31) / 32 * 32;
    uint16_t* const weights = reinterpret_cast<uint16_t*>(shared);
    uint16_t* const matrix = reinterpret_cast<uint16_t*>(shared + at.matrix);
    float *const a = reinterpret_cast<float*>(shared + at.coefficients), *const b = a + hidden, *const c = b + hidden;
    float* const constant = reinterpret_cast<float*>(shared + at.constant);
    float* const parts = reinterpret_cast<float*>(shared + at.parts);
    block.each([&](int thread) {
      for (int i = thread; i < hidden * kWide; i += kThreads) {
        const int h = i / kWide, n = i % kWide;
        const bool there = h < args.hidden && n < args.channels;
        weights[place(h) * kPitch + place(n)] =
            there ? rounded_weight<Format>(args.expansion, int64_t{h} * args.channels + n) : uint16_t{0};
      }
    });
    block.wait_for_kernels();
    block.each([&](int thread) {
      if (args.before != nullptr && thread < args.channels) {
        reinterpret_cast<float*>(shared + at.means)[thread] = args.interval[thread].mean;
      }
      float most = 0;
      for (int i = thread; i < hidden; i += kThreads) {
        const Back back = i < args.hidden ? args.back[i] : Back{0, 0, 0, 0};
        a[i] = back.a, b[i] = back.b, c[i] = back.c;
        most = fabsf(back.b) > most ? fabsf(back.b) : most;
      }
      parts[thread] = most;
    });
    const float scale = power_below(largest(block, parts));
    Local<float[kWide / 16][4]> acc(block);
    square(block, weights, b, hidden, scale, acc);
    // W^T c by all threads: first parts of the depth
    constexpr int kParts = kThreads / kWide;
    block.each([&](int thread) {
      const int n = thread % kWide;
      float sum = 0;
      for (int h = thread / kWide; h < args.hidden; h += kParts) {
        sum = fma(c[h], Format::first(weights[place(h) * kPitch + place(n)]), sum);
      }
      parts[thread] = sum;
    });
    block.sync();
    block.each([&](int thread) {
      if (thread >= kWide) return;
      float sum = 0;
      for (int i = 0; i < kParts; ++i) sum += parts[i * kWide + thread];
      constant[thread] = sum;
    });
    block.sync();
    block.each([&](int thread) {
      float most = 0;
      if (thread / 32 < kTiles) {
        NASFAST_UNROLL
        for (int i = 0; i < kWide / 4; ++i) {
          const float size = fabsf(acc[thread][i / 4][i % 4]);
          most = size > most ? size : most;
        }
      }
      parts[thread] = most;
    });
    const float second = power_below(largest(block, parts));
    block.each([&](int thread) {
      const int lane = thread % 32, n = thread / 32 * 8 + 2 * (lane % 4);
      if (thread / 32 < kTiles) {
        NASFAST_UNROLL
        for (int i = 0; i < kWide / 8; ++i) {
          const int row = 8 * i + lane / 4;
          const float (&v)[4] = acc[thread][i / 2];
          uint32_t high, low;
          split(v[i % 2 * 2] * second, v[i % 2 * 2 + 1] * second, &high, &low);
          *reinterpret_cast<uint32_t*>(matrix + row * kPitch + n) = high;
          *reinterpret_cast<uint32_t*>(matrix + (kWide + row) * kPitch + n) = low;
        }
      }
      for (int i = thread; i < hidden * kWide / 2; i += kThreads) {
        const int h = i / (kWide / 2);
        uint32_t& pair = *reinterpret_cast<uint32_t*>(weights + place(h) * kPitch + i % (kWide / 2) * 2);
        pair = Format::pack(a[h] * Format::first(pair), a[h] * Format::second(pair));
      }
    });
    block.sync();
    return 1 / scale / second;
  }

  static NASFAST_DEVICE int place(int channel) { return (channel & ~31) + column_of(channel % 32); }

  // A pair of numbers as the sum of two pairs of 16 bits.
  static NASFAST_DEVICE void split(float first, float second, uint32_t* high, uint32_t* low) {
    *high = Format::pack(first, second);
    *low = Format::pack(first - Format::first(*high), second - Format::second(*high));
  }

  // acc = W^T diag(scale b) W: a warp has 8 columns
  template <class Block>
  static NASFAST_DEVICE void square(const Block& block, const uint16_t* weights, const float* b, int hidden,
                                    float scale, Local<float[kWide / 16][4]>& acc) {
    block.warps([&](const Warp& warp) {
      if (warp.index >= kTiles) return;
      Local<uint32_t[4]> in(warp), right(warp), rest(warp);
      const auto first = [&](int lane) { return 32 * warp.index + lane; };
      warp.each([&](int lane) {
        NASFAST_UNROLL
        for (int i = 0; i < kWide / 4; ++i) acc[first(lane)][i / 4][i % 4] = 0;
      });
      NASFAST_NO_UNROLL
      for (int k = 0; k < hidden; k += 32) {
        warp.load_transposed([&](int lane) -> auto& { return right[lane]; },
                             [&](int lane) { return weights + (k + lane) * kPitch + 8 * warp.index; });
        warp.each([&](int lane) {
          const float* factor = b + k + 8 * (lane % 4);
          NASFAST_UNROLL
          for (int j = 0; j < 4; ++j) {
            const uint32_t pair = right[lane][j];
            split(scale * factor[2 * j] * Format::first(pair), scale * factor[2 * j + 1] * Format::second(pair),
                  &right[lane][j], &rest[lane][j]);
          }
        });
        NASFAST_UNROLL
        for (int step = 0; step < 2; ++step) {
          NASFAST_UNROLL
          for (int m = 0; m < kWide / 16; ++m) {
            // matrices (k, m), (k, m + 8), (k + 8, m), (k + 8, m + 8): rows of the left factor are columns of W
            warp.load_transposed([&](int lane) -> auto& { return in[lane]; },
                                 [&](int lane) {
                                   const int row = k + 16 * step + lane / 16 * 8 + lane % 8;
                                   return weights + row * kPitch + 16 * m + lane / 8 % 2 * 8;
                                 });
            for (auto* factor : {&right, &rest}) {
              warp.template multiply_16<Format>([&](int lane) -> auto& { return acc[first(lane)][m]; },
                                                [&](int lane) -> auto& { return in[lane]; },
                                                [&](int lane) { return (*factor)[lane] + 2 * step; });
            }
          }
        }
      }
    });
  }
};

template <class Machine>
Grid expansion_gradient_grid(const Geometry& g, const Machine& machine) {
  const int wide = g.in_channels > 32 ? 64 : 32;
  const int64_t rows = kGradientWarps * 16 * gradient_row_tiles(wide), needed = (g.in_rows() + rows - 1) / rows;
  const int64_t at_once = 2 * machine.multiprocessors;
  const GradientMemory memory(wide, (g.out_channels + 31) / 32 * 32);
  return {static_cast<int>(needed < at_once ? needed : at_once), 1, static_cast<size_t>(memory.bytes)};
}

template <class Format, class Machine>
void expansion_gradient(const Machine& machine, const Grid& grid, const ExpansionGradient& stage) {
  if (stage.channels > 32) {
    machine.template launch<ExpansionGradientKernel<Format, 2>>(grid.rows, 1, grid.shared, stage);
  } else {
    machine.template launch<ExpansionGradientKernel<Format, 1>>(grid.rows, 1, grid.shared, stage);
  }
}

}  // namespace nasfast::gpu
