// Kernels of bn_act, compiled once per instruction set. Formula and shapes: nasfast/ops/reference.py.

#include "bn_act.h"
#include "simd.h"

namespace nasfast::cpu::NASFAST_ISA {
namespace {

// Sums run in float inside a tile and in double between tiles. 64 terms per float sum keep its error near 1e-7, and make
// the double arithmetic per tile an eighth of the float work.
constexpr int64_t kTileRows = 64;
constexpr int64_t kTileVectors = 64;

struct Identity {
  static VecF value(VecF z) { return z; }
  static VecF backward(VecF grad, VecF) { return grad; }
};

struct Relu {
  static VecF value(VecF z) { return maximum(VecF{}, z); }
  static VecF backward(VecF grad, VecF z) { return z > 0.0f ? grad : VecF{}; }
};

struct Relu6 {
  static VecF value(VecF z) { return minimum(broadcast(6.0f), maximum(VecF{}, z)); }
  static VecF backward(VecF grad, VecF z) { return (z > 0.0f) & (z < 6.0f) ? grad : VecF{}; }
};

struct Tanh {
  static VecF value(VecF z) { return tanh(z); }
  static VecF backward(VecF grad, VecF z) {
    const VecF y = tanh(z);
    return grad * (1.0f - y * y);
  }
};

inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// Merges a tile of count values, whose sums of d and d^2 (d = x - pivot) are given, into the mean and squared distance
// (m2) of the `before` values already seen (Chan et al.).
inline void merge_tile(double pivot, double sum, double squares, int64_t count, int64_t before, double* mean, double* m2) {
  const double tile_mean = pivot + sum / count;
  const double tile_m2 = squares - sum * sum / count;
  const double delta = tile_mean - *mean;
  const double total = static_cast<double>(before + count);
  *mean += delta * (count / total);
  *m2 += (tile_m2 > 0 ? tile_m2 : 0) + delta * delta * (static_cast<double>(before) * count / total);
}

// The pivot is the mean so far, and for the first tile its own mean in float: the squares are never a small difference of
// large numbers, whatever the mean of the input and wherever its outliers.
template <typename T>
void bn_stats_rows(const BnActParams& p, int64_t begin, int64_t end, float* scratch) {
  const int64_t channels = p.channels;
  float* sum = scratch;
  float* squares = scratch + p.stride;
  float* pivot = scratch + 2 * p.stride;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item * p.item_rows;
    const int64_t last = lesser(first + p.item_rows, p.rows);
    const T* x = static_cast<const T*>(p.x);
    double* partial = p.partial + item * channels * 2;
    const int64_t sample_end = lesser(first + kTileRows, last);
    for (int64_t c = 0; c < p.stride; ++c) pivot[c] = 0;
    for (int64_t row = first; row < sample_end; ++row) {
      for_each_vector(channels, [&](int64_t c, auto lanes) {
        store(pivot + c, load(pivot + c, lanes) + load(x + row * channels + c, lanes), lanes);
      });
    }
    for (int64_t c = 0; c < channels; ++c) pivot[c] /= static_cast<float>(sample_end - first);
    for (int64_t c = 0; c < 2 * channels; ++c) partial[c] = 0;
    for (int64_t tile = first; tile < last; tile += kTileRows) {
      const int64_t tile_end = lesser(tile + kTileRows, last);
      for (int64_t c = 0; c < 2 * p.stride; ++c) scratch[c] = 0;
      for (int64_t row = tile; row < tile_end; ++row) {
        for_each_vector(channels, [&](int64_t c, auto lanes) {
          const VecF k = load(pivot + c, lanes);
          VecF s = load(sum + c, lanes);
          VecF q = load(squares + c, lanes);
          const VecF d = load(x + row * channels + c, lanes) - k;
          s += d;
          q += d * d;
          store(sum + c, s, lanes);
          store(squares + c, q, lanes);
        });
      }
      for (int64_t c = 0; c < channels; ++c) {
        merge_tile(pivot[c], sum[c], squares[c], tile_end - tile, tile - first, partial + 2 * c, partial + 2 * c + 1);
        pivot[c] = static_cast<float>(partial[2 * c]);
      }
    }
  }
}

template <typename T>
void bn_stats_planes(const BnActParams& p, int64_t begin, int64_t end, float*) {
  for (int64_t item = begin; item < end; ++item) {
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
    p.partial[2 * item] = mean;
    p.partial[2 * item + 1] = m2;
  }
}

// The normalising passes walk their items backwards: the statistics pass before them ended there, so the last part of x is
// still in the cache.
template <typename T, typename A, bool kResidual>
void bn_act_fwd_rows(const BnActParams& p, int64_t begin, int64_t end, float*) {
  const int64_t channels = p.channels;
  // local, because the compiler must assume that a store to y changes p
  const float* centers = p.center;
  const float* scales = p.scale;
  const float* shifts = p.shift;
  for (int64_t item = end - 1; item >= begin; --item) {
    const int64_t first = item * p.item_rows;
    const int64_t last = lesser(first + p.item_rows, p.rows);
    const T* x = static_cast<const T*>(p.x);
    const T* residual = static_cast<const T*>(p.residual);
    T* y = static_cast<T*>(p.y);
    for (int64_t row = first; row < last; ++row) {
      for_each_vector(channels, [&](int64_t c, auto lanes) {
        const VecF center = load(centers + c, lanes);
        const VecF scale = load(scales + c, lanes);
        const VecF shift = load(shifts + c, lanes);
        const int64_t at = row * channels + c;
        VecF out = A::value((load(x + at, lanes) - center) * scale + shift);
        if constexpr (kResidual) out += load(residual + at, lanes);
        store(y + at, out, lanes);
      });
    }
  }
}

template <typename T, typename A, bool kResidual>
void bn_act_fwd_planes(const BnActParams& p, int64_t begin, int64_t end, float*) {
  for (int64_t item = end - 1; item >= begin; --item) {
    const int64_t c = item % p.channels;
    const VecF center = broadcast(p.center[c]);
    const VecF scale = broadcast(p.scale[c]);
    const VecF shift = broadcast(p.shift[c]);
    const T* x = static_cast<const T*>(p.x) + item * p.plane;
    const T* residual = static_cast<const T*>(p.residual) + (kResidual ? item * p.plane : 0);
    T* y = static_cast<T*>(p.y) + item * p.plane;
    for_each_vector(p.plane, [&](int64_t i, auto lanes) {
      VecF out = A::value((load(x + i, lanes) - center) * scale + shift);
      if constexpr (kResidual) out += load(residual + i, lanes);
      store(y + i, out, lanes);
    });
  }
}

template <typename T, typename A>
void bn_act_bwd_reduce_rows(const BnActParams& p, int64_t begin, int64_t end, float* scratch) {
  const int64_t channels = p.channels;
  const float* centers = p.center;
  const float* scales = p.scale;
  const float* shifts = p.shift;
  float* sum = scratch;
  float* moment = scratch + p.stride;
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item * p.item_rows;
    const int64_t last = lesser(first + p.item_rows, p.rows);
    const T* x = static_cast<const T*>(p.x);
    const T* grad = static_cast<const T*>(p.grad);
    double* partial = p.partial + item * channels * 2;
    for (int64_t c = 0; c < 2 * channels; ++c) partial[c] = 0;
    for (int64_t tile = first; tile < last; tile += kTileRows) {
      const int64_t tile_end = lesser(tile + kTileRows, last);
      for (int64_t c = 0; c < 2 * p.stride; ++c) scratch[c] = 0;
      for (int64_t row = tile; row < tile_end; ++row) {
        for_each_vector(channels, [&](int64_t c, auto lanes) {
          const VecF center = load(centers + c, lanes);
          const VecF scale = load(scales + c, lanes);
          const VecF shift = load(shifts + c, lanes);
          VecF s = load(sum + c, lanes);
          VecF m = load(moment + c, lanes);
          const int64_t at = row * channels + c;
          const VecF d = load(x + at, lanes) - center;
          const VecF dz = A::backward(load(grad + at, lanes), d * scale + shift);
          s += dz;
          m += dz * d;
          store(sum + c, s, lanes);
          store(moment + c, m, lanes);
        });
      }
      for (int64_t c = 0; c < channels; ++c) {
        partial[2 * c] += sum[c];
        partial[2 * c + 1] += moment[c];
      }
    }
  }
}

