// Orthogonalisation by blocks of threads: what each thread of a GPU does, written so that a host can do it too.
//
// The code is a sequence of phases. `block.each(f)` runs f(thread) for every thread of the block, then waits for all of
// them. On the host, a loop takes the place of the threads, in either order: so tests on machines without a GPU run
// what a GPU runs. Code between two phases is executed by every thread, each with the same result, because it reads
// only what the next phase does not write. Threads share nothing within a phase and add nothing atomically, so results
// do not depend on timing, on the other matrices of a call, or on whether a panel is kept in shared memory.
#pragma once

#include <algorithm>
#include <cstddef>

#include "householder.h"
#include "panel.h"

namespace nasfast::orthogonal {

// In an update, each thread works on one of kTileColumns columns and on every kSlices-th row of it.
constexpr int kTileColumns = 64;
constexpr int kSlices = kThreads / kTileColumns;
// Rows that a thread of an update loads before it uses the first: this hides the latency of the L2 cache.
constexpr int kAhead = 4;

// Threads of a block of which each does one tiny matrix.
constexpr int kTinyThreads = 64;
// Odd, so that the threads that copy a matrix to shared memory use different banks.
constexpr int kTinyStride = kTinyThreads + 1;

// Up to kTinyThreads matrices of one shape, one after the other in memory.
template <typename T>
struct TinyTask {
  const T* in;
  T* out;
  int count, rows, columns;  // rows and columns of the tall form
  bool wide;
};

// The steps of a matrix, in this order. kFactor and kUpdate alternate over the panels; kForm goes through the panels
// from the last to the first.
enum class Step { kLoad, kFactor, kUpdate, kIdentity, kForm, kStore };

struct PanelStep {
  Step step;
  int i_panel;
};

// Elements of shared memory for a tile of an update.
constexpr int kTileScratch = (kSlices + 2) * kPanel * kTileColumns;

// Bytes of shared memory for matrices of this many rows, and the number of rows up to which a panel is kept in it.
struct SharedMemory {
  size_t bytes;
  int resident_rows;

