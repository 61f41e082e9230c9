// Standard normal numbers in float64: those of torch.randn with a CPU generator, up to rounding.
//
// torch fills a tensor of 16 or more elements so: each element gets a uniform number, and in each block of 16 the
// numbers i and i + 8 become a pair of normal ones (Box and Muller 1958). If the last block is not whole, the last 16
// elements are drawn again. A uniform number is 53 bits of two words of MT19937 (Matsumoto and Nishimura 1998). Only
// kernel files include this: it is compiled once per instruction set.
#pragma once

#include "../cpu/simd.h"

namespace nasfast::cpu::NASFAST_ISA {
namespace {

constexpr int kLanesD = kLanes / 2;
typedef double VecD __attribute__((vector_size(kLanesD * sizeof(double))));
typedef uint64_t VecU64 __attribute__((vector_size(kLanesD * sizeof(uint64_t))));

inline VecD roots(VecD x) {
  for (int lane = 0; lane < kLanesD; ++lane) x[lane] = __builtin_sqrt(x[lane]);
  return x;
}

inline VecD as_double(VecU64 bits) {
  VecD v;
  memcpy(&v, &bits, sizeof v);
  return v;
}

inline VecU64 as_words(VecD v) {
  VecU64 bits;
  memcpy(&bits, &v, sizeof bits);
  return bits;
}

constexpr uint64_t kOne = uint64_t{1023} << 52;         // the bits of 1.0
constexpr uint64_t kTwo52 = uint64_t{1023 + 52} << 52;  // the bits of 2^52: an integer below 2^52 fits behind them
inline VecD from_integers(VecU64 n) { return as_double(n | kTwo52) - 0x1p52; }

// The uniform numbers of one generator, in order.
class Uniforms {
 public:
  explicit Uniforms(uint32_t seed) {
    state_[0] = seed;
    for (uint32_t k = 1; k < kState; ++k) state_[k] = 1812433253u * (state_[k - 1] ^ (state_[k - 1] >> 30)) + k;
  }

  void fill(double* to, int64_t count) {
    while (count > 0) {
      if (next_ == kState / 2) refill();
      const int64_t here = count < kState / 2 - next_ ? count : kState / 2 - next_;
      memcpy(to, numbers_ + next_, here * sizeof(double));
      next_ += here;
      to += here;
      count -= here;
    }
  }

 private:
  static constexpr int kState = 624, kShift = 397;
  static_assert(kState / 2 % kLanesD == 0, "a refill is whole vectors");

  static uint32_t twist(uint32_t high, uint32_t low, uint32_t far) {
    const uint32_t mixed = (high & 0x80000000u) | (low & 0x7fffffffu);
    return far ^ (mixed >> 1) ^ (-(low & 1u) & 0x9908b0dfu);
  }

  void refill() {
    for (int k = 0; k < kState - kShift; ++k) state_[k] = twist(state_[k], state_[k + 1], state_[k + kShift]);
    for (int k = kState - kShift; k < kState - 1; ++k) {
      state_[k] = twist(state_[k], state_[k + 1], state_[k + kShift - kState]);
    }
    state_[kState - 1] = twist(state_[kState - 1], state_[0], state_[kShift - 1]);
    uint32_t words[kState];
    for (int k = 0; k < kState; ++k) {
      uint32_t y = state_[k];
      y ^= y >> 11;
      y ^= (y << 7) & 0x9d2c5680u;
      y ^= (y << 15) & 0xefc60000u;
      words[k] = y ^ (y >> 18);
    }
    for (int i = 0; i < kState / 2; i += kLanesD) {
      VecU64 pairs;  // a little-endian processor reads the first word of a pair, the high one, into the low bits
      memcpy(&pairs, words + 2 * i, sizeof pairs);
      const VecD high = from_integers(pairs & 0x1fffff), low = from_integers(pairs >> 32);
      const VecD uniform = (high * 0x1p32 + low) * 0x1p-53;
      memcpy(numbers_ + i, &uniform, sizeof uniform);
    }
    next_ = 0;
  }

