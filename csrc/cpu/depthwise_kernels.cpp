// Kernels of depthwise convolution stages, compiled once per instruction set.
//
// Rows of the input are normalised and activated once, as float, into a ring of the last `kernel` rows with zeros on either
// side; the stencil slides along it with its sums in registers, a vector of channels at a time. Backward runs the same way
// on rows of dy with the transposed stencil. The rows may also come from an expansion computed on the spot.

#include "bn_tile.h"
#include "conv_bn_act.h"
#include "gemm.h"

namespace nasfast::cpu::NASFAST_ISA {
namespace {

// Bytes of a ring: with the rows of the tensors that are read beside it, it shall stay in a 1 MiB second-level cache.
constexpr int64_t kRingBytes = 192 * 1024;
constexpr int kMaxKernel = 7;

// kOut neighbouring outputs of a kK x kK stencil. rows: the taps' rows, from the first column this segment reads on;
// weights: kK vectors of channels each, ld apart.
// Forward (and backward at stride 1, with flipped weights): out[j] = sum over kx of row[j * stride + kx] w[kx].
template <int kK, int kStride, int kOut>
inline void stencil(const float* const* rows, const float* const* weights, int64_t ld, int64_t ldw, VecF* sum) {
#pragma GCC unroll 8
  for (int j = 0; j < kOut; ++j) sum[j] = VecF{};
  for (int ky = 0; ky < kK; ++ky) {
    const float* row = rows[ky];
    VecF w[kK];
#pragma GCC unroll 7
    for (int kx = 0; kx < kK; ++kx) w[kx] = load(weights[ky] + kx * ldw, AllLanes{});
#pragma GCC unroll 32
    for (int ix = 0; ix < (kOut - 1) * kStride + kK; ++ix) {
      const VecF v = load(row + ix * ld, AllLanes{});
#pragma GCC unroll 8
      for (int j = 0; j < kOut; ++j) {
        const int kx = ix - j * kStride;
        if (kx >= 0 && kx < kK) sum[j] += v * w[kx];
      }
    }
  }
}

// Backward at stride 2, kOut even: out[j] = sum of row[(j + p - kx) / 2] w[kx] over the kx for which that is whole, and over
// the given rows, those whose ky fits the row of the output. Rows start p / 2 columns before the segment's first.
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

// A row of `segments` segments, kLanes channels wide, into out [segments * kOut][kLanes].
template <int kK, int kStride, bool kTransposed, int kOut>
void stencil_row(const float* const* rows, const float* const* weights, int taps, int64_t ld, int64_t ldw, int64_t segments,
                 float* out) {
  const float* from[kK];
  for (int t = 0; t < taps; ++t) from[t] = rows[t];
  for (int64_t segment = 0; segment < segments; ++segment) {
    VecF sum[kOut];
    if constexpr (kTransposed) {
      stencil_transposed<kK, kOut>(from, weights, taps, ld, ldw, sum);
    } else {
      stencil<kK, kStride, kOut>(from, weights, ld, ldw, sum);
    }
#pragma GCC unroll 16
    for (int j = 0; j < kOut; ++j) store(out + (segment * kOut + j) * kLanes, sum[j], AllLanes{});
    const int64_t step = (kTransposed ? kOut / 2 : kOut * kStride) * ld;
    for (int t = 0; t < taps; ++t) from[t] += step;
  }
}

using StencilRow = void (*)(const float* const* rows, const float* const* weights, int taps, int64_t ld, int64_t ldw,
                            int64_t segments, float* out);

// One pass of a stencil over an image: from a source of source_height x source_width to a result of height x width.
struct Pass {
  int64_t source_height, source_width, height, width;
  int64_t kernel, stride;
  bool transposed;   // the stencil of backward at stride 2
  int64_t outputs;   // per segment
  int64_t segments;  // per row of the result
  int64_t halo;      // columns of zeros before the first of a source row
  int64_t columns;   // of a source row, zeros included
  StencilRow run;

