// A panel of columns, turned into reflectors by a block of threads. The code is a sequence of phases: see blocks.h.
#pragma once

#include "householder.h"

namespace nasfast::orthogonal {

// Columns of a panel. A panel of 16 float columns with 1536 rows fits into the 99 KB of shared memory of sm_86.
constexpr int kPanel = 16;
constexpr int kThreads = 256;
// While a panel is factored, each thread works on one column and on every kRowGroups-th row of it.
constexpr int kRowGroups = kThreads / kPanel;

// Elements of shared memory beside a panel while it is factored.
constexpr int kPanelScratch = kPanel * (kRowGroups + 1) + kRowGroups + kPanel * kPanel + kPanel;

// One matrix in its tall form (rows >= columns); a wide matrix is represented by its transpose. Strides are in
// elements.
template <typename T>
struct Task {
  const T* in;
  T* out;
  int64_t in_row, in_column, out_row, out_column;
  T* v;  // [rows][ld], where ld is columns rounded up to whole panels: the matrix at first, the reflectors at the end
  T* q;  // [rows][q_ld], where Q is formed: `out` itself, or memory from which Q is transposed to `out`
  T* t;  // [panels][kPanel][kPanel]: H_1 .. H_16 of a panel are I - V t V', t upper triangular
  int64_t ld, q_ld;
  int rows, columns;

  NASFAST_ANYWHERE int panels() const { return static_cast<int>(ld / kPanel); }
};

namespace {

// The first row of a group that is below the diagonal element of column k.
NASFAST_DEVICE int first_below(int k, int group) {
  static_assert(kRowGroups >= kPanel, "the sum below must not be negative");
  return k + 1 + (group - (k + 1) + kRowGroups) % kRowGroups;
}

// If the sum of the squares of a column is below this, some of the squares may have underflowed. The rounding errors
// that rank-deficient matrices leave in a scaled column are seldom as small.
template <typename T>
constexpr T kSmallSquare = T(1) / (int64_t{1} << 60);

// One panel while it is factored. The work is done in shared memory where the panel fits (`resident`) and in place
// otherwise, with the same arithmetic.
template <typename T>
struct Panel {
  int rows;   // from the first diagonal element of the panel on
  int width;  // columns of the matrix in this panel: kPanel, or fewer in the last panel
  bool resident;
  T* global;  // the panel in task.v
  int64_t global_ld;
  T* data;  // where the work is done
  int64_t ld;
  T* partial;  // [column][group], and one more column of squares
  T* squares;  // [group]: sums of squares of the next column below its diagonal element
  T* gram;     // [j][k] = v_j' v_k for j < k
  T* taus;

  NASFAST_DEVICE Panel(const Task<T>& task, int i_panel, bool resident, T* shared) : resident(resident) {
    const int begin = i_panel * kPanel;
    rows = task.rows - begin;
    width = task.columns - begin < kPanel ? task.columns - begin : kPanel;
    global = task.v + begin * task.ld + begin;
    global_ld = task.ld;
    data = resident ? shared + kPanelScratch : global;
    ld = resident ? kPanel : global_ld;
    partial = shared;
    squares = partial + kPanel * (kRowGroups + 1);
    gram = squares + kRowGroups;
    taus = gram + kPanel * kPanel;
  }

  NASFAST_DEVICE T& at(int i, int j) const { return data[i * ld + j]; }

