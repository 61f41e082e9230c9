// The phases of BatchNorm on a tile: rows x channels elements in row-major order, where a row is the channels of one
// pixel. The loop over rows is the inner one, so that coefficients and sums of a few vectors of channels stay in
// registers.
#pragma once

#include "activation.h"
#include "params.h"
#include "simd.h"

namespace nasfast::cpu::NASFAST_ISA {

// Sums are float within a tile and double between tiles. With 64 terms per float sum, the error of the sum is near 1e-7
// and the double arithmetic of a tile is an eighth of its float arithmetic.
constexpr int64_t kTileRows = 64;

// How many rows ahead of its arithmetic a pass asks for its inputs. It reads a few vectors of each row, and a processor
// does not recognise so many streams: without this, kernels on large tensors take up to 1.5 times as long.
constexpr int64_t kAhead = 8;

// Vectors of channels that are held in registers; backward needs five registers for each of them.
#if defined(__AVX512F__)
constexpr int kGroup = 4;
#else
constexpr int kGroup = 2;
#endif

// Rows that a pass over a tile goes through before it turns to the next vectors of channels. Memory needs addresses that
// follow each other, and with fewer rows a pass over what a cache holds loads its coefficients too often. In bfloat16 this
// and `Ahead` together took 1.1 of the time.
template <typename T>
constexpr int64_t kBlock = sizeof(T) > 2 ? 4 : kTileRows;

template <int N>
struct Count {
  static constexpr int value = N;
};

inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// Calls body(first row, rows) for every tile of an item, which is p.item_rows of the p.rows rows.
template <typename Params, typename Body>
inline void for_each_tile(const Params& p, int64_t item, const Body& body) {
  const int64_t first = item * p.item_rows;
  const int64_t last = lesser(first + p.item_rows, p.rows);
  for (int64_t tile = first; tile < last; tile += kTileRows) body(tile, lesser(kTileRows, last - tile));
}

// Calls body(c, Count<n>{}, lanes) until all channels are covered: for n whole vectors from channel c on, or for a last
// vector with fewer lanes.
template <typename Body>
inline void for_each_group(int64_t channels, const Body& body) {
  int64_t c = 0;
  for (; c + kGroup * kLanes <= channels; c += kGroup * kLanes) body(c, Count<kGroup>{}, AllLanes{});
  for (; c + kLanes <= channels; c += kLanes) body(c, Count<1>{}, AllLanes{});
  if (c < channels) body(c, Count<1>{}, static_cast<int>(channels - c));
}

// Calls body(c, Count<n>{}, lanes, first, last) for blocks of rows from first to last, as for_each_group does for each.
template <typename Body>
inline void for_each_block(int64_t rows, int64_t block_rows, int64_t channels, const Body& body) {
  for (int64_t first = 0; first < rows; first += block_rows) {
    const int64_t last = lesser(first + block_rows, rows);
    for_each_group(channels, [&](int64_t c, auto count, auto lanes) { body(c, count, lanes, first, last); });
  }
}

// y = act(bn(x)) (+ residual, which has the layout of x); x and y may have different storage types
template <typename A, bool kResidual, typename T, typename U>
inline void bn_act_tile(const BnFold& bn, const T* x, const T* residual, int64_t ldx, U* y, int64_t ldy, int64_t rows,
                        int64_t channels, int64_t block_rows = kBlock<T>) {
  const A act(bn.act);
  for_each_block(rows, block_rows, channels, [&](int64_t c, auto count, auto lanes, int64_t first, int64_t last) {
    constexpr int n = decltype(count)::value;
    VecF center[n], scale[n], shift[n];
    for (int j = 0; j < n; ++j) {
      center[j] = load(bn.center + c + j * kLanes, lanes);
      scale[j] = load(bn.scale + c + j * kLanes, lanes);
      shift[j] = load(bn.shift + c + j * kLanes, lanes);
    }
    for (int64_t r = first; r < last; ++r) {
      for (int j = 0; j < n; ++j) {
        const int64_t at = r * ldx + c + j * kLanes;
        prefetch(x + at + kAhead * ldx);
        VecF out = act.value((load(x + at, lanes) - center[j]) * scale[j] + shift[j]);
        if constexpr (kResidual) out += load(residual + at, lanes);
        store(y + r * ldy + c + j * kLanes, out, lanes);
      }
    }
  });
}

// Writes act(bn(sums)) (+ residual) of n vectors of channels in several rows, where bn and residual begin at these
// channels. Calls each(body) with the body that takes the number of a row, that of a vector, and its sums.
template <int n, typename T, typename Lanes, typename Each>
inline void put_finished(const BnFold& bn, const T* residual, int64_t ld_residual, T* y, int64_t ldy, bool streams,
                         Lanes lanes, const Each& each) {
  VecF center[n], scale[n], shift[n];
  for (int j = 0; j < n; ++j) {
    center[j] = load(bn.center + j * kLanes, lanes);
    scale[j] = load(bn.scale + j * kLanes, lanes);
    shift[j] = load(bn.shift + j * kLanes, lanes);
  }
  by_act(bn.act, [&](auto act) {
    each([&](int64_t i, int j, VecF sums) {
      VecF out = act.value((sums - center[j]) * scale[j] + shift[j]);
      if (residual) out += load(residual + i * ld_residual + j * kLanes, lanes);
      put(y + i * ldy + j * kLanes, out, streams, lanes);
    });
  });
}

// y = x, with another type or leading dimension
template <typename T, typename U>
inline void copy_tile(const T* x, int64_t ldx, U* y, int64_t ldy, int64_t rows, int64_t channels) {
  for (int64_t r = 0; r < rows; ++r) {
    for_each_vector(channels,
                    [&](int64_t c, auto lanes) { store(y + r * ldy + c, load(x + r * ldx + c, lanes), lanes); });
  }
}

// a = x - center, rows x channels
template <typename T, typename C>
inline void centre_tile(const T* x, const float* center, C* a, int64_t lda, int64_t rows, int64_t channels) {
  for (int64_t r = 0; r < rows; ++r) {
    for_each_vector(channels, [&](int64_t c, auto lanes) {
      store(a + r * lda + c, load(x + r * channels + c, lanes) - load(center + c, lanes), lanes);
    });
  }
}

// What the gradient of BatchNorm's input gets through the statistics of the batch. Running statistics have a slope of 0,
// which times an infinity or NaN would not be 0.
inline VecF through_statistics(VecF d, VecF slope, VecF offset) { return slope != 0.0f ? d * slope + offset : offset; }

// dy = gradient of BatchNorm's input, where dz = grad * act'(z)
template <typename A, typename T, typename U>
inline void bn_act_bwd_tile(const BnFold& bn, const T* grad, int64_t ldgrad, const T* y, int64_t ld, U* dy,
                            int64_t lddy, int64_t rows, int64_t channels, int64_t block_rows = kBlock<T>) {
  const A act(bn.act);
  for_each_block(rows, block_rows, channels, [&](int64_t c, auto count, auto lanes, int64_t first, int64_t last) {
    constexpr int n = decltype(count)::value;
    VecF center[n], scale[n], shift[n], slope[n], offset[n];
    for (int j = 0; j < n; ++j) {
      center[j] = load(bn.center + c + j * kLanes, lanes);
      scale[j] = load(bn.scale + c + j * kLanes, lanes);
      shift[j] = load(bn.shift + c + j * kLanes, lanes);
      slope[j] = load(bn.slope + c + j * kLanes, lanes);
      offset[j] = load(bn.offset + c + j * kLanes, lanes);
    }
    for (int64_t r = first; r < last; ++r) {
      for (int j = 0; j < n; ++j) {
        prefetch(y + (r + kAhead) * ld + c + j * kLanes);
        prefetch(grad + (r + kAhead) * ldgrad + c + j * kLanes);
        const VecF d = load(y + r * ld + c + j * kLanes, lanes) - center[j];
        const VecF dz = act.backward(load(grad + r * ldgrad + c + j * kLanes, lanes), d * scale[j] + shift[j]);
        store(dy + r * lddy + c + j * kLanes, dz * scale[j] + through_statistics(d, slope[j], offset[j]), lanes);
      }
    }
  });
}

// Adds sum dz and sum dz * (y - center) to the two double arrays. sums and moments have whole vectors of zeros, before
// and after.
template <typename A, typename T>
inline void bn_act_bwd_reduce_tile(const BnFold& bn, const T* grad, int64_t ldgrad, const T* y, int64_t ld,
                                   int64_t rows, int64_t channels, int64_t block_rows, float* sums, float* moments,
                                   double* sum, double* moment) {
  const A act(bn.act);
  for_each_block(rows, block_rows, channels, [&](int64_t c, auto count, auto lanes, int64_t first, int64_t last) {
    constexpr int n = decltype(count)::value;
    VecF center[n], scale[n], shift[n], s[n], m[n];
    for (int j = 0; j < n; ++j) {
      center[j] = load(bn.center + c + j * kLanes, lanes);
      scale[j] = load(bn.scale + c + j * kLanes, lanes);
      shift[j] = load(bn.shift + c + j * kLanes, lanes);
      s[j] = load(sums + c + j * kLanes, AllLanes{});
      m[j] = load(moments + c + j * kLanes, AllLanes{});
    }
    for (int64_t r = first; r < last; ++r) {
      for (int j = 0; j < n; ++j) {
        prefetch(y + (r + kAhead) * ld + c + j * kLanes);
        prefetch(grad + (r + kAhead) * ldgrad + c + j * kLanes);
        const VecF d = load(y + r * ld + c + j * kLanes, lanes) - center[j];
        const VecF g = act.backward(load(grad + r * ldgrad + c + j * kLanes, lanes), d * scale[j] + shift[j]);
        s[j] += g;
        m[j] += g * d;
      }
    }
    for (int j = 0; j < n; ++j) {
      store(sums + c + j * kLanes, s[j], AllLanes{});
      store(moments + c + j * kLanes, m[j], AllLanes{});
    }
  });
  for (int64_t c = 0; c < channels; ++c) sum[c] += sums[c];
  for (int64_t c = 0; c < channels; ++c) moment[c] += moments[c];
  const int64_t held = (channels + kLanes - 1) / kLanes * kLanes;
  memset(sums, 0, held * sizeof(float));
  memset(moments, 0, held * sizeof(float));
}

// Merges `rows` values of `width` channels into the mean and the squared distance to it (m2) of the `before` rows seen
// so far (Chan et al.), and moves the pivot to the new mean. The values are given as sums and sums of squares of their
// distance to the pivot. The pivot is the mean so far, or at first a value of the same size: so m2 is never a small
// difference of large numbers.
inline void merge_sums(const float* sums, const float* squares, int64_t width, int64_t rows, int64_t before,
                       float* pivot, double* mean, double* m2) {
  const double inverse = 1.0 / static_cast<double>(rows);
  const double share = static_cast<double>(rows) / static_cast<double>(before + rows);
  const double between = static_cast<double>(before) * share;
  if (before == 0) {
    for (int64_t i = 0; i < width; ++i) mean[i] = m2[i] = 0;
  }
  for (int64_t i = 0; i < width; ++i) {
    const double sum = sums[i];
    const double tile_m2 = squares[i] - sum * sum * inverse;
    const double delta = pivot[i] + sum * inverse - mean[i];
    mean[i] += delta * share;
    m2[i] += (tile_m2 > 0 ? tile_m2 : 0.0) + delta * delta * between;
    pivot[i] = static_cast<float>(mean[i]);
  }
}

// Does merge_sums for a tile of x, after `before` rows of the same channels.
template <typename T>
inline void bn_stats_tile(const T* x, int64_t ld, int64_t rows, int64_t channels, int64_t before, float* pivot,
                          double* mean, double* m2) {
  for_each_group(channels, [&](int64_t c, auto count, auto lanes) {
    constexpr int n = decltype(count)::value;
    VecF k[n], s[n], q[n];
    for (int j = 0; j < n; ++j) s[j] = q[j] = VecF{};
    if (before == 0) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int j = 0; j < n; ++j) s[j] += load(x + r * ld + c + j * kLanes, lanes);
      }
      for (int j = 0; j < n; ++j) {
        k[j] = s[j] * (1.0f / static_cast<float>(rows));
        store(pivot + c + j * kLanes, k[j], lanes);
        s[j] = VecF{};
      }
    } else {
      for (int j = 0; j < n; ++j) k[j] = load(pivot + c + j * kLanes, lanes);
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int j = 0; j < n; ++j) {
        prefetch(x + (r + kAhead) * ld + c + j * kLanes);
        const VecF d = load(x + r * ld + c + j * kLanes, lanes) - k[j];
        s[j] += d;
        q[j] += d * d;
      }
    }
    float sums[n * kLanes], squares[n * kLanes];
    for (int j = 0; j < n; ++j) {
      store(sums + j * kLanes, s[j], AllLanes{});
      store(squares + j * kLanes, q[j], AllLanes{});
    }
    merge_sums(sums, squares, lesser(n * kLanes, channels - c), rows, before, pivot + c, mean + c, m2 + c);
  });
}

}  // namespace nasfast::cpu::NASFAST_ISA
