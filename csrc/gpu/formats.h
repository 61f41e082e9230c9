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
inline float relu(float x) { return x <= 0 ? 0.f : x; }
template <class Format>
uint32_t least_pair(uint32_t a, uint32_t b) {
  const auto least = [](float x, float y) { return x != x || x < y ? x : y; };
  return Format::pack(least(Format::first(a), Format::first(b)), least(Format::second(a), Format::second(b)));
}
#endif

// The storage types. Two numbers share 32 bits, and the lower half is the first. pack_relu packs the numbers above 0,
// and 0 for others, at no cost; at_most takes the smaller number of each half. Both keep NaN.
struct Bf16 {
  static constexpr uint32_t kSixes = 0x40c040c0;
  static NASFAST_DEVICE float first(uint32_t pair) { return as_float(pair << 16); }
  static NASFAST_DEVICE float second(uint32_t pair) { return as_float(pair & 0xffff0000u); }
#ifdef __CUDACC__
  static NASFAST_DEVICE uint32_t pack(float first, float second) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
  }
  static NASFAST_DEVICE uint32_t pack_relu(float first, float second) {
    uint32_t pair;
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
  }
  static NASFAST_DEVICE uint32_t at_most(uint32_t pair, uint32_t limit) {
    uint32_t least;
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(least) : "r"(pair), "r"(limit));
    return least;
  }
#else
  static uint32_t round(float x) {
    const uint32_t bits = as_bits(x);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  static uint32_t pack(float first, float second) { return round(first) | round(second) << 16; }
  static uint32_t pack_relu(float first, float second) { return pack(relu(first), relu(second)); }
  static uint32_t at_most(uint32_t pair, uint32_t limit) { return least_pair<Bf16>(pair, limit); }
#endif
};

struct Fp16 {
  static constexpr uint32_t kSixes = 0x46004600;
#ifdef __CUDACC__
  static NASFAST_DEVICE float first(uint32_t pair) { return convert(static_cast<uint16_t>(pair)); }
  static NASFAST_DEVICE float second(uint32_t pair) { return convert(static_cast<uint16_t>(pair >> 16)); }
  static NASFAST_DEVICE uint32_t pack(float first, float second) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
  }
  static NASFAST_DEVICE uint32_t pack_relu(float first, float second) {
    uint32_t pair;
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
  }
  static NASFAST_DEVICE uint32_t at_most(uint32_t pair, uint32_t limit) {
    uint32_t least;
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(least) : "r"(pair), "r"(limit));
    return least;
  }

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
  static uint32_t pack_relu(float first, float second) { return pack(relu(first), relu(second)); }
  static uint32_t at_most(uint32_t pair, uint32_t limit) { return least_pair<Fp16>(pair, limit); }
#endif
};

}  // namespace nasfast::gpu
