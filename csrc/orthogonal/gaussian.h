// The arithmetic of torch.randn in float64 on a CPU, without its branches: the 32-bit Mersenne Twister (Matsumoto and
// Nishimura 1998) and the transform of Box and Muller, for vectors of a CPU and threads of a GPU.
#pragma once

#include <cstdint>
#include <cstring>

#include "../gpu/macros.h"

namespace nasfast::orthogonal {

constexpr int kWords = 624;  // of the state of the twister; each turn of it makes as many random words
constexpr int kShift = 397;
constexpr int kUniforms = kWords / 2;  // of one turn: a number in float64 takes two words
// torch.randn draws this many uniform numbers at a time: the first half becomes the radii, the second the angles
constexpr int kBlock = 16;

// State word i + 1 at the start, from word i.
NASFAST_ANYWHERE uint32_t seeded_word(uint32_t word, int i) {
  return 1812433253u * (word ^ (word >> 30)) + static_cast<uint32_t>(i) + 1;
}

// State word i after a turn: word and next are words i and i + 1, far is word i + kShift.
NASFAST_ANYWHERE uint32_t twisted(uint32_t word, uint32_t next, uint32_t far) {
  const uint32_t mixed = (word & 0x80000000u) | (next & 0x7fffffffu);
  return far ^ (mixed >> 1) ^ ((0u - (next & 1u)) & 0x9908b0dfu);
}

NASFAST_ANYWHERE uint32_t tempered(uint32_t word) {
  word ^= word >> 11;
  word ^= (word << 7) & 0x9d2c5680u;
  word ^= (word << 15) & 0xefc60000u;
  return word ^ (word >> 18);
}

NASFAST_ANYWHERE double from_bits(uint64_t bits) {
  double x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

NASFAST_ANYWHERE uint64_t to_bits(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

// An integer below 2^52 as a number; not every instruction set converts vectors of them.
NASFAST_ANYWHERE double to_double(uint64_t integer) { return from_bits(integer | 0x4330000000000000u) - 0x1p52; }

// From 0 to 1, without 1: the lower 53 bits of two words.
NASFAST_ANYWHERE double uniform(uint32_t high, uint32_t low) {
  return to_double(high & 0x1fffffu) * 0x1p-21 + to_double(low) * 0x1p-53;
}

// The natural logarithm of x in (0, 1], to about one unit in the last place: x = 2^k (1 + f), s = f / (2 + f), and
// log(1 + f) = 2 artanh(s) by a polynomial in s^2 (coefficients and order of the sum: fdlibm, e_log.c).
NASFAST_ANYWHERE double logarithm(double x) {
  // k so that 1 + f is from sqrt(1/2) to sqrt(2)
  const uint64_t bits = to_bits(x) + (0x3ff0000000000000u - 0x3fe6a09e667f3bcdu);
  const double k = to_double(bits >> 52) - 1023;
  const double f = from_bits((bits & 0xfffffffffffffu) + 0x3fe6a09e667f3bcdu) - 1;
  const double s = f / (2 + f), z = s * s, half = 0.5 * f * f;
  double sum = 1.479819860511658591e-01;
  sum = sum * z + 1.531383769920937332e-01;
  sum = sum * z + 1.818357216161805012e-01;
  sum = sum * z + 2.222219843214978396e-01;
  sum = sum * z + 2.857142874366239149e-01;
  sum = sum * z + 3.999999999940941908e-01;
  sum = sum * z + 6.666666666666735130e-01;
  sum *= z;
  return k * 6.93147180369123816490e-01 - ((half - (s * (half + sum) + k * 1.90821492927058770002e-10)) - f);
}

// radius cos(2 pi turns) and radius sin(2 pi turns) for turns in [0, 1): by polynomials within an eighth of a turn
// around the nearest quarter (coefficients: fdlibm, k_cos.c and k_sin.c).
NASFAST_ANYWHERE void on_circle(double radius, double turns, double* cosine, double* sine) {
  const double shifted = turns * 4 + 0x1.8p52;  // rounds to whole quarters, which are then its last bits
  const uint64_t quarter = to_bits(shifted);
  const double angle = (turns - (shifted - 0x1.8p52) * 0.25) * 6.283185307179586476925;
  const double z = angle * angle;
  double c = -1.13596475577881948265e-11;
  c = c * z + 2.08757232129817482790e-09;
  c = c * z - 2.75573143513906633035e-07;
  c = c * z + 2.48015872894767294178e-05;
  c = c * z - 1.38888888888741095749e-03;
  c = c * z + 4.16666666666666019037e-02;
  c = (c * z - 0.5) * z + 1;
  double s = 1.58969099521155010221e-10;
  s = s * z - 2.50507602534068634195e-08;
  s = s * z + 2.75573137070700676789e-06;
  s = s * z - 1.98412698298579493134e-04;
  s = s * z + 8.33333333332248946124e-03;
  s = s * z - 1.66666666666666324348e-01;
  s = s * z * angle + angle;
  const bool swap = quarter & 1;
  const uint64_t sign_of_cosine = ((quarter + 1) & 2) << 62, sign_of_sine = (quarter & 2) << 62;
  *cosine = radius * from_bits(to_bits(swap ? s : c) ^ sign_of_cosine);
  *sine = radius * from_bits(to_bits(swap ? c : s) ^ sign_of_sine);
}

}  // namespace nasfast::orthogonal
