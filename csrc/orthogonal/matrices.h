// What the launchers of orthogonalize use: checks of the tensors, memory for the results, and the matrices in the
// tensors.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "householder.h"

namespace nasfast::orthogonal {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A contiguous batch of matrices, [batch][rows][columns], tall or wide.
template <typename T>
struct Matrices {
  const T* in;
  T* out;
  int64_t batch, rows, columns;

  bool wide() const { return rows < columns; }
  int64_t size() const { return rows * columns; }
  bool tiny() const { return size() <= kTinyElements; }
};

template <typename T>
constexpr ScalarType scalar_type() {
  return sizeof(T) == sizeof(float) ? ScalarType::Float : ScalarType::Double;
}

struct Work {
  std::vector<Tensor> inputs;   // contiguous
  std::vector<Tensor> results;  // contiguous, not yet written

  // Refuses what would corrupt memory. nasfast/ops/checks.py checks the same before, with explanations for the user.
  explicit Work(const std::vector<Tensor>& matrices) {
    for (const Tensor& z : matrices) {
      STD_TORCH_CHECK(z.dim() >= 2, "orthogonalize: a matrix must have two dimensions or more, got ", z.dim());
      STD_TORCH_CHECK(z.scalar_type() == ScalarType::Float || z.scalar_type() == ScalarType::Double,
                      "orthogonalize: matrices must be float32 or float64");
      STD_TORCH_CHECK(z.device() == matrices[0].device(), "orthogonalize: all matrices must be on one device");
      STD_TORCH_CHECK(z.size(-2) <= kMaxSide && z.size(-1) <= kMaxSide, "orthogonalize: a matrix is too large");
      inputs.push_back(torch::stable::contiguous(z));
      results.push_back(torch::stable::new_empty(inputs.back(), z.sizes()));
    }
  }

  // The matrices with elements of type T.
  template <typename T>
  std::vector<Matrices<T>> of_type() const {
    std::vector<Matrices<T>> found;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Tensor& z = inputs[i];
      if (z.scalar_type() != scalar_type<T>() || z.numel() == 0) continue;
      const int64_t rows = z.size(-2);
      const int64_t columns = z.size(-1);
      found.push_back({static_cast<const T*>(z.const_data_ptr()), static_cast<T*>(results[i].mutable_data_ptr()),
                       z.numel() / (rows * columns), rows, columns});
    }
    return found;
  }

 private:
  static constexpr int64_t kMaxSide = std::numeric_limits<int>::max() / 2;
};

}  // namespace nasfast::orthogonal
