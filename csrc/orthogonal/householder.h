// Blocked Householder orthogonalisation (compact WY): what each thread of a GPU does, written so that a host can do it
// too. Formulas: nasfast/ops/reference.py, orthogonalize.
//
// The reflector of a column x, taken from its diagonal element on: s = sign(x_1), v = x + s |x| e_1, tau = 2 / v'v, H =
// I - tau v v'. R is never stored. A zero column gives v = 0 and tau = 0. Because R_kk = -s |x| and v_1 has the sign s,
// the sign of R_kk is read from v_1.
//
// A team is a warp that has a matrix to itself, or a block of threads that does one tile of a step of a larger matrix.
// The code is a sequence of phases. `team.each(f)` runs f(thread) for every thread of the team, then waits for all of
// them. `team.each_sum<T>(f, g)` runs f(thread, sum), adds the sums of the threads of each warp that are kQuads apart,
// runs g(thread, sum) for the first kQuads threads of each warp, and waits. On the host, a loop takes the place of the
// threads, in either order: so tests on machines without a GPU run what a GPU runs. Code between two phases is executed
// by every thread, each with the same result, because it reads only what the next phase does not write. Threads share
// nothing within a phase and add nothing atomically, so results do not depend on timing or on the other matrices of a
// call.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "../gpu/macros.h"

namespace nasfast::orthogonal {

constexpr int kBlockThreads = 256;
// Columns of a panel. While a panel is factored, each thread works on kQuad of them and on every kGroups-th row.
constexpr int kPanel = 16;
constexpr int kQuad = 4, kQuads = kPanel / kQuad;
template <typename T>
struct alignas(16) Quad {
  T of[kQuad];
};
// In an update, each thread works on `slots` columns, kPanel apart: with more of them, it loads less per product.
template <typename T>
constexpr int kBlockSlots = 16 / sizeof(T);
constexpr int kWarpSlots = 2;
// Rows that a thread loads before it uses the first: this hides the latency of memory.
constexpr int kAhead = 4;
// A warp does matrices of up to this many columns that take no more memory than this, so that four fit on every GPU.
constexpr int kWarpColumns = 32;
constexpr int kWarpBytes = 24 * 1024;

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
  Strided<T> result;      // scale times Q diag(sign R_kk); may be z itself
  Strided<T> reflectors;  // or no data; with their factors, taus[n][columns]
  T* taus;
  T scale;
  int rows, columns;
  // Memory to work in. v: [rows][ld]: the matrix, followed by columns of zeros up to whole panels, then the reflectors.
  T* v;
  T* q;  // [rows][ld]: the identity at first; H_1 .. H_n times it at the end
  T* t;  // [panels][kPanel][kPanel]: H_1 .. H_16 of a panel are I - V t V', t upper triangular

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
    if (reflectors.data != nullptr) {
      one.reflectors.data += n * reflectors.batch;
      one.taus += int64_t{n} * columns;
    }
    if (v != nullptr) one.work_in(v + n * work_elements());
    return one;
  }
};

// Matrix n of a batch.
struct Item {
  int i_batch, n;
};

// The matrices are scaled and copied. Panel by panel, the columns of a panel become reflectors, while those of the
// panel before it are applied to the columns behind: one step, as neither waits for the other. Then the panels are
// applied to Q, the last one first. The results are written.
enum class Step { kBegin, kForward, kForm, kFinish };

// Calls f(step, i_panel) in order.
template <typename F>
NASFAST_ANYWHERE void for_each_step(int panels, const F& f) {
  f(Step::kBegin, 0);
  for (int i_panel = 0; i_panel < panels; ++i_panel) f(Step::kForward, i_panel);
  for (int i_panel = panels - 1; i_panel >= 0; --i_panel) f(Step::kForm, i_panel);
  f(Step::kFinish, 0);
}

// The number of tiles of a step: each is the work of one team, and those of one step and panel may run at once.
template <typename T>
NASFAST_ANYWHERE int tiles(const Task<T>& task, Step step, int i_panel, int slots) {
  const int behind = task.panels() - i_panel;
  if (behind <= 0) return 0;
  if (step == Step::kForm) return (behind + slots - 1) / slots;
  if (step == Step::kForward) return i_panel == 0 ? 1 : 1 + (behind - 1 + slots - 1) / slots;
  return behind;
}