  // source rows first .. last that row r of the result reads, before clipping to the image
  int64_t last_source(int64_t r) const { return transposed ? (r + kernel / 2) / 2 : r * stride - kernel / 2 + kernel - 1; }
  int64_t first_source(int64_t r) const {
    // the smallest row s with r + kernel / 2 - 2 s < kernel
    return transposed ? (r < kernel / 2 ? 0 : (r - kernel / 2 + 1) / 2) : r * stride - kernel / 2;
  }
};

template <int kK, int kStride, bool kTransposed>
Pass make_pass(Pass pass) {
  // maps of 224 x 224 images are multiples of 7 wide, those of 32 x 32 images multiples of 4
  constexpr int a = kTransposed ? 14 : 7;
  constexpr int b = kTransposed ? 8 : 4;
  const bool first = divide_up(pass.width, a) * a <= divide_up(pass.width, b) * b;
  pass.outputs = first ? a : b;
  pass.run = first ? stencil_row<kK, kStride, kTransposed, a> : stencil_row<kK, kStride, kTransposed, b>;
  return pass;
}

template <int kK>
Pass make_pass(const Pass& pass) {
  if (pass.transposed) return make_pass<kK, 2, true>(pass);
  return pass.stride == 1 ? make_pass<kK, 1, false>(pass) : make_pass<kK, 2, false>(pass);
}

Pass make_pass(const DepthwiseParams& p, bool backward) {
  Pass pass{};
  pass.kernel = p.kernel;
  // backward at stride 1 is forward with flipped weights
  pass.stride = p.stride;
  pass.transposed = backward && p.stride == 2;
  pass.source_height = backward ? p.out_height : p.height;
  pass.source_width = backward ? p.out_width : p.width;
  pass.height = backward ? p.height : p.out_height;
  pass.width = backward ? p.width : p.out_width;
  pass = p.kernel == 3 ? make_pass<3>(pass) : p.kernel == 5 ? make_pass<5>(pass) : make_pass<7>(pass);
  pass.segments = divide_up(pass.width, pass.outputs);
  const int64_t half = p.kernel / 2;
  pass.halo = pass.transposed ? half / 2 : half;
  const int64_t last = pass.segments * pass.outputs - 1;  // column of the result, surplus ones included
  const int64_t read = pass.transposed ? (last + half) / 2 + half / 2 + 1 : last * pass.stride + p.kernel;
  const int64_t held = pass.source_width + 2 * pass.halo;
  pass.columns = read > held ? read : held;
  return pass;
}

// Runs result rows [r0, r1) of one image, for channels that are ld apart in the source.
//   provide(row, to): writes source row `row`, width x ld, to `to`
//   finish(r, eval): does result row r; eval(c, out) writes the vector of channels at c to out, [pixel][kLanes]
// ring has `kernel` rows of columns * ld floats, zero before the first call; zeros is one such row.
template <typename Provide, typename Finish>
inline void slide(const Pass& pass, int64_t r0, int64_t r1, int64_t ld, float* ring, const float* zeros, const float* weight,
                  int64_t ldw, const Provide& provide, const Finish& finish) {
  const int64_t slot = pass.columns * ld;
  int64_t next = pass.first_source(r0) < 0 ? 0 : pass.first_source(r0);
  for (int64_t r = r0; r < r1; ++r) {
    const int64_t last = lesser(pass.last_source(r), pass.source_height - 1);
    for (; next <= last; ++next) provide(next, ring + next % pass.kernel * slot + pass.halo * ld);
    const float* rows[kMaxKernel];
    const float* weights[kMaxKernel];
    int taps = 0;
    for (int64_t ky = 0; ky < pass.kernel; ++ky) {
      int64_t source = pass.first_source(r) + ky;
      if (pass.transposed) {
        const int64_t doubled = r + pass.kernel / 2 - ky;
        if (doubled % 2 != 0) continue;
        source = doubled / 2;
      }
      const bool inside = source >= 0 && source < pass.source_height;
      rows[taps] = inside ? ring + source % pass.kernel * slot : zeros;
      weights[taps++] = weight + ky * pass.kernel * ldw;
    }
    finish(r, [&](int64_t c, float* out) {
      const float* from[kMaxKernel];
      const float* with[kMaxKernel];
      for (int t = 0; t < taps; ++t) {
        from[t] = rows[t] + c;
        with[t] = weights[t] + c;
      }
      pass.run(from, with, taps, ld, ldw, pass.segments, out);
    });
  }
}

// Channels per group: whole vectors, as many as keep the ring within kRingBytes.
inline int64_t group_channels(int64_t channels, int64_t ring_columns) {
  const int64_t fitting = kRingBytes / (ring_columns * static_cast<int64_t>(sizeof(float))) / kLanes * kLanes;
  const int64_t all = divide_up(channels, kLanes) * kLanes;
  if (fitting >= all) return all;
  const int64_t most = fitting < kLanes ? kLanes : fitting;
  // groups of equal size
  return divide_up(divide_up(all, divide_up(all, most)), kLanes) * kLanes;
}

// A is the activation of the stage before (of the expansion, where there is one).
template <typename T, typename A>
void depthwise_fwd_items(const DepthwiseParams& p, int64_t begin, int64_t end) {
  using C = typename Multiplied<T>::Type;
  const Pass pass = make_pass(p, false);
  const bool expanded = p.expansion.in_channels > 0;
  const int64_t all = divide_up(p.channels, kLanes) * kLanes;
  const int64_t group = expanded ? all : group_channels(p.channels, pass.kernel * pass.columns);
  const int64_t lda = expanded ? tile_ld<C>(p.expansion.in_channels) : 0;
  const int64_t a_size = tile_rows(p.width) * lda;
  const int64_t ring_size = pass.kernel * pass.columns * group;
  const int64_t out_size = pass.segments * pass.outputs * kLanes;
  Scratch scratch(Scratch::size<float>(ring_size) + Scratch::size<float>(pass.columns * group) +
                  3 * Scratch::size<float>(group) + Scratch::size<C>(a_size) + Scratch::size<float>(out_size));
  float* ring = scratch.take<float>(ring_size);
  const float* zeros = scratch.take<float>(pass.columns * group);
  float* pivot = scratch.take<float>(group);
  float* sums = scratch.take<float>(group);
  float* squares = scratch.take<float>(group);
  C* a = scratch.take<C>(a_size);
  float* out = scratch.take<float>(out_size);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t image = item / p.strips;
    const int64_t r0 = item % p.strips * p.strip_rows;
    const int64_t r1 = lesser(r0 + p.strip_rows, p.out_height);
    for (int64_t c0 = 0; c0 < p.channels; c0 += group) {
      const int64_t channels = lesser(group, p.channels - c0);
      int64_t before = 0;  // pixels in the partial statistics
      int64_t summed = 0;  // pixels in sums and squares
      const auto provide = [&](int64_t row, float* to) {
        if (expanded) {
          const T* x = static_cast<const T*>(p.expansion.x) + (image * p.height + row) * p.width * p.expansion.in_channels;
          const Expansion& e = p.expansion;
          centre_tile(x, e.center, a, lda, p.width, e.in_channels);
          gemm_tile(a, lda, p.width, static_cast<const C*>(e.weight), e.in_channels, channels,
                    [&](int64_t r, int count, int64_t c, const VecF* sum, auto lanes) {
            const VecF bias = load(e.bias + c, lanes);
            const VecF scale = load(e.bn.scale + c, lanes);
            const VecF shift = load(e.bn.shift + c, lanes);
            for_each_row(count, sum, [&](int i, VecF v) {
              store(to + (r + i) * group + c, A::value((v + bias) * scale + shift), lanes);
            });
          });
          return;
        }
        const T* x = static_cast<const T*>(p.x.data) + (image * p.height + row) * p.width * p.channels + c0;
        if (p.x.folded) {
          const BnFold& bn = p.x.bn;
          const BnFold here = {bn.center + c0, bn.scale + c0, bn.shift + c0, nullptr, nullptr, bn.act};
          bn_act_tile<A, false>(here, x, static_cast<const T*>(nullptr), p.channels, to, group, p.width, channels);
        } else {
          copy_tile(x, p.channels, to, group, p.width, channels);
        }
      };
      const auto finish = [&](int64_t r, const auto& eval) {
        for_each_vector(channels, [&](int64_t c, auto lanes) {
          eval(c, out);
          T* y = static_cast<T*>(p.y) + (image * p.out_height + r) * p.out_width * p.channels + c0 + c;
          if (!p.partial) {
            for (int64_t x = 0; x < pass.width; ++x) {
              put(y + x * p.channels, load(out + x * kLanes, AllLanes{}), p.streams, lanes);
            }
            return;
          }
          VecF k = load(pivot + c, AllLanes{});
          VecF s = load(sums + c, AllLanes{});
          VecF q = load(squares + c, AllLanes{});
          if (before + summed == 0) {
            VecF total{};
            for (int64_t x = 0; x < pass.width; ++x) total += load(out + x * kLanes, AllLanes{});
            k = total * (1.0f / static_cast<float>(pass.width));
            store(pivot + c, k, AllLanes{});
          }
          for (int64_t x = 0; x < pass.width; ++x) {
            const VecF sum = load(out + x * kLanes, AllLanes{});
            put(y + x * p.channels, sum, p.streams, lanes);
            const VecF d = as_stored<T>(sum) - k;
            s += d;
            q += d * d;
          }
          store(sums + c, s, AllLanes{});
          store(squares + c, q, AllLanes{});
        });
        summed += pass.width;
        if (!p.partial || (summed < kTileRows && r + 1 < r1)) return;
        double* mean = p.partial + item * 2 * p.channels + c0;
        merge_sums(sums, squares, channels, summed, before, pivot, mean, mean + p.channels);
        for (int64_t c = 0; c < group; ++c) sums[c] = squares[c] = 0;
        before += summed;
        summed = 0;
      };
      slide(pass, r0, r1, group, ring, zeros, p.weight + c0, p.weight_ld, provide, finish);
    }
  }
}

// One row of dy, channels [c0, c0 + channels), into a ring.
template <typename T>
inline void provide_dy(const DepthwiseParams& p, int64_t image, int64_t row, int64_t c0, int64_t channels, float* to,
                       int64_t ld) {
  const int64_t pixel = (image * p.out_height + row) * p.out_width;
  const BnFold& bn = p.grad.bn;
  const BnFold here = {bn.center + c0, bn.scale + c0, bn.shift + c0, bn.slope + c0, bn.offset + c0, bn.act};
  const T* grad = static_cast<const T*>(p.grad.data) + pixel * p.grad.ld + c0;
  const T* y = static_cast<const T*>(p.grad.y) + pixel * p.channels + c0;
  by_act(bn.act, [&](auto act) {
    bn_act_bwd_tile<decltype(act)>(here, grad, p.grad.ld, y, p.channels, to, ld, p.out_width, channels);
    return 0;
  });
}

// Adds the float sums of `channels` channels to partial [2][ld], and clears all `held`: lanes beyond the channels hold
// whatever their vectors did, perhaps NaN.
inline void flush_sums(float* sums, float* moments, int64_t channels, int64_t held, double* partial, int64_t ld) {
  for (int64_t c = 0; c < channels; ++c) partial[c] += sums[c];
  for (int64_t c = 0; c < channels; ++c) partial[ld + c] += moments[c];
  memset(sums, 0, held * sizeof(float));
  memset(moments, 0, held * sizeof(float));
}

// A is the activation of the stage before, if kFolded.
template <typename T, typename A, bool kFolded>
void depthwise_bwd_items(const DepthwiseParams& p, int64_t begin, int64_t end) {
  const Pass pass = make_pass(p, true);
  const int64_t group = group_channels(p.channels, pass.kernel * pass.columns);
  const int64_t ring_size = pass.kernel * pass.columns * group;
  const int64_t out_size = pass.segments * pass.outputs * kLanes;
  Scratch scratch(Scratch::size<float>(ring_size) + Scratch::size<float>(pass.columns * group) +
                  2 * Scratch::size<float>(group) + Scratch::size<float>(out_size));
  float* ring = scratch.take<float>(ring_size);
  const float* zeros = scratch.take<float>(pass.columns * group);
  float* sums = scratch.take<float>(group);
  float* moments = scratch.take<float>(group);
  float* out = scratch.take<float>(out_size);
  const StageInputGrad& dx = p.dx;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t image = item / p.strips;
    const int64_t r0 = item % p.strips * p.strip_rows;
    const int64_t r1 = lesser(r0 + p.strip_rows, p.height);
    double* partial = kFolded ? dx.partial + item * 2 * p.channels : nullptr;
    for (int64_t i = 0; kFolded && i < 2 * p.channels; ++i) partial[i] = 0;
    for (int64_t c0 = 0; c0 < p.channels; c0 += group) {
      const int64_t channels = lesser(group, p.channels - c0);
      int64_t summed = 0;  // pixels in sums and moments
      const auto provide = [&](int64_t row, float* to) { provide_dy<T>(p, image, row, c0, channels, to, group); };
      const auto finish = [&](int64_t r, const auto& eval) {
        const int64_t row_at = (image * p.height + r) * p.width * p.channels + c0;
        for_each_vector(channels, [&](int64_t c, auto lanes) {
          eval(c, out);
          const int64_t at = row_at + c;
          T* to = static_cast<T*>(dx.data) + at;
          if constexpr (kFolded) {
            const T* y = static_cast<const T*>(dx.y) + at;
            const VecF center = load(dx.bn.center + c0 + c, lanes);
            const VecF scale = load(dx.bn.scale + c0 + c, lanes);
            const VecF shift = load(dx.bn.shift + c0 + c, lanes);
            VecF s = load(sums + c, AllLanes{});
            VecF m = load(moments + c, AllLanes{});
            for (int64_t x = 0; x < pass.width; ++x) {
              const VecF d = load(y + x * p.channels, lanes) - center;
              const VecF g = A::backward(load(out + x * kLanes, AllLanes{}), d * scale + shift);
              put(to + x * p.channels, g, p.streams, lanes);
              s += g;
              m += g * d;
            }
            store(sums + c, s, AllLanes{});
            store(moments + c, m, AllLanes{});
          } else {
            const T* added = static_cast<const T*>(dx.added) + (dx.added ? at : 0);
            for (int64_t x = 0; x < pass.width; ++x) {
              VecF v = load(out + x * kLanes, AllLanes{});
              if (added) v += load(added + x * p.channels, lanes);
              put(to + x * p.channels, v, p.streams, lanes);
            }
          }
        });
        summed += p.width;
        if (kFolded && (summed >= kTileRows || r + 1 == r1)) {
          flush_sums(sums, moments, channels, group, partial + c0, p.channels);
          summed = 0;
        }
      };
      slide(pass, r0, r1, group, ring, zeros, p.weight + c0, p.weight_ld, provide, finish);
    }
  }
}

