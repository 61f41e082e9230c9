// Kernels of bn_act, compiled once per instruction set. Formula and shapes: nasfast/ops/reference.py.

#include "bn_act.h"
#include "bn_tile.h"

namespace nasfast::cpu::NASFAST_ISA {
namespace {

// Vectors per float sum of a plane; see kTileRows.
constexpr int64_t kTileVectors = 64;

// Bytes of a tensor from which a pass over it waits for memory more than for the cache.
constexpr int64_t kMemoryBytes = 4 * 1024 * 1024;

// Rows that a pass goes through before it turns to the next vectors of channels. With many rows, coefficients and sums
// stay in registers. With few, addresses follow each other, which memory needs and the cache does not. Measured with
// AVX-512: up to 1.7 times as fast.
inline int64_t block_rows(const BnActParams& p) {
  const bool wide = p.channels > kGroup * kLanes;
  if (p.rows * p.channels * (p.bfloat16 ? 2 : 4) < kMemoryBytes || (p.bfloat16 && !wide)) return kTileRows;
  return wide && !p.bfloat16 ? 1 : 8;
}

template <typename T>
void bn_stats_rows(const BnActParams& p, int64_t begin, int64_t end) {
  const int64_t channels = p.channels;
  Scratch scratch(Scratch::size<float>(channels + kLanes));
  float* pivot = scratch.take<float>(channels + kLanes);
  const T* x = static_cast<const T*>(p.x);
  for (int64_t item = begin; item < end; ++item) {
    double* mean = p.partial + item * channels * 2;
    for_each_tile(p, item, [&](int64_t row, int64_t rows) {
      bn_stats_tile(x + row * channels, channels, rows, channels, row - item * p.item_rows, pivot, mean,
                    mean + channels);
    });
  }
}

// Merges a tile of `count` values into the mean and the squared distance to it (m2) of the `before` values already
// seen, as bn_stats_tile does. The tile is given as sums of d and d^2, where d = x - pivot.
inline void merge_tile(double pivot, double sum, double squares, int64_t count, int64_t before, double* mean,
                       double* m2) {
  const double tile_mean = pivot + sum / count;
  const double tile_m2 = squares - sum * sum / count;
  const double delta = tile_mean - *mean;
  const double total = static_cast<double>(before + count);
  *mean += delta * (count / total);
  *m2 += (tile_m2 > 0 ? tile_m2 : 0) + delta * delta * (static_cast<double>(before) * count / total);
}

template <typename T>
void bn_stats_planes(const BnActParams& p, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    const int64_t c = item % p.channels;
    const T* x = static_cast<const T*>(p.x) + item * p.plane;
    double mean = 0;
    double m2 = 0;
    const int64_t sample = lesser(kTileVectors * kLanes, p.plane);
    VecF sample_sum{};
    for_each_vector(sample, [&](int64_t i, auto lanes) { sample_sum += load(x + i, lanes); });
    float pivot = sum_lanes(sample_sum) / static_cast<float>(sample);
    for (int64_t tile = 0; tile < p.plane; tile += kTileVectors * kLanes) {
      const int64_t count = lesser(kTileVectors * kLanes, p.plane - tile);
      VecF s{};
      VecF q{};
      for_each_vector(count, [&](int64_t i, auto lanes) {
        const VecF d = keep_lanes(load(x + tile + i, lanes) - pivot, lanes);
        s += d;
        q += d * d;
      });
      merge_tile(pivot, sum_lanes(s), sum_lanes(q), count, tile, &mean, &m2);
      pivot = static_cast<float>(mean);
    }
    double* partial = p.partial + (item - c) * 2 + c;
    partial[0] = mean;
    partial[p.channels] = m2;
  }
}

// The normalising passes go through their items backwards: the statistics pass before them ended at the last item,
// which is still in the cache.
template <typename T, typename A, bool kResidual>
void bn_act_fwd_rows(const BnActParams& p, int64_t begin, int64_t end) {
  const int64_t channels = p.channels;
  const T* x = static_cast<const T*>(p.x);
  const T* residual = static_cast<const T*>(p.residual);
  T* y = static_cast<T*>(p.y);
  const int64_t block = block_rows(p);
  for (int64_t item = end - 1; item >= begin; --item) {
    for_each_tile(p, item, [&](int64_t row, int64_t rows) {
      const int64_t at = row * channels;
      const T* added = kResidual ? residual + at : nullptr;
      bn_act_tile<A, kResidual>(p.bn, x + at, added, channels, y + row * p.ldy, p.ldy, rows, channels, block);
    });
  }
}

template <typename T, typename A, bool kResidual>
void bn_act_fwd_planes(const BnActParams& p, int64_t begin, int64_t end) {
  const A act(p.bn.act);
  for (int64_t item = end - 1; item >= begin; --item) {
    const int64_t c = item % p.channels;
    const VecF center = broadcast(p.bn.center[c]);
    const VecF scale = broadcast(p.bn.scale[c]);
    const VecF shift = broadcast(p.bn.shift[c]);
    const T* x = static_cast<const T*>(p.x) + item * p.plane;
    const T* residual = static_cast<const T*>(p.residual) + (kResidual ? item * p.plane : 0);
    T* y = static_cast<T*>(p.y) + item * p.plane;
    for_each_vector(p.plane, [&](int64_t i, auto lanes) {
      VecF out = act.value((load(x + i, lanes) - center) * scale + shift);
      if constexpr (kResidual) out += load(residual + i, lanes);
      store(y + i, out, lanes);
    });
  }
}

template <typename T, typename A>
void bn_act_bwd_reduce_rows(const BnActParams& p, int64_t begin, int64_t end) {
  const int64_t channels = p.channels;
  const T* x = static_cast<const T*>(p.x);
  const T* grad = static_cast<const T*>(p.grad);
  const int64_t block = block_rows(p);
  Scratch scratch(2 * Scratch::size<float>(channels + kLanes));
  float* sums = scratch.take<float>(channels + kLanes);
  float* moments = scratch.take<float>(channels + kLanes);
  for (int64_t item = begin; item < end; ++item) {
    double* sum = p.partial + item * channels * 2;
    for (int64_t i = 0; i < 2 * channels; ++i) sum[i] = 0;
    for_each_tile(p, item, [&](int64_t row, int64_t rows) {
      const int64_t at = row * channels;
      bn_act_bwd_reduce_tile<A>(p.bn, grad + row * p.ldgrad, p.ldgrad, x + at, channels, rows, channels, block, sums,
                                moments, sum, sum + channels);
    });
  }
}

template <typename T, typename A>
void bn_act_bwd_reduce_planes(const BnActParams& p, int64_t begin, int64_t end) {
  const A act(p.bn.act);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t c = item % p.channels;
    const VecF center = broadcast(p.bn.center[c]);
    const VecF scale = broadcast(p.bn.scale[c]);
    const VecF shift = broadcast(p.bn.shift[c]);
    const T* x = static_cast<const T*>(p.x) + item * p.plane;
    const T* grad = static_cast<const T*>(p.grad) + item * p.plane;
    double sum = 0;
    double moment = 0;
    for (int64_t tile = 0; tile < p.plane; tile += kTileVectors * kLanes) {
      const int64_t count = lesser(kTileVectors * kLanes, p.plane - tile);
      VecF s{};
      VecF m{};
      for_each_vector(count, [&](int64_t i, auto lanes) {
        const VecF d = load(x + tile + i, lanes) - center;
        const VecF dz = keep_lanes(act.backward(load(grad + tile + i, lanes), d * scale + shift), lanes);
        s += dz;
        m += dz * d;
      });
      sum += sum_lanes(s);
      moment += sum_lanes(m);
    }
    double* partial = p.partial + (item - c) * 2 + c;
    partial[0] = sum;
    partial[p.channels] = moment;
  }
}

