// Which block of threads does which matrix, and how much memory the matrices need, on the GPU and in its emulation on
// the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "blocks.h"
#include "matrices.h"

namespace nasfast::orthogonal {

// One block does a whole matrix of up to this many columns. Larger matrices are few, and would keep one multiprocessor
// busy while the others are idle: their updates are spread over all multiprocessors, in one launch per panel and step.
constexpr int kBlockColumns = 256;
// Matrices of up to this many columns have a launch of their own: several of their blocks share a multiprocessor, which
// longer panels in the same launch would prevent.
constexpr int kSmallColumns = 64;

template <typename T>
struct Plan {
  std::vector<TinyTask<T>> tiny;
  std::vector<Task<T>> small, medium,
      large;             // up to kSmallColumns, up to kBlockColumns, more; in each, most work first
  size_t workspace = 0;  // in elements

  explicit Plan(const std::vector<Matrices<T>>& all) {
    for (const Matrices<T>& matrices : all) {
      matrices.tiny() ? add_tiny(matrices) : add(matrices);
    }
    const auto work = [](const Task<T>& task) { return int64_t{task.rows} * task.columns * task.columns; };
    const auto longer = [&](const Task<T>& a, const Task<T>& b) { return work(a) > work(b); };
    for (auto* tasks : {&small, &medium, &large}) std::stable_sort(tasks->begin(), tasks->end(), longer);
  }

  // Gives every task its part of the workspace, which is aligned to 16 bytes.
  void place(T* workspace) {
    for (auto* tasks : {&small, &medium, &large}) {
      for (Task<T>& task : *tasks) {
        task.v = workspace;
        task.t = task.v + task.rows * task.ld;
        workspace = task.t + task.ld * kPanel;
        if (task.q) continue;
        task.q = workspace;
        workspace += task.rows * task.ld;
      }
    }
  }

  int most_panels() const {
    int most = 0;
    for (const Task<T>& task : large) most = std::max(most, task.panels());
    return most;
  }

  static int rows(const std::vector<Task<T>>& tasks) {
    int most = 0;
    for (const Task<T>& task : tasks) most = std::max(most, task.rows);
    return most;
  }

 private:
  void add_tiny(const Matrices<T>& matrices) {
    const int rows = static_cast<int>(matrices.rows);
    const int columns = static_cast<int>(matrices.columns);
    for (int64_t first = 0; first < matrices.batch; first += kTinyThreads) {
      const int64_t offset = first * matrices.size();
      const int count = static_cast<int>(std::min<int64_t>(kTinyThreads, matrices.batch - first));
      tiny.push_back({matrices.in + offset, matrices.out + offset, count, std::max(rows, columns),
                      std::min(rows, columns), matrices.wide()});
    }
  }

  void add(const Matrices<T>& matrices) {
    Task<T> task{};
    task.rows = static_cast<int>(std::max(matrices.rows, matrices.columns));
    task.columns = static_cast<int>(std::min(matrices.rows, matrices.columns));
    task.in_row = task.out_row = matrices.wide() ? 1 : task.columns;
    task.in_column = task.out_column = matrices.wide() ? task.rows : 1;
    task.ld = (task.columns + kPanel - 1) / kPanel * kPanel;
    task.q_ld = matrices.wide() ? task.ld : task.columns;
    auto& tasks = task.columns <= kSmallColumns ? small : task.columns <= kBlockColumns ? medium : large;
    for (int64_t i = 0; i < matrices.batch; ++i) {
      task.in = matrices.in + i * matrices.size();
      task.out = matrices.out + i * matrices.size();
      task.q = matrices.wide() ? nullptr : task.out;
      tasks.push_back(task);
      workspace += (matrices.wide() ? 2 : 1) * task.rows * task.ld + task.ld * kPanel;
    }
  }
};

}  // namespace nasfast::orthogonal
