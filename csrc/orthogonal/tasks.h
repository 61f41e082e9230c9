// The tensors of one call of `gaussians` or `householder`, and the order of its launches on a GPU and in the emulation.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <vector>

#include "draws.h"
#include "householder.h"

namespace nasfast::orthogonal {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
constexpr ScalarType kType = sizeof(T) == sizeof(float) ? ScalarType::Float : ScalarType::Double;

// The tensors with elements of type T, longest first.
template <typename T>
std::vector<Draw<T>> draws_of(const std::vector<Tensor>& zs, const std::vector<int64_t>& seeds) {
  STD_TORCH_CHECK(seeds.size() == zs.size(), "gaussians: needs as many seeds as tensors");
  std::vector<Draw<T>> draws;
  for (size_t i = 0; i < zs.size(); ++i) {
    const ScalarType type = zs[i].scalar_type();
    STD_TORCH_CHECK(zs[i].is_contiguous() && zs[i].device() == zs[0].device() &&
                        (type == ScalarType::Float || type == ScalarType::Double),
                    "gaussians: tensor ", i, " must be contiguous, float32 or float64, and on the device of the first");
    if (type != kType<T>) continue;
    draws.push_back({static_cast<T*>(zs[i].mutable_data_ptr()), zs[i].numel(), static_cast<uint32_t>(seeds[i])});
  }
  std::stable_sort(draws.begin(), draws.end(), [](const Draw<T>& a, const Draw<T>& b) { return a.count > b.count; });
  return draws;
}

// What householder gets; csrc/library.cpp has the shapes.
struct Given {
  const std::vector<Tensor>&z, &q, &v, &tau;
  const std::vector<double>& scales;
};

// The matrices with elements of type T: those of a warp each, and the others, most columns first, then most rows.
template <typename T>
struct Work {
  std::vector<Task<T>> batches;
  std::vector<Item> small, large;
  int64_t small_elements = 0;    // of shared memory for each warp
  std::optional<Tensor> memory;  // for the large ones

  const Task<T>& of(const Item& item) const { return batches[item.i_batch]; }

