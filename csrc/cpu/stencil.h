// Depthwise stencils, and the ring of rows along which they slide. Kernel files include this, once per instruction set.
//
// The ring holds rows of the source as floats, with zeros on either side. The stencil goes along the rows, one vector
// of channels at a time, with its sums in registers.
#pragma once

#include "bn_tile.h"
#include "gemm.h"

namespace nasfast::cpu::NASFAST_ISA {

// Most bytes of a ring: it should stay in a 1 MiB second-level cache, together with the rows that are read beside it.
constexpr int64_t kRingBytes = 192 * 1024;
constexpr int kMaxKernel = 7;

// kOut neighbouring outputs of a kK x kK stencil, forward, and backward at stride 1 with flipped weights:
// out[j] = sum over ky and kx of rows[ky][j * stride + kx] weights[ky][kx].
// rows begin at the first column that this segment reads; weights are kK vectors of channels each, ldw apart.
template <int kK, int kStride, int kOut>
inline void stencil(const float* const* rows, const float* const* weights, int64_t ld, int64_t ldw, VecF* sum) {
#pragma GCC unroll 10
  for (int j = 0; j < kOut; ++j) sum[j] = VecF{};
  for (int ky = 0; ky < kK; ++ky) {
    const float* row = rows[ky];
    VecF w[kK];
#pragma GCC unroll 7
    for (int kx = 0; kx < kK; ++kx) w[kx] = load(weights[ky] + kx * ldw, AllLanes{});
#pragma GCC unroll 32
    for (int ix = 0; ix < (kOut - 1) * kStride + kK; ++ix) {
      const VecF v = load(row + ix * ld, AllLanes{});
#pragma GCC unroll 10
      for (int j = 0; j < kOut; ++j) {
        const int kx = ix - j * kStride;
        if (kx >= 0 && kx < kK) sum[j] += v * w[kx];
      }
    }
  }
}

// Backward at stride 2, kOut even: out[j] = sum of row[(j + p - kx) / 2] w[kx] over the kx for which the index is an
// integer, and over the given rows, which are those that fit the row of the output. rows begin p / 2 columns before the
// first column of the segment.
template <int kK, int kOut>
inline void stencil_transposed(const float* const* rows, const float* const* weights, int taps, int64_t ld, int64_t ldw,
                               VecF* sum) {
  constexpr int p = kK / 2;
#pragma GCC unroll 16
  for (int j = 0; j < kOut; ++j) sum[j] = VecF{};
  for (int t = 0; t < taps; ++t) {
    const float* row = rows[t];
    VecF w[kK];
#pragma GCC unroll 7
    for (int kx = 0; kx < kK; ++kx) w[kx] = load(weights[t] + kx * ldw, AllLanes{});
#pragma GCC unroll 32
    for (int o = -(p / 2); o <= (kOut - 1 + p) / 2; ++o) {
      const VecF v = load(row + (o + p / 2) * ld, AllLanes{});
#pragma GCC unroll 16
      for (int j = 0; j < kOut; ++j) {
        const int kx = j + p - 2 * o;
        if (kx >= 0 && kx < kK) sum[j] += v * w[kx];
      }
    }
  }
}

// Writes one row of outputs, kLanes channels wide, to `out`, with out_step floats between pixels. The row is `dilation`
// interleaved rows of `segments` segments each: a stencil dilated by 2 reads every second column, so the even and the
// odd outputs of a row are two rows without dilation.
template <int kK, int kStride, bool kTransposed, int kOut>
void stencil_row(const float* const* rows, const float* const* weights, int taps, int64_t ld, int64_t ldw,
                 int64_t segments, int64_t dilation, float* out, int64_t out_step) {
  const int64_t column = dilation * ld;
  const int64_t output = dilation * out_step;
  for (int64_t phase = 0; phase < dilation; ++phase) {
    const float* from[kK];
    for (int t = 0; t < taps; ++t) from[t] = rows[t] + phase * ld;
    float* to = out + phase * out_step;
    for (int64_t segment = 0; segment < segments; ++segment) {
      VecF sum[kOut];
      if constexpr (kTransposed) {
        stencil_transposed<kK, kOut>(from, weights, taps, column, ldw, sum);
      } else {
        stencil<kK, kStride, kOut>(from, weights, column, ldw, sum);
      }
#pragma GCC unroll 16
      for (int j = 0; j < kOut; ++j) store(to + j * output, sum[j], AllLanes{});
      const int64_t step = (kTransposed ? kOut / 2 : kOut * kStride) * column;
      for (int t = 0; t < taps; ++t) from[t] += step;
      to += kOut * output;
    }
  }
}

using StencilRow = void (*)(const float* const* rows, const float* const* weights, int taps, int64_t ld, int64_t ldw,
                            int64_t segments, int64_t dilation, float* out, int64_t out_step);

// One pass of a stencil over an image: from a source of source_height x source_width to a result of height x width.
struct Pass {
  int64_t source_height, source_width, height, width;
  int64_t kernel, stride;
  int64_t dilation;  // greater than 1 only at stride 1
  bool transposed;   // whether this is the stencil of backward at stride 2
  int64_t outputs;   // outputs per segment
  int64_t segments;  // segments per row of the result, for each phase of its columns modulo dilation
  int64_t halo;      // columns of zeros before the first of a source row
  int64_t columns;   // columns of a source row in the ring, including zeros
  int64_t ring;      // rows of the source that are held at once
  StencilRow run;