  SharedMemory(int rows, size_t element, size_t limit) {
    const size_t most = (limit / element - kPanelScratch) / kPanel;
    resident_rows = static_cast<int>(std::min<size_t>(rows, most));
    bytes = std::max<size_t>(kTileScratch, kPanelScratch + resident_rows * kPanel) * element;
  }
};

// Elements of shared memory for a block that does tiny matrices.
constexpr size_t kTinyShared = (kTinyElements + kTinyColumns) * kTinyStride;

namespace {

template <typename T, typename Block>
NASFAST_DEVICE void run_tiny(const Block& block, const TinyTask<T>& task, T* shared) {
  const int elements = task.rows * task.columns;
  const auto place = [&](int e) {  // index in shared memory
    return tiny_place(e % elements, task.rows, task.columns, task.wide) * kTinyStride + e / elements;
  };
  block.each([&](int thread) {
    for (int e = thread; e < task.count * elements; e += kTinyThreads) {
      shared[place(e)] = task.in[e];
    }
  });
  block.each([&](int thread) {
    if (thread >= task.count) return;
    orthogonalize_tiny<Format<T>>(shared + thread, kTinyStride, task.rows, task.columns);
  });
  block.each([&](int thread) {
    for (int e = thread; e < task.count * elements; e += kTinyThreads) {
      task.out[e] = shared[place(e)];
    }
  });
}

// Copies row i of a panel of V to v. Each row begins with a whole panel of memory that is aligned to 16 bytes.
template <typename T>
NASFAST_DEVICE void load_row(const T* row, T* v) {
  memcpy(v, __builtin_assume_aligned(row, 16), kPanel * sizeof(T));
}

// Copies one tile of columns to V, scaled, and fills the columns behind the matrix in the last panel with zeros.
template <typename T, typename Block>
NASFAST_DEVICE void load(const Block& block, const Task<T>& task, int first_column, T* shared) {
  block.each([&](int thread) {
    const int column = first_column + thread % kTileColumns;
    T largest = 0;
    if (column < task.columns) {
      for (int i = thread / kTileColumns; i < task.rows; i += kSlices) {
        const T x = task.in[i * task.in_row + column * task.in_column];
        largest = greater(largest, greater(x, -x));
      }
    }
    shared[thread] = largest;
  });
  block.each([&](int thread) {
    const int column = first_column + thread % kTileColumns;
    if (column >= task.ld) return;
    T largest = 0;
    for (int slice = 0; slice < kSlices; ++slice) {
      largest = greater(largest, shared[slice * kTileColumns + thread % kTileColumns]);
    }
    const T scale = scale_of<Format<T>>(largest);
    for (int i = thread / kTileColumns; i < task.rows; i += kSlices) {
      const T x = column < task.columns ? task.in[i * task.in_row + column * task.in_column] : T(0);
      task.v[i * task.ld + column] = x * scale;
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
};

// partial = V' c, by slices of rows
template <typename T, typename Block>
NASFAST_DEVICE void project(const Block& block, const Update<T>& update) {
  const int64_t step = kSlices * update.ld;
  const int64_t step_c = kSlices * update.ld_c;
  block.each([&](int thread) {
    const int column = thread % kTileColumns;
    const int slice = thread / kTileColumns;
    if (column >= update.columns) return;
    T sum[kPanel] = {};
    const T* p_v = update.v + slice * update.ld;
    const T* p_c = update.c + slice * update.ld_c + column;
    int i = slice;
    for (; i + (kAhead - 1) * kSlices < update.rows; i += kAhead * kSlices) {
      T x[kAhead];
      NASFAST_UNROLL for (int u = 0; u < kAhead; ++u) x[u] = p_c[u * step_c];
      NASFAST_UNROLL for (int u = 0; u < kAhead; ++u) {
        T row[kPanel];
        load_row(p_v + u * step, row);
        NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) sum[p] += row[p] * x[u];
      }
      p_v += kAhead * step;
      p_c += kAhead * step_c;
    }
    for (; i < update.rows; i += kSlices) {
      T row[kPanel];
      load_row(p_v, row);
      NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) sum[p] += row[p] * *p_c;
      p_v += step;
      p_c += step_c;
    }
    NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) {
      update.partial[(slice * kPanel + p) * kTileColumns + column] = sum[p];
    }
  });
}

// products = op(t) times the sum of partial over the slices
template <typename T, typename Block>
NASFAST_DEVICE void multiply_t(const Block& block, const Update<T>& update) {
  block.each([&](int thread) {
    const int column = thread % kTileColumns;
    if (column >= update.columns) return;
    for (int p = thread / kTileColumns; p < kPanel; p += kSlices) {
      T sum = 0;
      for (int slice = 0; slice < kSlices; ++slice) {
        sum += update.partial[(slice * kPanel + p) * kTileColumns + column];
      }
      update.sums[p * kTileColumns + column] = sum;
    }
  });
  block.each([&](int thread) {
    const int column = thread % kTileColumns;
    if (column >= update.columns) return;
    for (int p = thread / kTileColumns; p < kPanel; p += kSlices) {
      T product = 0;
      for (int r = 0; r < kPanel; ++r) {
        product +=
            update.t[update.transpose ? r * kPanel + p : p * kPanel + r] * update.sums[r * kTileColumns + column];
      }
      update.products[p * kTileColumns + column] = product;
    }
  });
}

// c -= V products
template <typename T, typename Block>
NASFAST_DEVICE void subtract(const Block& block, const Update<T>& update) {
  const int64_t step = kSlices * update.ld;
  const int64_t step_c = kSlices * update.ld_c;
  block.each([&](int thread) {
    const int column = thread % kTileColumns;
    const int slice = thread / kTileColumns;
    if (column >= update.columns) return;
    T product[kPanel];
    NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) product[p] = update.products[p * kTileColumns + column];
    const T* p_v = update.v + slice * update.ld;
    T* p_c = update.c + slice * update.ld_c + column;
    int i = slice;
    for (; i + (kAhead - 1) * kSlices < update.rows; i += kAhead * kSlices) {
      T x[kAhead];
      NASFAST_UNROLL for (int u = 0; u < kAhead; ++u) x[u] = p_c[u * step_c];
      NASFAST_UNROLL for (int u = 0; u < kAhead; ++u) {
        T row[kPanel];
        load_row(p_v + u * step, row);
        NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) x[u] -= row[p] * product[p];
      }
      NASFAST_UNROLL for (int u = 0; u < kAhead; ++u) p_c[u * step_c] = x[u];
      p_v += kAhead * step;
      p_c += kAhead * step_c;
    }
    for (; i < update.rows; i += kSlices) {
      T row[kPanel];
      load_row(p_v, row);
      T x = *p_c;
      NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) x -= row[p] * product[p];
      *p_c = x;
      p_v += step;
      p_c += step_c;
    }
  });
}