// The power of two that brings a number to [1/2, 1), or as near as normal numbers do. It changes no rounding.
template <typename T>
NASFAST_DEVICE T scale_of(T largest) {
  constexpr int kMost = std::numeric_limits<T>::max_exponent - 2;
  int exponent;
  std::frexp(largest, &exponent);
  return std::ldexp(T(1), exponent > kMost ? -kMost : (exponent < -kMost ? kMost : -exponent));
}

// Copies the columns of one panel to v and writes those of the identity. They are scaled, which does not change Q:
// products of very large columns would overflow, and denormal ones would lose bits.
template <typename T, typename Team>
NASFAST_DEVICE void begin(const Team& team, const Task<T>& task, int i_panel, T* scratch) {
  constexpr int kGroups = Team::kThreads / kPanel;
  const int64_t ld = task.ld();
  team.each([&](int thread) {
    const int column = i_panel * kPanel + thread % kPanel;
    T largest = 0;
    if (column < task.columns) {
      NASFAST_UNROLL_4 for (int i = thread / kPanel; i < task.rows; i += kGroups) {
        largest = greater(largest, std::abs(task.z.at(i, column)));
      }
    }
    scratch[thread] = largest;
  });
  team.each([&](int thread) {
    const int column = i_panel * kPanel + thread % kPanel;
    T largest = 0;
    for (int group = 0; group < kGroups; ++group) {
      largest = greater(largest, scratch[group * kPanel + thread % kPanel]);
    }
    const T scale = scale_of(largest);
    for (int i = thread / kPanel; i < task.rows; i += kGroups) {
      task.v[i * ld + column] = column < task.columns ? task.z.at(i, column) * scale : T(0);
      task.q[i * ld + column] = i == column && column < task.columns ? T(1) : T(0);
    }
  });
}

// One panel while it is factored. Either it stays where it is, or the team works on a copy on chip. This also has
// copies of the column that is reflected and of the next one: their elements lie in different banks of shared memory.
template <bool on_chip, typename T, typename Team>
struct Panel {
  static constexpr int kGroups = Team::kThreads / kQuads, kWarps = Team::kThreads / 32;
  static constexpr int kScratch = kWarps * kPanel + kPanel * kPanel + 2 * kPanel;
  static_assert((kGroups & (kGroups - 1)) == 0, "a remainder below is that of a power of two");

  int rows;    // from the first diagonal element of the panel on
  int width;   // columns of the matrix in this panel: kPanel, or fewer in the last panel
  T* partial;  // [warp][column]
  T* gram;     // [j][k] = v_j' v_k for j < k
  T* row;      // the row of the diagonal element
  T* taus;
  T* data;
  int64_t ld;
  T* copies;  // [2][rows]: of columns k and k + 1

  NASFAST_DEVICE Panel(const Task<T>& task, int i_panel, T* from, T* scratch) {
    const int begin = i_panel * kPanel;
    rows = task.rows - begin;
    width = task.columns - begin < kPanel ? task.columns - begin : kPanel;
    partial = scratch;
    gram = partial + kWarps * kPanel;
    row = gram + kPanel * kPanel;
    taus = row + kPanel;
    data = on_chip ? taus + kPanel : from;
    ld = on_chip ? kPanel : task.ld();
    copies = data + rows * kPanel;
  }

  static NASFAST_ANYWHERE int64_t elements(int64_t rows) { return kScratch + (on_chip ? rows * (kPanel + 2) : 0); }

  NASFAST_DEVICE T& at(int i, int j) const { return data[i * ld + j]; }
  NASFAST_DEVICE Quad<T>* quad(int i, int j) const { return reinterpret_cast<Quad<T>*>(data + i * ld + j); }
  NASFAST_DEVICE T& copied(int i, int k) const { return on_chip ? copies[k % 2 * rows + i] : at(i, k); }

  NASFAST_DEVICE T sum(int column) const {
    T sum = 0;
    NASFAST_UNROLL for (int warp = 0; warp < kWarps; ++warp) sum += partial[warp * kPanel + column];
    return sum;
  }

