// Launchers and registration of bn_act on the CPU: layout, per-channel arithmetic between the phases, parallel loops.

#include "bn_act.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "isa.h"

namespace nasfast::cpu {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Row blocks per NHWC tensor: enough for the cores of a large machine to share evenly, few enough that their partial sums
// are small beside the tensor.
constexpr int64_t kMaxItems = 128;
// Rows per block at least: one tile of the kernels.
constexpr int64_t kMinItemRows = 64;
// Elements below which a second thread costs more than it saves.
constexpr int64_t kParallelElements = 16384;

// Floats in the widest vector. Per-channel arrays start at such a multiple, because they are read once per vector of data
// and a load across two cache lines costs double.
constexpr int64_t kAlignment = 16;

// An array of zeros aligned to kAlignment floats.
class AlignedFloats {
 public:
  explicit AlignedFloats(int64_t size) : storage_(size + kAlignment) {
    void* start = storage_.data();
    size_t space = storage_.size() * sizeof(float);
    data_ = static_cast<float*>(std::align(kAlignment * sizeof(float), size * sizeof(float), start, space));
  }
  float* data() { return data_; }

 private:
  std::vector<float> storage_;
  float* data_;
};

const BnActKernels& kernels() {
  switch (current_isa()) {
#ifdef NASFAST_X86_ISAS
    case Isa::kAvx512Bf16:
      return avx512bf16::kBnActKernels;
    case Isa::kAvx512:
      return avx512::kBnActKernels;
    case Isa::kAvx2:
      return avx2::kBnActKernels;
#endif
    default:
      return baseline::kBnActKernels;
  }
}

Act parse_act(const std::string& act) {
  if (act == "identity") return Act::kIdentity;
  if (act == "relu") return Act::kRelu;
  if (act == "relu6") return Act::kRelu6;
  if (act == "tanh") return Act::kTanh;
  STD_TORCH_CHECK(false, "bn_act: act must be identity, relu, relu6 or tanh, got ", act);
}

// Whether memory order is N, H, W, C; dimensions of size 1 may have any stride.
bool is_channels_last(const Tensor& x) {
  int64_t expected = 1;
  for (int64_t dim : {1, 3, 2, 0}) {
    if (x.size(dim) != 1 && x.stride(dim) != expected) return false;
    expected *= x.size(dim);
  }
  return true;
}

// Guards what would corrupt memory; nasfast/ops/checks.py has the explanations.
void check_x(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 4, "bn_act: x must be 4-d (N, C, H, W), got ", x.dim(), " dimensions");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float || x.scalar_type() == ScalarType::BFloat16,
                  "bn_act: x must be float32 or bfloat16");
  STD_TORCH_CHECK(x.is_contiguous() || is_channels_last(x), "bn_act: x must be contiguous or channels_last");
}

void check_like(const char* name, const Tensor& tensor, const Tensor& x) {
  bool same = tensor.dim() == 4 && tensor.scalar_type() == x.scalar_type();
  for (int64_t dim = 0; same && dim < 4; ++dim) same = tensor.size(dim) == x.size(dim);
  same = same && (!x.is_contiguous() || tensor.is_contiguous()) && (!is_channels_last(x) || is_channels_last(tensor));
  STD_TORCH_CHECK(same, "bn_act: ", name, " must have the shape, type and memory format of x");
}

void check_vector(const char* name, const Tensor& vector, int64_t channels, ScalarType type) {
  STD_TORCH_CHECK(vector.dim() == 1 && vector.size(0) == channels && vector.is_contiguous() && vector.scalar_type() == type,
                  "bn_act: ", name, " must be a contiguous vector of ", channels, " elements of the documented type");
}

struct Geometry {
  BnActParams params{};
  int64_t groups;        // of partial sums
  int64_t items;         // of work
  int64_t items_grain;   // least items per thread

