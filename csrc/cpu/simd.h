// A vector of floats as wide as the instruction set this file is compiled for, and its loads and stores.
//
// Only kernel files include this. CMake compiles them once per instruction set; NASFAST_ISA is the name of the
// namespace. Everything here is in that namespace, and kernel files use no templates of the standard library: the
// linker would merge a function that two instruction sets have in common, and the wrong one could run on an old
// processor.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace nasfast::cpu::NASFAST_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;  // SSE2 and NEON
#endif

typedef float VecF __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t VecI __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint32_t VecU __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef uint16_t VecH __attribute__((vector_size(kLanes * sizeof(uint16_t))));

struct BFloat16 {
  uint16_t bits;
};

// Tag of a load or store of kLanes elements. An int in its place is the number of lanes to load or store.
struct AllLanes {};

inline VecF broadcast(float value) { return value - VecF{}; }

inline VecF as_float(VecU bits) {
  VecF v;
  memcpy(&v, &bits, sizeof v);
  return v;
}

inline VecU as_bits(VecF v) {
  VecU bits;
  memcpy(&bits, &v, sizeof bits);
  return bits;
}

inline VecF widen(VecH h) {
#if defined(__AVX512F__)
  // for __builtin_convertvector, GCC 12 widens the halves apart and joins them
  return as_float((VecU)_mm512_cvtepu16_epi32((__m256i)h) << 16);
#elif defined(__AVX2__)
  return as_float((VecU)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#elif defined(__aarch64__)
  // for __builtin_convertvector, GCC 12 moves every lane through a register of integers
  return as_float((VecU)vmovl_u16((uint16x4_t)h) << 16);
#else
  return as_float(__builtin_convertvector(h, VecU) << 16);
#endif
}

inline VecH narrow(VecF v) {
#if defined(__AVX512BF16__)
  const __m256bh h = _mm512_cvtneps_pbh((__m512)v);
  VecH result;
  memcpy(&result, &h, sizeof result);
  return result;
#else
  const VecU bits = as_bits(v);
  const VecU even = bits + 0x7fff + ((bits >> 16) & 1);  // round to nearest, ties to even
  const VecU quiet = (bits | 0x400000);                  // rounding must not turn a NaN into an infinity or a zero
  return __builtin_convertvector((v == v ? even : quiet) >> 16, VecH);
#endif
}

// v rounded to the storage type T
template <typename T>
inline VecF as_stored(VecF v) {
  return v;
}
template <>
inline VecF as_stored<BFloat16>(VecF v) {
  return widen(narrow(v));
}

inline VecF load(const float* p, AllLanes) {
  VecF v;
  memcpy(&v, p, sizeof v);
  return v;
}

inline VecF load(const BFloat16* p, AllLanes) {
  VecH h;
  memcpy(&h, p, sizeof h);
  return widen(h);
}

// Asks for memory that will be read soon; p may lie outside of all tensors.
template <typename T>
inline void prefetch(const T* p) {
  __builtin_prefetch(p);
}

inline void store(float* p, VecF v, AllLanes) { memcpy(p, &v, sizeof v); }

inline void store(BFloat16* p, VecF v, AllLanes) {
  const VecH h = narrow(v);
  memcpy(p, &h, sizeof h);
}

// Not with the sanitizer: it does not see what masked intrinsics read and write.
#if defined(__AVX512F__) && !defined(__SANITIZE_ADDRESS__)

inline VecF load(const float* p, int lanes) {
  return (VecF)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << lanes) - 1), p);
}

inline VecF load(const BFloat16* p, int lanes) {
  return widen((VecH)_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << lanes) - 1), p));
}

inline void store(float* p, VecF v, int lanes) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << lanes) - 1), (__m512)v);
}

inline void store(BFloat16* p, VecF v, int lanes) {
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>((1u << lanes) - 1), (__m256i)narrow(v));
}

#else

template <typename T>
inline VecF load(const T* p, int lanes) {
  T padded[kLanes] = {};
  for (int i = 0; i < lanes; ++i) padded[i] = p[i];
  return load(padded, AllLanes{});
}

template <typename T>
inline void store(T* p, VecF v, int lanes) {
  T padded[kLanes];
  store(padded, v, AllLanes{});
  for (int i = 0; i < lanes; ++i) p[i] = padded[i];
}

#endif

// Stores past the caches: an ordinary store reads the memory before it writes it. p must be aligned to the vector.
inline void stream(float* p, VecF v, AllLanes) {
#if defined(__SANITIZE_ADDRESS__)
  store(p, v, AllLanes{});  // the sanitizer does not see what an intrinsic writes
#elif defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX__)
  _mm256_stream_ps(p, (__m256)v);
#else
  store(p, v, AllLanes{});
#endif
}

// An ordinary store for bfloat16, whose vectors are parts of a cache line and would be written to memory one by one,
// and for partial vectors, which have no such store.
template <typename T, typename Lanes>
inline void stream(T* p, VecF v, Lanes lanes) {
  store(p, v, lanes);
}

// Makes what was streamed visible to other threads; the barrier of a thread pool need not do that.
inline void finish_streams() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

// Streams or stores.
template <typename T, typename Lanes>
inline void put(T* p, VecF v, bool streams, Lanes lanes) {
  if (streams) {
    stream(p, v, lanes);
  } else {
    store(p, v, lanes);
  }
}

