// Kernels of pool_3x3, compiled once per instruction set.
//
// At stride 1, neighbours are C elements apart everywhere. So a row is one run of elements, whatever the number of
// channels, except for its first and last pixel. At stride 2 every pixel is a run.

#include "bn_tile.h"
#include "pool_3x3.h"

namespace nasfast::cpu::NASFAST_ISA {
namespace {

typedef uint8_t VecB __attribute__((vector_size(kLanes)));

// One to three instructions; for __builtin_convertvector, GCC 12 emits dozens on some processors.
inline VecI widen(VecB b) {
#if defined(__AVX512F__)
  return (VecI)_mm512_cvtepu8_epi32((__m128i)b);
#elif defined(__AVX2__)
  long long bytes[2] = {0, 0};
  memcpy(bytes, &b, sizeof b);
  return (VecI)_mm256_cvtepu8_epi32(_mm_set_epi64x(0, bytes[0]));
#elif defined(__aarch64__)
  uint32_t bytes;
  memcpy(&bytes, &b, sizeof b);
  return (VecI)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(bytes))));
#else
  return __builtin_convertvector(b, VecI);
#endif
}

inline VecB narrow(VecI v) {
#if defined(__aarch64__)
  const uint16x4_t halves = vmovn_u32((uint32x4_t)v);
  const uint8x8_t bytes = vmovn_u16(vcombine_u16(halves, halves));
  VecB b;
  memcpy(&b, &bytes, sizeof b);
  return b;
#else
  return __builtin_convertvector(v, VecB);
#endif
}

inline VecI load_index(const uint8_t* p, AllLanes) {
  VecB b;
  memcpy(&b, p, sizeof b);
  return widen(b);
}

inline VecI load_index(const uint8_t* p, int lanes) {
  VecB b{};
  memcpy(&b, p, lanes);
  return widen(b);
}

inline void store_index(uint8_t* p, VecI v, AllLanes) {
  const VecB b = narrow(v);
  memcpy(p, &b, sizeof b);
}

inline void store_index(uint8_t* p, VecI v, int lanes) {
  const VecB b = narrow(v);
  memcpy(p, &b, lanes);
}

// The neighbours first .. last, of 0, 1 and 2 along one dimension, that are inside the image.
template <int kFirst, int kLast>
struct Taps {
  static constexpr int first = kFirst;
  static constexpr int last = kLast;
};

// Which of the 3 neighbours around source row r * stride are inside the image.
struct Window {
  int64_t first, last;
  Window(int64_t r, int64_t stride, int64_t size) : first(r == 0 ? 1 : 0), last(r * stride + 1 < size ? 2 : 1) {}
  int64_t count() const { return last - first + 1; }
};

// Calls body(at, centre, count, taps) for the runs of a row of the result: elements [at, at + count), whose middle
// neighbours in the source begin at `centre`.
template <typename Body>
inline void for_each_run(const Pool3x3Params& p, const Body& body) {
  const int64_t c = p.channels;
  if (p.width == 1) {
    body(0, 0, c, Taps<1, 1>{});
    return;
  }
  body(0, 0, c, Taps<1, 2>{});
  const int64_t whole = (p.width - 2) / p.stride + 1;  // the first result whose window leaves the image on the right
  if (p.stride == 1) {
    body(c, c, (whole - 1) * c, Taps<0, 2>{});
  } else {
    for (int64_t o = 1; o < whole; ++o) body(o * c, o * p.stride * c, c, Taps<0, 2>{});
  }
  if (whole < p.out_width) body(whole * c, whole * p.stride * c, c, Taps<0, 1>{});
}

// The results that read a source row or column: `count` results from `first` on. The first one reads it as neighbour
// `tap`, the next ones as neighbours tap - stride and tap - 2 * stride.
struct Readers {
  int64_t first, count, tap;
  Readers(int64_t at, int64_t stride, int64_t results) {
    first = at == 0 ? 0 : (at - 1 + stride - 1) / stride;
    tap = at - first * stride + 1;
    const int64_t last = lesser((at + 1) / stride, results - 1);
    count = last - first + 1;
  }
};

// Calls body(at, from, count, n, tap) for the runs of a row of the source: the elements [at, at + count) are read by n
// results, which begin at `from` and are C apart. The first result reads them as neighbour `tap`.
template <typename Body>
inline void for_each_source_run(const Pool3x3Params& p, const Body& body) {
  const int64_t c = p.channels;
  const auto pixels = [&](int64_t x, int64_t count) {
    const Readers readers(x, p.stride, p.out_width);
    const auto run = [&](auto n) { body(x * c, readers.first * c, count * c, n, readers.tap); };
    if (readers.count == 1) run(Count<1>{});
    if (readers.count == 2) run(Count<2>{});
    if (readers.count == 3) run(Count<3>{});
  };
  if (p.stride > 1 || p.width < 3) {
    for (int64_t x = 0; x < p.width; ++x) pixels(x, 1);
    return;
  }
  pixels(0, 1);
  pixels(1, p.width - 2);
  pixels(p.width - 1, 1);
}

