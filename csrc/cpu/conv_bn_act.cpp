// Launchers of chains of convolution -> BatchNorm -> activation: they run the stages in order, and do the arithmetic of
// BatchNorm between them.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "chain.h"
#include "expansion.h"
#include "kernels.h"
#include "launch.h"
#include "pool.h"

namespace nasfast::cpu {
namespace {

ShuffleParams shuffle_params(const Chain& chain) {
  ShuffleParams p{};
  p.bfloat16 = chain.bfloat16;
  p.channels = chain.channels;
  const RowItems items(chain.batch * chain.height * chain.width);
  p.rows = items.rows;
  p.item_rows = items.item_rows;
  return p;
}

void run_shuffle(const ShuffleParams& p, void (*kernel)(const ShuffleParams&, int64_t, int64_t)) {
  const int64_t items = (p.rows + p.item_rows - 1) / p.item_rows;
  run_items(items, p.item_rows * 2 * p.channels, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

// BatchNorm and activation on the result of the last convolution; the caller adds pointers to what it reads and writes.
BnActParams last_bn_params(const Chain& chain, const RowItems& items) {
  BnActParams p{};
  p.bfloat16 = chain.bfloat16;
  p.channels_last = true;
  p.channels = chain.last().out_channels;
  p.rows = items.rows;
  p.item_rows = items.item_rows;
  return p;
}

void run_bn(BnActPhase phase, const BnActParams& p, const RowItems& items) {
  run_items(items.items, items.item_rows * p.channels, [&](int64_t begin, int64_t end) { phase(p, begin, end); });
}

// Copies the even channels of x to the even half of y, and the odd ones, which the stages run on, to a block of memory.
std::unique_ptr<PoolBlock> split_channels(const Chain& chain, const Tensor& x, Tensor& y) {
  auto odd = std::make_unique<PoolBlock>(chain.last().rows * chain.channels * chain.element_size());
  ShuffleParams p = shuffle_params(chain);
  p.source_whole = x.const_data_ptr();
  p.left = y.mutable_data_ptr();
  p.ld_left = 2 * chain.channels;
  p.right = odd->data();
  p.ld_right = chain.channels;
  run_shuffle(p, kernels().conv.shuffle_split);
  return odd;
}

// Writes dx from the gradient of the even channels, which is a part of grad, and that of the odd ones.
void merge_channels(const Chain& chain, const Tensor& grad, int64_t ldgrad, const void* odd, Tensor& dx) {
  ShuffleParams p = shuffle_params(chain);
  p.source_left = grad.const_data_ptr();
  p.ld_left = ldgrad;
  p.source_right = odd;
  p.ld_right = chain.channels;
  p.whole = dx.mutable_data_ptr();
  run_shuffle(p, kernels().conv.shuffle_merge);
}

// What one stage of forward reads and writes.
struct StageForward {
  StageInput input;
  StageOutput y;
  double *mean, *var;            // written when the stage uses the statistics of the batch
  std::vector<double>* partial;  // memory for partial statistics, used again by every stage

  // Memory for the partial statistics of this many groups, or null when the stage has running statistics.
  double* zeroed_partial(const Stage& stage, int64_t groups) const {
    if (!stage.batch_statistics) return nullptr;
    partial->assign(groups * 2 * stage.out_channels, 0);
    return partial->data();
  }
};

void depthwise_forward(const Chain& chain, const Stage& stage, const StageForward& work, const Expansion* expansion) {
  const Strips strips(chain.batch, stage.out_height, work.y.finished ? strips_for_threads() : kMinStrips);
  const AlignedFloats weight = pack_filter(stage.weight, stage.out_channels, stage.kernel, false);
  DepthwiseParams p = depthwise_params(chain, stage, strips);
  p.weight = weight.data();
  p.x = work.input;
  p.y = work.y;
  p.streams = streams(chain.bfloat16, stage.rows, stage.out_channels);
  if (expansion) p.expansion = *expansion;
  const int64_t groups = chain.batch * strips.strips;
  p.partial = work.zeroed_partial(stage, groups);
  const auto kernel = kernels().depthwise.depthwise_fwd;
  run_items(groups, strips.strip_rows * stage.out_width * stage.out_channels,
            [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
  if (!stage.batch_statistics) return;
  const auto count = [&](int64_t group) {
    const int64_t r0 = group % strips.strips * strips.strip_rows;
    return std::min(strips.strip_rows, stage.out_height - r0) * stage.out_width;
  };
  BatchNorm::join(p.partial, groups, stage.out_channels, count, work.mean, work.var);
}

void pointwise_forward(const Chain& chain, const Stage& stage, const StageForward& work) {
  const RowItems items(stage.rows);
  const Packed weight = forward_weight(chain, stage);
  PointwiseParams p = pointwise_params(chain, stage, items);
  p.weight = weight.data();
  p.x = work.input;
  p.y = work.y;
  p.streams = streams(chain.bfloat16, stage.rows, stage.out_channels);
  p.partial = work.zeroed_partial(stage, items.items);
  const auto kernel = kernels().conv.pointwise_fwd;
  const int64_t row_elements = stage.out_channels + stage.kernel * stage.kernel * stage.in_channels;
  run_items(items.items, items.item_rows * row_elements, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
  if (!stage.batch_statistics) return;
  const auto count = [&](int64_t group) { return items.count(group); };
  BatchNorm::join(p.partial, items.items, stage.out_channels, count, work.mean, work.var);
}

// Decides whether a stage uses the statistics of the batch; otherwise copies its running statistics to mean and var.
void take_running_statistics(Stage& stage, const Tensor& running_mean, const Tensor& running_var, double* mean,
                             double* var) {
  stage.batch_statistics = running_mean.numel() == 0;
  if (stage.batch_statistics) return;
  check_vector(kConvOp, "running_mean", running_mean, stage.out_channels, ScalarType::Float);
  check_vector(kConvOp, "running_var", running_var, stage.out_channels, ScalarType::Float);
  std::copy_n(float_data(running_mean), stage.out_channels, mean);
  std::copy_n(float_data(running_var), stage.out_channels, var);
}

void check_forward_images(const Chain& chain, const Tensor& x, const std::optional<Tensor>& residual, bool add_input) {
  chain.check_image("x", x, chain.shuffle ? 2 * chain.channels : chain.channels, chain.height, chain.width);
  const Stage& last = chain.last();
  STD_TORCH_CHECK(!chain.shuffle || (!residual && !add_input), kConvOp, ": shuffle and a residual exclude each other");
  if (residual) chain.check_image("residual", *residual, last.out_channels, last.out_height, last.out_width);
  if (add_input) chain.check_image("x, to be added,", x, last.out_channels, last.out_height, last.out_width);
}

std::tuple<Tensor, Tensor, Tensor> conv_bn_act_chain_fwd_cpu(
    const Tensor& x, std::vector<Tensor> conv_weights, std::vector<Tensor> bn_weights, std::vector<Tensor> bn_biases,
    std::vector<Tensor> running_means, std::vector<Tensor> running_vars, const std::optional<Tensor>& residual,
    std::vector<int64_t> plan, std::vector<double> eps, bool add_input, bool keep) {
  Chain chain(ChainPlan(plan), x.scalar_type(), conv_weights, bn_weights, bn_biases, eps.size());
  STD_TORCH_CHECK(running_means.size() == chain.stages.size() && running_vars.size() == chain.stages.size(), kConvOp,
                  ": every stage needs running statistics, empty where it uses those of the batch");
  check_forward_images(chain, x, residual, add_input);
  const Stage& last = chain.last();
  Tensor y = chain.empty_image(chain.ldy(), last.out_height, last.out_width);
  Tensor saved = pool_empty({keep ? chain.saved_size : 0}, {1}, chain.type());
  Tensor statistics = empty_vector(x, chain.statistics_size, ScalarType::Double);
  double* numbers = static_cast<double*>(statistics.mutable_data_ptr());

  StageInput input{x.const_data_ptr(), false, {}};
  char* result = static_cast<char*>(y.mutable_data_ptr()) + chain.result_offset();
  const void* added = add_input ? x.const_data_ptr() : residual ? residual->const_data_ptr() : nullptr;
  // without `keep`, the result of a stage lives until the next stage has read it
  std::unique_ptr<PoolBlock> input_memory, output_memory;
  if (chain.shuffle) {
    input_memory = split_channels(chain, x, y);
    input.data = input_memory->data();
  }
  std::optional<ExpansionNumbers> expansion_numbers;
  std::vector<double> partial;
  for (size_t i = 0; i < chain.stages.size(); ++i) {
    Stage& stage = chain.stages[i];
    double* mean = numbers + stage.statistics_at;
    double* var = mean + stage.out_channels;
    take_running_statistics(stage, running_means[i], running_vars[i], mean, var);
    if (i == 0 && chain.recompute) {
      if (stage.batch_statistics) expansion_statistics(chain, x.const_data_ptr(), mean, var);
      expansion_numbers.emplace(chain, x.const_data_ptr(), eps[0], float_data(bn_weights[0]), float_data(bn_biases[0]),
                                mean, var);
      continue;
    }
    // where nothing is kept and the statistics are known, a stage writes its result; else the next stage makes it
    StageOutput out{nullptr, stage.out_channels, !keep && !stage.batch_statistics, {}, nullptr};
    if (out.finished) {
      stage.bn.set_statistics(mean, var, eps[i], float_data(bn_weights[i]), float_data(bn_biases[i]));
      out.bn = stage.bn.fold();
    }
    if (out.finished && i + 1 == chain.stages.size()) {
      out.data = result;
      out.ld = chain.ldy();
      out.residual = added;
    } else if (keep) {
      out.data = chain.saved(saved, stage);
    } else {
      output_memory = std::make_unique<PoolBlock>(stage.rows * stage.out_channels * chain.element_size());
      out.data = output_memory->data();
    }
    const StageForward work{input, out, mean, var, &partial};
    if (stage.kind != Kind::kDepthwise) {
      pointwise_forward(chain, stage, work);
    } else if (i == 1 && expansion_numbers) {
      const Expansion expansion = expansion_numbers->expansion(x.const_data_ptr());
      depthwise_forward(chain, stage, work, &expansion);
    } else {
      depthwise_forward(chain, stage, work, nullptr);
    }
    if (!out.finished) {
      stage.bn.set_statistics(mean, var, eps[i], float_data(bn_weights[i]), float_data(bn_biases[i]));
    }
    input = {out.data, !out.finished, stage.bn.fold()};
    input_memory = std::move(output_memory);
  }
  if (!input.folded) return {y, saved, statistics};

  const RowItems items(last.rows);
  BnActParams p = last_bn_params(chain, items);
  p.x = input.data;
  p.bn = input.bn;
  p.residual = added;
  p.ldy = chain.ldy();
  p.y = result;
  run_bn(kernels().bn.bn_act_fwd, p, items);
  return {y, saved, statistics};
}

// One call of backward: the stages from the last to the first that has to be reached.
class Backward {
 public:
  Tensor dx;
  std::vector<Tensor> dweights, dbiases;

  Backward(Chain& chain, const std::optional<Tensor>& x, const Tensor& saved, const Tensor& statistics,
           const std::vector<Tensor>& bn_weights, const std::vector<Tensor>& bn_biases,
           const std::vector<bool>& batch_statistics, const std::vector<double>& eps, const std::vector<bool>& wants)
      : chain_(chain), x_(x), saved_(saved), wants_(wants), count_(chain.stages.size()), eps_(eps[0]) {
    stop_ = count_;
    for (size_t i = count_; i-- > 0;) {
      Stage& stage = chain.stages[i];
      stage.batch_statistics = batch_statistics[i];
      const double* mean = double_data(statistics) + stage.statistics_at;
      stage.bn.set_statistics(mean, mean + stage.out_channels, eps[i], float_data(bn_weights[i]),
                              float_data(bn_biases[i]));
      if (want_weight(i) || want_bias(i)) stop_ = i;
    }
    if (want_x()) stop_ = 0;
    for (size_t i = 0; i < count_; ++i) {
      const int64_t channels = chain.stages[i].out_channels;
      dweights.push_back(empty_vector(bn_weights[i], want_weight(i) ? channels : 0, ScalarType::Float));
      dbiases.push_back(empty_vector(bn_biases[i], want_bias(i) ? channels : 0, ScalarType::Float));
    }
    first_mean_ = double_data(statistics) + chain.stages[0].statistics_at;
    first_weight_ = float_data(bn_weights[0]);
    first_bias_ = float_data(bn_biases[0]);
  }

  // grad is the gradient of the last stage's result, with ldgrad elements between its rows. The gradient of the first
  // stage's input goes to first_dx (null: not wanted), plus `added` if that is not null.
  void run(const void* grad, int64_t ldgrad, void* first_dx, const void* added) {
    if (stop_ < count_) reduce_last(grad, ldgrad);
    std::unique_ptr<PoolBlock> dz;  // null at the last stage, whose gradient is grad
    for (size_t i = count_; i-- > stop_;) {
      const Stage& stage = chain_.stages[i];
      const bool first = i == 0;
      if (i == stop_ && !(first && want_x())) break;
      StageGrad out{dz ? dz->data() : grad, dz ? stage.out_channels : ldgrad, chain_.saved(saved_, stage),
                    stage.bn.fold()};
      if (i + 1 < count_) out.bn.act = Act::kIdentity;  // dz is behind the activation
      if (i == 1 && chain_.recompute) {
        depthwise_with_expansion(out, added);
        break;
      }
      StageInputGrad in{};
      std::unique_ptr<PoolBlock> previous_dz;
      if (first) {
        in.data = first_dx;
        in.added = added;
      } else {
        const Stage& previous = chain_.stages[i - 1];
        previous_dz = std::make_unique<PoolBlock>(previous.rows * previous.out_channels * chain_.element_size());
        in = {previous_dz->data(), true, chain_.saved(saved_, previous), previous.bn.fold(), nullptr, nullptr};
      }
      const int64_t groups = stage.kind == Kind::kDepthwise ? depthwise(stage, out, in) : pointwise(stage, out, in);
      if (!first) finish(i - 1, groups);
      dz = std::move(previous_dz);
    }
  }

 private:
  bool want_x() const { return wants_[0]; }
  bool want_weight(size_t i) const { return wants_[1 + 2 * i]; }
  bool want_bias(size_t i) const { return wants_[2 + 2 * i]; }
  float* dweight(size_t i) { return want_weight(i) ? static_cast<float*>(dweights[i].mutable_data_ptr()) : nullptr; }
  float* dbias(size_t i) { return want_bias(i) ? static_cast<float*>(dbiases[i].mutable_data_ptr()) : nullptr; }

  // The sums of BatchNorm's backward of the last stage.
  void reduce_last(const void* grad, int64_t ldgrad) {
    const RowItems items(chain_.last().rows);
    BnActParams p = last_bn_params(chain_, items);
    p.x = chain_.saved(saved_, chain_.last());
    p.grad = grad;
    p.ldgrad = ldgrad;
    p.bn = chain_.last().bn.fold();
    partial_.resize(items.items * 2 * p.channels);
    p.partial = partial_.data();
    run_bn(kernels().bn.bn_act_bwd_reduce, p, items);
    finish(count_ - 1, items.items);
  }

  // Gradients of the affine parameters of stage i from its partial sums.
  void finish(size_t i, int64_t groups) {
    Stage& stage = chain_.stages[i];
    stage.bn.set_gradient_sums(partial_, groups, stage.rows, stage.batch_statistics, dweight(i), dbias(i));
  }

  // Memory for the partial sums of the stage before; null when there is none, as the chain's input has no BatchNorm.
  double* zeroed_partial(bool has_previous, int64_t groups, int64_t channels) {
    partial_.assign(has_previous ? groups * 2 * channels : 0, 0);
    return has_previous ? partial_.data() : nullptr;
  }

  bool streams_input_gradient(const Stage& stage) const {
    return streams(chain_.bfloat16, chain_.batch * stage.height * stage.width, stage.in_channels);
  }

  // These two return the number of groups of partial sums.
  int64_t depthwise(const Stage& stage, const StageGrad& out, const StageInputGrad& in,
                    const Expansion* expansion = nullptr) {
    const Strips strips(chain_.batch, stage.height, kMinStrips);
    const AlignedFloats weight = pack_filter(stage.weight, stage.out_channels, stage.kernel, stage.stride == 1);
    DepthwiseParams p = depthwise_params(chain_, stage, strips);
    p.weight = weight.data();
    p.grad = out;
    p.dx = in;
    p.streams = streams_input_gradient(stage);
    if (expansion) p.expansion = *expansion;
    const int64_t groups = chain_.batch * strips.strips;
    p.dx.partial = zeroed_partial(in.folded || expansion, groups, stage.in_channels);
    const auto kernel = kernels().depthwise.depthwise_bwd;
    run_items(groups, strips.strip_rows * stage.width * stage.in_channels,
              [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
    return groups;
  }

  int64_t pointwise(const Stage& stage, const StageGrad& out, const StageInputGrad& in) {
    const RowItems items(stage.rows);
    const Packed weight(chain_.bfloat16, stage.weight, stage.out_channels, stage.in_channels, stage.in_channels, 1);
    PointwiseParams p = pointwise_params(chain_, stage, items);
    p.weight = weight.data();
    p.grad = out;
    p.dx = in;
    p.streams = streams_input_gradient(stage);
    p.dx.partial = zeroed_partial(in.folded, items.items, stage.in_channels);
    const auto kernel = kernels().conv.pointwise_bwd;
    run_items(items.items, items.item_rows * (stage.out_channels + stage.in_channels),
              [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
    return items.items;
  }

  // The depthwise convolution of stage 1 and the expansion before it, in one pass; this ends the chain.
  void depthwise_with_expansion(const StageGrad& out, const void* added) {
    const void* x = x_->const_data_ptr();
    const int64_t hidden = chain_.stages[0].out_channels;
    const ExpansionNumbers numbers(chain_, x, eps_, first_weight_, first_bias_, first_mean_, first_mean_ + hidden);
    const Packed weight_bwd = numbers.backward_weight();
    Expansion expansion = numbers.expansion(x);
    expansion.weight_bwd = weight_bwd.data();
    expansion.v = want_x() ? dx.mutable_data_ptr() : nullptr;
    const int64_t groups = depthwise(chain_.stages[1], out, StageInputGrad{}, &expansion);
    add_groups(partial_.data(), groups, 2 * hidden);
    numbers.affine_gradients(partial_.data(), dweight(0), dbias(0));
    if (want_x()) numbers.finish_input_gradient(x, partial_.data(), added, dx.mutable_data_ptr());
  }

  Chain& chain_;
  const std::optional<Tensor>& x_;
  const Tensor& saved_;
  const std::vector<bool>& wants_;
  size_t count_;
  size_t stop_;  // the first stage whose BatchNorm backward has to reach, or count_
  // of stage 0, for the expansion
  double eps_;
  const double* first_mean_;
  const float *first_weight_, *first_bias_;
  std::vector<double> partial_;
};

std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>> conv_bn_act_chain_bwd_cpu(
    const Tensor& grad, const std::optional<Tensor>& x, const Tensor& saved, const Tensor& statistics,
    std::vector<Tensor> conv_weights, std::vector<Tensor> bn_weights, std::vector<Tensor> bn_biases,
    std::vector<bool> batch_statistics, std::vector<int64_t> plan, std::vector<double> eps, bool add_input,
    std::vector<bool> wants) {
  Chain chain(ChainPlan(plan), saved.scalar_type(), conv_weights, bn_weights, bn_biases, eps.size());
  const size_t count = chain.stages.size();
  STD_TORCH_CHECK(batch_statistics.size() == count && wants.size() == 1 + 2 * count, kConvOp,
                  ": wrong number of flags");
  STD_TORCH_CHECK(saved.numel() == chain.saved_size && saved.is_contiguous(), kConvOp,
                  ": saved does not belong to this chain");
  check_vector(kConvOp, "statistics", statistics, chain.statistics_size, ScalarType::Double);
  const bool shuffle = chain.shuffle;
  // grad may be a range of the channels of a wider tensor
  const int64_t ldgrad = row_distance(grad);
  chain.check_image("grad", grad, chain.ldy(), chain.last().out_height, chain.last().out_width, ldgrad);
  STD_TORCH_CHECK(x.has_value() == chain.recompute, kConvOp,
                  ": x is needed exactly when the plan computes the first stage again");
  if (x) chain.check_image("x", *x, chain.channels, chain.height, chain.width);
  const bool want_x = wants[0];
  STD_TORCH_CHECK(!want_x || chain.stages[0].kind != Kind::kDense, kConvOp, ": a dense stage has no input gradient");
  const Stage& last = chain.last();
  STD_TORCH_CHECK(!add_input || (!shuffle && last.out_channels == chain.channels && last.out_height == chain.height &&
                                 last.out_width == chain.width),
                  kConvOp, ": x can be added only to a result of its shape, without shuffle");
  STD_TORCH_CHECK(!add_input || ldgrad == chain.channels, kConvOp, ": grad must be dense where x was added");

  Backward backward(chain, x, saved, statistics, bn_weights, bn_biases, batch_statistics, eps, wants);
  backward.dx = want_x ? chain.empty_image(shuffle ? 2 * chain.channels : chain.channels, chain.height, chain.width)
                       : torch::stable::new_empty(saved, {0}, chain.type());
  // with shuffle, the stages ran on the odd channels of x, and their result is the second half of y
  std::unique_ptr<PoolBlock> odd;
  if (want_x && shuffle) odd = std::make_unique<PoolBlock>(chain.last().rows * chain.channels * chain.element_size());
  void* first_dx = !want_x ? nullptr : shuffle ? odd->data() : backward.dx.mutable_data_ptr();
  const char* last_grad = static_cast<const char*>(grad.const_data_ptr()) + chain.result_offset();
  backward.run(last_grad, ldgrad, first_dx, add_input ? grad.const_data_ptr() : nullptr);
  if (odd) merge_channels(chain, grad, ldgrad, odd->data(), backward.dx);
  return {backward.dx, backward.dweights, backward.dbiases};
}

}  // namespace
}  // namespace nasfast::cpu

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) {
  m.impl("conv_bn_act_chain_fwd", TORCH_BOX(&nasfast::cpu::conv_bn_act_chain_fwd_cpu));
  m.impl("conv_bn_act_chain_bwd", TORCH_BOX(&nasfast::cpu::conv_bn_act_chain_bwd_cpu));
}
