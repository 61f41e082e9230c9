// Kernels of pointwise and dense convolution stages, compiled once per instruction set.
//
// A tile of kTileRows pixels goes through all steps of a stage while it is in the cache: it is normalised and activated
// into A, multiplied, written once, and added to the statistics.

#include "bn_tile.h"
#include "conv_bn_act.h"
#include "gemm.h"

namespace nasfast::cpu::NASFAST_ISA {
namespace {

// Copies `count` elements. The last vector overlaps the one before it, as a partial vector takes several times as long.
template <typename T>
inline void copy_run(const T* from, T* to, int64_t count) {
  const auto copy = [&](int64_t i, auto lanes) { store(to + i, load(from + i, lanes), lanes); };
  if (count < kLanes) return for_each_vector(count, copy);
  for (int64_t i = 0; i + kLanes < count; i += kLanes) copy(i, AllLanes{});
  copy(count - kLanes, AllLanes{});
}

// Gathers the patches of the output pixels [row, row + rows) of a dense convolution, with zeros outside the image.
template <typename T>
void gather_patches(const PointwiseParams& p, int64_t row, int64_t rows, T* patches, int64_t ld) {
  const T* x = static_cast<const T*>(p.x.data);
  const int64_t run = p.kernel * p.in_channels;
  const int64_t plane = p.out_height * p.out_width;
  int64_t image = row / plane;
  int64_t oy = row % plane / p.out_width;
  int64_t ox = row % p.out_width;
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t x0 = ox * p.stride - p.padding;
    // the taps [0, left) are before the left edge of the image, and [left, inside) are inside it
    const int64_t left = x0 < 0 ? lesser(-x0, p.kernel) : 0;
    const int64_t inside = lesser(p.kernel, p.width - x0);
    for (int64_t ky = 0; ky < p.kernel; ++ky) {
      T* to = patches + r * ld + ky * run;
      const int64_t iy = oy * p.stride - p.padding + ky;
      const bool outside = iy < 0 || iy >= p.height || inside <= left;
      const int64_t begin = outside ? run : left * p.in_channels;
      const int64_t end = outside ? run : inside * p.in_channels;
      for (int64_t i = 0; i < begin; ++i) to[i] = T{};
      if (!outside) {
        const T* from = x + ((image * p.height + iy) * p.width + x0) * p.in_channels;
        copy_run(from + begin, to + begin, end - begin);
      }
      for (int64_t i = end; i < run; ++i) to[i] = T{};
    }
    if (++ox == p.out_width) {
      ox = 0;
      if (++oy == p.out_height) {
        oy = 0;
        ++image;
      }
    }
  }
}

// Gathers patches into a tile of A: through `patches`, which has memory for them, where A has another type.
template <typename T>
inline void gather_tile(const PointwiseParams& p, int64_t row, int64_t rows, T*, T* a, int64_t lda) {
  gather_patches(p, row, rows, a, lda);
}

template <typename T, typename C>
inline void gather_tile(const PointwiseParams& p, int64_t row, int64_t rows, T* patches, C* a, int64_t lda) {
  const int64_t depth = p.kernel * p.kernel * p.in_channels;
  gather_patches(p, row, rows, patches, depth);
  copy_tile(patches, depth, a, lda, rows, depth);
}

// Whether a product reads rows of x where they lie: they have its type, fill its blocks, and do not share the sets of a
// cache (see `tile_ld`).
template <typename T, typename C>
inline bool reads_in_place(const PointwiseParams& p, int64_t rows) {
  constexpr int64_t kSize = sizeof(C);
  return __is_same(T, C) && rows % kRowMultiple == 0 && p.in_channels % Packing<C>::kMultiple == 0 &&
         p.in_channels * kSize % 2048 != 0;
}

// Whether a product asks for the memory of the next tile.
template <typename T>
inline bool asks_ahead(const PointwiseParams& p) {
  return p.rows * (p.in_channels + p.out_channels) * static_cast<int64_t>(sizeof(T)) >= kAheadBytes;
}

template <typename T>
void pointwise_fwd_items(const PointwiseParams& p, int64_t begin, int64_t end) {
  using C = typename Multiplied<T>::Type;
  const int64_t depth = p.in_channels * p.kernel * p.kernel;
  const int64_t lda = tile_ld<C>(depth);
  const int64_t padded = divide_up(p.out_channels, kLanes) * kLanes;
  const bool gathers = p.kernel > 1 || p.stride > 1;
  const int64_t patches_size = gathers ? kTileRows * depth : 0;
  Scratch scratch(Scratch::size<C>(kTileRows * lda) + Scratch::size<T>(patches_size) +
                  3 * Scratch::size<float>(padded));
  C* a = scratch.take<C>(kTileRows * lda);
  T* patches = scratch.take<T>(patches_size);
  float* pivot = scratch.take<float>(padded);
  float* sums = scratch.take<float>(padded);
  float* squares = scratch.take<float>(padded);
  const C* weight = static_cast<const C*>(p.weight);
  for (int64_t item = begin; item < end; ++item) {
    for_each_tile(p, item, [&](int64_t row, int64_t rows) {
      const T* x = static_cast<const T*>(p.x.data) + row * p.in_channels;
      const C* left = a;
      int64_t ld = lda;
      if (gathers) {
        gather_tile(p, row, rows, patches, a, lda);
      } else if (p.x.folded) {
        by_act(p.x.bn.act, [&](auto act) {
          bn_act_tile<decltype(act), false>(p.x.bn, x, static_cast<const T*>(nullptr), p.in_channels, a, lda, rows,
                                            p.in_channels);
        });
      } else if (reads_in_place<T, C>(p, rows)) {
        left = reinterpret_cast<const C*>(x);
        ld = p.in_channels;
      } else {
        copy_tile(x, p.in_channels, a, lda, rows, p.in_channels);
      }
      T* y = static_cast<T*>(p.y.data) + row * p.y.ld;
      const T* residual = static_cast<const T*>(p.y.residual) + (p.y.residual ? row * p.out_channels : 0);
      const int64_t before = row - item * p.item_rows;
      Ahead ahead;
      if (asks_ahead<T>(p)) {
        if (!gathers) ahead.add(x + rows * p.in_channels, rows * p.in_channels);
        if (!p.streams) ahead.add(y + rows * p.y.ld, rows * p.y.ld);
      }
      gemm_tile(left, ld, rows, weight, depth, p.out_channels, ahead,
                [&](int64_t r, int count, int64_t c, const VecF* sum, auto lanes) {
                  T* to = y + r * p.y.ld + c;
                  if (p.y.finished) {
                    const T* added = residual + (residual ? r * p.out_channels + c : 0);
                    put_finished<1>(
                        p.y.bn.from(c), added, p.out_channels, to, p.y.ld, p.streams, lanes,
                        [&](const auto& body) { for_each_row(count, sum, [&](int i, VecF v) { body(i, 0, v); }); });
                    return;
                  }
                  if (!p.partial) {
                    for_each_row(count, sum, [&](int i, VecF v) { put(to + i * p.y.ld, v, p.streams, lanes); });
                    return;
                  }
                  VecF s = load(sums + c, AllLanes{});
                  VecF q = load(squares + c, AllLanes{});
                  if (before + r == 0) {
                    VecF total{};
                    for_each_row(count, sum, [&](int, VecF v) { total += v; });
                    store(pivot + c, total * (1.0f / static_cast<float>(count)), AllLanes{});
                  }
                  const VecF k = load(pivot + c, AllLanes{});
                  for_each_row(count, sum, [&](int i, VecF v) {
                    put(to + i * p.y.ld, v, p.streams, lanes);
                    const VecF d = as_stored<T>(v) - k;
                    s += d;
                    q += d * d;
                  });
                  store(sums + c, s, AllLanes{});
                  store(squares + c, q, AllLanes{});
                });
      if (p.partial) {
        double* mean = p.partial + item * 2 * p.out_channels;
        merge_sums(sums, squares, p.out_channels, rows, before, pivot, mean, mean + p.out_channels);
        for (int64_t c = 0; c < padded; ++c) sums[c] = squares[c] = 0;
      }
    });
  }
}

// dx = W^T dy
template <typename T, bool kFolded>
void pointwise_bwd_items(const PointwiseParams& p, int64_t begin, int64_t end) {
  using C = typename Multiplied<T>::Type;
  const int64_t lda = tile_ld<C>(p.out_channels);
  const int64_t padded = divide_up(p.in_channels, kLanes) * kLanes;
  Scratch scratch(Scratch::size<C>(kTileRows * lda) + 2 * Scratch::size<float>(padded));
  C* a = scratch.take<C>(kTileRows * lda);
  float* sums = scratch.take<float>(padded);
  float* moments = scratch.take<float>(padded);
  const C* weight = static_cast<const C*>(p.weight);
  const StageInputGrad& dx = p.dx;
  for (int64_t item = begin; item < end; ++item) {
    for (int64_t i = 0; kFolded && i < 2 * p.in_channels; ++i) dx.partial[item * 2 * p.in_channels + i] = 0;
    for_each_tile(p, item, [&](int64_t row, int64_t rows) {
      const int64_t at_out = row * p.out_channels;
      const int64_t at_in = row * p.in_channels;
      const T* grad = static_cast<const T*>(p.grad.data) + row * p.grad.ld;
      by_act(p.grad.bn.act, [&](auto act) {
        bn_act_bwd_tile<decltype(act)>(p.grad.bn, grad, p.grad.ld, static_cast<const T*>(p.grad.y) + at_out,
                                       p.out_channels, a, lda, rows, p.out_channels);
      });
      T* out = static_cast<T*>(dx.data) + at_in;
      const T* y = static_cast<const T*>(dx.y) + (dx.folded ? at_in : 0);
      const T* added = static_cast<const T*>(dx.added) + (dx.added ? at_in : 0);
      Ahead ahead;
      if (asks_ahead<T>(p)) {
        const int64_t next_out = rows * p.out_channels, next_in = rows * p.in_channels;
        ahead.add(grad + rows * p.grad.ld, rows * p.grad.ld);
        ahead.add(static_cast<const T*>(p.grad.y) + at_out + next_out, next_out);
        ahead.add(y ? y + next_in : nullptr, next_in);
        ahead.add(added ? added + next_in : nullptr, next_in);
        if (!p.streams) ahead.add(out + next_in, next_in);
      }
      gemm_tile(a, lda, rows, weight, p.out_channels, p.in_channels, ahead,
                [&](int64_t r, int count, int64_t c, const VecF* sum, auto lanes) {
                  const int64_t at = r * p.in_channels + c;
                  if constexpr (kFolded) {
                    const VecF center = load(dx.bn.center + c, lanes);
                    const VecF scale = load(dx.bn.scale + c, lanes);
                    const VecF shift = load(dx.bn.shift + c, lanes);
                    VecF s = load(sums + c, AllLanes{});
                    VecF m = load(moments + c, AllLanes{});
                    by_act(dx.bn.act, [&](auto act) {
                      for_each_row(count, sum, [&](int i, VecF v) {
                        prefetch(y + at + i * p.in_channels + kPanelVectors * kLanes);  // of the next panel
                        const VecF d = load(y + at + i * p.in_channels, lanes) - center;
                        const VecF g = act.backward(v, d * scale + shift);
                        put(out + at + i * p.in_channels, g, p.streams, lanes);
                        s += g;
                        m += g * d;
                      });
                    });
                    store(sums + c, s, AllLanes{});
                    store(moments + c, m, AllLanes{});
                  } else {
                    for_each_row(count, sum, [&](int i, VecF v) {
                      if (added) v += load(added + at + i * p.in_channels, lanes);
                      put(out + at + i * p.in_channels, v, p.streams, lanes);
                    });
                  }
                });
      if constexpr (kFolded) {
        double* to = dx.partial + item * 2 * p.in_channels;
        for (int64_t c = 0; c < p.in_channels; ++c) to[c] += sums[c];
        for (int64_t c = 0; c < p.in_channels; ++c) to[p.in_channels + c] += moments[c];
        for (int64_t c = 0; c < padded; ++c) sums[c] = moments[c] = 0;
      }
    });
  }
}

// second += sum over rows r of a[r][i] a[r][j], for i in [i0, i0 + kBlockRows) and kWidth vectors of j
template <int kWidth>
inline void covariance_block(const float* a, int64_t lda, int64_t rows, int64_t i0, int64_t j0, int64_t channels,
                             double* second) {
  VecF sum[kBlockRows][kWidth];
  for (int i = 0; i < kBlockRows; ++i) {
    for (int j = 0; j < kWidth; ++j) sum[i][j] = VecF{};
  }
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = a + r * lda;
    VecF v[kWidth];
    for (int j = 0; j < kWidth; ++j) v[j] = load(row + j0 + j * kLanes, AllLanes{});
    for (int i = 0; i < kBlockRows; ++i) {
      const VecF left = broadcast(row[i0 + i]);
      for (int j = 0; j < kWidth; ++j) sum[i][j] += left * v[j];
    }
  }
  float values[kWidth * kLanes];
  for (int64_t i = i0; i < lesser(i0 + kBlockRows, channels); ++i) {
    for (int j = 0; j < kWidth; ++j) store(values + j * kLanes, sum[i - i0][j], AllLanes{});
    const int64_t width = lesser(kWidth * kLanes, channels - j0);
    for (int64_t j = 0; j < width; ++j) second[i * channels + j0 + j] += values[j];
  }
}