struct Item {
  int64_t image, r0, r1;
  Item(const Pool3x3Params& p, int64_t item, int64_t rows) {
    image = item / p.strips;
    r0 = item % p.strips * p.strip_rows;
    r1 = lesser(r0 + p.strip_rows, rows);
  }
};

// Takes the larger of two values and its place. Of equal values it keeps the first, of NaNs the last.
inline void take_larger(VecF candidate, VecI place, VecF* value, VecI* index) {
  const VecI larger = (candidate > *value) | (candidate != candidate);
  *value = larger ? candidate : *value;
  *index = larger ? place : *index;
}

// First takes the maxima along each row; three of these then give the maximum of a window.
template <typename T>
void max_fwd_items(const Pool3x3Params& p, int64_t begin, int64_t end) {
  const int64_t size = p.out_width * p.channels;
  const int64_t held = size + kLanes;  // runs are stored in whole vectors
  Scratch scratch(Scratch::size<float>(3 * held) + Scratch::size<int32_t>(3 * held));
  float* values = scratch.take<float>(3 * held);
  int32_t* columns = scratch.take<int32_t>(3 * held);
  for (int64_t i = begin; i < end; ++i) {
    const Item item(p, i, p.out_height);
    int64_t next = item.r0 == 0 ? 0 : item.r0 * p.stride - 1;
    for (int64_t r = item.r0; r < item.r1; ++r) {
      const Window window(r, p.stride, p.height);
      for (; next <= r * p.stride + window.last - 1; ++next) {
        const T* x = static_cast<const T*>(p.x) + (item.image * p.height + next) * p.width * p.channels;
        float* value = values + next % 3 * held;
        int32_t* column = columns + next % 3 * held;
        for_each_run(p, [&](int64_t at, int64_t centre, int64_t count, auto taps) {
          for_each_vector(count, [&](int64_t e, auto lanes) {
            constexpr int first = decltype(taps)::first;
            const T* from = x + centre + e - p.channels;
            VecF v = load(from + first * p.channels, lanes);
            VecI k = VecI{} + first;
#pragma GCC unroll 3
            for (int tap = first + 1; tap <= decltype(taps)::last; ++tap) {
              take_larger(load(from + tap * p.channels, lanes), VecI{} + tap, &v, &k);
            }
            store(value + at + e, v, AllLanes{});
            memcpy(column + at + e, &k, sizeof k);
          });
        });
      }
      const int64_t to = (item.image * p.out_height + r) * size;
      T* y = static_cast<T*>(p.y) + to;
      uint8_t* index = p.index + (p.index ? to : 0);
      for_each_vector(size, [&](int64_t e, auto lanes) {
        VecF v{};
        VecI k{};
        for (int64_t tap = window.first; tap <= window.last; ++tap) {
          const int64_t at = (r * p.stride + tap - 1) % 3 * held + e;
          VecI place;
          memcpy(&place, columns + at, sizeof place);
          place += static_cast<int32_t>(3 * tap);
          const VecF candidate = load(values + at, AllLanes{});
          if (tap == window.first) {
            v = candidate;
            k = place;
          } else {
            take_larger(candidate, place, &v, &k);
          }
        }
        store(y + e, v, lanes);
        if (p.index) store_index(index + e, k, lanes);
      });
    }
  }
}

template <typename T>
void avg_fwd_items(const Pool3x3Params& p, int64_t begin, int64_t end) {
  const int64_t row = p.width * p.channels;
  Scratch scratch(Scratch::size<float>(row));
  float* sums = scratch.take<float>(row);
  for (int64_t i = begin; i < end; ++i) {
    const Item item(p, i, p.out_height);
    for (int64_t r = item.r0; r < item.r1; ++r) {
      const Window window(r, p.stride, p.height);
      const T* x = static_cast<const T*>(p.x) + (item.image * p.height + r * p.stride + window.first - 1) * row;
      for_each_vector(row, [&](int64_t e, auto lanes) {
        VecF sum = load(x + e, lanes);
        for (int64_t k = 1; k < window.count(); ++k) sum += load(x + k * row + e, lanes);
        store(sums + e, sum, lanes);
      });
      T* y = static_cast<T*>(p.y) + (item.image * p.out_height + r) * p.out_width * p.channels;
      for_each_run(p, [&](int64_t at, int64_t centre, int64_t count, auto taps) {
        constexpr int first = decltype(taps)::first;
        constexpr int last = decltype(taps)::last;
        const VecF scale = broadcast(1.0f / static_cast<float>((last - first + 1) * window.count()));
        for_each_vector(count, [&](int64_t e, auto lanes) {
          const float* from = sums + centre + e - p.channels;
          VecF sum = load(from + first * p.channels, lanes);
#pragma GCC unroll 3
          for (int tap = first + 1; tap <= last; ++tap) sum += load(from + tap * p.channels, lanes);
          store(y + at + e, sum * scale, lanes);
        });
      });
    }
  }
}