  // Calls f(i, element of column k, those of a thread's columns) for the rows of a thread below row k.
  template <typename F>
  NASFAST_DEVICE void below(int k, int thread, const F& f) const {
    const int group = thread / kQuads, first = thread % kQuads * kQuad;
    for (int begin = k + 1 + ((group - k - 1) & (kGroups - 1)); begin < rows; begin += kAhead * kGroups) {
      T x[kAhead];
      Quad<T> y[kAhead];
      NASFAST_UNROLL for (int u = 0; u < kAhead; ++u) {
        const int i = begin + u * kGroups < rows ? begin + u * kGroups : begin;
        x[u] = copied(i, k);
        y[u] = *quad(i, first);
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
    if (thread >= kQuads) return;
    NASFAST_UNROLL for (int c = 0; c < kQuad; ++c) panel.row[first + c] = panel.at(k, first + c);
  };
  team.template each_sum<T>(dots, [&](int thread, const Quad<T>& sum) {
    memcpy(panel.partial + thread / 32 * kPanel + thread % kQuads * kQuad, &sum, sizeof sum);
  });
}

// The elimination may leave so little of a column that its squares would underflow: it is scaled then.
template <bool on_chip, typename T, typename Team>
NASFAST_DEVICE void scale_column(const Team& team, const Panel<on_chip, T, Team>& panel, int k) {
  team.each([&](int thread) {
    if (thread >= kPanel) return;
    T largest = 0;
    for (int i = k + thread; i < panel.rows; i += kPanel) largest = greater(largest, std::abs(panel.at(i, k)));
    panel.partial[thread] = largest;
  });
  T largest = 0;
  for (int i = 0; i < kPanel; ++i) largest = greater(largest, panel.partial[i]);
  if (largest == 0) return;  // and so are all products
  const T scale = scale_of(largest);
  team.each([&](int thread) {
    for (int i = k + thread; i < panel.rows; i += Team::kThreads) {
      const T x = panel.at(i, k) * scale;
      panel.at(i, k) = x;
      panel.copied(i, k) = x;
    }
  });
  multiply_column(team, panel, k);
}

// Turns column k into a reflector and applies it to the columns after k.
template <bool on_chip, typename T, typename Team>
NASFAST_DEVICE void reflect_column(const Team& team, const Panel<on_chip, T, Team>& panel, int k) {
  constexpr T kFar = T(1ull << 40);
  multiply_column(team, panel, k);
  const T length = panel.sum(k) + panel.row[k] * panel.row[k];
  if (!(length > 1 / kFar && length < kFar)) scale_column(team, panel, k);
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
      if (on_chip) *panel.quad(i, first) = y;
    });
  });
}

// Row i of a panel's t, from its diagonal: t_kk = tau_k, t[:k, k] = -tau_k t[:k, :k] (V[:, :k]' v_k).
template <bool on_chip, typename T, typename Team>
NASFAST_DEVICE void write_t(const Panel<on_chip, T, Team>& panel, int i, T* t) {
  T row[kPanel];
  NASFAST_UNROLL for (int k = 0; k < kPanel; ++k) {
    T sum = 0;
    NASFAST_UNROLL for (int j = 0; j < k; ++j) {
      if (j >= i && k < panel.width) sum += row[j] * panel.gram[j * kPanel + k];
    }
    row[k] = k < i || k >= panel.width ? T(0) : panel.taus[k] * (k == i ? T(1) : -sum);
    t[i * kPanel + k] = row[k];
  }
}

// Turns the columns of one panel into reflectors, with zeros above them, and makes the panel's t.
template <bool on_chip, typename T, typename Team>
NASFAST_DEVICE void factor(const Team& team, const Task<T>& task, int i_panel, T* scratch) {
  constexpr int kStep = Team::kThreads / kPanel;
  const int64_t ld = task.ld();
  T* const from = task.v + i_panel * kPanel * (ld + 1);
  const Panel<on_chip, T, Team> panel(task, i_panel, from, scratch);
  if (on_chip) {
    team.each([&](int thread) {
      const int j = thread % kPanel;
      NASFAST_UNROLL_4 for (int i = thread / kPanel; i < panel.rows; i += kStep) {
        const T x = from[i * ld + j];
        panel.at(i, j) = x;
        if (j == 0) panel.copied(i, 0) = x;
      }
    });
  }
  for (int k = 0; k < panel.width; ++k) reflect_column(team, panel, k);
  team.each([&](int thread) {
    const int j = thread % kPanel;
    if (on_chip) {
      NASFAST_UNROLL_4 for (int i = thread / kPanel; i < panel.rows; i += kStep) from[i * ld + j] = panel.at(i, j);
    }
    if (thread < kPanel) write_t(panel, thread, task.t + i_panel * kPanel * kPanel);
  });
}

// One update c -= V op(t) V' c: over the rows of one panel and the columns of a tile. op is the transpose where the
// matrix is factored; where Q is formed, t is used as it is.
template <typename T, typename Team>
struct Update {
  static constexpr int kHalf = kPanel / 2, kColumns = kPanel * Team::kSlots;
  static constexpr int kSlices = Team::kThreads / (2 * kPanel);  // of rows, where V' c is summed
  static constexpr int kTile = kPanel * kColumns;
  static constexpr int kScratch = (kSlices > 1 ? kSlices + 2 : 2) * kTile;