  // Sum of the squares of the next column below its diagonal element.
  NASFAST_DEVICE T below() const {
    T sum = 0;
    for (int g = 0; g < kRowGroups; ++g) sum += squares[g];
    return sum;
  }
};

// Copies the panel to shared memory if it is resident, and sums the squares of its first column.
template <typename T, typename Block>
NASFAST_DEVICE void begin_panel(const Block& block, const Panel<T>& panel) {
  block.each([&](int thread) {
    const int j = thread % kPanel;
    const int group = thread / kPanel;
    T square = 0;
    for (int i = group; i < panel.rows; i += kRowGroups) {
      const T x = panel.global[i * panel.global_ld + j];
      if (panel.resident) panel.at(i, j) = x;
      if (i > 0) square += x * x;
    }
    if (j == 0) panel.squares[group] = square;
  });
}

// Scales what the elimination has left of column k, and sums its squares again.
template <typename T, typename Block>
NASFAST_DEVICE void rescale(const Block& block, const Panel<T>& panel, int k) {
  block.each([&](int thread) {
    if (thread % kPanel) return;
    const int group = thread / kPanel;
    T largest = 0;
    for (int i = k + group; i < panel.rows; i += kRowGroups) {
      const T x = panel.at(i, k);
      largest = greater(largest, greater(x, -x));
    }
    panel.partial[group] = largest;
  });
  block.each([&](int thread) {
    if (thread % kPanel) return;
    const int group = thread / kPanel;
    T largest = 0;
    for (int g = 0; g < kRowGroups; ++g) largest = greater(largest, panel.partial[g]);
    const T scale = scale_of<Format<T>>(largest);
    T square = 0;
    for (int i = k + group; i < panel.rows; i += kRowGroups) {
      const T x = panel.at(i, k) * scale;
      panel.at(i, k) = x;
      if (i > k) square += x * x;
    }
    panel.squares[group] = square;
  });
}

// Turns column k into a reflector and applies it to the columns after k.
template <typename T, typename Block>
NASFAST_DEVICE void reflect_column(const Block& block, const Panel<T>& panel, int k) {
  // every thread reads the same values, which the next phase does not write
  T below = panel.below();
  T x_k = panel.at(k, k);
  if (x_k * x_k + below < kSmallSquare<T>) {
    rescale(block, panel, k);
    below = panel.below();
    x_k = panel.at(k, k);
  }
  const Reflector<T> h = reflector<Format<T>>(x_k, below);
  // v_k' times every column, in groups of rows
  block.each([&](int thread) {
    const int j = thread % kPanel;
    const int group = thread / kPanel;
    if (thread == 0) {
      panel.partial[k * (kRowGroups + 1)] = h.first;  // column k itself needs no product
      panel.taus[k] = h.tau;
    }
    if (j == k) return;
    T dot = 0;
    for (int i = first_below(k, group); i < panel.rows; i += kRowGroups) dot += panel.at(i, k) * panel.at(i, j);
    if (group == 0) dot += h.first * panel.at(k, j);
    panel.partial[j * (kRowGroups + 1) + group] = dot;
  });
  block.each([&](int thread) {
    const int j = thread % kPanel;
    const int group = thread / kPanel;
    if (j == k) {
      if (group == 0) panel.at(k, k) = panel.partial[k * (kRowGroups + 1)];
      return;
    }
    T dot = 0;
    for (int g = 0; g < kRowGroups; ++g) dot += panel.partial[j * (kRowGroups + 1) + g];
    if (j < k) {
      if (group == 0) panel.gram[j * kPanel + k] = dot;
      return;
    }
    dot *= panel.taus[k];
    T square = 0;
    for (int i = first_below(k, group); i < panel.rows; i += kRowGroups) {
      const T x = panel.at(i, j) - dot * panel.at(i, k);
      panel.at(i, j) = x;
      if (i > k + 1) square += x * x;
    }
    if (group == 0) panel.at(k, j) = 0;
    if (j == k + 1) panel.squares[group] = square;
  });
}

// Copies a resident panel back and makes its t, one row by each of the first kPanel threads:
// t_kk = tau_k, t[:k, k] = -tau_k t[:k, :k] (V[:, :k]' v_k).
template <typename T, typename Block>
NASFAST_DEVICE void end_panel(const Block& block, const Panel<T>& panel, T* t) {
  block.each([&](int thread) {
    if (panel.resident) {
      for (int i = thread / kPanel; i < panel.rows; i += kRowGroups) {
        panel.global[i * panel.global_ld + thread % kPanel] = panel.at(i, thread % kPanel);
      }
    }
    if (thread >= kPanel) return;
    for (int k = 0; k < kPanel; ++k) {
      T sum = 0;
      if (k < panel.width) {
        for (int j = thread; j < k; ++j) sum += t[thread * kPanel + j] * panel.gram[j * kPanel + k];
        sum = k == thread ? panel.taus[k] : -panel.taus[k] * sum;
      }
      t[thread * kPanel + k] = k < thread ? T(0) : sum;
    }
  });
}

// Turns the columns of one panel into reflectors, with zeros above them, and makes the panel's t.
template <typename T, typename Block>
NASFAST_DEVICE void factor(const Block& block, const Task<T>& task, int i_panel, bool resident, T* shared) {
  const Panel<T> panel(task, i_panel, resident, shared);
  begin_panel(block, panel);
  for (int k = 0; k < panel.width; ++k) reflect_column(block, panel, k);
  end_panel(block, panel, task.t + i_panel * kPanel * kPanel);
}

}  // namespace
}  // namespace nasfast::orthogonal
