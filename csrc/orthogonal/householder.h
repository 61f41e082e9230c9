// Batched Householder orthogonalisation for a GPU: what each thread does, written so that a host can do it too.
//
//   scale the columns                                            Step::kBegin
//   for each panel, 16 columns:                                  Step::kForward
//     columns of the panel and behind -= V T' V' columns         trailing update, by the panel before
//     for each column x of the panel, from its diagonal on:
//       v = x + sign(x_1) |x| e_1, tau = 2 / v'v                 reflector H = I - tau v v'; v = 0, tau = 0 if x = 0
//       later columns of the panel -= tau v (v' columns)
//     T, upper triangular                                        T factor: H_1 .. H_16 = I - V T V' (compact WY)
//   Q = the first columns of the identity
//   for each panel, the last one first: Q -= V T V' Q            Step::kForm
//   column k of Q *= sign(R_kk) = -sign(v_1)                     Step::kFinish
//
// R is never stored. Formulas: nasfast/ops/reference.py, orthogonalize.
//
// A team of threads does one tile of one step: a block of threads, or for a small matrix a warp, which does all steps.
// `team.each(f)` runs f(thread) for every thread, then waits for all of them. `team.each_sum<T>(f, g)` runs f(thread,
// sum), adds the sums of the threads of each warp that are kQuads apart, runs g(thread, sum) for the first kQuads
// threads of each warp, and waits. On a host, a loop takes the place of the threads, in either order. Threads share
// nothing between two waits and add nothing atomically, so results depend neither on timing nor on the other matrices
// of a call.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "../gpu/macros.h"

namespace nasfast::orthogonal {

constexpr int kBlockThreads = 256;
constexpr int kPanel = 16;
// While a panel is factored, each thread works on kQuad of its columns and on every kGroups-th row.
constexpr int kQuad = 4, kQuads = kPanel / kQuad;
// In an update, each thread works on this many columns: with more of them, it loads less per product.
template <typename T>
constexpr int kBlockColumns = 16 / sizeof(T);
constexpr int kWarpColumns = 2;
// A warp does matrices of up to this many columns that take no more memory than this, so that four fit on every GPU.
constexpr int kSmall = 32, kSmallBytes = 24 * 1024;

// Elements that are loaded at once.
template <typename T, int n>
struct alignas(n * sizeof(T) < 16 ? n * sizeof(T) : 16) Vector {
  T of[n];
};
template <typename T>
using Quad = Vector<T, kQuad>;

template <int n, typename T>
NASFAST_DEVICE Vector<T, n>& vector_at(T* x) {
  return *reinterpret_cast<Vector<T, n>*>(x);
}
template <int n, typename T>
NASFAST_DEVICE const Vector<T, n>& vector_at(const T* x) {
  return *reinterpret_cast<const Vector<T, n>*>(x);
}

template <typename T>
NASFAST_ANYWHERE constexpr T greater(T a, T b) {
  return a > b ? a : b;
}

// A batch of matrices of the caller, of any strides.
template <typename T>
struct Strided {
  T* data;
  int64_t batch, row, column;

  NASFAST_ANYWHERE T& at(int i, int j) const { return data[i * row + j * column]; }
};

// A batch of matrices with at least as many rows as columns; `at` makes a task of its one matrix n.
template <typename T>
struct Task {
  Strided<const T> z;
  Strided<T> result;      // scale times Q; may be z itself
  Strided<T> reflectors;  // or no data
  T scale;
  int rows, columns;
  // Memory to work in. v: [rows][ld]: the matrix, followed by columns of zeros up to whole panels, then the reflectors.
  T* v;
  T* q;  // [rows][ld]
  T* t;  // [panels][kPanel][kPanel]: the T factors

