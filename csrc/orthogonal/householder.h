// Blocked Householder orthogonalisation (compact WY): what each thread of a GPU does, written so that a host can do it
// too. Formulas: nasfast/ops/reference.py, orthogonalize.
//
// The reflector of a column x, taken from its diagonal element on: s = sign(x_1), v = x + s |x| e_1, tau = 2 / v'v, H =
// I - tau v v'. R is never stored. A zero column gives v = 0 and tau = 0. Because R_kk = -s |x| and v_1 has the sign s,
// the sign of R_kk is read from v_1.
//
// The code is a sequence of phases. `block.each(f)` runs f(thread) for every thread of the block, then waits for all of
// them. On the host, a loop takes the place of the threads, in either order: so tests on machines without a GPU run
// what a GPU runs. Code between two phases is executed by every thread, each with the same result, because it reads
// only what the next phase does not write. Threads share nothing within a phase and add nothing atomically, so results
// do not depend on timing or on the other matrices of a call.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../gpu/macros.h"

namespace nasfast::orthogonal {

constexpr int kThreads = 256;
// Columns of a panel, also in nasfast/ops/orthogonal.py. While a panel is factored, each thread works on one column and
// on every kRowGroups-th row of it.
constexpr int kPanel = 16;
constexpr int kRowGroups = kThreads / kPanel;
// In an update, each thread works on one of kTileColumns columns and on every kSlices-th row of it.
constexpr int kTileColumns = 64;
constexpr int kSlices = kThreads / kTileColumns;
// Rows that a thread of an update loads before it uses the first: this hides the latency of the L2 cache.
constexpr int kAhead = 4;
// Elements of shared memory of a block. For double these are the 48 KB that every GPU has without being asked for more.
constexpr int kShared = (kSlices + 2) * kPanel * kTileColumns;
// Columns are scaled to this power of two before their squares are summed: these stay far from overflow, and elements
// much smaller than the largest one stay far from underflow.
constexpr int kScaledExponent = 32;

// One matrix with at least as many rows as columns.
template <typename T>
struct Task {
  T* v;  // [rows][ld]: the matrix at first, followed by columns of zeros up to whole panels; the reflectors at the end
  T* q;  // [rows][columns]: the identity at first; H_1 .. H_n times it at the end
  T* t;  // [panels][kPanel][kPanel]: H_1 .. H_16 of a panel are I - V t V', t upper triangular
  int rows, columns;

  NASFAST_ANYWHERE int panels() const { return (columns + kPanel - 1) / kPanel; }
  NASFAST_ANYWHERE int64_t ld() const { return int64_t{panels()} * kPanel; }
};

// What is done for one panel: its columns become reflectors; these are applied to the columns behind it; these are
// applied to Q.
enum class Step { kFactor, kUpdate, kForm };

// The first column that a step changes.
NASFAST_ANYWHERE int first_column(Step step, int i_panel) {
  return (step == Step::kUpdate ? i_panel + 1 : i_panel) * kPanel;
}

// The number of tiles of a step. Each tile is the work of one block, and the tiles of one step and panel may run at
// once.
template <typename T>
NASFAST_ANYWHERE int tiles(const Task<T>& task, Step step, int i_panel) {
  const int columns = task.columns - first_column(step, i_panel);
  if (columns <= 0) return 0;
  return step == Step::kFactor ? 1 : (columns + kTileColumns - 1) / kTileColumns;
}

template <typename T>
NASFAST_DEVICE T greater(T a, T b) {
  return a > b ? a : b;
}

// One panel while it is factored, with its shared memory.
template <typename T>
struct Panel {
  int rows;   // from the first diagonal element of the panel on
  int width;  // columns of the matrix in this panel: kPanel, or fewer in the last panel
  T* data;
  int64_t ld;
  T* largest;  // [thread]
  T* squares;  // [thread]
  T* partial;  // [column][group]
  T* gram;     // [j][k] = v_j' v_k for j < k
  T* taus;

  NASFAST_DEVICE Panel(const Task<T>& task, int i_panel, T* shared) {
    const int begin = i_panel * kPanel;
    rows = task.rows - begin;
    width = task.columns - begin < kPanel ? task.columns - begin : kPanel;
    ld = task.ld();
    data = task.v + begin * ld + begin;
    largest = shared;
    squares = largest + kThreads;
    partial = squares + kThreads;
    gram = partial + kPanel * (kRowGroups + 1);
    taus = gram + kPanel * kPanel;
  }

