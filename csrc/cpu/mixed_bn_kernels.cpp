// Kernels of mixed_bn, compiled once per instruction set. Formula and shapes: nasfast/ops/reference.py.
//
// The kernels read one block of every tensor before the next block, so that the block of y (or grad) stays in the
// cache. Within a block they read one tensor after the other, so that coefficients stay in registers.

#include "bn_tile.h"
#include "mixed_bn.h"

namespace nasfast::cpu::NASFAST_ISA {
namespace {

// Elements of a block: 64 KB. Blocks of 4 KB are read from memory at two thirds of the speed, because they are too
// short for the hardware prefetcher; much larger blocks leave no room for y in the second-level cache.
constexpr int64_t kBlockElements = 16384;

inline int64_t block_rows(const MixedBnParams& p) {
  const int64_t tiles = kBlockElements / (kTileRows * p.width);
  return kTileRows * (tiles > 1 ? tiles : 1);
}

// Calls body(first row, rows) for every block of an item.
template <typename Body>
inline void for_each_block(const MixedBnParams& p, int64_t item, const Body& body) {
  const int64_t block = block_rows(p);
  const int64_t first = item * p.item_rows;
  const int64_t last = lesser(first + p.item_rows, p.rows);
  for (int64_t row = first; row < last; row += block) body(row, lesser(block, last - row));
}

// Calls body(first row, rows, width) for every tile of a block: first the whole rows, then the shorter last row.
template <typename Body>
inline void for_each_part(const MixedBnParams& p, int64_t row, int64_t rows, const Body& body) {
  const bool shorter = row + rows == p.rows && p.last_width < p.width;
  const int64_t whole = rows - (shorter ? 1 : 0);
  for (int64_t at = 0; at < whole; at += kTileRows) body(row + at, lesser(kTileRows, whole - at), p.width);
  if (shorter) body(row + whole, int64_t{1}, p.last_width);
}

// Merges the mean and m2 of `count` values into those of the `before` values seen so far.
inline void merge(double count, double mean, double m2, double before, double* all_mean, double* all_m2) {
  const double delta = mean - *all_mean;
  const double share = count / (before + count);
  *all_mean += delta * share;
  *all_m2 += m2 + delta * delta * before * share;
}

template <typename T>
void stats(const MixedBnParams& p, int64_t begin, int64_t end) {
  Scratch scratch(Scratch::size<float>(p.width + kLanes) + 2 * Scratch::size<double>(p.width));
  float* pivot = scratch.take<float>(p.width + kLanes);
  double* mean = scratch.take<double>(p.width);
  double* m2 = scratch.take<double>(p.width);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t item = i % p.items;
    const T* x = static_cast<const T*>(p.xs[p.measured[i / p.items]]);
    double* all_mean = p.partial + i * 2 * p.channels;
    double* all_m2 = all_mean + p.channels;
    for (int64_t c = 0; c < p.channels; ++c) all_mean[c] = all_m2[c] = 0;
    int64_t seen = 0;
    int64_t extra = 0;  // pixels of the shorter last row
    for_each_block(p, item, [&](int64_t row, int64_t rows) {
      for_each_part(p, row, rows, [&](int64_t first, int64_t whole, int64_t width) {
        const T* tile = x + first * p.width;
        if (width == p.width) {
          bn_stats_tile(tile, p.width, whole, p.width, seen, pivot, mean, m2);
          seen += whole;
          return;
        }
        extra = width / p.channels;
        for_each_vector(width, [&](int64_t at, auto lanes) { store(pivot + at, load(tile + at, lanes), lanes); });
      });
    });
    const double count = static_cast<double>(seen);
    for (int64_t phase = 0; phase < p.phases && seen > 0; ++phase) {
      const int64_t at = phase * p.channels;
      for (int64_t c = 0; c < p.channels; ++c) {
        merge(count, mean[at + c], m2[at + c], count * static_cast<double>(phase), all_mean + c, all_m2 + c);
      }
    }
    for (int64_t phase = 0; phase < extra; ++phase) {
      const double before = static_cast<double>(seen * p.phases + phase);
      for (int64_t c = 0; c < p.channels; ++c)
        merge(1, pivot[phase * p.channels + c], 0, before, all_mean + c, all_m2 + c);
    }
  }
}

// sum (+)= (x - center) * scale; the first tensor also adds the shift
template <bool kFirst, typename T>
inline void add_tile(const BnFold& bn, const T* x, float* sum, int64_t ld, int64_t rows, int64_t width) {
  for_each_group(width, [&](int64_t c, auto count, auto lanes) {
    constexpr int n = decltype(count)::value;
    VecF center[n], scale[n], shift[n];
    for (int j = 0; j < n; ++j) {
      center[j] = load(bn.center + c + j * kLanes, lanes);
      scale[j] = load(bn.scale + c + j * kLanes, lanes);
      if constexpr (kFirst) shift[j] = load(bn.shift + c + j * kLanes, lanes);
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int j = 0; j < n; ++j) {
        const int64_t at = r * ld + c + j * kLanes;
        const VecF before = kFirst ? shift[j] : load(sum + at, lanes);
        store(sum + at, (load(x + at, lanes) - center[j]) * scale[j] + before, lanes);
      }
    }
  });
}