  NASFAST_ANYWHERE int panels() const { return (columns + kPanel - 1) / kPanel; }
  NASFAST_ANYWHERE int64_t ld() const { return int64_t{panels()} * kPanel; }
  NASFAST_ANYWHERE int64_t work_elements() const { return 2 * rows * ld() + panels() * kPanel * kPanel; }
  NASFAST_ANYWHERE void work_in(T* memory) {
    v = memory;
    q = v + rows * ld();
    t = q + rows * ld();
  }
  NASFAST_ANYWHERE Task at(int n) const {
    Task one = *this;
    one.z.data += n * z.batch;
    one.result.data += n * result.batch;
    if (reflectors.data != nullptr) one.reflectors.data += n * reflectors.batch;
    if (v != nullptr) one.work_in(v + n * work_elements());
    return one;
  }
};

// Matrix n of a batch.
struct Item {
  int i_batch, n;
};

struct Step {
  enum Kind { kBegin, kForward, kForm, kFinish } kind;
  int i_panel;
};

NASFAST_ANYWHERE int step_count(int panels) { return 2 * panels + 2; }
NASFAST_ANYWHERE Step step_of(int panels, int i) {
  if (i == 0) return {Step::kBegin, 0};
  if (i <= panels) return {Step::kForward, i - 1};
  return i <= 2 * panels ? Step{Step::kForm, 2 * panels - i} : Step{Step::kFinish, 0};
}

// The number of tiles of a step, each the work of one team; all of them may run at once. The first tile of kForward is
// the panel that becomes reflectors, while the others apply the panel before it to the columns behind.
template <typename T, typename Team>
NASFAST_ANYWHERE int tiles(const Task<T>& task, Step step) {
  const int behind = task.panels() - step.i_panel;
  if (step.kind == Step::kBegin || step.kind == Step::kFinish || behind <= 0) return greater(behind, 0);
  const auto wide = [](int panels) { return (panels * kPanel + Team::kTile - 1) / Team::kTile; };
  return step.kind == Step::kForm ? wide(behind) : step.i_panel == 0 ? 1 : 1 + wide(behind - 1);
}

// Runs f(i, j) for all elements of a panel.
template <typename Team, typename F>
NASFAST_DEVICE void each_element(const Team& team, int rows, const F& f) {
  team.each([&](int thread) {
    NASFAST_UNROLL_4 for (int i = thread / kPanel; i < rows; i += Team::kThreads / kPanel) f(i, thread % kPanel);
  });
}

// Runs set(i, j, get(i, j) * scale) for all elements of a panel, with the power of two for each column that brings its
// largest element to [1/2, 1), or as near as normal numbers do. It changes neither Q nor any rounding. Otherwise
// products of very large columns would overflow, and small ones would lose bits. scratch: an element for each thread.
template <typename T, typename Team, typename Get, typename Set>
NASFAST_DEVICE void scale_columns(const Team& team, int rows, T* scratch, const Get& get, const Set& set) {
  constexpr int kMost = std::numeric_limits<T>::max_exponent - 2;
  team.each([&](int thread) {
    T largest = 0;
    NASFAST_UNROLL_4 for (int i = thread / kPanel; i < rows; i += Team::kThreads / kPanel) {
      largest = greater(largest, std::abs(get(i, thread % kPanel)));
    }
    scratch[thread] = largest;
  });
  team.each([&](int thread) {
    T largest = 0;
    for (int i = thread % kPanel; i < Team::kThreads; i += kPanel) largest = greater(largest, scratch[i]);
    int exponent;
    std::frexp(largest, &exponent);
    const T scale = std::ldexp(T(1), exponent > kMost ? -kMost : (exponent < -kMost ? kMost : -exponent));
    for (int i = thread / kPanel; i < rows; i += Team::kThreads / kPanel) {
      set(i, thread % kPanel, get(i, thread % kPanel) * scale);
    }
  });
}

// Copies the columns of one panel to v, scaled, and writes those of the identity to q.
template <typename T, typename Team>
NASFAST_DEVICE void begin(const Team& team, const Task<T>& task, int i_panel, T* scratch) {
  const int64_t ld = task.ld();
  const int first = i_panel * kPanel, width = task.columns - first;
  const auto get = [&](int i, int j) { return j < width ? task.z.at(i, first + j) : T(0); };
  scale_columns(team, task.rows, scratch, get, [&](int i, int j, T x) {
    task.v[i * ld + first + j] = x;
    task.q[i * ld + first + j] = i == first + j && j < width ? T(1) : T(0);
  });
}

// One panel while it is factored: either where it is, or a copy on chip. That has copies of the column that is
// reflected and of the next one, too, because their elements lie in different banks of shared memory.
template <bool on_chip, typename T, typename Team>
struct Panel {
  static constexpr int kGroups = Team::kThreads / kQuads, kWarps = Team::kThreads / 32;
  static constexpr int kScratch = kWarps * kPanel + kPanel * kPanel + 2 * kPanel + Team::kThreads;
  // Rows that a thread loads before it uses the first: this hides the latency of memory. A warp's matrix has few.
  static constexpr int kAhead = kWarps > 1 ? 4 : 2;
  static_assert((kGroups & (kGroups - 1)) == 0, "a remainder below is that of a power of two");

