// Launchers of bn_act on the CPU and their registration. They check the layout, do the arithmetic per channel between
// the phases, and run the phases in parallel.

#include "bn_act.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.h"
#include "launch.h"

namespace nasfast::cpu {

namespace {

// Refuses what would corrupt memory. nasfast/ops checks the same before, with explanations for the user.
void check_x(const Tensor& x) {
  STD_TORCH_CHECK(x.dim() == 4, "bn_act: x must be 4-d (N, C, H, W), got ", x.dim(), " dimensions");
  check_image_type("bn_act", x.scalar_type());
  STD_TORCH_CHECK(x.is_contiguous() || is_channels_last(x), "bn_act: x must be contiguous or channels_last");
}

void check_like(const char* name, const Tensor& tensor, const Tensor& x) {
  const bool same = tensor.scalar_type() == x.scalar_type() && sizes_of(tensor) == sizes_of(x) &&
                    (!x.is_contiguous() || tensor.is_contiguous()) &&
                    (!is_channels_last(x) || is_channels_last(tensor));
  STD_TORCH_CHECK(same, "bn_act: ", name, " must have the shape, type and memory format of x");
}

struct Geometry {
  BnActParams params{};
  int64_t groups;         // groups of partial sums
  int64_t items;          // items of work
  int64_t item_elements;  // elements per item

  explicit Geometry(const Tensor& x) {
    params.bfloat16 = x.scalar_type() == ScalarType::BFloat16;
    // with one channel both layouts are the same memory, and planes use whole vectors
    params.channels_last = is_channels_last(x) && x.size(1) > 1;
    params.channels = params.ldy = params.ldgrad = x.size(1);
    params.plane = x.size(2) * x.size(3);
    params.rows = x.size(0) * params.plane;
    params.x = x.const_data_ptr();
    item_elements = params.plane;
    if (params.channels_last) {
      const RowItems rows(params.rows);
      params.item_rows = rows.item_rows;
      groups = items = rows.items;
      item_elements = rows.item_rows * params.channels;
    } else {
      groups = x.size(0);
      items = groups * params.channels;
    }
  }

  int64_t group_count(int64_t group) const {
    if (!params.channels_last) return params.plane;
    return std::min(params.item_rows, params.rows - group * params.item_rows);
  }