// The depthwise convolution's backward and that of the expansion before it, whose activation is A: for a panel of channels
// the stencil gives da, a product gives xhat again, and dz stays here as the input of the product that gives v.
template <typename T, typename A>
void expansion_bwd_items(const DepthwiseParams& p, int64_t begin, int64_t end) {
  using C = typename Multiplied<T>::Type;
  const Pass pass = make_pass(p, true);
  const Expansion& e = p.expansion;
  const int64_t ld = divide_up(p.channels, kLanes) * kLanes;
  const int64_t lda = tile_ld<C>(e.in_channels);
  const int64_t ldz = tile_ld<C>(p.channels);
  const int64_t a_rows = tile_rows(p.width);
  const int64_t ring_size = pass.kernel * pass.columns * ld;
  // blocks of the product may go beyond the row
  const int64_t pixels = pass.segments * pass.outputs > a_rows ? pass.segments * pass.outputs : a_rows;
  const int64_t out_size = pixels * kLanes;
  Scratch scratch(Scratch::size<float>(ring_size) + Scratch::size<float>(pass.columns * ld) + 2 * Scratch::size<float>(ld) +
                  Scratch::size<float>(kPanelVectors * out_size) + Scratch::size<C>(a_rows * lda) +
                  Scratch::size<C>(a_rows * ldz));
  float* ring = scratch.take<float>(ring_size);
  const float* zeros = scratch.take<float>(pass.columns * ld);
  float* sums = scratch.take<float>(ld);
  float* moments = scratch.take<float>(ld);
  float* da = scratch.take<float>(kPanelVectors * out_size);
  C* a = scratch.take<C>(a_rows * lda);
  C* dz = scratch.take<C>(a_rows * ldz);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t image = item / p.strips;
    const int64_t r0 = item % p.strips * p.strip_rows;
    const int64_t r1 = lesser(r0 + p.strip_rows, p.height);
    double* partial = p.dx.partial + item * 2 * p.channels;
    for (int64_t i = 0; i < 2 * p.channels; ++i) partial[i] = 0;
    int64_t summed = 0;
    const auto provide = [&](int64_t row, float* to) { provide_dy<T>(p, image, row, 0, p.channels, to, ld); };
    const auto finish = [&](int64_t r, const auto& eval) {
      const int64_t at = (image * p.height + r) * p.width * e.in_channels;
      centre_tile(static_cast<const T*>(e.x) + at, e.center, a, lda, p.width, e.in_channels);
      for_each_panel(static_cast<const C*>(e.weight), e.in_channels, p.channels, [&](auto width, int64_t column, const C* b) {
        constexpr int kWidth = decltype(width)::value;
        for (int j = 0; j < kWidth; ++j) eval(column + j * kLanes, da + j * out_size);
        gemm_panel<kWidth>(a, lda, b, e.in_channels, p.width, column, p.channels,
                           [&](int64_t row, int count, int64_t c, const VecF* sum, auto lanes) {
          const float* from = da + (c - column) / kLanes * out_size + row * kLanes;
          const VecF bias = load(e.bias + c, lanes);
          const VecF scale = load(e.bn.scale + c, lanes);
          const VecF shift = load(e.bn.shift + c, lanes);
          VecF s = load(sums + c, AllLanes{});
          VecF m = load(moments + c, AllLanes{});
          for_each_row(count, sum, [&](int i, VecF v) {
            const VecF xhat = v + bias;
            const VecF g = A::backward(load(from + i * kLanes, AllLanes{}), xhat * scale + shift);
            store(dz + (row + i) * ldz + c, g, lanes);
            s += g;
            m += g * xhat;
          });
          store(sums + c, s, AllLanes{});
          store(moments + c, m, AllLanes{});
        });
      });
      T* v = static_cast<T*>(e.v) + (e.v ? at : 0);
      if (v) gemm_tile(dz, ldz, p.width, static_cast<const C*>(e.weight_bwd), p.channels, e.in_channels,
                [&](int64_t row, int count, int64_t c, const VecF* sum, auto lanes) {
        for_each_row(count, sum, [&](int i, VecF value) { store(v + (row + i) * e.in_channels + c, value, lanes); });
      });
      summed += p.width;
      if (summed >= kTileRows || r + 1 == r1) {
        flush_sums(sums, moments, p.channels, ld, partial, p.channels);
        summed = 0;
      }
    };
    slide(pass, r0, r1, ld, ring, zeros, p.weight, p.weight_ld, provide, finish);
  }
}