  int rows;    // from the first diagonal element of the panel on
  T* partial;  // [warp][column]
  T* gram;     // [j][k] = v_j' v_k for j < k
  T* row;      // the row of the diagonal element
  T* taus;
  T* largest;  // of each thread, in scale_columns
  T* data;
  int64_t ld;
  T* copies;  // [2][rows]: of columns k and k + 1

  NASFAST_DEVICE Panel(int rows, T* from, int64_t ld_from, T* scratch) : rows(rows), partial(scratch) {
    gram = partial + kWarps * kPanel;
    row = gram + kPanel * kPanel;
    taus = row + kPanel;
    largest = taus + kPanel;
    data = on_chip ? largest + Team::kThreads : from;
    ld = on_chip ? kPanel : ld_from;
    copies = data + rows * kPanel;
  }

  static NASFAST_ANYWHERE int64_t elements(int64_t rows) { return kScratch + (on_chip ? rows * (kPanel + 2) : 0); }

  NASFAST_DEVICE T& at(int i, int j) const { return data[i * ld + j]; }
  NASFAST_DEVICE T& copied(int i, int k) const { return on_chip ? copies[k % 2 * rows + i] : at(i, k); }

  NASFAST_DEVICE T sum(int column) const {
    T sum = 0;
    NASFAST_UNROLL for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp * kPanel + column];
    return sum;
  }

  // Runs f(i, element of column k, those of a thread's columns) for the rows of a thread below row k.
  template <typename F>
  NASFAST_DEVICE void below(int k, int thread, const F& f) const {
    const int group = thread / kQuads, first = thread % kQuads * kQuad;
    for (int begin = k + 1 + ((group - k - 1) & (kGroups - 1)); begin < rows; begin += kAhead * kGroups) {
      T x[kAhead];
      Quad<T> y[kAhead];
      NASFAST_UNROLL for (int u = 0; u < kAhead; ++u) {
        const int i = begin + u * kGroups < rows ? begin + u * kGroups : begin;
        x[u] = copied(i, k);
        y[u] = vector_at<kQuad>(&at(i, first));
      }
      NASFAST_UNROLL for (int u = 0; u < kAhead; ++u) {
        if (begin + u * kGroups < rows) f(begin + u * kGroups, x[u], y[u]);
      }
    }
  }
};