// The gradient of an element is the sum over the windows in which it is the maximum.
template <typename T>
void max_bwd_items(const Pool3x3Params& p, int64_t begin, int64_t end) {
  const int64_t size = p.out_width * p.channels;
  const int32_t stride = static_cast<int32_t>(p.stride);
  for (int64_t i = begin; i < end; ++i) {
    const Item item(p, i, p.height);
    for (int64_t r = item.r0; r < item.r1; ++r) {
      const Readers rows(r, p.stride, p.out_height);
      const int64_t source = (item.image * p.out_height + rows.first) * size;
      const T* grad = static_cast<const T*>(p.grad) + source;
      const uint8_t* index = p.index + source;
      T* dx = static_cast<T*>(p.dx) + (item.image * p.height + r) * p.width * p.channels;
      for_each_source_run(p, [&](int64_t at, int64_t from, int64_t count, auto n, int64_t tap) {
        for_each_vector(count, [&](int64_t e, auto lanes) {
          VecF sum{};
          int32_t place = static_cast<int32_t>(3 * rows.tap + tap);
          for (int64_t k = 0; k < rows.count; ++k, place -= 3 * stride) {
#pragma GCC unroll 3
            for (int j = 0; j < decltype(n)::value; ++j) {
              const int64_t read = k * size + from + e + j * p.channels;
              const VecI chosen = load_index(index + read, lanes) == place - j * stride;
              sum += chosen ? load(grad + read, lanes) : VecF{};
            }
          }
          store(dx + at + e, sum, lanes);
        });
      });
    }
  }
}

template <typename T>
void avg_bwd_items(const Pool3x3Params& p, int64_t begin, int64_t end) {
  const int64_t size = p.out_width * p.channels;
  Scratch scratch(Scratch::size<float>(size));
  float* sums = scratch.take<float>(size);
  for (int64_t i = begin; i < end; ++i) {
    const Item item(p, i, p.height);
    for (int64_t r = item.r0; r < item.r1; ++r) {
      const Readers rows(r, p.stride, p.out_height);
      const T* grad = static_cast<const T*>(p.grad) + (item.image * p.out_height + rows.first) * size;
      VecF scales[3];
      for (int64_t k = 0; k < rows.count; ++k) {
        scales[k] = broadcast(1.0f / static_cast<float>(Window(rows.first + k, p.stride, p.height).count()));
      }
      for_each_run(p, [&](int64_t at, int64_t, int64_t count, auto taps) {
        const VecF scale = broadcast(1.0f / static_cast<float>(decltype(taps)::last - decltype(taps)::first + 1));
        for_each_vector(count, [&](int64_t e, auto lanes) {
          VecF sum{};
          for (int64_t k = 0; k < rows.count; ++k) sum += load(grad + k * size + at + e, lanes) * scales[k];
          store(sums + at + e, sum * scale, lanes);
        });
      });
      T* dx = static_cast<T*>(p.dx) + (item.image * p.height + r) * p.width * p.channels;
      for_each_source_run(p, [&](int64_t at, int64_t from, int64_t count, auto n, int64_t) {
        for_each_vector(count, [&](int64_t e, auto lanes) {
          VecF sum = load(sums + from + e, lanes);
#pragma GCC unroll 3
          for (int j = 1; j < decltype(n)::value; ++j) sum += load(sums + from + e + j * p.channels, lanes);
          store(dx + at + e, sum, lanes);
        });
      });
    }
  }
}

void pool_3x3_fwd(const Pool3x3Params& p, int64_t begin, int64_t end) {
  if (p.max) return (p.bfloat16 ? max_fwd_items<BFloat16> : max_fwd_items<float>)(p, begin, end);
  (p.bfloat16 ? avg_fwd_items<BFloat16> : avg_fwd_items<float>)(p, begin, end);
}

void pool_3x3_bwd(const Pool3x3Params& p, int64_t begin, int64_t end) {
  if (p.max) return (p.bfloat16 ? max_bwd_items<BFloat16> : max_bwd_items<float>)(p, begin, end);
  (p.bfloat16 ? avg_bwd_items<BFloat16> : avg_bwd_items<float>)(p, begin, end);
}

}  // namespace

extern const Pool3x3Kernels kPool3x3Kernels = {pool_3x3_fwd, pool_3x3_bwd};

}  // namespace nasfast::cpu::NASFAST_ISA
