// Kernels of depthwise_conv2d, compiled once per instruction set. The result and the gradient of the input use the
// stencils of stencil.h; the gradient of the weight is a sum of products along the same rings of rows.

#include "depthwise_conv2d.h"
#include "stencil.h"

namespace nasfast::cpu::NASFAST_ISA {
namespace {

template <typename T>
inline T* pixel_row(const PixelGrid& grid, int64_t image, int64_t row) {
  return static_cast<T*>(grid.data) + image * grid.image_step + row * grid.row_step;
}

inline Pass forward_pass(const DepthwiseConv2dParams& p) {
  return make_pass(p.kernel, p.stride, p.dilation, false, p.x.height, p.x.width, p.y.height, p.y.width);
}

// A strip of one group of images.
struct Unit {
  int64_t image, images;  // the first image, and the number of images
  int64_t r0, r1;

  Unit(const DepthwiseConv2dParams& p, int64_t unit, int64_t height) {
    image = unit / p.strips * p.images;
    images = lesser(p.images, p.batch - image);
    r0 = unit % p.strips * p.strip_rows;
    r1 = lesser(r0 + p.strip_rows, height);
  }
};

// Channels that are held at once: all of them when images share a vector.
inline int64_t held_channels(const DepthwiseConv2dParams& p, int64_t ring_columns) {
  return p.images > 1 ? kLanes : group_channels(p.channels, ring_columns);
}

// Copies row `row` of the unit's images, channels [c0, c0 + channels), to `to`: [pixel][ld] floats.
template <typename T>
inline void read_row(const DepthwiseConv2dParams& p, const PixelGrid& grid, const Unit& unit, int64_t row, int64_t c0,
                     int64_t channels, float* to, int64_t ld) {
  for (int64_t i = 0; i < unit.images; ++i) {
    const T* from = pixel_row<const T>(grid, unit.image + i, row) + c0;
    float* here = to + i * p.channels;
    if (grid.pixel_step == channels && ld == channels) {
      for_each_vector(grid.width * channels,
                      [&](int64_t at, auto lanes) { store(here + at, load(from + at, lanes), lanes); });
      continue;
    }
    for (int64_t x = 0; x < grid.width; ++x) {
      for_each_vector(channels, [&](int64_t c, auto lanes) {
        store(here + x * ld + c, load(from + x * grid.pixel_step + c, lanes), lanes);
      });
    }
  }
}

// Whether the stencil may write a row directly to the result: it needs whole vectors and no surplus pixels.
inline bool is_direct(const Pass& pass, AllLanes) { return pass.result_columns() == pass.width; }
inline bool is_direct(const Pass&, int) { return false; }

template <typename T>
inline float* as_floats(T*) {
  return nullptr;
}
template <>
inline float* as_floats<float>(float* p) {
  return p;
}

// result = stencil(source)
template <typename T>
void convolve_items(const DepthwiseConv2dParams& p, const Pass& pass, const PixelGrid& source, const PixelGrid& result,
                    int64_t begin, int64_t end) {
  const int64_t ld = held_channels(p, pass.ring * pass.columns);
  const int64_t ring_size = pass.ring * pass.columns * ld;
  Scratch scratch(Scratch::size<float>(ring_size) + Scratch::size<float>(pass.columns * ld) +
                  Scratch::size<float>(pass.result_columns() * kLanes));
  float* ring = scratch.take<float>(ring_size);
  const float* zeros = scratch.take<float>(pass.columns * ld);
  float* out = scratch.take<float>(pass.result_columns() * kLanes);
  const int64_t last = lesser(end * p.units_per_item, p.units);
  for (int64_t i_unit = begin * p.units_per_item; i_unit < last; ++i_unit) {
    const Unit unit(p, i_unit, pass.height);
    for (int64_t c0 = 0; c0 < p.channels; c0 += ld) {
      const int64_t channels = lesser(ld, p.channels - c0);
      const auto provide = [&](int64_t row, float* to) { read_row<T>(p, source, unit, row, c0, channels, to, ld); };
      const auto finish = [&](int64_t r, const auto& eval) {
        if (p.images > 1) {
          eval(0, out);
          for (int64_t i = 0; i < unit.images; ++i) {
            T* to = pixel_row<T>(result, unit.image + i, r);
            const float* from = out + i * channels;
            const int lanes = static_cast<int>(channels);
            for (int64_t x = 0; x < pass.width; ++x)
              store(to + x * result.pixel_step, load(from + x * kLanes, lanes), lanes);
          }
          return;
        }
        T* to = pixel_row<T>(result, unit.image, r) + c0;
        for_each_vector(channels, [&](int64_t c, auto lanes) {
          if (float* there = as_floats(to + c); there && is_direct(pass, lanes)) {
            eval(c, there, result.pixel_step);
            return;
          }
          eval(c, out);
          for (int64_t x = 0; x < pass.width; ++x) {
            store(to + c + x * result.pixel_step, load(out + x * kLanes, AllLanes{}), lanes);
          }
        });
      };
      slide(pass, unit.r0, unit.r1, ld, ring, zeros, p.weight + c0, p.weight_ld, provide, finish);
    }
  }
}

// Gradients that `correlate` holds in registers.
constexpr int kCorrelated = 4;

// Adds the sum over outputs o of grad[o] * row[o * stride + kx] to acc [kRows][kK][ld], for kRows rows of the input.
template <int kK, int kStride, int kRows>
inline void correlate(const float* const* rows, const float* grad, int64_t ld, int64_t segments, int64_t dilation,
                      float* acc) {
  constexpr int kOut = kCorrelated;
  VecF sum[kRows][kK];
#pragma GCC unroll 8
  for (int t = 0; t < kRows; ++t) {
#pragma GCC unroll 8
    for (int kx = 0; kx < kK; ++kx) sum[t][kx] = load(acc + (t * kK + kx) * ld, AllLanes{});
  }
  const int64_t column = dilation * ld;
  for (int64_t phase = 0; phase < dilation; ++phase) {
    const float* g = grad + phase * ld;
    const float* from[kRows];
#pragma GCC unroll 8
    for (int t = 0; t < kRows; ++t) from[t] = rows[t] + phase * ld;
    for (int64_t segment = 0; segment < segments; ++segment) {
      VecF with[kOut];
#pragma GCC unroll 8
      for (int j = 0; j < kOut; ++j) with[j] = load(g + j * column, AllLanes{});
#pragma GCC unroll 32
      for (int ix = 0; ix < (kOut - 1) * kStride + kK; ++ix) {
#pragma GCC unroll 8
        for (int t = 0; t < kRows; ++t) {
          const VecF v = load(from[t] + ix * column, AllLanes{});
#pragma GCC unroll 8
          for (int j = 0; j < kOut; ++j) {
            const int kx = ix - j * kStride;
            if (kx >= 0 && kx < kK) sum[t][kx] += v * with[j];
          }
        }
      }
      g += kOut * column;
#pragma GCC unroll 8
      for (int t = 0; t < kRows; ++t) from[t] += kOut * kStride * column;
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < kRows; ++t) {
#pragma GCC unroll 8
    for (int kx = 0; kx < kK; ++kx) store(acc + (t * kK + kx) * ld, sum[t][kx], AllLanes{});
  }
}

// Rows of the filter that are done at once: their sums and the gradients of a segment fit into registers, and there are
// enough sums that no multiply-add waits for the one before.
template <int kK>
constexpr int kFilterRows = kK == 3   ? 3
                            : kK == 5 ? 2
                                      : 1;

template <int kK, int kStride>
void correlate_rows(const float* const* rows, const float* grad, int64_t ld, int64_t segments, int64_t dilation,
                    float* acc) {
  constexpr int kRows = kFilterRows<kK>;
  int ky = 0;
  for (; ky + kRows <= kK; ky += kRows) {
    correlate<kK, kStride, kRows>(rows + ky, grad, ld, segments, dilation, acc + ky * kK * ld);
  }
  for (; ky < kK; ++ky) correlate<kK, kStride, 1>(rows + ky, grad, ld, segments, dilation, acc + ky * kK * ld);
}

using CorrelateRows = void (*)(const float* const* rows, const float* grad, int64_t ld, int64_t segments,
                               int64_t dilation, float* acc);

template <int kK>
CorrelateRows correlation(int64_t stride) {
  return stride == 1 ? correlate_rows<kK, 1> : correlate_rows<kK, 2>;
}

// Sums of the weight gradient: float over whole rows with about kTileRows pixels together, double beyond them.
template <typename T>
void correlate_items(const DepthwiseConv2dParams& p, int64_t begin, int64_t end) {
  const Pass pass = with_outputs(forward_pass(p), kCorrelated);
  const CorrelateRows run = p.kernel == 3   ? correlation<3>(p.stride)
                            : p.kernel == 5 ? correlation<5>(p.stride)
                                            : correlation<7>(p.stride);
  const int64_t taps = p.kernel * p.kernel;
  const int64_t ld = held_channels(p, pass.ring * pass.columns);
  const int64_t ring_size = pass.ring * pass.columns * ld;
  Scratch scratch(Scratch::size<float>(ring_size) + Scratch::size<float>(pass.columns * ld) +
                  Scratch::size<float>(pass.result_columns() * ld) + Scratch::size<float>(taps * ld));
  float* ring = scratch.take<float>(ring_size);
  const float* zeros = scratch.take<float>(pass.columns * ld);
  float* grad = scratch.take<float>(pass.result_columns() * ld);
  float* acc = scratch.take<float>(taps * ld);
  for (int64_t item = begin; item < end; ++item) {
    double* partial = p.partial + item * taps * p.channels;
    for (int64_t i = 0; i < taps * p.channels; ++i) partial[i] = 0;
    const int64_t last = lesser((item + 1) * p.units_per_item, p.units);
    for (int64_t i_unit = item * p.units_per_item; i_unit < last; ++i_unit) {
      const Unit unit(p, i_unit, pass.height);
      for (int64_t c0 = 0; c0 < p.channels; c0 += ld) {
        const int64_t channels = lesser(ld, p.channels - c0);
        int64_t summed = 0;  // pixels in acc
        const auto provide = [&](int64_t row, float* to) { read_row<T>(p, p.x, unit, row, c0, channels, to, ld); };
        const auto visit = [&](int64_t r, const float* const* rows, const int64_t*, int) {
          read_row<T>(p, p.y, unit, r, c0, channels, grad, ld);
          for (int64_t c = 0; c < ld; c += kLanes) {
            const float* from[kMaxKernel];
            for (int64_t ky = 0; ky < p.kernel; ++ky) from[ky] = rows[ky] + c;
            run(from, grad + c, ld, pass.segments, p.dilation, acc + c);
          }
          summed += p.y.width;
          if (summed < kTileRows && r + 1 < unit.r1) return;
          for (int64_t t = 0; t < taps; ++t) {
            double* sum = partial + t * p.channels + c0;
            // lanes of missing images and lanes beyond the channels have arbitrary values and are not read
            for (int64_t i = 0; i < unit.images; ++i) {
              const float* part = acc + t * ld + i * p.channels;
              for (int64_t c = 0; c < channels; ++c) sum[c] += part[c];
            }
          }
          memset(acc, 0, taps * ld * sizeof(float));
          summed = 0;
        };
        slide_rows(pass, unit.r0, unit.r1, ld, ring, zeros, provide, visit);
      }
    }
  }
}

void depthwise_conv2d_fwd(const DepthwiseConv2dParams& p, int64_t begin, int64_t end) {
  (p.bfloat16 ? convolve_items<BFloat16> : convolve_items<float>)(p, forward_pass(p), p.x, p.y, begin, end);
}

void depthwise_conv2d_bwd_x(const DepthwiseConv2dParams& p, int64_t begin, int64_t end) {
  // at stride 1 this is the convolution of the gradient with the flipped filter
  const Pass pass =
      make_pass(p.kernel, p.stride, p.dilation, p.stride == 2, p.y.height, p.y.width, p.x.height, p.x.width);
  (p.bfloat16 ? convolve_items<BFloat16> : convolve_items<float>)(p, pass, p.y, p.x, begin, end);
}

void depthwise_conv2d_bwd_weight(const DepthwiseConv2dParams& p, int64_t begin, int64_t end) {
  (p.bfloat16 ? correlate_items<BFloat16> : correlate_items<float>)(p, begin, end);
}

}  // namespace

extern const DepthwiseConv2dKernels kDepthwiseConv2dKernels = {kLanes, depthwise_conv2d_fwd, depthwise_conv2d_bwd_x,
                                                               depthwise_conv2d_bwd_weight};

}  // namespace nasfast::cpu::NASFAST_ISA