// Column k below the diagonal times every column, itself too.
template <bool on_chip, typename T, typename Team>
NASFAST_DEVICE void multiply_column(const Team& team, const Panel<on_chip, T, Team>& panel, int k) {
  const auto dots = [&](int thread, Quad<T>& sum) {
    const int first = thread % kQuads * kQuad;
    panel.below(k, thread, [&](int, T x, const Quad<T>& y) {
      NASFAST_UNROLL for (int c = 0; c < kQuad; ++c) sum.of[c] += x * y.of[c];
    });
    if (thread < kQuads) vector_at<kQuad>(panel.row + first) = vector_at<kQuad>(&panel.at(k, first));
  };
  team.template each_sum<T>(dots, [&](int thread, const Quad<T>& sum) {
    vector_at<kQuad>(panel.partial + thread / 32 * kPanel + thread % kQuads * kQuad) = sum;
  });
}

// Turns column k into a reflector and applies it to the columns after k.
template <bool on_chip, typename T, typename Team>
NASFAST_DEVICE void reflect_column(const Team& team, const Panel<on_chip, T, Team>& panel, int k) {
  constexpr T kFar = T(1ull << 40);
  multiply_column(team, panel, k);
  const T length = panel.sum(k) + panel.row[k] * panel.row[k];
  if (!(length > 1 / kFar && length < kFar)) {
    // the elimination may leave so little of a column that its squares would underflow; slower threads still read
    // partial
    const auto get = [&](int i, int j) { return panel.at(k + i, j); };
    scale_columns(team, panel.rows - k, panel.largest, get, [&](int i, int j, T x) {
      if (j >= k) panel.at(k + i, j) = x;
      if (j == k) panel.copied(k + i, k) = x;
    });
    multiply_column(team, panel, k);
  }
  team.each([&](int thread) {
    const int first = thread % kQuads * kQuad, next = k + 1 - first;
    const T below = panel.sum(k), x_k = panel.row[k], norm = std::sqrt(x_k * x_k + below);
    const T v_1 = x_k < 0 ? x_k - norm : x_k + norm;
    const T square = v_1 * v_1 + below, tau = square > 0 ? 2 / square : T(0);
    Quad<T> factor;
    NASFAST_UNROLL for (int c = 0; c < kQuad; ++c) {
      const int j = first + c;
      const T dot = panel.sum(j) + v_1 * panel.row[j];
      factor.of[c] = j > k ? tau * dot : T(0);
      if (thread >= kQuads) continue;
      if (j < k) panel.gram[j * kPanel + k] = dot;
      if (j == k) panel.taus[k] = tau;
      if (j >= k) panel.at(k, j) = j == k ? v_1 : T(0);
    }
    if (first + kQuad <= k + 1) return;
    panel.below(k, thread, [&](int i, T x, Quad<T>& y) {
      NASFAST_UNROLL for (int c = 0; c < kQuad; ++c) {
        y.of[c] -= factor.of[c] * x;
        if (!on_chip && first + c > k) panel.at(i, first + c) = y.of[c];
        if (on_chip && c == next) panel.copied(i, k + 1) = y.of[c];
      }
      if (on_chip) vector_at<kQuad>(&panel.at(i, first)) = y;
    });
  });
}

// Turns the columns of one panel into reflectors, with zeros above them, and makes the T factor: t_kk = tau_k, t[:k, k]
// = -tau_k t[:k, :k] (V[:, :k]' v_k), a thread for each row from its diagonal on.
template <bool on_chip, typename T, typename Team>
NASFAST_DEVICE void factor(const Team& team, const Task<T>& task, int i_panel, T* scratch) {
  const int64_t ld = task.ld();
  const int first = i_panel * kPanel, width = task.columns - first < kPanel ? task.columns - first : kPanel;
  T* const from = task.v + first * (ld + 1);
  T* const t = task.t + first * kPanel;
  const Panel<on_chip, T, Team> panel(task.rows - first, from, ld, scratch);
  if (on_chip) {
    each_element(team, panel.rows, [&](int i, int j) {
      const T x = from[i * ld + j];
      panel.at(i, j) = x;
      if (j == 0) panel.copied(i, 0) = x;
    });
  }
  for (int k = 0; k < width; ++k) reflect_column(team, panel, k);
  team.each([&](int i) {
    for (int r = i / kPanel, j = i % kPanel; on_chip && r < panel.rows; r += Team::kThreads / kPanel) {
      from[r * ld + j] = panel.at(r, j);
    }
    if (i >= kPanel) return;
    T row[kPanel];
    NASFAST_UNROLL for (int k = 0; k < kPanel; ++k) {
      T sum = 0;
      NASFAST_UNROLL for (int j = 0; j < k; ++j) {
        if (j >= i && k < width) sum += row[j] * panel.gram[j * kPanel + k];
      }
      row[k] = k < i || k >= width ? T(0) : panel.taus[k] * (k == i ? T(1) : -sum);
      t[i * kPanel + k] = row[k];
    }
  });
}