template <typename T>
void covariance_items(const CovarianceParams& p, int64_t begin, int64_t end) {
  constexpr int kWidest = 3;  // vectors of a block
  const int64_t lda = divide_up(p.channels, kWidest * kLanes) * kWidest * kLanes + kBlockRows;
  Scratch scratch(Scratch::size<float>(kTileRows * lda));
  float* a = scratch.take<float>(kTileRows * lda);
  for (int64_t item = begin; item < end; ++item) {
    double* first = p.first + item * p.channels;
    double* second = p.second + item * p.channels * p.channels;
    for (int64_t i = 0; i < p.channels; ++i) first[i] = 0;
    for (int64_t i = 0; i < p.channels * p.channels; ++i) second[i] = 0;
    for_each_tile(p, item, [&](int64_t row, int64_t rows) {
      centre_tile(static_cast<const T*>(p.x) + row * p.channels, p.center, a, lda, rows, p.channels);
      for_each_vector(p.channels, [&](int64_t c, auto lanes) {
        VecF sum{};
        for (int64_t r = 0; r < rows; ++r) sum += load(a + r * lda + c, lanes);
        float values[kLanes];
        store(values, sum, AllLanes{});
        for (int64_t i = 0; i < lesser(kLanes, p.channels - c); ++i) first[c + i] += values[i];
      });
      for (int64_t i = 0; i < p.channels; i += kBlockRows) {
        // only the upper triangle: the matrix is symmetric
        for (int64_t j = i / kLanes * kLanes; j < p.channels;) {
          const int64_t vectors = divide_up(p.channels - j, kLanes);
          if (vectors >= kWidest) {
            covariance_block<kWidest>(a, lda, rows, i, j, p.channels, second);
            j += kWidest * kLanes;
          } else {
            covariance_block<1>(a, lda, rows, i, j, p.channels, second);
            j += kLanes;
          }
        }
      }
    });
  }
}