void depthwise_fwd(const DepthwiseParams& p, int64_t begin, int64_t end) {
  const Act act = p.expansion.in_channels ? p.expansion.bn.act : p.x.folded ? p.x.bn.act : Act::kIdentity;
  by_type(p.bfloat16, act, [](auto t, auto a) { return depthwise_fwd_items<decltype(t), decltype(a)>; })(p, begin, end);
  if (p.streams) finish_streams();
}

void depthwise_bwd(const DepthwiseParams& p, int64_t begin, int64_t end) {
  if (p.expansion.in_channels) {
    const Act act = p.expansion.bn.act;
    by_type(p.bfloat16, act, [](auto t, auto a) { return expansion_bwd_items<decltype(t), decltype(a)>; })(p, begin, end);
  } else if (p.dx.folded) {
    const Act act = p.dx.bn.act;
    by_type(p.bfloat16, act, [](auto t, auto a) { return depthwise_bwd_items<decltype(t), decltype(a), true>; })(p, begin, end);
  } else {
    (p.bfloat16 ? depthwise_bwd_items<BFloat16, Identity, false> : depthwise_bwd_items<float, Identity, false>)(p, begin, end);
  }
  if (p.streams) finish_streams();
}

}  // namespace

extern const DepthwiseKernels kDepthwiseKernels = {depthwise_fwd, depthwise_bwd};

}  // namespace nasfast::cpu::NASFAST_ISA