// Elements of scratch memory that `apply` needs.
template <typename Team>
constexpr int kApplyScratch = (Team::kThreads * Team::kColumns / (2 * Team::kTile) + 1) * kPanel * Team::kTile;

// The trailing update c -= V T' V' c, or c -= V T V' c where Q is formed. c is a tile of `columns` columns, or as many
// as there are, from the first row of the panel on.
template <typename T, typename Team>
NASFAST_DEVICE void apply(const Team& team, const Task<T>& task, int i_panel, bool to_q, int first, int columns,
                          T* scratch) {
  constexpr int kColumns = Team::kColumns, kAcross = Team::kTile / kColumns;   // threads for the columns of a tile
  constexpr int kHalf = kPanel / 2, kSlices = Team::kThreads / (2 * kAcross);  // of reflectors; of rows, in V' c
  constexpr int kElements = kPanel * Team::kTile;
  const int64_t ld = task.ld();
  const int rows = task.rows - i_panel * kPanel, left = static_cast<int>(ld) - first;
  const T* const v = task.v + i_panel * kPanel * (ld + 1);
  const T* const t = task.t + i_panel * kPanel * kPanel;
  T* const c = (to_q ? task.q : task.v) + i_panel * kPanel * ld + first;
  T* const sums = scratch;  // [slice][reflector][column]
  T* const products = sums + kSlices * kElements;
  if (columns > left) columns = left;
  const auto each_product = [&](const auto& f) {
    team.each([&](int thread) {
      for (int column = thread % kPanel; column < columns; column += kPanel) {
        for (int p = thread / kPanel; p < kPanel; p += Team::kThreads / kPanel) f(p, column, p * Team::kTile + column);
      }
    });
  };
  team.each([&](int thread) {
    const int column = thread % kAcross * kColumns, half = thread / kAcross % 2, slice = thread / (2 * kAcross);
    if (column >= columns) return;
    Vector<T, kColumns> sum[kHalf] = {};
    NASFAST_UNROLL_4 for (int i = slice; i < rows; i += kSlices) {
      const auto row = vector_at<kHalf>(v + i * ld + half * kHalf);
      const auto x = vector_at<kColumns>(c + i * ld + column);
      NASFAST_UNROLL for (int p = 0; p < kHalf; ++p) {
        NASFAST_UNROLL for (int u = 0; u < kColumns; ++u) sum[p].of[u] += row.of[p] * x.of[u];
      }
    }
    NASFAST_UNROLL for (int p = 0; p < kHalf; ++p) {
      vector_at<kColumns>(sums + slice * kElements + (half * kHalf + p) * Team::kTile + column) = sum[p];
    }
  });
  each_product([&](int, int, int e) {
    NASFAST_UNROLL for (int slice = 1; slice < kSlices; ++slice) sums[e] += sums[slice * kElements + e];
  });
  each_product([&](int p, int column, int e) {
    T product = 0;
    NASFAST_UNROLL for (int r = 0; r < kPanel; ++r) {
      product += t[to_q ? p * kPanel + r : r * kPanel + p] * sums[r * Team::kTile + column];
    }
    products[e] = product;
  });
  team.each([&](int thread) {
    constexpr int kStep = Team::kThreads / kAcross, kAhead = 2;
    const int column = thread % kAcross * kColumns;
    if (column >= columns) return;
    Vector<T, kColumns> product[kPanel], x[kAhead];
    NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) {
      product[p] = vector_at<kColumns>(products + p * Team::kTile + column);
    }
    for (int begin = thread / kAcross; begin < rows; begin += kAhead * kStep) {
      NASFAST_UNROLL for (int r = 0; r < kAhead; ++r) {
        if (begin + r * kStep < rows) x[r] = vector_at<kColumns>(c + (begin + r * kStep) * ld + column);
      }
      NASFAST_UNROLL for (int r = 0; r < kAhead; ++r) {
        const int i = begin + r * kStep;
        if (i >= rows) break;
        const auto row = vector_at<kPanel>(v + i * ld);
        NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) {
          NASFAST_UNROLL for (int u = 0; u < kColumns; ++u) x[r].of[u] -= row.of[p] * product[p].of[u];
        }
        vector_at<kColumns>(c + i * ld + column) = x[r];
      }
    }
  });
}