template <typename T>
void correction_items(const CorrectionParams& p, int64_t begin, int64_t end) {
  using C = typename Multiplied<T>::Type;
  const int64_t lda = tile_ld<C>(p.channels);
  Scratch scratch(Scratch::size<C>(kTileRows * lda));
  C* a = scratch.take<C>(kTileRows * lda);
  const C* weight = static_cast<const C*>(p.weight);
  for (int64_t item = begin; item < end; ++item) {
    for_each_tile(p, item, [&](int64_t row, int64_t rows) {
      const int64_t at = row * p.channels;
      T* dx = static_cast<T*>(p.dx) + at;
      const T* added = p.added ? static_cast<const T*>(p.added) + at : nullptr;
      if (!weight) {
        for_each_vector(rows * p.channels, [&](int64_t i, auto lanes) {
          store(dx + i, load(dx + i, lanes) + load(added + i, lanes), lanes);
        });
        return;
      }
      centre_tile(static_cast<const T*>(p.x) + at, p.center, a, lda, rows, p.channels);
      gemm_tile(a, lda, rows, weight, p.channels, p.channels,
                [&](int64_t r, int count, int64_t c, const VecF* sum, auto lanes) {
                  const VecF bias = load(p.bias + c, lanes);
                  for_each_row(count, sum, [&](int i, VecF v) {
                    const int64_t at = (r + i) * p.channels + c;
                    VecF out = load(dx + at, lanes) + bias - v;
                    if (added) out += load(added + at, lanes);
                    store(dx + at, out, lanes);
                  });
                });
    });
  }
}

