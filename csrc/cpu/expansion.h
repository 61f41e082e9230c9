// An expansion is a pointwise convolution before a depthwise one. Its result is computed wherever it is read, and never
// written: Facts 1 to 3 of docs/method.md 6.
#pragma once

#include <optional>
#include <vector>

#include "chain.h"

namespace nasfast::cpu {

// Mean and biased variance of the result of stage 0, from the first and second moments of x (Fact 1).
void expansion_statistics(const Chain& chain, const void* x, double* mean, double* var);

// The coefficients of stage 0 of a chain as an expansion: xhat = (W x - mean) rstd = (rstd W)(x - center) + bias.
class ExpansionNumbers {
 public:
  // mean and var are those that BatchNorm uses; gamma and beta are its affine parameters.
  ExpansionNumbers(const Chain& chain, const void* x, double eps, const float* gamma, const float* beta,
                   const double* mean, const double* var);

  // What the kernels of forward read.
  Expansion expansion(const void* x) const;

  // The weight of backward: v = weight dz.
  Packed backward_weight() const;

  // Affine gradients (null: not wanted) from the sums of dz and dz * xhat, [2][hidden].
  void affine_gradients(const double* sums, float* dweight, float* dbias) const;

  // Turns dx, which holds v, into the gradient of x, plus `added` if that is not null (Fact 3).
  void finish_input_gradient(const void* x, const double* sums, const void* added, void* dx) const;

 private:
  const Chain& chain_;
  const Stage& stage_;
  // With the statistics of a batch, the mean of a sample of x: any vector near the mean of x serves. Otherwise zero, so
  // that no image of a batch depends on another.
  AlignedFloats center_;
  AlignedFloats rstd_, bias_, scale_, shift_;
  std::optional<Packed> weight_;
};

}  // namespace nasfast::cpu