template <typename T, typename A>
void bn_act_bwd_reduce_planes(const BnActParams& p, int64_t begin, int64_t end, float*) {
  for (int64_t item = begin; item < end; ++item) {
    const int64_t c = item % p.channels;
    const VecF center = broadcast(p.center[c]);
    const VecF scale = broadcast(p.scale[c]);
    const VecF shift = broadcast(p.shift[c]);
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
        const VecF dz = keep_lanes(A::backward(load(grad + tile + i, lanes), d * scale + shift), lanes);
        s += dz;
        m += dz * d;
      });
      sum += sum_lanes(s);
      moment += sum_lanes(m);
    }
    p.partial[2 * item] = sum;
    p.partial[2 * item + 1] = moment;
  }
}

template <typename T, typename A>
void bn_act_bwd_rows(const BnActParams& p, int64_t begin, int64_t end, float*) {
  const int64_t channels = p.channels;
  const float* centers = p.center;
  const float* scales = p.scale;
  const float* shifts = p.shift;
  const float* slopes = p.slope;
  const float* offsets = p.offset;
  for (int64_t item = end - 1; item >= begin; --item) {
    const int64_t first = item * p.item_rows;
    const int64_t last = lesser(first + p.item_rows, p.rows);
    const T* x = static_cast<const T*>(p.x);
    const T* grad = static_cast<const T*>(p.grad);
    T* dx = static_cast<T*>(p.dx);
    for (int64_t row = first; row < last; ++row) {
      for_each_vector(channels, [&](int64_t c, auto lanes) {
        const VecF center = load(centers + c, lanes);
        const VecF scale = load(scales + c, lanes);
        const VecF shift = load(shifts + c, lanes);
        const VecF slope = load(slopes + c, lanes);
        const VecF offset = load(offsets + c, lanes);
        const int64_t at = row * channels + c;
        const VecF d = load(x + at, lanes) - center;
        const VecF dz = A::backward(load(grad + at, lanes), d * scale + shift);
        store(dx + at, dz * scale + (d * slope + offset), lanes);
      });
    }
  }
}