template <typename T>
void shuffle_split_items(const ShuffleParams& p, int64_t begin, int64_t end) {
  const int64_t last = lesser(end * p.item_rows, p.rows);
  for (int64_t row = begin * p.item_rows; row < last; ++row) {
    const T* whole = static_cast<const T*>(p.source_whole) + row * 2 * p.channels;
    T* left = static_cast<T*>(p.left) + row * p.ld_left;
    T* right = static_cast<T*>(p.right) + row * p.ld_right;
    for (int64_t c = 0; c < p.channels; ++c) {
      left[c] = whole[2 * c];
      right[c] = whole[2 * c + 1];
    }
  }
}

template <typename T>
void shuffle_merge_items(const ShuffleParams& p, int64_t begin, int64_t end) {
  const int64_t last = lesser(end * p.item_rows, p.rows);
  for (int64_t row = begin * p.item_rows; row < last; ++row) {
    const T* left = static_cast<const T*>(p.source_left) + row * p.ld_left;
    const T* right = static_cast<const T*>(p.source_right) + row * p.ld_right;
    T* whole = static_cast<T*>(p.whole) + row * 2 * p.channels;
    for (int64_t c = 0; c < p.channels; ++c) {
      whole[2 * c] = left[c];
      whole[2 * c + 1] = right[c];
    }
  }
}

