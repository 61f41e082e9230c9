// Kernels of depthwise convolution stages, compiled once per instruction set.
//
// Each row of the input is normalised and activated once and put, as float, into a ring of the last `kernel` rows with
// zeros on either side. The stencil slides along the ring, one vector of channels at a time, with its sums in
// registers. Backward does the same on rows of dy with the transposed stencil. An expansion before the depthwise
// convolution computes the rows where they are needed.

#include "bn_tile.h"
#include "conv_bn_act.h"
#include "gemm.h"
#include "stencil.h"

namespace nasfast::cpu::NASFAST_ISA {
namespace {

Pass chain_pass(const DepthwiseParams& p, bool backward) {
  // backward at stride 1 is forward with flipped weights
  if (!backward) return make_pass(p.kernel, p.stride, 1, false, p.height, p.width, p.out_height, p.out_width);
  return make_pass(p.kernel, p.stride, 1, p.stride == 2, p.out_height, p.out_width, p.height, p.width);
}

// Writes row `row` of one image as the stencil reads it, channels [c0, c0 + channels), to `to`: [pixel][ld] floats.
template <typename T>
inline void provide_input(const DepthwiseParams& p, int64_t image, int64_t row, int64_t c0, int64_t channels, float* to,
                          int64_t ld) {
  const T* x = static_cast<const T*>(p.x.data) + (image * p.height + row) * p.width * p.channels + c0;
  if (!p.x.folded) return copy_tile(x, p.channels, to, ld, p.width, channels);
  by_act(p.x.bn.act, [&](auto act) {
    bn_act_tile<decltype(act), false>(p.x.bn.from(c0), x, static_cast<const T*>(nullptr), p.channels, to, ld, p.width,
                                      channels);
  });
}

// The same from an expansion, all its channels. `a` is memory for the centred row of x.
template <typename T, typename C>
inline void provide_expansion(const DepthwiseParams& p, int64_t image, int64_t row, C* a, int64_t lda, float* to,
                              int64_t ld, Ahead& ahead) {
  const Expansion& e = p.expansion;
  const T* x = static_cast<const T*>(e.x) + (image * p.height + row) * p.width * e.in_channels;
  centre_tile(x, e.center, a, lda, p.width, e.in_channels);
  gemm_tile(a, lda, p.width, static_cast<const C*>(e.weight), e.in_channels, p.channels, ahead,
            [&](int64_t r, int count, int64_t c, const VecF* sum, auto lanes) {
              const VecF bias = load(e.bias + c, lanes);
              const VecF scale = load(e.bn.scale + c, lanes);
              const VecF shift = load(e.bn.shift + c, lanes);
              by_act(e.bn.act, [&](auto act) {
                for_each_row(count, sum, [&](int i, VecF v) {
                  store(to + (r + i) * ld + c, act.value((v + bias) * scale + shift), lanes);
                });
              });
            });
}

// Statistics of one item's results: float sums around a pivot, which are merged into double ones every kTileRows
// pixels.
struct RunningSums {
  float *pivot, *sums, *squares;
  int64_t before;  // pixels that were merged already
  int64_t summed;  // pixels in sums and squares
};

// Vectors of channels that are written together: a cache line, as far as vectors are parts of one. A line that is
// written past the caches in two parts goes to memory twice.
#if defined(__AVX512F__)
constexpr int kLineVectors = 1;
#else
constexpr int kLineVectors = 2;
#endif

// Calls body(c, Count<n>{}, lanes) as for_each_group does, for n of kLineVectors or 1.
template <typename Body>
inline void for_each_line(int64_t channels, const Body& body) {
  int64_t c = 0;
  for (; c + kLineVectors * kLanes <= channels; c += kLineVectors * kLanes) body(c, Count<kLineVectors>{}, AllLanes{});
  if (kLineVectors > 1 && c + kLanes <= channels) {
    body(c, Count<1>{}, AllLanes{});
    c += kLanes;
  }
  if (c < channels) body(c, Count<1>{}, static_cast<int>(channels - c));
}

// Stores a row of results, n vectors of channels wide, and adds it to the sums; `out` is [pixel][n * kLanes] floats.
template <int n, typename T, typename Lanes>
inline void store_and_sum(const float* out, int64_t width, T* y, int64_t ldy, bool streams, const RunningSums& running,
                          int64_t c, Lanes lanes) {
  VecF k[n], s[n], q[n];
  for (int j = 0; j < n; ++j) {
    const int64_t at = c + j * kLanes;
    k[j] = load(running.pivot + at, AllLanes{});
    s[j] = load(running.sums + at, AllLanes{});
    q[j] = load(running.squares + at, AllLanes{});
    if (running.before + running.summed == 0) {
      VecF total{};
      for (int64_t x = 0; x < width; ++x) total += load(out + (x * n + j) * kLanes, AllLanes{});
      k[j] = total * (1.0f / static_cast<float>(width));
      store(running.pivot + at, k[j], AllLanes{});
    }
  }
  for (int64_t x = 0; x < width; ++x) {
    for (int j = 0; j < n; ++j) {
      const VecF sum = load(out + (x * n + j) * kLanes, AllLanes{});
      put(y + x * ldy + j * kLanes, sum, streams, lanes);
      const VecF d = as_stored<T>(sum) - k[j];
      s[j] += d;
      q[j] += d * d;
    }
  }
  for (int j = 0; j < n; ++j) {
    store(running.sums + c + j * kLanes, s[j], AllLanes{});
    store(running.squares + c + j * kLanes, q[j], AllLanes{});
  }
}

template <typename T>
void depthwise_fwd_items(const DepthwiseParams& p, int64_t begin, int64_t end) {
  using C = typename Multiplied<T>::Type;
  const Pass pass = chain_pass(p, false);
  const bool expanded = p.expansion.in_channels > 0;
  const int64_t all = divide_up(p.channels, kLanes) * kLanes;
  const int64_t group = expanded ? all : group_channels(p.channels, pass.kernel * pass.columns);
  const int64_t lda = expanded ? tile_ld<C>(p.expansion.in_channels) : 0;
  const int64_t a_size = tile_rows(p.width) * lda;
  const int64_t ring_size = pass.kernel * pass.columns * group;
  const int64_t out_size = pass.segments * pass.outputs * kLineVectors * kLanes;
  Scratch scratch(Scratch::size<float>(ring_size) + Scratch::size<float>(pass.columns * group) +
                  3 * Scratch::size<float>(group) + Scratch::size<C>(a_size) + Scratch::size<float>(out_size));
  float* ring = scratch.take<float>(ring_size);
  const float* zeros = scratch.take<float>(pass.columns * group);
  RunningSums running{scratch.take<float>(group), scratch.take<float>(group), scratch.take<float>(group), 0, 0};
  C* a = scratch.take<C>(a_size);
  float* out = scratch.take<float>(out_size);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t image = item / p.strips;
    const int64_t r0 = item % p.strips * p.strip_rows;
    const int64_t r1 = lesser(r0 + p.strip_rows, p.out_height);
    for (int64_t c0 = 0; c0 < p.channels; c0 += group) {
      const int64_t channels = lesser(group, p.channels - c0);
      running.before = running.summed = 0;
      const auto provide = [&](int64_t row, float* to) {
        if (expanded) {
          Ahead ahead;  // of the row of the result for which this is the last row
          const int64_t last = row - p.kernel / 2;
          if (!p.streams && last % p.stride == 0) {
            const int64_t pixel = (image * p.out_height + last / p.stride) * p.out_width;
            ahead.add(static_cast<const T*>(p.y.data) + pixel * p.y.ld, p.out_width * p.y.ld);
          }
          return provide_expansion<T>(p, image, row, a, lda, to, group, ahead);
        }
        provide_input<T>(p, image, row, c0, channels, to, group);
      };
      const auto finish = [&](int64_t r, const auto& eval) {
        for_each_line(channels, [&](int64_t c, auto count, auto lanes) {
          constexpr int n = decltype(count)::value;
          for (int j = 0; j < n; ++j) eval(c + j * kLanes, out + j * kLanes, n * kLanes);
          const int64_t pixel = (image * p.out_height + r) * p.out_width;
          T* y = static_cast<T*>(p.y.data) + pixel * p.y.ld + c0 + c;
          if (p.partial) return store_and_sum<n>(out, pass.width, y, p.y.ld, p.streams, running, c, lanes);
          if (p.y.finished) {
            const T* residual = static_cast<const T*>(p.y.residual);
            if (residual) residual += pixel * p.channels + c0 + c;
            return put_finished<n>(p.y.bn.from(c0 + c), residual, p.channels, y, p.y.ld, p.streams, lanes,
                                   [&](const auto& body) {
                                     for (int64_t x = 0; x < pass.width; ++x) {
                                       for (int j = 0; j < n; ++j)
                                         body(x, j, load(out + (x * n + j) * kLanes, AllLanes{}));
                                     }
                                   });
          }
          for (int64_t x = 0; x < pass.width; ++x) {
            for (int j = 0; j < n; ++j) {
              put(y + x * p.y.ld + j * kLanes, load(out + (x * n + j) * kLanes, AllLanes{}), p.streams, lanes);
            }
          }
        });
        running.summed += pass.width;
        if (!p.partial || (running.summed < kTileRows && r + 1 < r1)) return;
        double* mean = p.partial + item * 2 * p.channels + c0;
        merge_sums(running.sums, running.squares, channels, running.summed, running.before, running.pivot, mean,
                   mean + p.channels);
        for (int64_t c = 0; c < group; ++c) running.sums[c] = running.squares[c] = 0;
        running.before += running.summed;
        running.summed = 0;
      };
      slide(pass, r0, r1, group, ring, zeros, p.weight + c0, p.weight_ld, provide, finish);
    }
  }
}

// Writes one row of dy, channels [c0, c0 + channels), into a ring.
template <typename T>
inline void provide_dy(const DepthwiseParams& p, int64_t image, int64_t row, int64_t c0, int64_t channels, float* to,
                       int64_t ld) {
  const int64_t pixel = (image * p.out_height + row) * p.out_width;
  const T* grad = static_cast<const T*>(p.grad.data) + pixel * p.grad.ld + c0;
  const T* y = static_cast<const T*>(p.grad.y) + pixel * p.channels + c0;
  by_act(p.grad.bn.act, [&](auto act) {
    bn_act_bwd_tile<decltype(act)>(p.grad.bn.from(c0), grad, p.grad.ld, y, p.channels, to, ld, p.out_width, channels);
  });
}

// Adds the float sums of `channels` channels to partial [2][ld], and clears all `held` sums: lanes beyond the channels
// have arbitrary values, which may be NaN.
inline void flush_sums(float* sums, float* moments, int64_t channels, int64_t held, double* partial, int64_t ld) {
  for (int64_t c = 0; c < channels; ++c) partial[c] += sums[c];
  for (int64_t c = 0; c < channels; ++c) partial[ld + c] += moments[c];
  memset(sums, 0, held * sizeof(float));
  memset(moments, 0, held * sizeof(float));
}

template <typename T, bool kFolded>
void depthwise_bwd_items(const DepthwiseParams& p, int64_t begin, int64_t end) {
  const Pass pass = chain_pass(p, true);
  const int64_t group = group_channels(p.channels, pass.kernel * pass.columns);
  const int64_t ring_size = pass.kernel * pass.columns * group;
  const int64_t out_size = pass.segments * pass.outputs * kLineVectors * kLanes;
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
        for_each_line(channels, [&](int64_t c, auto count, auto lanes) {
          constexpr int n = decltype(count)::value;
          for (int j = 0; j < n; ++j) eval(c + j * kLanes, out + j * kLanes, n * kLanes);
          const int64_t at = row_at + c;
          T* to = static_cast<T*>(dx.data) + at;
          if constexpr (kFolded) {
            const T* y = static_cast<const T*>(dx.y) + at;
            VecF center[n], scale[n], shift[n], s[n], m[n];
            for (int j = 0; j < n; ++j) {
              center[j] = load(dx.bn.center + c0 + c + j * kLanes, lanes);
              scale[j] = load(dx.bn.scale + c0 + c + j * kLanes, lanes);
              shift[j] = load(dx.bn.shift + c0 + c + j * kLanes, lanes);
              s[j] = load(sums + c + j * kLanes, AllLanes{});
              m[j] = load(moments + c + j * kLanes, AllLanes{});
            }
            by_act(dx.bn.act, [&](auto act) {
              for (int64_t x = 0; x < pass.width; ++x) {
                prefetch(y + x * p.channels + n * kLanes);  // of the next vectors of channels
                for (int j = 0; j < n; ++j) {
                  const int64_t here = x * p.channels + j * kLanes;
                  const VecF d = load(y + here, lanes) - center[j];
                  const VecF sum = load(out + (x * n + j) * kLanes, AllLanes{});
                  const VecF g = act.backward(sum, d * scale[j] + shift[j]);
                  put(to + here, g, p.streams, lanes);
                  s[j] += g;
                  m[j] += g * d;
                }
              }
            });
            for (int j = 0; j < n; ++j) {
              store(sums + c + j * kLanes, s[j], AllLanes{});
              store(moments + c + j * kLanes, m[j], AllLanes{});
            }
          } else {
            const T* added = static_cast<const T*>(dx.added) + (dx.added ? at : 0);
            for (int64_t x = 0; x < pass.width; ++x) {
              for (int j = 0; j < n; ++j) {
                const int64_t here = x * p.channels + j * kLanes;
                VecF v = load(out + (x * n + j) * kLanes, AllLanes{});
                if (added) v += load(added + here, lanes);
                put(to + here, v, p.streams, lanes);
              }
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

// Backward of a depthwise convolution and of the expansion before it. For a panel of channels, the stencil gives da,
// and a product gives xhat again; dz stays in this thread's memory, as input of the product that gives v.
template <typename T>
void expansion_bwd_items(const DepthwiseParams& p, int64_t begin, int64_t end) {
  using C = typename Multiplied<T>::Type;
  const Pass pass = chain_pass(p, true);
  const Expansion& e = p.expansion;
  const int64_t ld = divide_up(p.channels, kLanes) * kLanes;
  const int64_t lda = tile_ld<C>(e.in_channels);
  const int64_t ldz = tile_ld<C>(p.channels);
  const int64_t a_rows = tile_rows(p.width);
  const int64_t ring_size = pass.kernel * pass.columns * ld;
  // the blocks of the product may reach beyond the row
  const int64_t pixels = pass.segments * pass.outputs > a_rows ? pass.segments * pass.outputs : a_rows;
  const int64_t out_size = pixels * kLanes;
  Scratch scratch(Scratch::size<float>(ring_size) + Scratch::size<float>(pass.columns * ld) +
                  2 * Scratch::size<float>(ld) + Scratch::size<float>(kPanelVectors * out_size) +
                  Scratch::size<C>(a_rows * lda) + Scratch::size<C>(a_rows * ldz));
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
      Ahead ahead;  // of the row that the next row of the result needs
      const int64_t next = r + 1 + p.kernel / 2;
      if (next % p.stride == 0) {
        const int64_t pixel = (image * p.out_height + next / p.stride) * p.out_width;
        ahead.add(static_cast<const T*>(p.grad.data) + pixel * p.grad.ld, p.out_width * p.grad.ld);
        ahead.add(static_cast<const T*>(p.grad.y) + pixel * p.channels, p.out_width * p.channels);
        ahead.divide(panel_count(p.channels) * divide_up(p.width, kBlockRows));
      }
      centre_tile(static_cast<const T*>(e.x) + at, e.center, a, lda, p.width, e.in_channels);
      for_each_panel(static_cast<const C*>(e.weight), e.in_channels, p.channels,
                     [&](auto width, int64_t column, const C* b) {
                       constexpr int kWidth = decltype(width)::value;
                       for (int j = 0; j < kWidth; ++j) eval(column + j * kLanes, da + j * out_size);
                       gemm_panel<kWidth>(a, lda, b, e.in_channels, p.width, column, p.channels, ahead,
                                          [&](int64_t row, int count, int64_t c, const VecF* sum, auto lanes) {
                                            const float* from = da + (c - column) / kLanes * out_size + row * kLanes;
                                            const VecF bias = load(e.bias + c, lanes);
                                            const VecF scale = load(e.bn.scale + c, lanes);
                                            const VecF shift = load(e.bn.shift + c, lanes);
                                            VecF s = load(sums + c, AllLanes{});
                                            VecF m = load(moments + c, AllLanes{});
                                            by_act(e.bn.act, [&](auto act) {
                                              for_each_row(count, sum, [&](int i, VecF v) {
                                                const VecF xhat = v + bias;
                                                const VecF da_row = load(from + i * kLanes, AllLanes{});
                                                const VecF g = act.backward(da_row, xhat * scale + shift);
                                                store(dz + (row + i) * ldz + c, g, lanes);
                                                s += g;
                                                m += g * xhat;
                                              });
                                            });
                                            store(sums + c, s, AllLanes{});
                                            store(moments + c, m, AllLanes{});
                                          });
                     });
      T* v = static_cast<T*>(e.v) + (e.v ? at : 0);
      if (v)
        gemm_tile(dz, ldz, p.width, static_cast<const C*>(e.weight_bwd), p.channels, e.in_channels,
                  [&](int64_t row, int count, int64_t c, const VecF* sum, auto lanes) {
                    for_each_row(count, sum,
                                 [&](int i, VecF value) { store(v + (row + i) * e.in_channels + c, value, lanes); });
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
  const TileRegisters tiles;
  (p.bfloat16 ? depthwise_fwd_items<BFloat16> : depthwise_fwd_items<float>)(p, begin, end);
  if (p.streams) finish_streams();
}

template <typename T>
void depthwise_bwd(const DepthwiseParams& p, int64_t begin, int64_t end) {
  if (p.expansion.in_channels) return expansion_bwd_items<T>(p, begin, end);
  (p.dx.folded ? depthwise_bwd_items<T, true> : depthwise_bwd_items<T, false>)(p, begin, end);
}

void depthwise_bwd(const DepthwiseParams& p, int64_t begin, int64_t end) {
  const TileRegisters tiles;
  (p.bfloat16 ? depthwise_bwd<BFloat16> : depthwise_bwd<float>)(p, begin, end);
  if (p.streams) finish_streams();
}

}  // namespace

extern const DepthwiseKernels kDepthwiseKernels = {depthwise_fwd, depthwise_bwd};

}  // namespace nasfast::cpu::NASFAST_ISA
