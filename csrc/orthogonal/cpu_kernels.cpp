// Kernels of orthogonalize and fill_orthogonal, compiled once per instruction set: Gaussian draws (gaussians.h), and
// tiny matrices, for which a call of LAPACK would cost more than their arithmetic. That arithmetic is the same as on a
// GPU (householder.h).

#include "cpu_kernels.h"

#include "gaussians.h"
#include "householder.h"

namespace nasfast::cpu::NASFAST_ISA {
namespace {

template <typename T>
struct Lanes;
template <>
struct Lanes<float> : orthogonal::Format<float> {
  using Real = VecF;
  using Bits = VecU;
  static constexpr int kCount = kLanes;
  static Real root(Real x) {
    for (int lane = 0; lane < kCount; ++lane) x[lane] = __builtin_sqrtf(x[lane]);
    return x;
  }
};
template <>
struct Lanes<double> : orthogonal::Format<double> {
  using Real = VecD;
  using Bits = VecU64;
  static constexpr int kCount = kLanesD;
  static Real root(Real x) { return roots(x); }
};

template <typename T>
void orthogonalize_lanes(const TinyParams& p, int64_t begin, int64_t end) {
  using F = Lanes<T>;
  const int elements = p.rows * p.columns;
  typename F::Real a[orthogonal::kTinyElements + orthogonal::kTinyColumns] = {};
  for (int64_t first = begin; first < end; first += F::kCount) {
    const int count = end - first < F::kCount ? static_cast<int>(end - first) : F::kCount;
    const T* in = static_cast<const T*>(p.in) + first * elements;
    T* out = static_cast<T*>(p.out) + first * elements;
    for (int e = 0; e < elements; ++e) {
      const int at = orthogonal::tiny_place(e, p.rows, p.columns, p.wide);
      for (int lane = 0; lane < count; ++lane) a[at][lane] = in[lane * elements + e];
    }
    orthogonal::orthogonalize_tiny<F>(a, 1, p.rows, p.columns);
    for (int e = 0; e < elements; ++e) {
      const int at = orthogonal::tiny_place(e, p.rows, p.columns, p.wide);
      for (int lane = 0; lane < count; ++lane) out[lane * elements + e] = a[at][lane];
    }
  }
}

template <typename T>
void store_scaled(const double* from, double scale, void* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) static_cast<T*>(to)[i] = static_cast<T>(from[i] * scale);
}

}  // namespace

extern const OrthogonalKernels kOrthogonalKernels = {orthogonalize_lanes<float>, orthogonalize_lanes<double>, gaussians,
                                                     store_scaled<float>, store_scaled<double>};

}  // namespace nasfast::cpu::NASFAST_ISA