  Geometry(const Tensor& x, const std::string& act) {
    params.bfloat16 = x.scalar_type() == ScalarType::BFloat16;
    // with one channel both layouts are the same memory, and planes use whole vectors
    params.channels_last = is_channels_last(x) && x.size(1) > 1;
    params.act = parse_act(act);
    params.channels = x.size(1);
    params.stride = (params.channels + kAlignment - 1) / kAlignment * kAlignment;
    params.plane = x.size(2) * x.size(3);
    params.rows = x.size(0) * params.plane;
    params.x = x.const_data_ptr();
    int64_t item_elements = params.plane;
    if (params.channels_last) {
      const int64_t rows = std::max(kMinItemRows, (params.rows + kMaxItems - 1) / kMaxItems);
      params.item_rows = (rows + kMinItemRows - 1) / kMinItemRows * kMinItemRows;
      groups = items = (params.rows + params.item_rows - 1) / params.item_rows;
      item_elements = params.item_rows * params.channels;
    } else {
      groups = x.size(0);
      items = groups * params.channels;
    }
    items_grain = std::max<int64_t>(1, kParallelElements / std::max<int64_t>(1, item_elements));
  }

  int64_t group_count(int64_t group) const {
    if (!params.channels_last) return params.plane;
    return std::min(params.item_rows, params.rows - group * params.item_rows);
  }

  void run(BnActPhase phase) const {
    torch::stable::parallel_for(0, items, items_grain, [&](int64_t begin, int64_t end) {
      AlignedFloats scratch(3 * params.stride);
      phase(params, begin, end, scratch.data());
    });
  }
};

// Per-channel numbers of the kernels; `slope` and `offset` are used by backward only.
struct Coefficients {
  AlignedFloats storage;
  float *center, *scale, *shift, *slope, *offset;

  explicit Coefficients(BnActParams* params) : storage(5 * params->stride) {
    params->center = center = storage.data();
    params->scale = scale = center + params->stride;
    params->shift = shift = scale + params->stride;
    params->slope = slope = shift + params->stride;
    params->offset = offset = slope + params->stride;
  }

  void fold(int64_t c, double mean, double var, double eps, double weight, double bias) {
    const double full_scale = weight / std::sqrt(var + eps);
    center[c] = static_cast<float>(mean);
    scale[c] = static_cast<float>(full_scale);
    shift[c] = static_cast<float>(bias - (mean - center[c]) * full_scale);
  }
};

// A (channels,) tensor of float or double, read as double.
class Statistics {
 public:
  explicit Statistics(const Tensor& tensor)
      : is_double_(tensor.scalar_type() == ScalarType::Double), data_(tensor.const_data_ptr()) {}
  double operator[](int64_t c) const {
    return is_double_ ? static_cast<const double*>(data_)[c] : static_cast<const float*>(data_)[c];
  }

 private:
  bool is_double_;
  const void* data_;
};

const float* float_data(const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); }

Tensor empty_vector(const Tensor& like, int64_t size, ScalarType type) {
  return torch::stable::new_empty(like, {size}, type);
}

std::tuple<Tensor, Tensor, Tensor> bn_act_fwd_cpu(
    const Tensor& x, const Tensor& weight, const Tensor& bias, const std::optional<Tensor>& residual,
    const std::optional<Tensor>& running_mean, const std::optional<Tensor>& running_var, double eps, std::string act) {
  check_x(x);
  const int64_t channels = x.size(1);
  check_vector("weight", weight, channels, ScalarType::Float);
  check_vector("bias", bias, channels, ScalarType::Float);
  if (residual) check_like("residual", *residual, x);
  STD_TORCH_CHECK(running_mean.has_value() == running_var.has_value(),
                  "bn_act: running_mean and running_var come together");

  Geometry work(x, act);
  Coefficients coefficients(&work.params);
  Tensor y = torch::stable::empty_like(x);
  work.params.y = y.mutable_data_ptr();
  if (residual) work.params.residual = residual->const_data_ptr();

  const int64_t returned = running_mean ? 0 : channels;
  Tensor mean = empty_vector(x, returned, ScalarType::Double);
  Tensor var = empty_vector(x, returned, ScalarType::Double);
  if (running_mean) {
    check_vector("running_mean", *running_mean, channels, ScalarType::Float);
    check_vector("running_var", *running_var, channels, ScalarType::Float);
    for (int64_t c = 0; c < channels; ++c) {
      coefficients.fold(c, float_data(*running_mean)[c], float_data(*running_var)[c], eps, float_data(weight)[c],
                        float_data(bias)[c]);
    }
  } else {
    STD_TORCH_CHECK(work.params.rows > 0, "bn_act: cannot take batch statistics of an empty batch");
    std::vector<double> partial(2 * work.groups * channels);
    work.params.partial = partial.data();
    work.run(kernels().bn_stats);
    double* means = static_cast<double*>(mean.mutable_data_ptr());
    double* vars = static_cast<double*>(var.mutable_data_ptr());
    std::fill(means, means + channels, 0.0);
    std::fill(vars, vars + channels, 0.0);
    double before = 0;
    for (int64_t group = 0; group < work.groups; ++group) {
      const double count = static_cast<double>(work.group_count(group));
      const double share = count / (before + count);
      for (int64_t c = 0; c < channels; ++c) {
        const double* group_partial = partial.data() + 2 * (group * channels + c);
        const double delta = group_partial[0] - means[c];
        means[c] += delta * share;
        vars[c] += group_partial[1] + delta * delta * before * share;
      }
      before += count;
    }
    for (int64_t c = 0; c < channels; ++c) {
      vars[c] /= before;
      coefficients.fold(c, means[c], vars[c], eps, float_data(weight)[c], float_data(bias)[c]);
    }
  }
  work.run(kernels().bn_act_fwd);
  return {y, mean, var};
}