  const T* v;
  const T* t;
  T* c;  // from the first row and column of the tile on
  int64_t ld;
  int rows, slots;  // slots: columns of each thread
  bool transpose;

  // Calls f(p, column) for the elements of a product [p][column] that are a thread's.
  template <typename F>
  NASFAST_DEVICE void elements_of(int thread, const F& f) const {
    for (int column = thread % kPanel; column < slots * kPanel; column += kPanel) {
      for (int p = thread / kPanel; p < kPanel; p += Team::kThreads / kPanel) f(p, column);
    }
  }
};

// V' c over one slice of the rows: half of the reflectors for each thread, times all of its columns.
template <typename T, typename Team>
NASFAST_DEVICE void multiply(const Update<T, Team>& update, int thread, T* partial) {
  using U = Update<T, Team>;
  const int column = thread % kPanel, half = thread / kPanel % 2, slice = thread / (2 * kPanel);
  T sum[U::kHalf][Team::kSlots] = {};
  NASFAST_UNROLL_4 for (int i = slice; i < update.rows; i += U::kSlices) {
    T row[U::kHalf];  // of memory that is aligned to 16 bytes
    memcpy(row, __builtin_assume_aligned(update.v + i * update.ld + half * U::kHalf, 16), sizeof row);
    NASFAST_UNROLL for (int u = 0; u < Team::kSlots; ++u) {
      const T x = u < update.slots ? update.c[i * update.ld + column + u * kPanel] : T(0);
      NASFAST_UNROLL for (int p = 0; p < U::kHalf; ++p) sum[p][u] += row[p] * x;
    }
  }
  NASFAST_UNROLL for (int p = 0; p < U::kHalf; ++p) {
    NASFAST_UNROLL for (int u = 0; u < Team::kSlots; ++u) {
      partial[slice * U::kTile + (half * U::kHalf + p) * U::kColumns + column + u * kPanel] = sum[p][u];
    }
  }
}

// c -= V products, for every kSlices-th row.
template <typename T, typename Team>
NASFAST_DEVICE void subtract(const Update<T, Team>& update, int thread, const T* products) {
  using U = Update<T, Team>;
  constexpr int kSlices = Team::kThreads / kPanel, kTogether = 2;
  const int column = thread % kPanel;
  T product[kPanel][Team::kSlots];
  NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) {
    NASFAST_UNROLL for (int u = 0; u < Team::kSlots; ++u) {
      product[p][u] = u < update.slots ? products[p * U::kColumns + column + u * kPanel] : T(0);
    }
  }
  for (int begin = thread / kPanel; begin < update.rows; begin += kTogether * kSlices) {
    T x[kTogether][Team::kSlots];
    NASFAST_UNROLL for (int r = 0; r < kTogether; ++r) {
      const int i = begin + r * kSlices;
      NASFAST_UNROLL for (int u = 0; u < Team::kSlots; ++u) {
        x[r][u] = i < update.rows && u < update.slots ? update.c[i * update.ld + column + u * kPanel] : T(0);
      }
    }
    NASFAST_UNROLL for (int r = 0; r < kTogether; ++r) {
      const int i = begin + r * kSlices;
      if (i >= update.rows) break;
      T row[kPanel];
      memcpy(row, __builtin_assume_aligned(update.v + i * update.ld, 16), sizeof row);
      NASFAST_UNROLL for (int u = 0; u < Team::kSlots; ++u) {
        NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) x[r][u] -= row[p] * product[p][u];
        if (u < update.slots) update.c[i * update.ld + column + u * kPanel] = x[r][u];
      }
    }
  }
}

template <typename T, typename Team>
NASFAST_DEVICE void apply(const Team& team, const Update<T, Team>& update, T* scratch) {
  using U = Update<T, Team>;
  T* const sums = scratch;
  T* const products = sums + U::kTile;
  T* const partial = U::kSlices > 1 ? products + U::kTile : sums;
  team.each([&](int thread) { multiply(update, thread, partial); });
  if (U::kSlices > 1) {
    team.each([&](int thread) {
      update.elements_of(thread, [&](int p, int column) {
        const int e = p * U::kColumns + column;
        T sum = 0;
        NASFAST_UNROLL for (int slice = 0; slice < U::kSlices; ++slice) sum += partial[slice * U::kTile + e];
        sums[e] = sum;
      });
    });
  }
  team.each([&](int thread) {
    update.elements_of(thread, [&](int p, int column) {
      T product = 0;
      NASFAST_UNROLL for (int r = 0; r < kPanel; ++r) {
        product += update.t[update.transpose ? r * kPanel + p : p * kPanel + r] * sums[r * U::kColumns + column];
      }
      products[p * U::kColumns + column] = product;
    });
  });
  team.each([&](int thread) { subtract(update, thread, products); });
}