// Goes through the items backwards, as bn_act does: what was read last is still in the cache.
template <typename T>
void fwd(const MixedBnParams& p, int64_t begin, int64_t end) {
  const int64_t size = block_rows(p) * p.width;
  Scratch scratch(Scratch::size<float>(size));
  float* sums = scratch.take<float>(size);
  T* y = static_cast<T*>(p.y);
  for (int64_t item = end - 1; item >= begin; --item) {
    for_each_block(p, item, [&](int64_t row, int64_t rows) {
      for (int64_t k = 0; k < p.count; ++k) {
        const T* x = static_cast<const T*>(p.xs[k]);
        for_each_part(p, row, rows, [&](int64_t first, int64_t whole, int64_t width) {
          const int64_t at = first * p.width;
          float* sum = sums + (first - row) * p.width;
          if (k == 0) {
            add_tile<true>(p.folds[k], x + at, sum, p.width, whole, width);
          } else {
            add_tile<false>(p.folds[k], x + at, sum, p.width, whole, width);
          }
        });
      }
      for_each_part(p, row, rows, [&](int64_t first, int64_t whole, int64_t width) {
        copy_tile(sums + (first - row) * p.width, p.width, y + first * p.width, p.width, whole, width);
      });
    });
  }
}

// Adds the sums of grad, or with kMoment those of grad * (x - center), to a double array.
template <bool kMoment, typename T>
inline void sum_tile(const float* centers, const T* grad, const T* x, int64_t ld, int64_t rows, int64_t width,
                     double* sum) {
  for_each_group(width, [&](int64_t c, auto count, auto lanes) {
    constexpr int n = decltype(count)::value;
    VecF center[n], s[n];
    for (int j = 0; j < n; ++j) {
      if constexpr (kMoment) center[j] = load(centers + c + j * kLanes, lanes);
      s[j] = VecF{};
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int j = 0; j < n; ++j) {
        const int64_t at = r * ld + c + j * kLanes;
        const VecF g = load(grad + at, lanes);
        if constexpr (kMoment) {
          s[j] += g * (load(x + at, lanes) - center[j]);
        } else {
          s[j] += g;
        }
      }
    }
    float sums[n * kLanes];
    for (int j = 0; j < n; ++j) store(sums + j * kLanes, s[j], AllLanes{});
    const int64_t columns = lesser(n * kLanes, width - c);
    for (int64_t i = 0; i < columns; ++i) sum[c + i] += sums[i];
  });
}