// Applies the reflectors of one panel to a tile of V (kUpdate) or of Q (kForm) that begins at first_column.
template <typename T, typename Block>
NASFAST_DEVICE void apply(const Block& block, const Task<T>& task, Step step, int i_panel, int first_column,
                          T* shared) {
  const bool form = step == Step::kForm;
  const int begin = i_panel * kPanel;
  Update<T> update;
  update.v = task.v + begin * task.ld + begin;
  update.t = task.t + i_panel * kPanel * kPanel;
  update.ld = task.ld;
  update.ld_c = form ? task.q_ld : task.ld;
  update.c = (form ? task.q : task.v) + begin * update.ld_c + first_column;
  update.rows = task.rows - begin;
  update.columns = task.columns - first_column;
  update.transpose = !form;
  update.partial = shared;
  update.sums = update.partial + kSlices * kPanel * kTileColumns;
  update.products = update.sums + kPanel * kTileColumns;
  project(block, update);
  multiply_t(block, update);
  subtract(block, update);
}

// Writes diag(sign) to the first rows of Q, and zeros elsewhere.
template <typename T, typename Block>
NASFAST_DEVICE void set_identity(const Block& block, const Task<T>& task, int first_column) {
  block.each([&](int thread) {
    const int column = first_column + thread % kTileColumns;
    if (column >= task.columns) return;
    const T sign = diagonal_sign(task.v[column * task.ld + column]);
    for (int i = thread / kTileColumns; i < task.rows; i += kSlices) {
      task.q[i * task.q_ld + column] = i == column ? sign : T(0);
    }
  });
}

// Copies Q from where it was formed to the result.
template <typename T, typename Block>
NASFAST_DEVICE void store(const Block& block, const Task<T>& task, int first_column) {
  block.each([&](int thread) {
    const int column = first_column + thread % kTileColumns;
    if (column >= task.columns) return;
    for (int i = thread / kTileColumns; i < task.rows; i += kSlices) {
      task.out[i * task.out_row + column * task.out_column] = task.q[i * task.q_ld + column];
    }
  });
}

// The number of tiles of a step. Each tile is the work of one block, and the tiles of one step and panel may run at
// once.
template <typename T>
NASFAST_ANYWHERE int tiles(const Task<T>& task, Step step, int i_panel) {
  const bool by_panel = step == Step::kFactor || step == Step::kUpdate || step == Step::kForm;
  if (by_panel && i_panel >= task.panels()) return 0;
  if (step == Step::kFactor) return 1;
  if (step == Step::kStore && task.q == task.out) return 0;
  int first = 0;
  if (step == Step::kUpdate) first = (i_panel + 1) * kPanel;
  if (step == Step::kForm) first = i_panel * kPanel;
  const int end = step == Step::kLoad ? static_cast<int>(task.ld) : task.columns;
  return end > first ? (end - first + kTileColumns - 1) / kTileColumns : 0;
}

// Does one tile of one step. `shared` has kPanelScratch elements and behind them the panel where it is resident, and at
// least kTileScratch elements.
template <typename T, typename Block>
NASFAST_DEVICE void run_step(const Block& block, const Task<T>& task, Step step, int i_panel, int tile,
                             int resident_rows, T* shared) {
  const int first = tile * kTileColumns;
  switch (step) {
    case Step::kLoad:
      return load(block, task, first, shared);
    case Step::kFactor:
      return factor(block, task, i_panel, task.rows - i_panel * kPanel <= resident_rows, shared);
    case Step::kUpdate:
      return apply(block, task, step, i_panel, first + (i_panel + 1) * kPanel, shared);
    case Step::kForm:
      return apply(block, task, step, i_panel, first + i_panel * kPanel, shared);
    case Step::kIdentity:
      return set_identity(block, task, first);
    case Step::kStore:
      return store(block, task, first);
  }
}

// The steps of a matrix with this many panels, in order: load; factor and update, panel by panel; identity; form, from
// the last panel to the first; store.
NASFAST_ANYWHERE int step_count(int panels) { return 3 * panels + 3; }

NASFAST_ANYWHERE PanelStep step_at(int panels, int i) {
  if (i == 0) return {Step::kLoad, 0};
  if (i <= 2 * panels) return {i % 2 ? Step::kFactor : Step::kUpdate, (i - 1) / 2};
  if (i == 2 * panels + 1) return {Step::kIdentity, 0};
  if (i < step_count(panels) - 1) return {Step::kForm, step_count(panels) - 2 - i};
  return {Step::kStore, 0};
}

// Does a whole matrix by one block.
template <typename T, typename Block>
NASFAST_DEVICE void run_matrix(const Block& block, const Task<T>& task, int resident_rows, T* shared) {
  for (int i = 0; i < step_count(task.panels()); ++i) {
    const PanelStep now = step_at(task.panels(), i);
    const int count = tiles(task, now.step, now.i_panel);
    for (int tile = 0; tile < count; ++tile) run_step(block, task, now.step, now.i_panel, tile, resident_rows, shared);
  }
}

}  // namespace
}  // namespace nasfast::orthogonal
