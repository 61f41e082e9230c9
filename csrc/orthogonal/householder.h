// Householder orthogonalisation: the arithmetic that the GPU, its emulation on the host and the CPU share.
// Formulas: nasfast/ops/reference.py, orthogonalize.
//
// The reflector of a column x, taken from its diagonal element on: s = sign(x_1), v = x + s |x| e_1, tau = 2 / v'v, H =
// I - tau v v'. R is never stored. A zero column gives v = 0 and tau = 0. Because R_kk = -s |x| and v_1 has the sign s,
// the sign of R_kk is read from v_1. Columns are scaled by powers of two, which changes neither Q nor the rounding:
// once before the elimination, so that no square overflows, and again where the elimination leaves so little of a
// column that its squares would underflow.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../gpu/macros.h"

namespace nasfast::orthogonal {
// The CPU kernels include this file once per instruction set. Internal linkage keeps the linker from merging the
// copies.
namespace {

// A tiny matrix has at most this many elements (7 x 7 filters, and all shapes up to 8 x 8). One thread of a GPU, or one
// lane of a CPU vector, does a whole tiny matrix.
constexpr int kTinyElements = 64;
constexpr int kTinyColumns = 8;  // in the tall form
static_assert(kTinyElements < (kTinyColumns + 1) * (kTinyColumns + 1), "a tiny matrix may have more columns");

template <typename T>
NASFAST_DEVICE T greater(T a, T b) {
  return a > b ? a : b;
}

// Properties of a floating type. A vector of several numbers has a Format of its own, derived from that of its
// elements.
template <typename T>
struct Format;
template <>
struct Format<float> {
  using Word = uint32_t;
  using Bits = Word;
  static constexpr int kMantissa = 23;
  static constexpr Word kBias = 127;
  static NASFAST_DEVICE float root(float x) { return sqrtf(x); }
};
template <>
struct Format<double> {
  using Word = uint64_t;
  using Bits = Word;
  static constexpr int kMantissa = 52;
  static constexpr Word kBias = 1023;
  static NASFAST_DEVICE double root(double x) { return sqrt(x); }
};

// Columns are scaled to this power of two: sums of squares stay far from overflow, and elements much smaller than the
// largest one stay far from underflow.
constexpr int kScaledExponent = 32;

// The power of two that brings x >= 0 closest to 2^kScaledExponent.
template <typename F, typename Real>
NASFAST_DEVICE Real scale_of(Real x) {
  using Bits = typename F::Bits;
  using Word = typename F::Word;
  Bits bits;
  memcpy(&bits, &x, sizeof bits);
  Bits exponent = bits >> F::kMantissa;  // x >= 0: no sign
  // the largest power of two has the exponent 2 * kBias
  const Bits low = Bits{} + Word(kScaledExponent);
  exponent = exponent < low ? low : exponent;
  bits = (Word(2 * F::kBias + kScaledExponent) - exponent) << F::kMantissa;
  memcpy(&x, &bits, sizeof bits);
  return x;
}

template <typename Real>
struct Reflector {
  Real first, tau;  // v_1 and tau
};

// The reflector of a column with first element x, where `below` is the sum of the squares of the other elements. The
// caller has scaled the column so that no square underflows.
template <typename F, typename Real>
NASFAST_DEVICE Reflector<Real> reflector(Real x, Real below) {
  const Real zero{};
  const Real norm = F::root(x * x + below);
  const Real first = x < zero ? x - norm : x + norm;
  const Real square = first * first + below;
  return {first, square > zero ? 2 / (square > zero ? square : zero + 1) : zero};
}

// The sign of R_kk, read from v_1.
template <typename Real>
NASFAST_DEVICE Real diagonal_sign(Real first) {
  const Real one = Real{} + 1;
  return first > Real{} ? -one : one;
}

// Orthogonalises one matrix in place, by one thread. a[e * stride] is element e of the row-major matrix, and behind the
// matrix tau[columns]. Real may be a vector; then each lane has a matrix of its own.
template <typename F, typename Real>
NASFAST_DEVICE void orthogonalize_tiny(Real* a, int stride, int rows, int columns) {
  const auto at = [=](int i, int j) -> Real& { return a[(i * columns + j) * stride]; };
  const auto scale_column = [=](int first, int k) {
    Real largest{};
    for (int i = first; i < rows; ++i) largest = greater(largest, greater(at(i, k), -at(i, k)));
    const Real scale = scale_of<F>(largest);
    for (int i = first; i < rows; ++i) at(i, k) *= scale;
  };
  for (int k = 0; k < columns; ++k) scale_column(0, k);
  for (int k = 0; k < columns; ++k) {
    scale_column(k, k);
    Real below{};
    for (int i = k + 1; i < rows; ++i) below += at(i, k) * at(i, k);
    const Reflector<Real> h = reflector<F>(at(k, k), below);
    at(k, k) = h.first;
    at(rows, k) = h.tau;
    for (int j = k + 1; j < columns; ++j) {
      Real dot{};
      for (int i = k; i < rows; ++i) dot += at(i, k) * at(i, j);
      dot *= h.tau;
      for (int i = k; i < rows; ++i) at(i, j) -= dot * at(i, k);
    }
  }
  // Q = H_1 .. H_n I diag(sign), from the last reflector to the first. When H_k is applied, row k of the columns after
  // k is still zero in Q, so it takes no part in the products.
  for (int k = columns - 1; k >= 0; --k) {
    const Real tau = at(rows, k);
    for (int j = k + 1; j < columns; ++j) {
      Real dot{};
      for (int i = k + 1; i < rows; ++i) dot += at(i, k) * at(i, j);
      dot *= tau;
      at(k, j) = -dot * at(k, k);
      for (int i = k + 1; i < rows; ++i) at(i, j) -= dot * at(i, k);
    }
    const Real first = at(k, k);
    const Real sign = diagonal_sign(first);
    const Real factor = sign * tau * first;
    at(k, k) = sign - factor * first;
    for (int i = k + 1; i < rows; ++i) at(i, k) *= -factor;
  }
}

// Index in the tall form of element e of a matrix in memory.
NASFAST_ANYWHERE int tiny_place(int e, int rows, int columns, bool wide) {
  return wide ? e % rows * columns + e / rows : e;
}

}  // namespace
}  // namespace nasfast::orthogonal