template <typename T, typename A>
void bn_act_bwd_rows(const BnActParams& p, int64_t begin, int64_t end) {
  const int64_t channels = p.channels;
  const T* x = static_cast<const T*>(p.x);
  const T* grad = static_cast<const T*>(p.grad);
  T* dx = static_cast<T*>(p.dx);
  const int64_t block = block_rows(p);
  for (int64_t item = end - 1; item >= begin; --item) {
    for_each_tile(p, item, [&](int64_t row, int64_t rows) {
      const int64_t at = row * channels;
      bn_act_bwd_tile<A>(p.bn, grad + row * p.ldgrad, p.ldgrad, x + at, channels, dx + at, channels, rows, channels,
                         block);
    });
  }
}

template <typename T, typename A>
void bn_act_bwd_planes(const BnActParams& p, int64_t begin, int64_t end) {
  const A act(p.bn.act);
  for (int64_t item = end - 1; item >= begin; --item) {
    const int64_t c = item % p.channels;
    const VecF center = broadcast(p.bn.center[c]);
    const VecF scale = broadcast(p.bn.scale[c]);
    const VecF shift = broadcast(p.bn.shift[c]);
    const VecF slope = broadcast(p.bn.slope[c]);
    const VecF offset = broadcast(p.bn.offset[c]);
    const T* x = static_cast<const T*>(p.x) + item * p.plane;
    const T* grad = static_cast<const T*>(p.grad) + item * p.plane;
    T* dx = static_cast<T*>(p.dx) + item * p.plane;
    for_each_vector(p.plane, [&](int64_t i, auto lanes) {
      const VecF d = load(x + i, lanes) - center;
      const VecF dz = act.backward(load(grad + i, lanes), d * scale + shift);
      store(dx + i, dz * scale + through_statistics(d, slope, offset), lanes);
    });
  }
}