// Writes the columns of one panel, with a positive diagonal of R, and the reflectors if they are wanted.
template <typename T, typename Team>
NASFAST_DEVICE void finish(const Team& team, const Task<T>& task, int i_panel) {
  team.each([&](int thread) {
    const int64_t ld = task.ld();
    const int column = i_panel * kPanel + thread % kPanel;
    if (column >= task.columns) return;
    const T scale = task.v[column * (ld + 1)] > 0 ? -task.scale : task.scale;
    for (int i = thread / kPanel; i < task.rows; i += Team::kThreads / kPanel) {
      task.result.at(i, column) = task.q[i * ld + column] * scale;
      if (task.reflectors.data != nullptr) task.reflectors.at(i, column) = task.v[i * ld + column];
    }
  });
}

// Does one tile of one step. A panel that takes more than `limit` elements stays in global memory.
template <typename T, typename Team>
NASFAST_DEVICE void run_tile(const Team& team, const Task<T>& task, Step step, int tile, int64_t limit, T* scratch) {
  const int here = step.i_panel * kPanel;
  if (step.kind == Step::kBegin) return begin(team, task, tile, scratch);
  if (step.kind == Step::kFinish) return finish(team, task, tile);
  if (step.kind == Step::kForm) {
    return apply(team, task, step.i_panel, true, here + tile * Team::kTile, Team::kTile, scratch);
  }
  const int first = tile == 0 ? here : here + kPanel + (tile - 1) * Team::kTile;
  if (here > 0) apply(team, task, step.i_panel - 1, false, first, tile == 0 ? kPanel : Team::kTile, scratch);
  if (tile > 0) return;
  if (Panel<true, T, Team>::elements(task.rows - here) <= limit) {
    factor<true>(team, task, step.i_panel, scratch);
  } else {
    factor<false>(team, task, step.i_panel, scratch);
  }
}

// Elements of shared memory that a tile of a panel with so many rows needs; a multiple of 4.
template <typename T, typename Team>
NASFAST_ANYWHERE int64_t scratch_elements(int rows, int64_t limit) {
  const int64_t panel = Panel<true, T, Team>::elements(rows);
  return (greater<int64_t>(panel <= limit ? panel : 0, kApplyScratch<Team>) + 3) / 4 * 4;
}

// Does all of one small matrix with a team, on chip.
template <typename T, typename Team>
NASFAST_DEVICE void run_steps(const Team& team, Task<T> task, T* shared) {
  task.work_in(shared);
  for (int i = 0; i < step_count(task.panels()); ++i) {
    const Step step = step_of(task.panels(), i);
    for (int tile = 0; tile < tiles<T, Team>(task, step); ++tile) {
      run_tile(team, task, step, tile, int64_t{1} << 62, shared + task.work_elements());
    }
  }
}

}  // namespace nasfast::orthogonal