  void run(BnActPhase phase) const {
    run_items(items, item_elements, [&](int64_t begin, int64_t end) { phase(params, begin, end); });
  }
};

// y = act(bn(x)) (+ residual) with running statistics; y may be x.
void normalize(const Tensor& x, const Tensor& weight, const Tensor& bias, const std::optional<Tensor>& residual,
               const Tensor& running_mean, const Tensor& running_var, double eps, const std::string& act, Tensor& y) {
  const int64_t channels = x.size(1);
  check_vector("bn_act", "running_mean", running_mean, channels, ScalarType::Float);
  check_vector("bn_act", "running_var", running_var, channels, ScalarType::Float);
  BatchNorm bn(parse_act("bn_act", act), channels);
  bn.set_statistics(float_data(running_mean), float_data(running_var), eps, float_data(weight), float_data(bias));
  Geometry work(x);
  work.params.y = y.mutable_data_ptr();
  if (residual) work.params.residual = residual->const_data_ptr();
  work.params.bn = bn.fold();
  work.run(kernels().bn.bn_act_fwd);
}

void check_forward(const Tensor& x, const Tensor& weight, const Tensor& bias, const std::optional<Tensor>& residual) {
  check_x(x);
  check_vector("bn_act", "weight", weight, x.size(1), ScalarType::Float);
  check_vector("bn_act", "bias", bias, x.size(1), ScalarType::Float);
  if (residual) check_like("residual", *residual, x);
}

void bn_act_running_cpu(Tensor x, const Tensor& weight, const Tensor& bias, const std::optional<Tensor>& residual,
                        const Tensor& running_mean, const Tensor& running_var, double eps, std::string act) {
  check_forward(x, weight, bias, residual);
  normalize(x, weight, bias, residual, running_mean, running_var, eps, act, x);
}

std::tuple<Tensor, Tensor, Tensor> bn_act_fwd_cpu(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                                  const std::optional<Tensor>& residual,
                                                  const std::optional<Tensor>& running_mean,
                                                  const std::optional<Tensor>& running_var, double eps,
                                                  std::string act) {
  check_forward(x, weight, bias, residual);
  const int64_t channels = x.size(1);
  STD_TORCH_CHECK(running_mean.has_value() == running_var.has_value(),
                  "bn_act: running_mean and running_var must be given together");

  Tensor y = pool_empty_like(x);
  if (running_mean) {
    normalize(x, weight, bias, residual, *running_mean, *running_var, eps, act, y);
    return {y, empty_vector(x, 0, ScalarType::Double), empty_vector(x, 0, ScalarType::Double)};
  }
  Geometry work(x);
  STD_TORCH_CHECK(work.params.rows > 0, "bn_act: cannot take batch statistics of an empty batch");
  BatchNorm bn(parse_act("bn_act", act), channels);
  work.params.y = y.mutable_data_ptr();
  if (residual) work.params.residual = residual->const_data_ptr();

  Tensor mean = empty_vector(x, channels, ScalarType::Double);
  Tensor var = empty_vector(x, channels, ScalarType::Double);
  std::vector<double> partial(2 * work.groups * channels);
  work.params.partial = partial.data();
  work.run(kernels().bn.bn_stats);
  double* means = static_cast<double*>(mean.mutable_data_ptr());
  double* vars = static_cast<double*>(var.mutable_data_ptr());
  BatchNorm::join(
      partial.data(), work.groups, channels, [&](int64_t group) { return work.group_count(group); }, means, vars);
  bn.set_statistics(means, vars, eps, float_data(weight), float_data(bias));
  work.params.bn = bn.fold();
  work.run(kernels().bn.bn_act_fwd);
  return {y, mean, var};
}

std::tuple<Tensor, Tensor, Tensor> bn_act_bwd_cpu(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                  const Tensor& bias, const Tensor& mean, const Tensor& var, double eps,
                                                  std::string act, bool batch_statistics, bool want_x, bool want_weight,
                                                  bool want_bias) {
  check_x(x);
  check_like("grad", grad, x);
  const int64_t channels = x.size(1);
  check_vector("bn_act", "weight", weight, channels, ScalarType::Float);
  check_vector("bn_act", "bias", bias, channels, ScalarType::Float);
  const ScalarType statistics_type = batch_statistics ? ScalarType::Double : ScalarType::Float;
  check_vector("bn_act", "mean", mean, channels, statistics_type);
  check_vector("bn_act", "var", var, channels, statistics_type);

  Geometry work(x);
  BatchNorm bn(parse_act("bn_act", act), channels);
  work.params.grad = grad.const_data_ptr();
  if (batch_statistics) {
    bn.set_statistics(double_data(mean), double_data(var), eps, float_data(weight), float_data(bias));
  } else {
    bn.set_statistics(float_data(mean), float_data(var), eps, float_data(weight), float_data(bias));
  }
  work.params.bn = bn.fold();

  Tensor dweight = empty_vector(weight, want_weight ? channels : 0, ScalarType::Float);
  Tensor dbias = empty_vector(bias, want_bias ? channels : 0, ScalarType::Float);
  if (want_weight || want_bias || batch_statistics) {
    std::vector<double> partial(2 * std::max<int64_t>(1, work.groups) * channels);  // zeros without rows
    work.params.partial = partial.data();
    work.run(kernels().bn.bn_act_bwd_reduce);
    const auto data = [](bool want, Tensor& t) { return want ? static_cast<float*>(t.mutable_data_ptr()) : nullptr; };
    bn.set_gradient_sums(partial, work.groups, work.params.rows, batch_statistics, data(want_weight, dweight),
                         data(want_bias, dbias));
  }
  if (!want_x) return {empty_vector(x, 0, x.scalar_type()), dweight, dbias};
  Tensor dx = pool_empty_like(x);
  work.params.dx = dx.mutable_data_ptr();
  work.run(kernels().bn.bn_act_bwd);
  return {dx, dweight, dbias};
}

}  // namespace
}  // namespace nasfast::cpu

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) {
  m.impl("bn_act_fwd", TORCH_BOX(&nasfast::cpu::bn_act_fwd_cpu));
  m.impl("bn_act_running_", TORCH_BOX(&nasfast::cpu::bn_act_running_cpu));
  m.impl("bn_act_bwd", TORCH_BOX(&nasfast::cpu::bn_act_bwd_cpu));
}