template <typename T>
void bwd_reduce(const MixedBnParams& p, int64_t begin, int64_t end) {
  const int64_t size = (1 + p.count) * p.width;
  Scratch scratch(Scratch::size<double>(size));
  double* sums = scratch.take<double>(size);
  const T* grad = static_cast<const T*>(p.grad);
  for (int64_t item = begin; item < end; ++item) {
    for (int64_t i = 0; i < size; ++i) sums[i] = 0;
    for_each_block(p, item, [&](int64_t row, int64_t rows) {
      for_each_part(p, row, rows, [&](int64_t first, int64_t whole, int64_t width) {
        sum_tile<false>(nullptr, grad + first * p.width, grad, p.width, whole, width, sums);
      });
      for (int64_t k = 0; k < p.count; ++k) {
        if (!p.in_sums[k]) continue;
        const T* x = static_cast<const T*>(p.xs[k]);
        for_each_part(p, row, rows, [&](int64_t first, int64_t whole, int64_t width) {
          const int64_t at = first * p.width;
          sum_tile<true>(p.folds[k].center, grad + at, x + at, p.width, whole, width, sums + (1 + k) * p.width);
        });
      }
    });
    double* partial = p.partial + item * (1 + p.count) * p.channels;
    for (int64_t k = 0; k <= p.count; ++k) {
      for (int64_t c = 0; c < p.channels; ++c) partial[k * p.channels + c] = 0;
      for (int64_t phase = 0; phase < p.phases; ++phase) {
        const double* from = sums + k * p.width + phase * p.channels;
        for (int64_t c = 0; c < p.channels; ++c) partial[k * p.channels + c] += from[c];
      }
    }
  }
}

// dx = grad * scale (+ (x - center) * slope + offset)
template <bool kNormalize, typename T>
inline void bwd_tile(const BnFold& bn, const T* grad, const T* x, T* dx, int64_t ld, bool streams, int64_t rows,
                     int64_t width) {
  for_each_group(width, [&](int64_t c, auto count, auto lanes) {
    constexpr int n = decltype(count)::value;
    VecF center[n], scale[n], slope[n], offset[n];
    for (int j = 0; j < n; ++j) {
      scale[j] = load(bn.scale + c + j * kLanes, lanes);
      if constexpr (kNormalize) {
        center[j] = load(bn.center + c + j * kLanes, lanes);
        slope[j] = load(bn.slope + c + j * kLanes, lanes);
        offset[j] = load(bn.offset + c + j * kLanes, lanes);
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int j = 0; j < n; ++j) {
        const int64_t at = r * ld + c + j * kLanes;
        VecF out = load(grad + at, lanes) * scale[j];
        if constexpr (kNormalize) out += (load(x + at, lanes) - center[j]) * slope[j] + offset[j];
        put(dx + at, out, streams, lanes);
      }
    }
  });
}

template <typename T>
void bwd(const MixedBnParams& p, int64_t begin, int64_t end) {
  const T* grad = static_cast<const T*>(p.grad);
  for (int64_t item = end - 1; item >= begin; --item) {
    for_each_block(p, item, [&](int64_t row, int64_t rows) {
      for (int64_t k = 0; k < p.count; ++k) {
        if (!p.dxs[k]) continue;
        const T* x = static_cast<const T*>(p.xs[k]);
        T* dx = static_cast<T*>(p.dxs[k]);
        for_each_part(p, row, rows, [&](int64_t first, int64_t whole, int64_t width) {
          const int64_t at = first * p.width;
          if (p.normalize[k]) {
            bwd_tile<true>(p.folds[k], grad + at, x + at, dx + at, p.width, p.streams, whole, width);
          } else {
            bwd_tile<false>(p.folds[k], grad + at, x + at, dx + at, p.width, p.streams, whole, width);
          }
        });
      }
    });
  }
  if (p.streams) finish_streams();
}

void mixed_bn_stats(const MixedBnParams& p, int64_t begin, int64_t end) {
  (p.bfloat16 ? stats<BFloat16> : stats<float>)(p, begin, end);
}

void mixed_bn_fwd(const MixedBnParams& p, int64_t begin, int64_t end) {
  (p.bfloat16 ? fwd<BFloat16> : fwd<float>)(p, begin, end);
}

void mixed_bn_bwd_reduce(const MixedBnParams& p, int64_t begin, int64_t end) {
  (p.bfloat16 ? bwd_reduce<BFloat16> : bwd_reduce<float>)(p, begin, end);
}

void mixed_bn_bwd(const MixedBnParams& p, int64_t begin, int64_t end) {
  (p.bfloat16 ? bwd<BFloat16> : bwd<float>)(p, begin, end);
}

}  // namespace

extern const MixedBnKernels kMixedBnKernels = {mixed_bn_stats, mixed_bn_fwd, mixed_bn_bwd_reduce, mixed_bn_bwd};

}  // namespace nasfast::cpu::NASFAST_ISA