std::tuple<Tensor, Tensor, Tensor> bn_act_bwd_cpu(
    const Tensor& grad, const Tensor& x, const Tensor& weight, const Tensor& bias, const Tensor& mean, const Tensor& var,
    double eps, std::string act, bool batch_statistics, bool want_x, bool want_weight, bool want_bias) {
  check_x(x);
  check_like("grad", grad, x);
  const int64_t channels = x.size(1);
  check_vector("weight", weight, channels, ScalarType::Float);
  check_vector("bias", bias, channels, ScalarType::Float);
  const ScalarType statistics_type = batch_statistics ? ScalarType::Double : ScalarType::Float;
  check_vector("mean", mean, channels, statistics_type);
  check_vector("var", var, channels, statistics_type);

  Geometry work(x, act);
  Coefficients coefficients(&work.params);
  work.params.grad = grad.const_data_ptr();
  const Statistics means(mean);
  const Statistics vars(var);
  for (int64_t c = 0; c < channels; ++c) {
    coefficients.fold(c, means[c], vars[c], eps, float_data(weight)[c], float_data(bias)[c]);
  }

  Tensor dweight = empty_vector(weight, want_weight ? channels : 0, ScalarType::Float);
  Tensor dbias = empty_vector(bias, want_bias ? channels : 0, ScalarType::Float);
  if (want_weight || want_bias || batch_statistics) {
    std::vector<double> partial(2 * work.groups * channels);
    work.params.partial = partial.data();
    work.run(kernels().bn_act_bwd_reduce);
    for (int64_t group = 1; group < work.groups; ++group) {
      for (int64_t i = 0; i < 2 * channels; ++i) partial[i] += partial[group * 2 * channels + i];
    }
    for (int64_t c = 0; c < channels; ++c) {
      const double rstd = 1 / std::sqrt(vars[c] + eps);
      const double rest = means[c] - coefficients.center[c];
      const double sum_dz = partial[2 * c];
      const double sum_dz_xhat = (partial[2 * c + 1] - rest * sum_dz) * rstd;
      if (want_bias) static_cast<float*>(dbias.mutable_data_ptr())[c] = static_cast<float>(sum_dz);
      if (want_weight) static_cast<float*>(dweight.mutable_data_ptr())[c] = static_cast<float>(sum_dz_xhat);
      if (batch_statistics) {
        // dx = scale * (dz - mean(dz) - xhat * mean(dz * xhat)), xhat = (x - center - rest) * rstd
        const double count = static_cast<double>(work.params.rows);
        const double scale = float_data(weight)[c] * rstd;
        const double slope = -scale * rstd * sum_dz_xhat / count;
        coefficients.slope[c] = static_cast<float>(slope);
        coefficients.offset[c] = static_cast<float>(-scale * sum_dz / count - slope * rest);
      }
    }
  }
  if (!want_x) return {empty_vector(x, 0, x.scalar_type()), dweight, dbias};
  Tensor dx = torch::stable::empty_like(x);
  work.params.dx = dx.mutable_data_ptr();
  work.run(kernels().bn_act_bwd);
  return {dx, dweight, dbias};
}

}  // namespace
}  // namespace nasfast::cpu

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) {
  m.impl("bn_act_fwd", TORCH_BOX(&nasfast::cpu::bn_act_fwd_cpu));
  m.impl("bn_act_bwd", TORCH_BOX(&nasfast::cpu::bn_act_bwd_cpu));
}
