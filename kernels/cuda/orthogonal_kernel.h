// Householder orthogonalisation of one matrix by one thread block; formulas: nasfast/ops/reference.py, orthogonalize.
//
// The text compiles for the GPU and for the host. It is written as phases: `block.each(f)` runs f(thread) for every
// thread of the block and then waits for all of them. On the host a loop takes the place of the threads, in either
// order, so that the tests of every machine run what a GPU runs. What stands between two phases every thread does for
// itself, with one result, from what the next phase does not write. Nothing is shared between the threads of a phase
// and nothing is added atomically, so results do not depend on timing, on the other matrices of a call, or on where a
// panel is kept.
//
// Reflector of column x from its diagonal on: s = sign(x_1), v = x + s |x| e_1, tau = 2 / v'v, H = I - tau v v'. R is
// never stored. A zero column gives v = 0 and tau = 0. R_kk = -s |x| and v_1 has the sign s, so the sign of R_kk is
// read from v_1. Columns are scaled by powers of two, which changes neither Q nor the rounding: at first, so that no
// square overflows, and again where the elimination leaves so little of a column that its squares would underflow.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define NASFAST_DEVICE __device__ __forceinline__
#define NASFAST_ANYWHERE __host__ __device__ __forceinline__
#define NASFAST_UNROLL _Pragma("unroll")
#else
#define NASFAST_DEVICE inline
#define NASFAST_ANYWHERE inline
#define NASFAST_UNROLL
#endif

namespace nasfast::orthogonal {
// the CPU kernels include this once per instruction set, and the linker must not merge what they make of it
namespace {

// Columns of a panel. A panel of 16 float columns with 1536 rows fits into the 99 KB of shared memory of sm_86.
constexpr int kPanel = 16;
constexpr int kThreads = 256;
// The threads of a panel: one column each, and these rows apart.
constexpr int kRowGroups = kThreads / kPanel;
// The threads of an update: one column each, and these rows apart.
constexpr int kTileColumns = 64;
constexpr int kSlices = kThreads / kTileColumns;
// Rows whose elements a thread of an update asks for before it uses the first: hides the latency of the L2 cache.
constexpr int kAhead = 4;

// Threads of a block of which each does one small matrix.
constexpr int kTinyThreads = 64;
// Odd, so that the threads that bring a matrix to shared memory use different banks.
constexpr int kTinyStride = kTinyThreads + 1;

// One matrix, tall (rows >= columns); a wide one comes through its transpose. Strides are in elements.
template <typename T>
struct Task {
  const T* in;
  T* out;
  int64_t in_row, in_column, out_row, out_column;
  T* v;         // [rows][ld], of ld = columns rounded up to whole panels: first the matrix, in the end the reflectors
  T* q;         // [rows][q_ld], where Q is made: out itself, or memory from which it is transposed to out
  T* t;         // [panels][kPanel][kPanel]: H_1 .. H_16 of a panel are I - V t V', t upper triangular
  int64_t ld, q_ld;
  int rows, columns;