int64_t packed_bytes(bool bfloat16, int64_t depth, int64_t columns) {
  using Narrow = Multiplied<BFloat16>::Type;
  using Wide = Multiplied<float>::Type;
  return bfloat16 ? packed_size<Narrow>(depth, columns) * sizeof(Narrow)
                  : packed_size<Wide>(depth, columns) * sizeof(Wide);
}

void pack_weight(bool bfloat16, const float* w, int64_t depth, int64_t columns, int64_t stride_k, int64_t stride_n,
                 const float* scale_k, const float* scale_n, void* packed, int64_t begin, int64_t end) {
  const auto run = [&](auto* to) { pack(w, depth, columns, stride_k, stride_n, scale_k, scale_n, to, begin, end); };
  if (bfloat16) {
    run(static_cast<Multiplied<BFloat16>::Type*>(packed));
  } else {
    run(static_cast<Multiplied<float>::Type*>(packed));
  }
}

void pointwise_fwd(const PointwiseParams& p, int64_t begin, int64_t end) {
  const TileRegisters tiles;
  (p.bfloat16 ? pointwise_fwd_items<BFloat16> : pointwise_fwd_items<float>)(p, begin, end);
  if (p.streams) finish_streams();
}

void pointwise_bwd(const PointwiseParams& p, int64_t begin, int64_t end) {
  const TileRegisters tiles;
  if (p.dx.folded) {
    (p.bfloat16 ? pointwise_bwd_items<BFloat16, true> : pointwise_bwd_items<float, true>)(p, begin, end);
  } else {
    (p.bfloat16 ? pointwise_bwd_items<BFloat16, false> : pointwise_bwd_items<float, false>)(p, begin, end);
  }
  if (p.streams) finish_streams();
}

void covariance(const CovarianceParams& p, int64_t begin, int64_t end) {
  (p.bfloat16 ? covariance_items<BFloat16> : covariance_items<float>)(p, begin, end);
}

void correction(const CorrectionParams& p, int64_t begin, int64_t end) {
  const TileRegisters tiles;
  (p.bfloat16 ? correction_items<BFloat16> : correction_items<float>)(p, begin, end);
}

// Elements are only moved, so only their size matters.
void shuffle_split(const ShuffleParams& p, int64_t begin, int64_t end) {
  (p.bfloat16 ? shuffle_split_items<uint16_t> : shuffle_split_items<uint32_t>)(p, begin, end);
}

void shuffle_merge(const ShuffleParams& p, int64_t begin, int64_t end) {
  (p.bfloat16 ? shuffle_merge_items<uint16_t> : shuffle_merge_items<uint32_t>)(p, begin, end);
}

}  // namespace

extern const ConvKernels kConvKernels = {packed_bytes, panel_count, pack_weight,   pointwise_fwd, pointwise_bwd,
                                         covariance,   correction,  shuffle_split, shuffle_merge};

}  // namespace nasfast::cpu::NASFAST_ISA