  // The first of `large` that have a panel: as many.
  int having(int i_panel) const {
    const auto has = [&](const Item& item) { return of(item).panels() > i_panel; };
    return static_cast<int>(std::partition_point(large.begin(), large.end(), has) - large.begin());
  }
};

// Refuses what would corrupt memory.
inline void check(const Given& given) {
  const size_t count = given.z.size();
  STD_TORCH_CHECK(given.q.size() == count && given.scales.size() == count && given.v.size() == given.tau.size() &&
                      (given.v.empty() || given.v.size() == count),
                  "householder: needs as many q and scales as z, and as many v and tau, or none");
  for (size_t i = 0; i < count; ++i) {
    const Tensor& z = given.z[i];
    const int64_t dim = z.dim();
    const auto fits = [&](const Tensor& tensor) {
      bool same =
          tensor.device() == given.z[0].device() && tensor.scalar_type() == z.scalar_type() && tensor.dim() == dim;
      for (int64_t d = 0; same && d < dim; ++d) same = tensor.size(d) == z.size(d);
      return same;
    };
    STD_TORCH_CHECK((dim == 2 || dim == 3) && fits(z) && fits(given.q[i]) && (given.v.empty() || fits(given.v[i])),
                    "householder: z, q and v ", i, " must be batches of one shape and type, all on one device");
    const int64_t longer = std::max(z.size(dim - 2), z.size(dim - 1)), most = std::numeric_limits<int>::max();
    STD_TORCH_CHECK(z.numel() > 0 && longer <= most / 2 && z.numel() / longer <= most, "householder: batch ", i,
                    " is empty or too large");
    if (given.v.empty()) continue;
    const Tensor& tau = given.tau[i];
    STD_TORCH_CHECK(tau.is_contiguous() && tau.numel() == z.numel() / longer && tau.device() == z.device() &&
                        tau.scalar_type() == z.scalar_type(),
                    "householder: tau ", i, " must be contiguous, with a number for each reflector");
  }
}

// A matrix with more columns than rows is taken as its transpose.
template <typename T>
Strided<T> strided(const Tensor& tensor) {
  const int64_t dim = tensor.dim();
  Strided<T> result{static_cast<T*>(tensor.mutable_data_ptr()), dim == 3 ? tensor.stride(0) : 0, tensor.stride(dim - 2),
                    tensor.stride(dim - 1)};
  if (tensor.size(dim - 2) < tensor.size(dim - 1)) std::swap(result.row, result.column);
  return result;
}

template <typename T>
Task<T> task_of(const Given& given, size_t i) {
  const Tensor& z = given.z[i];
  const int64_t dim = z.dim(), rows = z.size(dim - 2), columns = z.size(dim - 1);
  Task<T> task{};
  task.z = strided<const T>(z);
  task.result = strided<T>(given.q[i]);
  if (!given.v.empty()) {
    task.reflectors = strided<T>(given.v[i]);
    task.taus = static_cast<T*>(given.tau[i].mutable_data_ptr());
  }
  task.scale = static_cast<T>(given.scales[i]);
  task.rows = static_cast<int>(std::max(rows, columns));
  task.columns = static_cast<int>(std::min(rows, columns));
  return task;
}

// Warp: the team of a small matrix.
template <typename T, typename Warp>
Work<T> work_of(const Given& given) {
  Work<T> work;
  int64_t elements = 0;  // of the large ones
  std::vector<int64_t> begins;
  for (size_t i = 0; i < given.z.size(); ++i) {
    if (given.z[i].scalar_type() != kType<T>) continue;
    const Task<T> task = task_of<T>(given, i);
    const int64_t each = task.work_elements(), on_chip = each + scratch_elements<T, Warp>(task.rows, kWarpBytes);
    const bool small = task.columns <= kWarpColumns && on_chip * static_cast<int64_t>(sizeof(T)) <= kWarpBytes;
    const int count = given.z[i].dim() == 3 ? static_cast<int>(given.z[i].size(0)) : 1;
    const int i_batch = static_cast<int>(work.batches.size());
    for (int n = 0; n < count; ++n) (small ? work.small : work.large).push_back({i_batch, n});
    begins.push_back(small ? -1 : elements);
    if (small) work.small_elements = std::max(work.small_elements, on_chip);
    if (!small) elements += count * each;
    work.batches.push_back(task);
  }
  if (work.large.empty()) return work;
  work.memory = torch::stable::empty({elements}, kType<T>, std::nullopt, given.z[0].device());
  for (size_t i = 0; i < begins.size(); ++i) {
    if (begins[i] >= 0) work.batches[i].work_in(static_cast<T*>(work.memory->mutable_data_ptr()) + begins[i]);
  }
  const auto before = [&work](const Item& a, const Item& b) {
    const Task<T>&x = work.of(a), &y = work.of(b);
    return x.panels() != y.panels() ? x.panels() > y.panels() : x.rows > y.rows;
  };
  std::stable_sort(work.large.begin(), work.large.end(), before);
  return work;
}

// Calls launch(step, i_panel, count, most, elements) for each step of the large matrices, in order: the first `count`
// of them have the panel, `most` tiles of it or fewer, and a tile needs that many elements of shared memory.
template <typename T, typename Block, typename Launch>
void run_launches(const Work<T>& work, int64_t limit, const Launch& launch) {
  if (work.large.empty()) return;
  const Task<T>& widest = work.of(work.large.front());
  for_each_step(widest.panels(), [&](Step step, int i_panel) {
    const int count = work.having(i_panel);
    int64_t elements = 0;
    for (int i = 0; i < count; ++i) {
      const int rows = work.of(work.large[i]).rows - i_panel * kPanel;
      elements = std::max(elements, scratch_elements<T, Block>(step == Step::kForward ? rows : 0, limit));
    }
    launch(step, i_panel, count, tiles(widest, step, i_panel, Block::kSlots), elements);
  });
}

}  // namespace nasfast::orthogonal
