// The tensors of one call of `gaussians` or `householder`, and the order of its launches on a GPU and in the emulation.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "draws.h"
#include "householder.h"

namespace nasfast::orthogonal {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

// The tensors to fill, longest first.
inline std::vector<Draw> draws_of(const Tensors& zs, const std::vector<int64_t>& seeds) {
  STD_TORCH_CHECK(seeds.size() == zs.size(), "gaussians: needs as many seeds as tensors");
  std::vector<Draw> draws;
  for (size_t i = 0; i < zs.size(); ++i) {
    const bool in_double = zs[i].scalar_type() == ScalarType::Double;
    STD_TORCH_CHECK(zs[i].is_contiguous() && zs[i].device() == zs[0].device() &&
                        (in_double || zs[i].scalar_type() == ScalarType::Float),
                    "gaussians: tensor ", i, " must be contiguous, float32 or float64, and on the device of the first");
    draws.push_back({zs[i].mutable_data_ptr(), in_double, zs[i].numel(), static_cast<uint32_t>(seeds[i])});
  }
  std::stable_sort(draws.begin(), draws.end(), [](const Draw& a, const Draw& b) { return a.count > b.count; });
  return draws;
}

// The operands of householder; csrc/library.cpp has the shapes.
struct Operands {
  const Tensors &z, &q, &v;
  const std::vector<double>& scales;

  // Refuses what would corrupt memory.
  void check() const {
    STD_TORCH_CHECK(q.size() == z.size() && scales.size() == z.size() && (v.empty() || v.size() == z.size()),
                    "householder: needs as many q and scales as z, and as many v, or none");
    for (size_t i = 0; i < z.size(); ++i) {
      const int64_t dim = z[i].dim(), longer = dim < 2 ? 0 : std::max(z[i].size(dim - 2), z[i].size(dim - 1));
      const auto fits = [&](const Tensor& x) {
        return x.sizes().equals(z[i].sizes()) && x.scalar_type() == z[i].scalar_type() && x.device() == z[0].device();
      };
      STD_TORCH_CHECK((dim == 2 || dim == 3) && fits(z[i]) && fits(q[i]) && (v.empty() || fits(v[i])),
                      "householder: z, q and v ", i, " must be batches of one shape and type, all on one device");
      constexpr int64_t kMost = std::numeric_limits<int>::max();
      STD_TORCH_CHECK(z[i].numel() == 0 || (longer <= kMost / 2 && z[i].numel() / longer <= kMost),
                      "householder: batch ", i, " is too large");
    }
  }
};

// A matrix with more columns than rows is taken as its transpose.
template <typename T>
Strided<T> strided(const Tensor& x) {
  const int64_t dim = x.dim();
  Strided<T> result{static_cast<T*>(x.mutable_data_ptr()), dim == 3 ? x.stride(0) : 0, x.stride(dim - 2),
                    x.stride(dim - 1)};
  if (x.size(dim - 2) < x.size(dim - 1)) std::swap(result.row, result.column);
  return result;
}

// The matrices with elements of type T: the small ones, of a warp each, and the others, most columns first, then most
// rows.
template <typename T>
struct Work {
  std::vector<Task<T>> batches;
  std::vector<Item> small, large;
  int64_t small_elements = 0;    // of shared memory for each warp
  std::optional<Tensor> memory;  // for the large ones

  const Task<T>& of(const Item& item) const { return batches[item.i_batch]; }
};

// Warp: the team of a small matrix.
template <typename T, typename Warp>
Work<T> work_of(const Operands& operands) {
  constexpr ScalarType kType = sizeof(T) == sizeof(float) ? ScalarType::Float : ScalarType::Double;
  Work<T> work;
  int64_t elements = 0;  // of the large ones
  std::vector<int64_t> begins;
  for (size_t i = 0; i < operands.z.size(); ++i) {
    const Tensor& z = operands.z[i];
    if (z.scalar_type() != kType || z.numel() == 0) continue;
    const int64_t dim = z.dim(), rows = z.size(dim - 2), columns = z.size(dim - 1), count = dim == 3 ? z.size(0) : 1;
    Task<T> task{};
    task.z = strided<const T>(z);
    task.result = strided<T>(operands.q[i]);
    if (!operands.v.empty()) task.reflectors = strided<T>(operands.v[i]);
    task.scale = static_cast<T>(operands.scales[i]);
    task.rows = static_cast<int>(std::max(rows, columns));
    task.columns = static_cast<int>(std::min(rows, columns));
    const int64_t on_chip = task.work_elements() + scratch_elements<T, Warp>(task.rows, kSmallBytes);
    const bool small = task.columns <= kSmall && on_chip * static_cast<int64_t>(sizeof(T)) <= kSmallBytes;
    const int i_batch = static_cast<int>(work.batches.size());
    for (int n = 0; n < count; ++n) (small ? work.small : work.large).push_back({i_batch, n});
    work.batches.push_back(task);
    begins.push_back(small ? -1 : elements);
    if (small) work.small_elements = std::max(work.small_elements, on_chip);
    if (!small) elements += count * task.work_elements();
  }
  if (work.large.empty()) return work;
  work.memory = torch::stable::empty({elements}, kType, std::nullopt, operands.z[0].device());
  for (size_t i = 0; i < begins.size(); ++i) {
    if (begins[i] >= 0) work.batches[i].work_in(static_cast<T*>(work.memory->mutable_data_ptr()) + begins[i]);
  }
  std::stable_sort(work.large.begin(), work.large.end(), [&work](const Item& a, const Item& b) {
    const Task<T>&x = work.of(a), &y = work.of(b);
    return x.panels() != y.panels() ? x.panels() > y.panels() : x.rows > y.rows;
  });
  return work;
}

// Calls launch(step, count, most, elements) for each step of the large matrices, in order: the first `count` of them
// have the panel, `most` tiles of it or fewer, and a tile needs that many elements of shared memory.
template <typename T, typename Block, typename Launch>
void run_launches(const Work<T>& work, int64_t limit, const Launch& launch) {
  if (work.large.empty()) return;
  const Task<T>& widest = work.of(work.large.front());
  for (int i_step = 0; i_step < step_count(widest.panels()); ++i_step) {
    const Step step = step_of(widest.panels(), i_step);
    int count = 0;
    int64_t elements = 0;
    for (const Item& item : work.large) {
      const Task<T>& task = work.of(item);
      if (task.panels() <= step.i_panel) break;
      const int rows = step.kind == Step::kForward ? task.rows - step.i_panel * kPanel : 0;
      elements = std::max(elements, scratch_elements<T, Block>(rows, limit));
      ++count;
    }
    launch(step, count, tiles<T, Block>(widest, step), elements);
  }
}

}  // namespace nasfast::orthogonal
