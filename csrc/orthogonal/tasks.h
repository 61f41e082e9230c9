// The matrices of one call of `householder`, and the order of its launches on a GPU and in the emulation.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "householder.h"

namespace nasfast::orthogonal {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The matrices with elements of type T, most columns first. Refuses what would corrupt memory; csrc/library.cpp has the
// shapes.
template <typename T>
std::vector<Task<T>> tasks_of(const std::vector<Tensor>& vs, const std::vector<Tensor>& qs,
                              const std::vector<Tensor>& ts) {
  STD_TORCH_CHECK(qs.size() == vs.size() && ts.size() == vs.size(), "householder: needs as many q and t as v");
  std::vector<Task<T>> tasks;
  for (size_t i = 0; i < vs.size(); ++i) {
    const Tensor &v = vs[i], &q = qs[i], &t = ts[i];
    for (const Tensor* each : {&v, &q, &t}) {
      STD_TORCH_CHECK(each->is_contiguous() && each->dim() >= 3 && each->device() == vs[0].device() &&
                          each->scalar_type() == v.scalar_type(),
                      "householder: all tensors must be contiguous batches on one device, each three of one type");
    }
    const int64_t batch = q.size(0), rows = q.size(1), columns = q.size(2);
    const int64_t panels = (columns + kPanel - 1) / kPanel, most = std::numeric_limits<int>::max() / 2;
    STD_TORCH_CHECK(0 < columns && columns <= rows && rows <= most && v.size(0) == batch && v.size(1) == rows &&
                        v.size(2) == panels * kPanel && t.numel() == batch * panels * kPanel * kPanel,
                    "householder: v, q and t ", i, " do not belong together");
    if (v.scalar_type() != (sizeof(T) == sizeof(float) ? ScalarType::Float : ScalarType::Double)) continue;
    const auto at = [batch](const Tensor& tensor, int64_t n) {
      return static_cast<T*>(tensor.mutable_data_ptr()) + n * (tensor.numel() / batch);
    };
    for (int64_t n = 0; n < batch; ++n) {
      tasks.push_back({at(v, n), at(q, n), at(t, n), static_cast<int>(rows), static_cast<int>(columns)});
    }
  }
  const auto wider = [](const Task<T>& a, const Task<T>& b) { return a.columns > b.columns; };
  std::stable_sort(tasks.begin(), tasks.end(), wider);
  return tasks;
}

// Calls launch(step, i_panel, count, most) for each step and panel, in order: the first `count` tasks have the panel,
// and `most` tiles of it or fewer.
template <typename T, typename Launch>
void run_steps(const std::vector<Task<T>>& tasks, const Launch& launch) {
  const int panels = tasks.empty() ? 0 : tasks.front().panels();
  const auto run = [&](Step step, int i_panel) {
    const auto has_panel = [=](const Task<T>& task) { return task.panels() > i_panel; };
    const auto end = std::partition_point(tasks.begin(), tasks.end(), has_panel);
    const int most = tiles(tasks.front(), step, i_panel);
    if (most > 0) launch(step, i_panel, static_cast<int>(end - tasks.begin()), most);
  };
  for (int i_panel = 0; i_panel < panels; ++i_panel) {
    run(Step::kFactor, i_panel);
    run(Step::kUpdate, i_panel);
  }
  for (int i_panel = panels - 1; i_panel >= 0; --i_panel) run(Step::kForm, i_panel);
}

}  // namespace nasfast::orthogonal