  // The last and the first source row that row r of the result reads; they may be outside the image.
  int64_t last_source(int64_t r) const {
    return transposed ? (r + kernel / 2) / 2 : r * stride + (kernel / 2) * dilation;
  }
  int64_t first_source(int64_t r) const {
    // transposed: the smallest row s with r + kernel / 2 - 2 s < kernel
    return transposed ? (r < kernel / 2 ? 0 : (r - kernel / 2 + 1) / 2) : r * stride - (kernel / 2) * dilation;
  }
  int64_t result_columns() const { return segments * outputs * dilation; }  // including surplus ones
};

template <int kK, int kStride, bool kTransposed>
Pass make_pass(Pass pass) {
  const int64_t width = divide_up(pass.width, pass.dilation);
  const auto surplus = [&](int64_t outputs) { return divide_up(width, outputs) * outputs - width; };
  const auto consider = [&](auto count) {
    constexpr int kOut = decltype(count)::value;
    if (pass.outputs && surplus(kOut) > surplus(pass.outputs)) return;
    pass.outputs = kOut;
    pass.run = stencil_row<kK, kStride, kTransposed, kOut>;
  };
  // The widths of feature maps are multiples of 7 for images of 224 x 224, of 5 for 160 x 160, and of 4 for 32 x 32. Among
  // equal surpluses the larger count is better, because more outputs use each value that is loaded. 16 registers hold the
  // sums of 10 outputs beside the weights.
#if defined(__AVX512F__)
  if constexpr (kTransposed) {
    consider(Count<8>{});
    consider(Count<14>{});
  } else {
    consider(Count<4>{});
    consider(Count<7>{});
    consider(Count<8>{});
  }
#else
  if constexpr (!kTransposed) {
    consider(Count<4>{});
    consider(Count<5>{});
    consider(Count<7>{});
  }
  consider(Count<8>{});
  consider(Count<10>{});
#endif
  return pass;
}

template <int kK>
Pass make_pass(const Pass& pass) {
  if (pass.transposed) return make_pass<kK, 2, true>(pass);
  return pass.stride == 1 ? make_pass<kK, 1, false>(pass) : make_pass<kK, 2, false>(pass);
}

// The pass with another number of outputs per segment, for callers that do not run its stencil.
inline Pass with_outputs(Pass pass, int64_t outputs) {
  pass.outputs = outputs;
  pass.segments = divide_up(divide_up(pass.width, pass.dilation), outputs);
  const int64_t half = pass.kernel / 2 * pass.dilation;
  const int64_t last = pass.result_columns() - 1;
  const int64_t read = pass.transposed ? (last + half) / 2 + half / 2 + 1 : last * pass.stride + 2 * half + 1;
  const int64_t held = pass.source_width + 2 * pass.halo;
  pass.columns = read > held ? read : held;
  return pass;
}

// The pass with this geometry.
inline Pass make_pass(int64_t kernel, int64_t stride, int64_t dilation, bool transposed, int64_t source_height,
                      int64_t source_width, int64_t height, int64_t width) {
  Pass pass{};
  pass.kernel = kernel;
  pass.stride = stride;
  pass.dilation = dilation;
  pass.transposed = transposed;
  pass.source_height = source_height;
  pass.source_width = source_width;
  pass.height = height;
  pass.width = width;
  pass = kernel == 3 ? make_pass<3>(pass) : kernel == 5 ? make_pass<5>(pass) : make_pass<7>(pass);
  pass.ring = (kernel - 1) * dilation + 1;
  pass.halo = kernel / 2 * dilation / (transposed ? 2 : 1);
  return with_outputs(pass, pass.outputs);
}

// Goes through the result rows [r0, r1) of one image; pixels of the ring are ld floats apart.
//   provide(row, to): writes source row `row`, source_width x ld, to `to`
//   visit(r, rows, ky, taps): does result row r, to which rows[t] contributes through row ky[t] of the filter, t < taps
// ring has pass.ring rows of columns * ld floats, zero before the first call; zeros is one more such row.
template <typename Provide, typename Visit>
inline void slide_rows(const Pass& pass, int64_t r0, int64_t r1, int64_t ld, float* ring, const float* zeros,
                       const Provide& provide, const Visit& visit) {
  const int64_t slot = pass.columns * ld;
  int64_t next = pass.first_source(r0) < 0 ? 0 : pass.first_source(r0);
  for (int64_t r = r0; r < r1; ++r) {
    const int64_t last = lesser(pass.last_source(r), pass.source_height - 1);
    for (; next <= last; ++next) provide(next, ring + next % pass.ring * slot + pass.halo * ld);
    const float* rows[kMaxKernel];
    int64_t with[kMaxKernel];
    int taps = 0;
    for (int64_t ky = 0; ky < pass.kernel; ++ky) {
      int64_t source = pass.first_source(r) + ky * pass.dilation;
      if (pass.transposed) {
        const int64_t doubled = r + pass.kernel / 2 - ky;
        if (doubled % 2 != 0) continue;
        source = doubled / 2;
      }
      const bool inside = source >= 0 && source < pass.source_height;
      rows[taps] = inside ? ring + source % pass.ring * slot : zeros;
      with[taps++] = ky;
    }
    visit(r, rows, with, taps);
  }
}

// Runs the stencil on result rows [r0, r1).
//   finish(r, eval): does result row r; eval(c, out, step) writes the vector of channels at c to out, with step floats
//     between pixels
template <typename Provide, typename Finish>
inline void slide(const Pass& pass, int64_t r0, int64_t r1, int64_t ld, float* ring, const float* zeros,
                  const float* weight, int64_t ldw, const Provide& provide, const Finish& finish) {
  const auto visit = [&](int64_t r, const float* const* rows, const int64_t* ky, int taps) {
    finish(r, [&](int64_t c, float* out, int64_t step = kLanes) {
      const float* from[kMaxKernel];
      const float* with[kMaxKernel];
      for (int t = 0; t < taps; ++t) {
        from[t] = rows[t] + c;
        with[t] = weight + ky[t] * pass.kernel * ldw + c;
      }
      pass.run(from, with, taps, ld, ldw, pass.segments, pass.dilation, out, step);
    });
  };
  slide_rows(pass, r0, r1, ld, ring, zeros, provide, visit);
}

// Channels per group: as many whole vectors as keep the ring within kRingBytes.
inline int64_t group_channels(int64_t channels, int64_t ring_columns) {
  const int64_t fitting = kRingBytes / (ring_columns * static_cast<int64_t>(sizeof(float))) / kLanes * kLanes;
  const int64_t all = divide_up(channels, kLanes) * kLanes;
  if (fitting >= all) return all;
  const int64_t most = fitting < kLanes ? kLanes : fitting;
  // groups of equal size
  return divide_up(divide_up(all, divide_up(all, most)), kLanes) * kLanes;
}

}  // namespace nasfast::cpu::NASFAST_ISA
