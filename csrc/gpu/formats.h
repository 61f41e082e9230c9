// The storage types of 16 bits, and arithmetic that a GPU has and C++ does not.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "macros.h"

#ifndef __CUDACC__
#include <torch/headeronly/util/Half.h>
#endif

namespace nasfast::gpu {

NASFAST_DEVICE float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
NASFAST_DEVICE uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

#ifdef __CUDACC__
NASFAST_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// x within [0, 1]; NaN becomes 0. Behind an fma it costs no instruction.
NASFAST_DEVICE float saturate(float x) { return __saturatef(x); }
#else
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float saturate(float x) { return x > 0 ? (x < 1 ? x : 1.f) : 0.f; }
#endif

// The storage types. Two numbers share 32 bits, and the lower half is the first. pack_relu packs the numbers above 0,
// and 0 for others, at no cost; at_most takes the smaller number of each half. Both keep NaN.
#ifdef __CUDACC__
#define NASFAST_PAIRS(TYPE)                                                             \
  static NASFAST_DEVICE uint32_t pack(float first, float second) {                      \
    uint32_t pair;                                                                      \
    asm("cvt.rn." TYPE ".f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));      \
    return pair;                                                                        \
  }                                                                                     \
  static NASFAST_DEVICE uint32_t pack_relu(float first, float second) {                 \
    uint32_t pair;                                                                      \
    asm("cvt.rn.relu." TYPE ".f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first)); \
    return pair;                                                                        \
  }                                                                                     \
  static NASFAST_DEVICE uint32_t at_most(uint32_t pair, uint32_t limit) {               \
    uint32_t least;                                                                     \
    asm("min.NaN." TYPE " %0, %1, %2;" : "=r"(least) : "r"(pair), "r"(limit));          \
    return least;                                                                       \
  }
#else
#define NASFAST_PAIRS(TYPE)                                                                        \
  static uint32_t pack_relu(float a, float b) { return pack(a <= 0 ? 0.f : a, b <= 0 ? 0.f : b); } \
  static uint32_t at_most(uint32_t pair, uint32_t limit) {                                         \
    const auto least = [](float x, float y) { return x != x || x < y ? x : y; };                   \
    return pack(least(first(pair), first(limit)), least(second(pair), second(limit)));             \
  }
#endif

struct Bf16 {
  static constexpr uint32_t kSixes = 0x40c040c0;
  static NASFAST_DEVICE float first(uint32_t pair) { return as_float(pair << 16); }
  static NASFAST_DEVICE float second(uint32_t pair) { return as_float(pair & 0xffff0000u); }
  NASFAST_PAIRS("bf16x2")
#ifndef __CUDACC__
  static uint32_t round(float x) {
    const uint32_t bits = as_bits(x);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  static uint32_t pack(float first, float second) { return round(first) | round(second) << 16; }
#endif
};

struct Fp16 {
  static constexpr uint32_t kSixes = 0x46004600;
  NASFAST_PAIRS("f16x2")
#ifdef __CUDACC__
  static NASFAST_DEVICE float first(uint32_t pair) { return convert(static_cast<uint16_t>(pair)); }
  static NASFAST_DEVICE float second(uint32_t pair) { return convert(static_cast<uint16_t>(pair >> 16)); }

 private:
  static NASFAST_DEVICE float convert(uint16_t half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
  }
#else
  static float first(uint32_t pair) { return c10::Half(static_cast<uint16_t>(pair), c10::Half::from_bits()); }
  static float second(uint32_t pair) { return first(pair >> 16); }
  static uint32_t pack(float first, float second) { return c10::Half(first).x | uint32_t{c10::Half(second).x} << 16; }
#endif
};
#undef NASFAST_PAIRS

}  // namespace nasfast::gpu