  NASFAST_DEVICE T& at(int i, int j) const { return data[i * ld + j]; }
};

// Scales column k from its diagonal element on by a power of two, which changes neither Q nor the rounding, and sums the
// squares below that element: the elimination may leave so little of a column that its squares would underflow.
template <typename T, typename Block>
NASFAST_DEVICE T scale_column(const Block& block, const Panel<T>& panel, int k) {
  block.each([&](int thread) {
    T largest = 0;
    for (int i = k + thread; i < panel.rows; i += kThreads) {
      const T x = panel.at(i, k);
      largest = greater(largest, greater(x, -x));
    }
    panel.largest[thread] = largest;
  });
  block.each([&](int thread) {
    T largest = 0;
    for (int i = 0; i < kThreads; ++i) largest = greater(largest, panel.largest[i]);
    int exponent;
    std::frexp(largest, &exponent);
    const int most = std::numeric_limits<T>::max_exponent - 1;  // of a power of two
    const int up = kScaledExponent - exponent < most ? kScaledExponent - exponent : most;
    const T scale = std::ldexp(T(1), up);
    T square = 0;
    for (int i = k + thread; i < panel.rows; i += kThreads) {
      const T x = panel.at(i, k) * scale;
      panel.at(i, k) = x;
      if (i > k) square += x * x;
    }
    panel.squares[thread] = square;
  });
  T below = 0;
  for (int i = 0; i < kThreads; ++i) below += panel.squares[i];
  return below;
}

// The first row of a group that is below the diagonal element of column k.
NASFAST_DEVICE int first_below(int k, int group) {
  static_assert(kRowGroups >= kPanel, "the sum below must not be negative");
  return k + 1 + (group - (k + 1) + kRowGroups) % kRowGroups;
}

// Turns column k into a reflector and applies it to the columns after k.
template <typename T, typename Block>
NASFAST_DEVICE void reflect_column(const Block& block, const Panel<T>& panel, int k) {
  const T below = scale_column(block, panel, k), x_k = panel.at(k, k);
  const T norm = std::sqrt(x_k * x_k + below);
  const T first = x_k < 0 ? x_k - norm : x_k + norm;  // v_1
  const T square = first * first + below, tau = square > 0 ? 2 / square : T(0);
  // v_k' times every column, in groups of rows
  block.each([&](int thread) {
    const int j = thread % kPanel, group = thread / kPanel;
    T dot = 0;
    for (int i = first_below(k, group); i < panel.rows; i += kRowGroups) dot += panel.at(i, k) * panel.at(i, j);
    if (group == 0) dot += first * panel.at(k, j);
    panel.partial[j * (kRowGroups + 1) + group] = dot;
    if (thread == 0) panel.taus[k] = tau;
  });
  block.each([&](int thread) {
    const int j = thread % kPanel, group = thread / kPanel;
    if (j == k) {
      if (group == 0) panel.at(k, k) = first;
      return;
    }
    T dot = 0;
    for (int g = 0; g < kRowGroups; ++g) dot += panel.partial[j * (kRowGroups + 1) + g];
    if (j < k) {
      if (group == 0) panel.gram[j * kPanel + k] = dot;
      return;
    }
    dot *= tau;
    for (int i = first_below(k, group); i < panel.rows; i += kRowGroups) panel.at(i, j) -= dot * panel.at(i, k);
    if (group == 0) panel.at(k, j) = 0;
  });
}

// Turns the columns of one panel into reflectors, with zeros above them, and makes the panel's t, one row by each of the
// first kPanel threads: t_kk = tau_k, t[:k, k] = -tau_k t[:k, :k] (V[:, :k]' v_k).
template <typename T, typename Block>
NASFAST_DEVICE void factor(const Block& block, const Task<T>& task, int i_panel, T* shared) {
  const Panel<T> panel(task, i_panel, shared);
  T* const t = task.t + i_panel * kPanel * kPanel;
  for (int k = 0; k < panel.width; ++k) reflect_column(block, panel, k);
  block.each([&](int thread) {
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

// One update c -= V op(t) V' c: over the rows of one panel and up to kTileColumns columns of c. op is the transpose
// where the matrix is factored; where Q is formed, t is used as it is.
template <typename T>
struct Update {
  const T* v;
  const T* t;
  T* c;  // from the first row and column of the tile on
  int64_t ld, ld_c;
  int rows, columns;  // columns from the first column of the tile on: may be more than the tile has
  bool transpose;
  T* partial;   // [slice][reflector][column]
  T* sums;      // [reflector][column]: V' c
  T* products;  // [reflector][column]: op(t) V' c

  // Calls f(i, row i of V, element of c in row i) for the rows of a slice.
  template <typename F>
  NASFAST_DEVICE void rows_of(int slice, int column, const F& f) const {
    for (int begin = slice; begin < rows; begin += kAhead * kSlices) {
      T x[kAhead];
      NASFAST_UNROLL for (int u = 0; u < kAhead; ++u) {
        const int i = begin + u * kSlices;
        x[u] = i < rows ? c[i * ld_c + column] : T(0);
      }
      NASFAST_UNROLL for (int u = 0; u < kAhead; ++u) {
        const int i = begin + u * kSlices;
        if (i >= rows) break;
        T row[kPanel];  // whole panels of memory that is aligned to 16 bytes
        memcpy(row, __builtin_assume_aligned(v + i * ld, 16), kPanel * sizeof(T));
        f(i, row, x[u]);
      }
    }
  }
};

template <typename T, typename Block>
NASFAST_DEVICE void apply(const Block& block, const Update<T>& update) {
  const auto place = [](int p, int column) { return p * kTileColumns + column; };
  block.each([&](int thread) {
    const int column = thread % kTileColumns, slice = thread / kTileColumns;
    if (column >= update.columns) return;
    T sum[kPanel] = {};
    update.rows_of(slice, column, [&](int, const T* row, T x) {
      NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) sum[p] += row[p] * x;
    });
    NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) update.partial[place(slice * kPanel + p, column)] = sum[p];
  });
  block.each([&](int thread) {
    const int column = thread % kTileColumns;
    if (column >= update.columns) return;
    for (int p = thread / kTileColumns; p < kPanel; p += kSlices) {
      T sum = 0;
      for (int slice = 0; slice < kSlices; ++slice) sum += update.partial[place(slice * kPanel + p, column)];
      update.sums[place(p, column)] = sum;
    }
  });
  block.each([&](int thread) {
    const int column = thread % kTileColumns;
    if (column >= update.columns) return;
    for (int p = thread / kTileColumns; p < kPanel; p += kSlices) {
      T product = 0;
      for (int r = 0; r < kPanel; ++r) {
        product += update.t[update.transpose ? r * kPanel + p : p * kPanel + r] * update.sums[place(r, column)];
      }
      update.products[place(p, column)] = product;
    }
  });
  block.each([&](int thread) {
    const int column = thread % kTileColumns, slice = thread / kTileColumns;
    if (column >= update.columns) return;
    T product[kPanel];
    NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) product[p] = update.products[place(p, column)];
    update.rows_of(slice, column, [&](int i, const T* row, T x) {
      NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) x -= row[p] * product[p];
      update.c[i * update.ld_c + column] = x;
    });
  });
}

// Does one tile of one step with kShared elements of shared memory.
template <typename T, typename Block>
NASFAST_DEVICE void run_step(const Block& block, const Task<T>& task, Step step, int i_panel, int tile, T* shared) {
  if (step == Step::kFactor) return factor(block, task, i_panel, shared);
  const int begin = i_panel * kPanel, column = first_column(step, i_panel) + tile * kTileColumns;
  Update<T> update;
  update.v = task.v + begin * task.ld() + begin;
  update.t = task.t + i_panel * kPanel * kPanel;
  update.ld = task.ld();
  update.transpose = step == Step::kUpdate;
  update.ld_c = update.transpose ? task.ld() : task.columns;
  update.c = (update.transpose ? task.v : task.q) + begin * update.ld_c + column;
  update.rows = task.rows - begin;
  update.columns = task.columns - column;
  update.partial = shared;
  update.sums = update.partial + kSlices * kPanel * kTileColumns;
  update.products = update.sums + kPanel * kTileColumns;
  apply(block, update);
}

}  // namespace nasfast::orthogonal