template <typename T, typename A>
void bn_act_bwd_planes(const BnActParams& p, int64_t begin, int64_t end, float*) {
  for (int64_t item = end - 1; item >= begin; --item) {
    const int64_t c = item % p.channels;
    const VecF center = broadcast(p.center[c]);
    const VecF scale = broadcast(p.scale[c]);
    const VecF shift = broadcast(p.shift[c]);
    const VecF slope = broadcast(p.slope[c]);
    const VecF offset = broadcast(p.offset[c]);
    const T* x = static_cast<const T*>(p.x) + item * p.plane;
    const T* grad = static_cast<const T*>(p.grad) + item * p.plane;
    T* dx = static_cast<T*>(p.dx) + item * p.plane;
    for_each_vector(p.plane, [&](int64_t i, auto lanes) {
      const VecF d = load(x + i, lanes) - center;
      const VecF dz = A::backward(load(grad + i, lanes), d * scale + shift);
      store(dx + i, dz * scale + (d * slope + offset), lanes);
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

// pick(T{}, A{}) for the storage type and activation the parameters name
template <typename T, typename Pick>
BnActPhase by_act(Act act, const Pick& pick) {
  switch (act) {
    case Act::kIdentity:
      return pick(T{}, Identity{});
    case Act::kRelu:
      return pick(T{}, Relu{});
    case Act::kRelu6:
      return pick(T{}, Relu6{});
    case Act::kTanh:
      return pick(T{}, Tanh{});
  }
  return nullptr;
}

template <typename Pick>
BnActPhase by_type(const BnActParams& p, const Pick& pick) {
  return p.bfloat16 ? by_act<BFloat16>(p.act, pick) : by_act<float>(p.act, pick);
}

void bn_stats(const BnActParams& p, int64_t begin, int64_t end, float* scratch) {
  (p.bfloat16 ? stats_phase<BFloat16>(p) : stats_phase<float>(p))(p, begin, end, scratch);
}

void bn_act_fwd(const BnActParams& p, int64_t begin, int64_t end, float* scratch) {
  by_type(p, [&](auto type, auto act) { return fwd_phase<decltype(type), decltype(act)>(p); })(p, begin, end, scratch);
}

void bn_act_bwd_reduce(const BnActParams& p, int64_t begin, int64_t end, float* scratch) {
  const auto pick = [&](auto type, auto act) { return bwd_reduce_phase<decltype(type), decltype(act)>(p); };
  by_type(p, pick)(p, begin, end, scratch);
}

void bn_act_bwd(const BnActParams& p, int64_t begin, int64_t end, float* scratch) {
  by_type(p, [&](auto type, auto act) { return bwd_phase<decltype(type), decltype(act)>(p); })(p, begin, end, scratch);
}

}  // namespace

extern const BnActKernels kBnActKernels = {bn_stats, bn_act_fwd, bn_act_bwd_reduce, bn_act_bwd};

}  // namespace nasfast::cpu::NASFAST_ISA