  NASFAST_ANYWHERE int panels() const { return static_cast<int>(ld / kPanel); }
};

// Up to kTinyThreads matrices of one shape that lie one after the other.
template <typename T>
struct TinyTask {
  const T* in;
  T* out;
  int count, rows, columns;  // of the tall form
  bool wide;
};

// What is to be done with the matrices, in this order; kFactor and kUpdate alternate over the panels, kForm goes back.
enum class Step { kLoad, kFactor, kUpdate, kIdentity, kForm, kStore };

// Elements of shared memory beside the panel, and for a tile of an update.
constexpr int kPanelScratch = kPanel * (kRowGroups + 1) + kRowGroups + kPanel * kPanel + kPanel;
constexpr int kTileScratch = (kSlices + 2) * kPanel * kTileColumns;

template <typename T>
NASFAST_DEVICE T greater(T a, T b) {
  return a > b ? a : b;
}

// What is known of a floating type. A vector of several numbers has its own, derived from that of its elements.
template <typename T>
struct Format;
template <>
struct Format<float> {
  using Word = uint32_t;
  using Bits = Word;
  static constexpr int kMantissa = 23;
  static constexpr Word kBias = 127;
  static NASFAST_DEVICE float root(float x) { return sqrtf(x); }
};
template <>
struct Format<double> {
  using Word = uint64_t;
  using Bits = Word;
  static constexpr int kMantissa = 52;
  static constexpr Word kBias = 1023;
  static NASFAST_DEVICE double root(double x) { return sqrt(x); }
};

// What columns are scaled to, as a power of two: sums of squares stay far from overflow, and what is much smaller than
// the largest element far from underflow.
constexpr int kScaledExponent = 32;

// The power of two that brings x >= 0 near 2^kScaledExponent, or as near as one can.
template <typename F, typename Real>
NASFAST_DEVICE Real scale_of(Real x) {
  using Bits = typename F::Bits;
  using Word = typename F::Word;
  Bits bits;
  memcpy(&bits, &x, sizeof bits);
  Bits exponent = bits >> F::kMantissa;  // x >= 0: no sign
  // the largest power of two has the exponent 2 * kBias
  const Bits low = Bits{} + Word(kScaledExponent);
  exponent = exponent < low ? low : exponent;
  bits = (Word(2 * F::kBias + kScaledExponent) - exponent) << F::kMantissa;
  memcpy(&x, &bits, sizeof bits);
  return x;
}

template <typename Real>
struct Reflector {
  Real first, tau;  // v_1 and tau
};

// From x_1 and the sum of the squares of the others, neither so small that a square underflows.
template <typename F, typename Real>
NASFAST_DEVICE Reflector<Real> reflector(Real x, Real below) {
  const Real zero{};
  const Real norm = F::root(x * x + below);
  const Real first = x < zero ? x - norm : x + norm;
  const Real square = first * first + below;
  return {first, square > zero ? 2 / (square > zero ? square : zero + 1) : zero};
}

// sign(R_kk) by v_1
template <typename Real>
NASFAST_DEVICE Real diagonal_sign(Real first) {
  const Real one = Real{} + 1;
  return first > Real{} ? -one : one;
}

// One matrix by one thread, in place. Element e of the row-major matrix and then of tau[columns] is a[e * stride]. Real
// may be a vector, of as many matrices as it has lanes.
template <typename F, typename Real>
NASFAST_DEVICE void orthogonalize_tiny(Real* a, int stride, int rows, int columns) {
  const auto at = [=](int i, int j) -> Real& { return a[(i * columns + j) * stride]; };
  const auto scale_column = [=](int first, int k) {
    Real largest{};
    for (int i = first; i < rows; ++i) largest = greater(largest, greater(at(i, k), -at(i, k)));
    const Real scale = scale_of<F>(largest);
    for (int i = first; i < rows; ++i) at(i, k) *= scale;
  };
  for (int k = 0; k < columns; ++k) scale_column(0, k);
  for (int k = 0; k < columns; ++k) {
    scale_column(k, k);
    Real below{};
    for (int i = k + 1; i < rows; ++i) below += at(i, k) * at(i, k);
    const Reflector<Real> h = reflector<F>(at(k, k), below);
    at(k, k) = h.first;
    at(rows, k) = h.tau;
    for (int j = k + 1; j < columns; ++j) {
      Real dot{};
      for (int i = k; i < rows; ++i) dot += at(i, k) * at(i, j);
      dot *= h.tau;
      for (int i = k; i < rows; ++i) at(i, j) -= dot * at(i, k);
    }
  }
  // Q = H_1 .. H_n I diag(sign), from the last column: what is left of it and above is not touched by H_k yet
  for (int k = columns - 1; k >= 0; --k) {
    const Real tau = at(rows, k);
    for (int j = k + 1; j < columns; ++j) {
      Real dot{};
      for (int i = k + 1; i < rows; ++i) dot += at(i, k) * at(i, j);
      dot *= tau;
      at(k, j) = -dot * at(k, k);
      for (int i = k + 1; i < rows; ++i) at(i, j) -= dot * at(i, k);
    }
    const Real first = at(k, k);
    const Real sign = diagonal_sign(first);
    const Real factor = sign * tau * first;
    at(k, k) = sign - factor * first;
    for (int i = k + 1; i < rows; ++i) at(i, k) *= -factor;
  }
}

// Where element e of a matrix in memory is in its tall form.
NASFAST_ANYWHERE int tiny_place(int e, int rows, int columns, bool wide) {
  return wide ? e % rows * columns + e / rows : e;
}

template <typename T, typename Block>
NASFAST_DEVICE void run_tiny(const Block& block, const TinyTask<T>& task, T* shared) {
  const int elements = task.rows * task.columns;
  const auto place = [&](int e) {  // in shared memory
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

// ---- larger matrices

// Row i of a panel of V. The rows start at whole panels of memory that is aligned to 16 bytes.
template <typename T>
NASFAST_DEVICE void load_row(const T* row, T* v) {
  memcpy(v, __builtin_assume_aligned(row, 16), kPanel * sizeof(T));
}

// Brings one tile of columns to V, scaled, with zeros in the columns that fill the last panel.
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

// The first row of a group below the diagonal of column k.
NASFAST_DEVICE int first_below(int k, int group) {
  static_assert(kRowGroups >= kPanel, "the sum below must not be negative");
  return k + 1 + (group - (k + 1) + kRowGroups) % kRowGroups;
}

// Below this sum of the squares of a column some of them may have underflowed. Rounding errors alone, as rank-deficient
// matrices leave them in a scaled column, are seldom as small.
template <typename T>
constexpr T kSmallSquare = T(1) / (int64_t{1} << 60);

// Scales what is left of column k of a panel, and sums its squares again.
template <typename T, typename Block>
NASFAST_DEVICE void rescale(const Block& block, T* panel, int64_t ld, int k, int rows, T* partial, T* squares) {
  block.each([&](int thread) {
    if (thread % kPanel) return;
    const int group = thread / kPanel;
    T largest = 0;
    for (int i = k + group; i < rows; i += kRowGroups) {
      const T x = panel[i * ld + k];
      largest = greater(largest, greater(x, -x));
    }
    partial[group] = largest;
  });
  block.each([&](int thread) {
    if (thread % kPanel) return;
    const int group = thread / kPanel;
    T largest = 0;
    for (int g = 0; g < kRowGroups; ++g) largest = greater(largest, partial[g]);
    const T scale = scale_of<Format<T>>(largest);
    T square = 0;
    for (int i = k + group; i < rows; i += kRowGroups) {
      const T x = panel[i * ld + k] * scale;
      panel[i * ld + k] = x;
      if (i > k) square += x * x;
    }
    squares[group] = square;
  });
}

// Turns the columns of one panel into reflectors, zeros above them, and makes its t. The panel is worked on in shared
// memory where it fits (`resident`) and in place otherwise, with the same arithmetic.
template <typename T, typename Block>
NASFAST_DEVICE void factor(const Block& block, const Task<T>& task, int i_panel, bool resident, T* shared) {
  const int begin = i_panel * kPanel;
  const int rows = task.rows - begin;
  const int width = task.columns - begin < kPanel ? task.columns - begin : kPanel;
  T* const partial = shared;                               // [column][group], and one more column of squares
  T* const squares = partial + kPanel * (kRowGroups + 1);  // [group], of the next column below its diagonal
  T* const gram = squares + kRowGroups;                    // [j][k] = v_j' v_k for j < k
  T* const taus = gram + kPanel * kPanel;
  T* const global = task.v + begin * task.ld + begin;
  T* const panel = resident ? shared + kPanelScratch : global;
  const int64_t ld = resident ? kPanel : task.ld;

  block.each([&](int thread) {
    const int j = thread % kPanel;
    const int group = thread / kPanel;
    T square = 0;
    for (int i = group; i < rows; i += kRowGroups) {
      const T x = global[i * task.ld + j];
      if (resident) panel[i * kPanel + j] = x;
      if (i > 0) square += x * x;
    }
    if (j == 0) squares[group] = square;
  });
  const auto sum_of_squares = [&] {
    T below = 0;
    for (int g = 0; g < kRowGroups; ++g) below += squares[g];
    return below;
  };
  for (int k = 0; k < width; ++k) {
    // every thread reads the same, which the next phase does not write
    T below = sum_of_squares();
    T x_k = panel[k * ld + k];
    if (x_k * x_k + below < kSmallSquare<T>) {
      rescale(block, panel, ld, k, rows, partial, squares);
      below = sum_of_squares();
      x_k = panel[k * ld + k];
    }
    const Reflector<T> h = reflector<Format<T>>(x_k, below);
    // v_k' times every column, by rows
    block.each([&](int thread) {
      const int j = thread % kPanel;
      const int group = thread / kPanel;
      if (thread == 0) {
        partial[k * (kRowGroups + 1)] = h.first;  // its own column needs no product
        taus[k] = h.tau;
      }
      if (j == k) return;
      T dot = 0;
      for (int i = first_below(k, group); i < rows; i += kRowGroups) dot += panel[i * ld + k] * panel[i * ld + j];
      if (group == 0) dot += h.first * panel[k * ld + j];
      partial[j * (kRowGroups + 1) + group] = dot;
    });
    block.each([&](int thread) {
      const int j = thread % kPanel;
      const int group = thread / kPanel;
      if (j == k) {
        if (group == 0) panel[k * ld + k] = partial[k * (kRowGroups + 1)];
        return;
      }
      T dot = 0;
      for (int g = 0; g < kRowGroups; ++g) dot += partial[j * (kRowGroups + 1) + g];
      if (j < k) {
        if (group == 0) gram[j * kPanel + k] = dot;
        return;
      }
      dot *= taus[k];
      T square = 0;
      for (int i = first_below(k, group); i < rows; i += kRowGroups) {
        const T x = panel[i * ld + j] - dot * panel[i * ld + k];
        panel[i * ld + j] = x;
        if (i > k + 1) square += x * x;
      }
      if (group == 0) panel[k * ld + j] = 0;
      if (j == k + 1) squares[group] = square;
    });
  }
  // t_kk = tau_k, t[:k, k] = -tau_k t[:k, :k] (V[:, :k]' v_k): row by row, one thread each
  T* const t = task.t + i_panel * kPanel * kPanel;
  block.each([&](int thread) {
    if (resident) {
      for (int i = thread / kPanel; i < rows; i += kRowGroups) {
        global[i * task.ld + thread % kPanel] = panel[i * kPanel + thread % kPanel];
      }
    }
    if (thread >= kPanel) return;
    for (int k = 0; k < kPanel; ++k) {
      T sum = 0;
      if (k < width) {
        for (int j = thread; j < k; ++j) sum += t[thread * kPanel + j] * gram[j * kPanel + k];
        sum = k == thread ? taus[k] : -taus[k] * sum;
      }
      t[thread * kPanel + k] = k < thread ? T(0) : sum;
    }
  });
}

// c -= V op(t) V' c over the rows of one panel and up to kTileColumns columns of c that begin at first_column; op is
// the transpose where the matrix is factored, and none where Q is formed.
template <typename T, typename Block>
NASFAST_DEVICE void apply(const Block& block, const Task<T>& task, int i_panel, T* c, int64_t ld_c, int first_column,
                          bool transpose, T* shared) {
  const int begin = i_panel * kPanel;
  const int rows = task.rows - begin;
  const T* const v = task.v + begin * task.ld + begin;
  const T* const t = task.t + i_panel * kPanel * kPanel;
  T* const tile = c + begin * ld_c + first_column;
  T* const partial = shared;                                        // [slice][reflector][column]
  T* const sums = partial + kSlices * kPanel * kTileColumns;        // [reflector][column]: V' c
  T* const products = sums + kPanel * kTileColumns;                 // [reflector][column]: op(t) V' c
  const int64_t step = kSlices * task.ld;
  const int64_t step_c = kSlices * ld_c;

  block.each([&](int thread) {
    const int column = thread % kTileColumns;
    const int slice = thread / kTileColumns;
    if (first_column + column >= task.columns) return;
    T sum[kPanel] = {};
    const T* p_v = v + slice * task.ld;
    const T* p_c = tile + slice * ld_c + column;
    int i = slice;
    for (; i + (kAhead - 1) * kSlices < rows; i += kAhead * kSlices) {
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
    for (; i < rows; i += kSlices) {
      T row[kPanel];
      load_row(p_v, row);
      NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) sum[p] += row[p] * *p_c;
      p_v += step;
      p_c += step_c;
    }
    NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) partial[(slice * kPanel + p) * kTileColumns + column] = sum[p];
  });
  block.each([&](int thread) {
    const int column = thread % kTileColumns;
    if (first_column + column >= task.columns) return;
    for (int p = thread / kTileColumns; p < kPanel; p += kSlices) {
      T sum = 0;
      for (int slice = 0; slice < kSlices; ++slice) sum += partial[(slice * kPanel + p) * kTileColumns + column];
      sums[p * kTileColumns + column] = sum;
    }
  });
  block.each([&](int thread) {
    const int column = thread % kTileColumns;
    if (first_column + column >= task.columns) return;
    for (int p = thread / kTileColumns; p < kPanel; p += kSlices) {
      T product = 0;
      for (int r = 0; r < kPanel; ++r) {
        product += t[transpose ? r * kPanel + p : p * kPanel + r] * sums[r * kTileColumns + column];
      }
      products[p * kTileColumns + column] = product;
    }
  });
  block.each([&](int thread) {
    const int column = thread % kTileColumns;
    const int slice = thread / kTileColumns;
    if (first_column + column >= task.columns) return;
    T product[kPanel];
    NASFAST_UNROLL for (int p = 0; p < kPanel; ++p) product[p] = products[p * kTileColumns + column];
    const T* p_v = v + slice * task.ld;
    T* p_c = tile + slice * ld_c + column;
    int i = slice;
    for (; i + (kAhead - 1) * kSlices < rows; i += kAhead * kSlices) {
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
    for (; i < rows; i += kSlices) {
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

// diag(sign) in the first rows of Q, zeros elsewhere
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

// Tiles of a step, each the work of one block; those of one step and panel may run at once.
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

// shared: kPanelScratch elements with the panel behind them where it is resident, kTileScratch at least.
template <typename T, typename Block>
NASFAST_DEVICE void run_step(const Block& block, const Task<T>& task, Step step, int i_panel, int tile,
                             int resident_rows, T* shared) {
  int first = tile * kTileColumns;
  switch (step) {
    case Step::kLoad:
      return load(block, task, first, shared);
    case Step::kFactor:
      return factor(block, task, i_panel, task.rows - i_panel * kPanel <= resident_rows, shared);
    case Step::kUpdate:
    case Step::kForm: {
      const bool form = step == Step::kForm;
      first += (form ? i_panel : i_panel + 1) * kPanel;
      return apply(block, task, i_panel, form ? task.q : task.v, form ? task.q_ld : task.ld, first, !form, shared);
    }
    case Step::kIdentity:
      return set_identity(block, task, first);
    case Step::kStore:
      return store(block, task, first);
  }
}

// The steps of a matrix of so many panels, in their order: load; factor and update by panels; identity; form, from the
// last panel to the first; store.
NASFAST_ANYWHERE int step_count(int panels) { return 3 * panels + 3; }

struct PanelStep {
  Step step;
  int i_panel;
};

NASFAST_ANYWHERE PanelStep step_at(int panels, int i) {
  if (i == 0) return {Step::kLoad, 0};
  if (i <= 2 * panels) return {i % 2 ? Step::kFactor : Step::kUpdate, (i - 1) / 2};
  if (i == 2 * panels + 1) return {Step::kIdentity, 0};
  if (i < step_count(panels) - 1) return {Step::kForm, step_count(panels) - 2 - i};
  return {Step::kStore, 0};
}

// A whole matrix by one block.
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
