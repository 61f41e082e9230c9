// orthogonalize and fill_orthogonal on the CPU. All matrices but the tiny ones go to LAPACK, through torch.
//
// LAPACK gains little from several threads within one matrix of the usual sizes. So each thread takes whole matrices,
// and the matrices with the most work are taken first. How a matrix is computed depends on its shape only, so its
// result does not depend on the other matrices.
//
// fill_orthogonal draws each matrix into memory that stays in the cache, orthogonalises it there, and writes only the
// result to the tensor. Because its matrices are Gaussian, the shape tells that most of them are well conditioned. For
// these it computes R by Cholesky and Q = Z R^-1: half the operations of Householder's reflectors, at the speed of a
// matrix product.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <vector>

#include "../cpu/kernels.h"
#include "../cpu/launch.h"
#include "../cpu/pool.h"
#include "householder.h"
#include "matrices.h"

// A function of MKL, where torch is built with MKL. Other LAPACKs detect by themselves that they are called by one
// thread of several.
extern "C" int MKL_Set_Num_Threads_Local(int threads) __attribute__((weak));

namespace nasfast::cpu {
namespace {

using namespace orthogonal;

// Makes LAPACK use no other threads when it is called from this one. Without this, within a parallel loop, MKL's sgeqrf
// waits forever for a team of threads that OpenMP does not provide there.
class OneThread {
 public:
  OneThread() {
    // The first time that a thread asks torch for this number, torch sets MKL's to it, after torch.set_num_threads.
    // Were that left to the first operator of this thread, it would undo what is set here.
    torch::stable::get_num_threads();
    before_ = set(1);
  }
  ~OneThread() { set(before_); }
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;

 private:
  static int set(int threads) { return MKL_Set_Num_Threads_Local ? MKL_Set_Num_Threads_Local(threads) : 0; }
  int before_;
};

// From this many multiply-adds on, counted as rows * columns^2, LAPACK's own threads share one matrix. Otherwise all
// other threads would wait for it. Such matrices are of 1300 x 900, or the classifier of an ImageNet network.
constexpr int64_t kThreadedWork = int64_t{1} << 30;
// Rows of a matrix that are transposed together: their cache lines stay in the cache for the next columns.
constexpr int64_t kTransposeSide = 64;
// A column needs no scaling if its largest element is between 1 / kOrdinary and kOrdinary.
constexpr int64_t kOrdinary = int64_t{1} << 32;
// Tiny matrices per item of work: a multiple of the lanes of all vectors.
constexpr int64_t kTinyItem = 256;

// One matrix in its tall form. LAPACK reads it column by column: a wide row-major matrix is the transpose of that.
template <typename T>
struct Job {
  const T* in;
  T* out;
  int64_t rows, columns;
  bool wide;

