// Launchers of chains of convolution -> BatchNorm -> activation: the order in which stages run, and BatchNorm's arithmetic
// between them.

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

const double* double_data(const Tensor& tensor) { return static_cast<const double*>(tensor.const_data_ptr()); }

std::tuple<Tensor, Tensor, Tensor> conv_bn_act_fwd_cpu(
    const Tensor& x, std::vector<Tensor> conv_weights, std::vector<Tensor> bn_weights, std::vector<Tensor> bn_biases,
    std::vector<Tensor> running_means, std::vector<Tensor> running_vars, const std::optional<Tensor>& residual,
    std::vector<int64_t> strides, std::string acts, std::vector<double> eps, bool add_input, bool one_pass,
    bool shuffle, bool keep) {
  STD_TORCH_CHECK(x.dim() == 4 && is_channels_last(x), kConvOp, ": x must be 4-d and channels_last");
  Chain chain({x.size(0), x.size(1), x.size(2), x.size(3)}, x.scalar_type(), conv_weights, bn_weights, bn_biases, strides, acts,
              eps.size(), one_pass, shuffle);
  STD_TORCH_CHECK(running_means.size() == chain.stages.size() && running_vars.size() == chain.stages.size(), kConvOp,
                  ": every stage needs running statistics, empty where it uses those of the batch");
  const Stage& last = chain.last();
  STD_TORCH_CHECK(!shuffle || (!residual && !add_input), kConvOp, ": shuffle and a residual exclude each other");
  if (residual) chain.check_image("residual", *residual, last.out_channels, last.out_height, last.out_width);
  if (add_input) chain.check_image("x, to be added,", x, last.out_channels, last.out_height, last.out_width);

  const int64_t y_channels = shuffle ? 2 * last.out_channels : last.out_channels;
  Tensor y = chain.empty_image(y_channels, last.out_height, last.out_width);
  Tensor saved = pool_empty({keep ? chain.saved_size : 0}, {1}, chain.type());
  Tensor statistics = empty_vector(x, chain.statistics_size, ScalarType::Double);
  double* numbers = static_cast<double*>(statistics.mutable_data_ptr());

  StageInput input{x.const_data_ptr(), false, {}};
  // what is written only for the next stage lives until that one has read it
  std::unique_ptr<PoolBlock> written, read;
  if (shuffle) {
    read = std::make_unique<PoolBlock>(last.rows * chain.channels * chain.element_size());
    ShuffleParams p = shuffle_params(chain);
    p.source_whole = x.const_data_ptr();
    p.left = y.mutable_data_ptr();
    p.ld_left = 2 * chain.channels;
    p.right = read->data();
    p.ld_right = chain.channels;
    run_shuffle(p, kernels().conv.shuffle_split);
    input.data = read->data();
  }
  std::optional<ExpansionNumbers> expansion;
  std::vector<double> partial;
  for (size_t i = 0; i < chain.stages.size(); ++i) {
    Stage& stage = chain.stages[i];
    const int64_t out = stage.out_channels;
    double* mean = numbers + stage.statistics_at;
    double* var = mean + out;
    stage.batch_statistics = running_means[i].numel() == 0;
    if (!stage.batch_statistics) {
      check_vector(kConvOp, "running_mean", running_means[i], out, ScalarType::Float);
      check_vector(kConvOp, "running_var", running_vars[i], out, ScalarType::Float);
      std::copy_n(float_data(running_means[i]), out, mean);
      std::copy_n(float_data(running_vars[i]), out, var);
    }
    if (i == 0 && one_pass) {
      if (stage.batch_statistics) expansion_statistics(chain, x.const_data_ptr(), mean, var);
      expansion.emplace(chain, x.const_data_ptr(), eps[0], float_data(bn_weights[0]), float_data(bn_biases[0]), mean, var);
      continue;
    }
    if (!keep) written = std::make_unique<PoolBlock>(stage.rows * out * chain.element_size());
    char* y_stage = keep ? chain.saved(saved, stage) : static_cast<char*>(written->data());
    int64_t groups;
    if (stage.kind == Kind::kDepthwise) {
      const Strips strips(chain.batch, stage.out_height);
      const AlignedFloats weight = depthwise_weight(stage, false);
      DepthwiseParams p = depthwise_params(chain, stage, strips);
      p.weight = weight.data();
      p.x = input;
      p.y = y_stage;
      p.streams = streams(chain.bfloat16, stage.rows, out);
      if (i == 1 && expansion) p.expansion = expansion->expansion(x.const_data_ptr());
      groups = chain.batch * strips.strips;
      if (stage.batch_statistics) partial.assign(groups * 2 * out, 0);
      p.partial = stage.batch_statistics ? partial.data() : nullptr;
      const auto kernel = kernels().depthwise.depthwise_fwd;
      run_items(groups, strips.strip_rows * stage.out_width * out, [&](int64_t b, int64_t e) { kernel(p, b, e); });
      if (stage.batch_statistics) {
        const auto count = [&](int64_t group) {
          const int64_t r0 = group % strips.strips * strips.strip_rows;
          return std::min(strips.strip_rows, stage.out_height - r0) * stage.out_width;
        };
        BatchNorm::join(partial.data(), groups, out, count, mean, var);
      }
    } else {
      const RowItems items(stage.rows);
      const Packed weight = forward_weight(chain, stage);
      PointwiseParams p = pointwise_params(chain, stage, items);
      p.weight = weight.data();
      p.x = input;
      p.y = y_stage;
      p.streams = streams(chain.bfloat16, stage.rows, out);
      if (stage.batch_statistics) partial.assign(items.items * 2 * out, 0);
      p.partial = stage.batch_statistics ? partial.data() : nullptr;
      const auto kernel = kernels().conv.pointwise_fwd;
      const int64_t row_elements = out + stage.kernel * stage.kernel * stage.in_channels;
      run_items(items.items, items.item_rows * row_elements, [&](int64_t b, int64_t e) { kernel(p, b, e); });
      if (stage.batch_statistics) {
        BatchNorm::join(partial.data(), items.items, out, [&](int64_t group) { return items.count(group); }, mean, var);
      }
    }
    stage.bn.set_statistics(mean, var, eps[i], float_data(bn_weights[i]), float_data(bn_biases[i]));
    input = {y_stage, true, stage.bn.fold()};
    read = std::move(written);
  }

  const RowItems items(last.rows);
  BnActParams p{};
  p.bfloat16 = chain.bfloat16;
  p.channels_last = true;
  p.channels = last.out_channels;
  p.rows = items.rows;
  p.item_rows = items.item_rows;
  p.x = input.data;
  p.bn = input.bn;
  p.residual = add_input ? x.const_data_ptr() : residual ? residual->const_data_ptr() : nullptr;
  p.ldy = y_channels;
  p.y = static_cast<char*>(y.mutable_data_ptr()) + (shuffle ? chain.channels * chain.element_size() : 0);
  const auto kernel = kernels().bn.bn_act_fwd;
  run_items(items.items, items.item_rows * p.channels, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
  return {y, saved, statistics};
}

std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>> conv_bn_act_bwd_cpu(
    const Tensor& grad, const std::optional<Tensor>& x, std::vector<int64_t> shape, const Tensor& saved, const Tensor& statistics, std::vector<Tensor> conv_weights,
    std::vector<Tensor> bn_weights, std::vector<Tensor> bn_biases, std::vector<bool> batch_statistics,
    std::vector<int64_t> strides, std::string acts, std::vector<double> eps, bool add_input, bool one_pass, bool shuffle,
    std::vector<bool> wants) {
  Chain chain(shape, saved.scalar_type(), conv_weights, bn_weights, bn_biases, strides, acts, eps.size(), one_pass, shuffle);
  const size_t count = chain.stages.size();
  STD_TORCH_CHECK(batch_statistics.size() == count && wants.size() == 1 + 2 * count, kConvOp, ": wrong number of flags");
  STD_TORCH_CHECK(saved.numel() == chain.saved_size && saved.is_contiguous(), kConvOp,
                  ": saved does not belong to this chain");
  check_vector(kConvOp, "statistics", statistics, chain.statistics_size, ScalarType::Double);
  const int64_t ldgrad = shuffle ? 2 * chain.channels : chain.last().out_channels;
  chain.check_image("grad", grad, ldgrad, chain.last().out_height, chain.last().out_width);
  // of the last stage's result
  const char* last_grad = static_cast<const char*>(grad.const_data_ptr()) + (shuffle ? chain.channels * chain.element_size() : 0);
  STD_TORCH_CHECK(x.has_value() == one_pass, kConvOp, ": x is needed exactly when one_pass is asked for");
  if (x) chain.check_image("x", *x, chain.channels, chain.height, chain.width);
  const bool want_x = wants[0];
  STD_TORCH_CHECK(!want_x || chain.stages[0].kind != Kind::kDense, kConvOp, ": a dense stage has no input gradient");

  std::vector<Tensor> dweights, dbiases;
  // the first stage whose BatchNorm backward has to reach
  size_t stop = want_x ? 0 : count;
  for (size_t i = count; i-- > 0;) {
    Stage& stage = chain.stages[i];
    stage.batch_statistics = batch_statistics[i];
    const double* mean = double_data(statistics) + stage.statistics_at;
    stage.bn.set_statistics(mean, mean + stage.out_channels, eps[i], float_data(bn_weights[i]), float_data(bn_biases[i]));
    if (wants[1 + 2 * i] || wants[2 + 2 * i]) stop = i;
  }
  if (want_x) stop = 0;
  for (size_t i = 0; i < count; ++i) {
    dweights.push_back(empty_vector(bn_weights[i], wants[1 + 2 * i] ? chain.stages[i].out_channels : 0, ScalarType::Float));
    dbiases.push_back(empty_vector(bn_biases[i], wants[2 + 2 * i] ? chain.stages[i].out_channels : 0, ScalarType::Float));
  }
  Tensor dx = want_x ? chain.empty_image(shape[1], chain.height, chain.width)
                     : torch::stable::new_empty(saved, {0}, chain.type());
  std::unique_ptr<PoolBlock> odd;
  if (want_x && shuffle) odd = std::make_unique<PoolBlock>(chain.last().rows * chain.channels * chain.element_size());
  void* first_dx = !want_x ? nullptr : shuffle ? odd->data() : dx.mutable_data_ptr();
  const void* added = add_input ? grad.const_data_ptr() : nullptr;
  const auto affine = [](bool wanted, Tensor& t) { return wanted ? static_cast<float*>(t.mutable_data_ptr()) : nullptr; };
  const auto finish = [&](size_t i, std::vector<double>& partial, int64_t groups) {
    chain.stages[i].bn.set_gradient_sums(partial, groups, chain.stages[i].rows, chain.stages[i].batch_statistics,
                                         affine(wants[1 + 2 * i], dweights[i]), affine(wants[2 + 2 * i], dbiases[i]));
  };

  std::vector<double> partial;
  if (stop < count) {
    const Stage& last = chain.last();
    const RowItems items(last.rows);
    BnActParams p{};
    p.bfloat16 = chain.bfloat16;
    p.channels_last = true;
    p.channels = last.out_channels;
    p.rows = items.rows;
    p.item_rows = items.item_rows;
    p.x = chain.saved(saved, last);
    p.grad = last_grad;
    p.ldgrad = ldgrad;
    p.bn = last.bn.fold();
    partial.resize(items.items * 2 * p.channels);
    p.partial = partial.data();
    const auto kernel = kernels().bn.bn_act_bwd_reduce;
    run_items(items.items, items.item_rows * p.channels, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
    finish(count - 1, partial, items.items);
  }
  // dz of the stage at hand; the gradient of the result at first
  std::unique_ptr<PoolBlock> dz;
  for (size_t i = count; i-- > stop;) {
    Stage& stage = chain.stages[i];
    const bool first = i == 0;
    if (i == stop && !(first && want_x)) break;
    StageGrad out{dz ? dz->data() : last_grad, dz ? stage.out_channels : ldgrad, chain.saved(saved, stage), stage.bn.fold()};
    if (i + 1 < count) out.bn.act = Act::kIdentity;

    const bool expanded = i == 1 && one_pass;
    StageInputGrad in{};
    std::unique_ptr<PoolBlock> dz_before;
    const Stage* before = first ? nullptr : &chain.stages[i - 1];
    if (first) {
      in.data = first_dx;
      in.added = added;
    } else if (!expanded) {
      dz_before = std::make_unique<PoolBlock>(before->rows * before->out_channels * chain.element_size());
      in = {dz_before->data(), true, chain.saved(saved, *before), before->bn.fold(), nullptr, nullptr};
    }
    int64_t groups;
    if (stage.kind == Kind::kDepthwise) {
      const Strips strips(chain.batch, stage.height);
      const AlignedFloats weight = depthwise_weight(stage, stage.stride == 1);
      DepthwiseParams p = depthwise_params(chain, stage, strips);
      p.weight = weight.data();
      p.grad = out;
      p.dx = in;
      p.streams = streams(chain.bfloat16, chain.batch * stage.height * stage.width, stage.in_channels);
      groups = chain.batch * strips.strips;
      const int64_t item_elements = strips.strip_rows * stage.width * stage.in_channels;
      partial.assign(first ? 0 : groups * 2 * stage.in_channels, 0);
      p.dx.partial = first ? nullptr : partial.data();
      const auto kernel = kernels().depthwise.depthwise_bwd;
      if (!expanded) {
        run_items(groups, item_elements, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
      } else {
        // backward of the expansion along with the depthwise one
        const double* mean = double_data(statistics) + before->statistics_at;
        const ExpansionNumbers numbers(chain, x->const_data_ptr(), eps[0], float_data(bn_weights[0]), float_data(bn_biases[0]),
                                       mean, mean + before->out_channels);
        const Packed weight_bwd = numbers.backward_weight();
        p.expansion = numbers.expansion(x->const_data_ptr());
        p.expansion.weight_bwd = weight_bwd.data();
        p.expansion.v = want_x ? dx.mutable_data_ptr() : nullptr;
        run_items(groups, item_elements, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
        add_groups(partial.data(), groups, 2 * before->out_channels);
        numbers.affine_gradients(partial.data(), affine(wants[1], dweights[0]), affine(wants[2], dbiases[0]));
        if (want_x) numbers.finish_input_gradient(x->const_data_ptr(), partial.data(), added, dx.mutable_data_ptr());
        break;
      }
    } else {
      const RowItems items(stage.rows);
      const Packed weight(chain.bfloat16, stage.weight, stage.out_channels, stage.in_channels, stage.in_channels, 1);
      PointwiseParams p = pointwise_params(chain, stage, items);
      p.weight = weight.data();
      p.grad = out;
      p.dx = in;
      p.streams = streams(chain.bfloat16, chain.batch * stage.height * stage.width, stage.in_channels);
      groups = items.items;
      partial.assign(first ? 0 : groups * 2 * stage.in_channels, 0);
      p.dx.partial = first ? nullptr : partial.data();
      const auto kernel = kernels().conv.pointwise_bwd;
      run_items(groups, items.item_rows * (stage.out_channels + stage.in_channels),
                [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
    }
    if (!first) finish(i - 1, partial, groups);
    dz = std::move(dz_before);
  }
  if (want_x && shuffle) {
    ShuffleParams p = shuffle_params(chain);
    p.source_left = grad.const_data_ptr();
    p.ld_left = ldgrad;
    p.source_right = odd->data();
    p.ld_right = chain.channels;
    p.whole = dx.mutable_data_ptr();
    run_shuffle(p, kernels().conv.shuffle_merge);
  }
  return {dx, dweights, dbiases};
}

}  // namespace
}  // namespace nasfast::cpu

STABLE_TORCH_LIBRARY_IMPL(nasfast, CPU, m) {
  m.impl("conv_bn_act_fwd", TORCH_BOX(&nasfast::cpu::conv_bn_act_fwd_cpu));
  m.impl("conv_bn_act_bwd", TORCH_BOX(&nasfast::cpu::conv_bn_act_bwd_cpu));
}