template <typename T>
BnActPhase stats_phase(const BnActParams& p) {
  return p.channels_last ? bn_stats_rows<T> : bn_stats_planes<T>;
}

template <typename T, typename A>
BnActPhase fwd_phase(const BnActParams& p) {
  if (p.residual) return p.channels_last ? bn_act_fwd_rows<T, A, true> : bn_act_fwd_planes<T, A, true>;
  return p.channels_last ? bn_act_fwd_rows<T, A, false> : bn_act_fwd_planes<T, A, false>;
}

template <typename T, typename A>
BnActPhase bwd_reduce_phase(const BnActParams& p) {
  return p.channels_last ? bn_act_bwd_reduce_rows<T, A> : bn_act_bwd_reduce_planes<T, A>;
}

template <typename T, typename A>
BnActPhase bwd_phase(const BnActParams& p) {
  return p.channels_last ? bn_act_bwd_rows<T, A> : bn_act_bwd_planes<T, A>;
}

void bn_stats(const BnActParams& p, int64_t begin, int64_t end) {
  (p.bfloat16 ? stats_phase<BFloat16>(p) : stats_phase<float>(p))(p, begin, end);
}

void bn_act_fwd(const BnActParams& p, int64_t begin, int64_t end) {
  by_type(p.bfloat16, p.bn.act, [&](auto type, auto act) { return fwd_phase<decltype(type), decltype(act)>(p); })(
      p, begin, end);
}

void bn_act_bwd_reduce(const BnActParams& p, int64_t begin, int64_t end) {
  const auto pick = [&](auto type, auto act) { return bwd_reduce_phase<decltype(type), decltype(act)>(p); };
  by_type(p.bfloat16, p.bn.act, pick)(p, begin, end);
}

void bn_act_bwd(const BnActParams& p, int64_t begin, int64_t end) {
  by_type(p.bfloat16, p.bn.act, [&](auto type, auto act) { return bwd_phase<decltype(type), decltype(act)>(p); })(
      p, begin, end);
}

}  // namespace

extern const BnActKernels kBnActKernels = {bn_stats, bn_act_fwd, bn_act_bwd_reduce, bn_act_bwd};

}  // namespace nasfast::cpu::NASFAST_ISA