  int64_t work() const { return rows * columns * columns; }
};

// to[j][i] = from[i][j] * signs[i]
template <typename T>
void transpose(const T* from, int64_t rows, int64_t columns, T* to, const T* signs) {
  for (int64_t i0 = 0; i0 < rows; i0 += kTransposeSide) {
    const int64_t i1 = std::min(rows, i0 + kTransposeSide);
    for (int64_t j = 0; j < columns; ++j) {
      for (int64_t i = i0; i < i1; ++i) to[j * rows + i] = from[i * columns + j] * signs[i];
    }
  }
}

// Scales a column that is so large that its norm may overflow in LAPACK, or so small that LAPACK would lose bits.
// Scaling other columns would not change Q.
template <typename T>
void scale_column(T* column, int64_t rows) {
  constexpr int kAtOnce = 16;  // separate maxima, which the compiler computes in one vector
  T largest[kAtOnce] = {};
  int64_t i = 0;
  for (; i + kAtOnce <= rows; i += kAtOnce) {
    for (int u = 0; u < kAtOnce; ++u) largest[u] = greater(largest[u], std::abs(column[i + u]));
  }
  for (; i < rows; ++i) largest[0] = greater(largest[0], std::abs(column[i]));
  const T most = *std::max_element(largest, largest + kAtOnce);
  if (most <= kOrdinary && most * kOrdinary >= 1) return;
  const T scale = scale_of<Format<T>>(most);
  for (i = 0; i < rows; ++i) column[i] *= scale;
}

template <typename T>
Tensor view(T* data, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  return torch::stable::from_blob(data, sizes, strides, torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  scalar_type<T>());
}

StableIValue to_stack(const Tensor& tensor) { return torch::stable::detail::from(tensor); }
// Releases a result that is also an argument.
void drop(StableIValue value) { torch::stable::detail::to<Tensor>(value); }

// torch.geqrf(a, out=(a, tau)): writes R on and above the diagonal, and the reflectors below it.
void geqrf(const Tensor& a, const Tensor& tau) {
  std::array<StableIValue, 3> stack{to_stack(a), to_stack(a), to_stack(tau)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::geqrf", "a", stack.data(), TORCH_ABI_VERSION));
  drop(stack[0]);
  drop(stack[1]);
}

// torch.linalg.householder_product(a, tau, out=a): replaces the reflectors by Q.
void orgqr(const Tensor& a, const Tensor& tau) {
  std::array<StableIValue, 3> stack{to_stack(a), to_stack(tau), to_stack(a)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::linalg_householder_product", "out", stack.data(), TORCH_ABI_VERSION));
  drop(stack[0]);
}

template <typename T>
void run(const Job<T>& job) {
  const int64_t size = job.rows * job.columns;
  // the rounding of LAPACK depends on the alignment of its memory, so it never works in the memory of the caller
  const int64_t taus = round_up(size, kAlignment);
  const PoolBlock memory((taus + job.columns) * sizeof(T));
  T* const data = static_cast<T*>(memory.data());
  std::vector<T> signs(job.rows, T(1));
  if (job.wide) {
    std::copy(job.in, job.in + size, data);
  } else {
    transpose(job.in, job.rows, job.columns, data, signs.data());
  }
  for (int64_t k = 0; k < job.columns; ++k) scale_column(data + k * job.rows, job.rows);
  const Tensor a = view(data, {job.rows, job.columns}, {1, job.rows});
  const Tensor tau = view(data + taus, {job.columns}, {1});
  geqrf(a, tau);
  for (int64_t k = 0; k < job.columns; ++k) signs[k] = data[k * job.rows + k] < 0 ? T(-1) : T(1);
  orgqr(a, tau);
  if (job.wide) {
    for (int64_t k = 0; k < job.columns; ++k) {
      for (int64_t i = k * job.rows; i < (k + 1) * job.rows; ++i) job.out[i] = data[i] * signs[k];
    }
  } else {
    transpose(data, job.columns, job.rows, job.out, signs.data());
  }
}

// Runs all items, those with the most work first. LAPACK's threads share each of the largest ones; then each thread
// takes whole items. A thread that finds no more items calls `rest`, which does other work in `rest_items` pieces.
template <typename Item, typename Rest>
void share(std::vector<Item>& items, size_t rest_items, const Rest& rest) {
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.work() > b.work(); });
  size_t threaded = 0;
  for (; threaded < items.size() && items[threaded].work() >= kThreadedWork; ++threaded) run(items[threaded]);
  std::atomic<size_t> next{threaded};
  const int64_t workers = std::min<int64_t>(torch::stable::get_num_threads(), items.size() - threaded + rest_items);
  torch::stable::parallel_for(0, workers, 1, [&](int64_t, int64_t) {
    const OneThread here;
    for (size_t i = next++; i < items.size(); i = next++) run(items[i]);
    rest();
  });
}

// Some of the tiny matrices of one shape.
struct TinyItem {
  TinyParams params;
  int64_t begin, end;
};

// Does all matrices of one type, in one parallel loop: where there are more threads than processors, each loop costs
// the time of a thread switch.
template <typename T>
void run_all(const std::vector<Matrices<T>>& all) {
  std::vector<Job<T>> jobs;
  std::vector<TinyItem> tiny;
  for (const Matrices<T>& matrices : all) {
    const int64_t rows = std::max(matrices.rows, matrices.columns);
    const int64_t columns = std::min(matrices.rows, matrices.columns);
    if (matrices.tiny()) {
      const TinyParams params{matrices.in, matrices.out, static_cast<int>(rows), static_cast<int>(columns),
                              matrices.wide()};
      for (int64_t begin = 0; begin < matrices.batch; begin += kTinyItem) {
        tiny.push_back({params, begin, std::min(matrices.batch, begin + kTinyItem)});
      }
      continue;
    }
    for (int64_t i = 0; i < matrices.batch; ++i) {
      const int64_t offset = i * matrices.size();
      jobs.push_back({matrices.in + offset, matrices.out + offset, rows, columns, matrices.wide()});
    }
  }
  const auto& orthogonal = kernels().orthogonal;
  const TinyPhase phase = scalar_type<T>() == ScalarType::Float ? orthogonal.tiny_float : orthogonal.tiny_double;
  std::atomic<size_t> next_tiny{0};
  share(jobs, tiny.size(), [&] {
    for (size_t i = next_tiny++; i < tiny.size(); i = next_tiny++) phase(tiny[i].params, tiny[i].begin, tiny[i].end);
  });
}

std::vector<Tensor> orthogonalize_cpu(const std::vector<Tensor>& matrices) {
  Work work(matrices);
  run_all(work.of_type<float>());
  run_all(work.of_type<double>());
  return work.results;
}

// torch.mm(a, b, out=out)
void mm(const Tensor& a, const Tensor& b, const Tensor& out) {
  std::array<StableIValue, 3> stack{to_stack(a), to_stack(b), to_stack(out)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::mm", "out", stack.data(), TORCH_ABI_VERSION));
  drop(stack[0]);
}

// torch.linalg.cholesky(a): the lower factor; only the lower half of a is read.
Tensor cholesky(const Tensor& a) {
  std::array<StableIValue, 2> stack{to_stack(a), torch::stable::detail::from(false)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linalg_cholesky", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// torch.linalg.solve_triangular(lower, b, upper=False, out=b)
void solve_lower(const Tensor& lower, const Tensor& b) {
  const auto flag = [](bool value) { return torch::stable::detail::from(value); };
  std::array<StableIValue, 6> stack{to_stack(lower), to_stack(b), flag(false), flag(true), flag(false), to_stack(b)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::linalg_solve_triangular", "out", stack.data(), TORCH_ABI_VERSION));
  drop(stack[0]);
}

// Columns of Z'Z that are computed by one product: only blocks on and below the diagonal are needed.
constexpr int64_t kGramColumns = 64;

// Replaces a well-conditioned Z by Z R^-1, where Z'Z = R'R and R has a positive diagonal: this is its Q.
void orthogonalize_by_cholesky(double* z, int64_t rows, int64_t columns, bool wide) {
  const int64_t row = wide ? 1 : columns, column = wide ? rows : 1;  // strides of the tall form
  const PoolBlock memory(columns * columns * sizeof(double));
  double* const gram = static_cast<double*>(memory.data());
  for (int64_t begin = 0; begin < columns; begin += kGramColumns) {
    const int64_t end = std::min(columns, begin + kGramColumns);
    mm(view(z + begin * column, {end - begin, rows}, {column, row}), view(z, {rows, end}, {row, column}),
       view(gram + begin * columns, {end - begin, end}, {columns, 1}));
  }
  solve_lower(cholesky(view(gram, {columns, columns}, {columns, 1})), view(z, {columns, rows}, {column, row}));
}

// Whether a Gaussian matrix of this tall form has a condition number of at most 64. The singular values are between
// sqrt(rows) -+ (sqrt(columns) + t), except with a probability of 2 exp(-t^2 / 2) (Davidson and Szarek 2001, theorem
// 2.13): 3e-8 for t = 6. Q by Cholesky departs from orthogonality by about the rounding of float64 times the square of
// this number, which is below 1e-12.
bool well_conditioned(int64_t rows, int64_t columns) {
  const double root = std::sqrt(static_cast<double>(rows)), spread = std::sqrt(static_cast<double>(columns)) + 6;
  return root + spread <= 64 * (root - spread);
}

// One tensor to fill: a batch of matrices that are drawn from one generator.
struct Draw {
  void* out;
  bool single;                   // float32, else float64
  int64_t batch, rows, columns;  // rows and columns of the tall form
  bool wide;
  uint32_t seed;
  double scale;

  int64_t size() const { return rows * columns; }
  int64_t work() const { return batch * size() * columns; }
};

void run(const Draw& draw) {
  const PoolBlock memory(draw.batch * draw.size() * sizeof(double));
  double* const data = static_cast<double*>(memory.data());
  const auto& orthogonal = kernels().orthogonal;
  orthogonal.gaussians(draw.seed, data, draw.batch * draw.size());
  if (draw.size() <= kTinyElements) {
    const TinyParams params{data, data, static_cast<int>(draw.rows), static_cast<int>(draw.columns), draw.wide};
    orthogonal.tiny_double(params, 0, draw.batch);
  } else {
    for (int64_t i = 0; i < draw.batch; ++i) {
      double* const z = data + i * draw.size();
      if (well_conditioned(draw.rows, draw.columns)) {
        orthogonalize_by_cholesky(z, draw.rows, draw.columns, draw.wide);
      } else {
        run(Job<double>{z, z, draw.rows, draw.columns, draw.wide});
      }
    }
  }
  const StoreScaled store = draw.single ? orthogonal.store_float : orthogonal.store_double;
  store(data, draw.scale, draw.out, draw.batch * draw.size());
}

void fill_orthogonal_cpu(const std::vector<Tensor>& out, const Tensor& seeds, const Tensor& scales) {
  const int64_t count = static_cast<int64_t>(out.size());
  STD_TORCH_CHECK(seeds.scalar_type() == ScalarType::Long && seeds.is_contiguous() && seeds.numel() == count &&
                      scales.scalar_type() == ScalarType::Double && scales.is_contiguous() && scales.numel() == count,
                  "fill_orthogonal: seeds and scales must be contiguous and have one number per tensor");
  std::vector<Draw> draws;
  for (int64_t i = 0; i < count; ++i) {
    const Tensor& t = out[i];
    const bool single = t.scalar_type() == ScalarType::Float;
    STD_TORCH_CHECK(t.is_cpu() && t.is_contiguous() && t.dim() >= 2, "fill_orthogonal: tensors must be contiguous ",
                    "matrices on the CPU");
    STD_TORCH_CHECK(single || t.scalar_type() == ScalarType::Double,
                    "fill_orthogonal: tensors must be float32 or float64");
    if (t.numel() == 0) continue;
    const int64_t rows = t.size(-2), columns = t.size(-1);
    // a generator of torch uses the low 32 bits of its seed
    const auto seed = static_cast<uint32_t>(static_cast<const int64_t*>(seeds.const_data_ptr())[i]);
    draws.push_back({t.mutable_data_ptr(), single, t.numel() / (rows * columns), std::max(rows, columns),
                     std::min(rows, columns), rows < columns, seed,
                     static_cast<const double*>(scales.const_data_ptr())[i]});
  }
  share(draws, 0, [] {});
}

}  // namespace
}  // namespace nasfast::cpu

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) {
  m.impl("orthogonalize", TORCH_BOX(&nasfast::cpu::orthogonalize_cpu));
  m.impl("fill_orthogonal", TORCH_BOX(&nasfast::cpu::fill_orthogonal_cpu));
}