// Applies the reflectors of one panel to `slots` panels of columns, or as many as there are.
template <typename T, typename Team>
NASFAST_DEVICE void apply(const Team& team, const Task<T>& task, int i_panel, bool to_q, int first, int slots,
                          T* scratch) {
  const int64_t ld = task.ld(), begin = i_panel * kPanel * ld;
  const int left = task.panels() - first;
  Update<T, Team> update;
  update.v = task.v + begin + i_panel * kPanel;
  update.t = task.t + i_panel * kPanel * kPanel;
  update.c = (to_q ? task.q : task.v) + begin + first * kPanel;
  update.ld = ld;
  update.rows = task.rows - i_panel * kPanel;
  update.slots = slots < left ? slots : left;
  update.transpose = !to_q;
  apply(team, update, scratch);
}

// Writes the columns of one panel, with a positive diagonal of R, and the reflectors if they are wanted.
template <typename T, typename Team>
NASFAST_DEVICE void finish(const Team& team, const Task<T>& task, int i_panel) {
  const int64_t ld = task.ld();
  team.each([&](int thread) {
    const int j = thread % kPanel, column = i_panel * kPanel + j;
    if (column >= task.columns) return;
    const T scale = task.v[column * ld + column] > 0 ? -task.scale : task.scale;
    for (int i = thread / kPanel; i < task.rows; i += Team::kThreads / kPanel) {
      task.result.at(i, column) = task.q[i * ld + column] * scale;
      if (task.reflectors.data != nullptr) task.reflectors.at(i, column) = task.v[i * ld + column];
    }
    if (task.reflectors.data != nullptr && thread < kPanel) {
      task.taus[column] = task.t[i_panel * kPanel * kPanel + j * (kPanel + 1)];
    }
  });
}

// Does one tile of one step. A panel that takes more than `limit` elements stays in global memory.
template <typename T, typename Team>
NASFAST_DEVICE void run_step(const Team& team, const Task<T>& task, Step step, int i_panel, int tile, int64_t limit,
                             T* scratch) {
  constexpr int kSlots = Team::kSlots;
  if (step == Step::kBegin) return begin(team, task, tile, scratch);
  if (step == Step::kFinish) return finish(team, task, tile);
  if (step == Step::kForm) return apply(team, task, i_panel, true, i_panel + tile * kSlots, kSlots, scratch);
  const int first = tile == 0 ? i_panel : i_panel + 1 + (tile - 1) * kSlots;
  if (i_panel > 0) apply(team, task, i_panel - 1, false, first, tile == 0 ? 1 : kSlots, scratch);
  if (tile > 0) return;
  if (Panel<true, T, Team>::elements(task.rows - i_panel * kPanel) <= limit) {
    factor<true>(team, task, i_panel, scratch);
  } else {
    factor<false>(team, task, i_panel, scratch);
  }
}

// Elements of shared memory that a tile needs, or of the scratch memory of a warp with a matrix; a multiple of 4.
template <typename T, typename Team>
NASFAST_ANYWHERE int64_t scratch_elements(int rows, int64_t limit) {
  const int64_t panel = Panel<true, T, Team>::elements(rows);
  const int64_t larger =
      greater(panel <= limit ? panel : 0, greater<int64_t>(Update<T, Team>::kScratch, Team::kThreads));
  return (larger + 3) / 4 * 4;
}

// Does all of one small matrix with a team, on chip.
template <typename T, typename Team>
NASFAST_DEVICE void run_steps(const Team& team, Task<T> task, T* shared) {
  constexpr int64_t kNoLimit = int64_t{1} << 62;
  task.work_in(shared);
  T* const scratch = shared + task.work_elements();
  for_each_step(task.panels(), [&](Step step, int i_panel) {
    const int count = tiles(task, step, i_panel, Team::kSlots);
    for (int tile = 0; tile < count; ++tile) {
      run_step(team, task, step, i_panel, tile, kNoLimit, scratch);
    }
  });
}

}  // namespace nasfast::orthogonal