  uint32_t state_[kState];
  double numbers_[kState / 2];
  int64_t next_ = kState / 2;
};

// log(x) for normal x > 0 with an error of about an ulp: x = 2^k m with m near 1, and log m = 2 artanh s by its series,
// where |s| <= 0.172.
inline VecD logarithm(VecD x) {
  const VecU64 bits = as_words(x);
  const uint64_t kRootHalf = 0x3fe6a09e667f3bcd;  // the bits of sqrt(1/2)
  const VecU64 shifted = bits + (kOne - kRootHalf);
  const VecD k = from_integers(shifted >> 52) - 1023.0;
  const VecD f = as_double((shifted & 0xfffffffffffff) + kRootHalf) - 1.0;
  const VecD s = f / (f + 2.0);
  const VecD square = s * s;
  VecD series = VecD{} + 2.0 / 21;
  for (int power = 19; power >= 3; power -= 2) series = series * square + 2.0 / power;
  // ln 2 in two parts: k times the first is exact. 2 s = f - s f
  return k * 0x1.62e42feep-1 + ((f - s * (f - square * series)) + k * 0x1.a39ef35793c76p-33);
}

// cos and sin of 2 pi u for u in [0, 1), by their series in the eighth of the circle around the next quarter
inline void cos_sin(VecD u, VecD& cosine, VecD& sine) {
  const VecD shifted = u * 4.0 + 0x1.8p52;  // its low bits are the nearest integer
  const VecU64 quarter = as_words(shifted);
  const VecD angle = (u - (shifted - 0x1.8p52) * 0.25) * 0x1.921fb54442d18p+2;
  const VecD square = angle * angle;
  VecD c = VecD{} + 1.0, s = VecD{} + 1.0;
  for (int k = 16; k >= 2; k -= 2) {
    c = 1.0 - c * square * (1.0 / (k * (k - 1)));
    s = 1.0 - s * square * (1.0 / (k * (k + 1)));
  }
  s *= angle;
  const VecU64 odd = -(quarter & 1), c_bits = as_words(c), s_bits = as_words(s);
  cosine = as_double(((c_bits & ~odd) | (s_bits & odd)) ^ (((quarter + 1) & 2) << 62));
  sine = as_double(((s_bits & ~odd) | (c_bits & odd)) ^ ((quarter & 2) << 62));
}

// Turns 16 uniform numbers into normal ones.
inline void to_normal(double* block) {
  for (int i = 0; i < 8; i += kLanesD) {
    VecD first, second, cosine, sine;
    memcpy(&first, block + i, sizeof first);
    memcpy(&second, block + i + 8, sizeof second);
    const VecD radius = roots(-2.0 * logarithm(1.0 - first));
    cos_sin(second, cosine, sine);
    cosine *= radius;
    sine *= radius;
    memcpy(block + i, &cosine, sizeof cosine);
    memcpy(block + i + 8, &sine, sizeof sine);
  }
}

// torch draws fewer than 16 numbers one by one, each pair from two uniform numbers in another order.
inline void few_gaussians(Uniforms& uniforms, double* to, int64_t count) {
  for (int64_t i = 0; i < count; i += 2) {
    double u[2];
    uniforms.fill(u, 2);
    const double radius = __builtin_sqrt(-2 * __builtin_log1p(-u[1]));
    const double angle = 0x1.921fb54442d18p+2 * u[0];
    to[i] = radius * __builtin_cos(angle);
    if (i + 1 < count) to[i + 1] = radius * __builtin_sin(angle);
  }
}

// Fills `to` with what torch.randn(count, dtype=float64) draws from a generator with this seed.
inline void gaussians(uint32_t seed, double* to, int64_t count) {
  constexpr int64_t kBlock = 16;
  Uniforms uniforms(seed);
  if (count < kBlock) return few_gaussians(uniforms, to, count);
  // some blocks at once: a vector that is loaded right after its elements were stored waits for them
  constexpr int64_t kAtOnce = 64 * kBlock;
  for (int64_t i = 0; i < count; i += kAtOnce) {
    const int64_t end = count < i + kAtOnce ? count : i + kAtOnce;
    uniforms.fill(to + i, end - i);
    for (int64_t j = i; j + kBlock <= end; j += kBlock) to_normal(to + j);
  }
  if (count % kBlock == 0) return;
  uniforms.fill(to + count - kBlock, kBlock);
  to_normal(to + count - kBlock);
}

}  // namespace
}  // namespace nasfast::cpu::NASFAST_ISA