// The larger (smaller) of two numbers, or the second argument when either is NaN: one instruction on x86.
#if defined(__AVX512F__)
inline VecF maximum(VecF a, VecF b) { return (VecF)_mm512_max_ps((__m512)a, (__m512)b); }
inline VecF minimum(VecF a, VecF b) { return (VecF)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
inline VecF maximum(VecF a, VecF b) { return (VecF)_mm256_max_ps((__m256)a, (__m256)b); }
inline VecF minimum(VecF a, VecF b) { return (VecF)_mm256_min_ps((__m256)a, (__m256)b); }
#else
inline VecF maximum(VecF a, VecF b) { return a > b ? a : b; }
inline VecF minimum(VecF a, VecF b) { return a < b ? a : b; }
#endif

// Calls body(index, AllLanes{}) for every whole vector of `count` elements, then body(index, lanes) for the rest.
template <typename Body>
inline void for_each_vector(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) body(i, AllLanes{});
  if (i < count) body(i, static_cast<int>(count - i));
}

// Memory of one thread for the duration of one phase: zeros, aligned to cache lines. `take` hands out pieces of it.
class Scratch {
 public:
  explicit Scratch(size_t bytes)
      : data_(static_cast<char*>(aligned_alloc(kLine, round_up(bytes)))), at_(data_), end_(data_ + round_up(bytes)) {
    if (data_ == nullptr) abort();  // a parallel region must not throw
    memset(data_, 0, end_ - data_);
  }
  ~Scratch() {
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(data_, end_ - data_);
#endif
    free(data_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  template <typename T>
  T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(at_);
    at_ += size<T>(count);
    if (at_ > end_) abort();
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(piece + count, at_ - reinterpret_cast<char*>(piece + count));
#endif
    return piece;
  }

  // Bytes that take<T>(count) uses.
  template <typename T>
  static size_t size(int64_t count) {
    return round_up(count * sizeof(T)) + kRedZone;
  }

 private:
  static constexpr size_t kLine = 64;
#ifdef __SANITIZE_ADDRESS__
  static constexpr size_t kRedZone = kLine;  // so that the sanitizer sees an access beyond a piece
#else
  static constexpr size_t kRedZone = 0;
#endif
  static size_t round_up(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
  char *data_, *at_, *end_;
};

// Adds the lanes in pairs: the order is fixed.
inline float sum_lanes(VecF v) {
  float lanes[kLanes];
  memcpy(lanes, &v, sizeof v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

// Zero beyond the given lanes, for sums over a partly loaded vector.
inline VecF keep_lanes(VecF v, AllLanes) { return v; }

inline VecF keep_lanes(VecF v, int lanes) {
  VecI index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  return index < lanes ? v : VecF{};
}

// tanh with a relative error below 4e-7 everywhere
[[gnu::noinline, maybe_unused]] static VecF tanh(VecF z) {
  const VecF square = z * z;
  // tanh(z) / z - 1 = square * polynomial, a Chebyshev fit on |z| <= 0.55
  VecF near = broadcast(-0.00661576f);
  near = near * square + 0.02131275f;
  near = near * square - 0.05391007f;
  near = near * square + 0.13333118f;
  near = near * square - 0.33333332f;
  near = z + z * square * near;
  // beyond it 1 - 2 / (exp(2|z|) + 1); at 9.1 tanh is 1 in float32, so the exponential cannot overflow
  const VecF magnitude = z < 0.0f ? -z : z;
  const VecF y = 2.0f * (magnitude < 9.1f ? magnitude : broadcast(9.1f));
  const VecF kRound = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  const VecF shifted = y * 1.44269504f + kRound;
  const VecF power = shifted - kRound;
  const VecF r = (y - power * 0.693359375f) + power * 2.12194440e-4f;  // ln 2 in two parts
  VecF e = broadcast(1.0f / 5040);
  e = e * r + 1.0f / 720;
  e = e * r + 1.0f / 120;
  e = e * r + 1.0f / 24;
  e = e * r + 1.0f / 6;
  e = e * r + 0.5f;
  e = e * r + 1.0f;
  e = e * r + 1.0f;
  e = as_float(as_bits(e) + (as_bits(shifted) << 23));
  const VecF far = 1.0f - 2.0f / (e + 1.0f);
  const VecF signed_far = z < 0.0f ? -far : far;
  const VecF result = magnitude < 0.55f ? near : signed_far;
  return z == z ? result : z;
}

// 1 / (1 + exp(-z)) with an absolute error below 2e-7, and 0 below -87. Most of its time is the latency of what follows
// from each other, so the chain is short.
[[gnu::always_inline]] inline VecF sigmoid(VecF z) {
  const VecF y = maximum(broadcast(-126.0f), z * -1.44269504f);
  const VecF kRound = broadcast(12582912.0f);  // as in tanh
  const VecF shifted = y + kRound;
  const VecF r = y - (shifted - kRound);
  // 2^r with a relative error below 1e-7 on |r| <= 0.5, a minimax fit
  const VecF square = r * r;
  const VecF high = (r * 1.3264727e-3f + 9.671513e-3f) * square + (r * 5.5507336e-2f + 2.4022242e-1f);
  const VecF e = high * square + (r * 6.9314700e-1f + 1.0f);
  const VecF result = 1.0f / (1.0f + as_float(as_bits(e) + (as_bits(shifted) << 23)));
  return z < -87.0f ? VecF{} : result;
}

}  // namespace nasfast::cpu::NASFAST_ISA
