#include "expansion.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels.h"

namespace nasfast::cpu {
namespace {

// Each item has channels^2 partial second moments, so there are fewer items than elsewhere.
constexpr int64_t kMaxCovarianceItems = 32;
// Rows of the sample of x; second moments are taken around the mean of this sample.
constexpr int64_t kSampleRows = 256;

double load_element(const void* data, bool bfloat16, int64_t i) {
  if (!bfloat16) return static_cast<const float*>(data)[i];
  const uint32_t wide = static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i]) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// The mean of at most kSampleRows rows, spread over x: cheap, and near the mean of x.
void sample_mean(const Chain& chain, const void* x, float* mean) {
  const int64_t rows = chain.batch * chain.height * chain.width;
  const int64_t count = std::min(rows, kSampleRows);
  for (int64_t c = 0; c < chain.channels; ++c) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += load_element(x, chain.bfloat16, i * rows / count * chain.channels + c);
    mean[c] = static_cast<float>(sum / static_cast<double>(count));
  }
}

// W center - mean
std::vector<double> expansion_offset(const Stage& stage, const float* center, const double* mean) {
  std::vector<double> offset(stage.out_channels);
  for (int64_t c = 0; c < stage.out_channels; ++c) {
    double at_center = 0;
    for (int64_t i = 0; i < stage.in_channels; ++i) {
      at_center += static_cast<double>(stage.weight[c * stage.in_channels + i]) * center[i];
    }
    offset[c] = at_center - mean[c];
  }
  return offset;
}

}  // namespace

void expansion_statistics(const Chain& chain, const void* x, double* mean, double* var) {
  const Stage& stage = chain.stages[0];
  const int64_t in = stage.in_channels;
  std::vector<float> center(in);
  sample_mean(chain, x, center.data());
  CovarianceParams p{};
  p.bfloat16 = chain.bfloat16;
  p.rows = stage.rows;
  p.item_rows =
      round_up(std::max(kMinItemRows, (p.rows + kMaxCovarianceItems - 1) / kMaxCovarianceItems), kMinItemRows);
  p.channels = in;
  p.x = x;
  p.center = center.data();
  const int64_t items = (p.rows + p.item_rows - 1) / p.item_rows;
  std::vector<double> first(items * in), second(items * in * in);
  p.first = first.data();
  p.second = second.data();
  const auto kernel = kernels().conv.covariance;
  run_items(items, p.item_rows * in, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
  add_groups(first.data(), items, in);
  add_groups(second.data(), items, in * in);
  const double count = static_cast<double>(p.rows);
  for (int64_t i = 0; i < in; ++i) first[i] /= count;
  for (int64_t i = 0; i < in; ++i) {
    for (int64_t j = i; j < in; ++j) {
      second[i * in + j] = second[j * in + i] = second[i * in + j] / count - first[i] * first[j];
    }
  }
  std::vector<double> row(in);
  for (int64_t c = 0; c < stage.out_channels; ++c) {
    const float* w = stage.weight + c * in;
    std::fill(row.begin(), row.end(), 0.0);
    for (int64_t i = 0; i < in; ++i) {
      for (int64_t j = 0; j < in; ++j) row[j] += w[i] * second[i * in + j];
    }
    double shift = 0, at_center = 0, variance = 0;
    for (int64_t i = 0; i < in; ++i) {
      shift += w[i] * first[i];
      at_center += static_cast<double>(w[i]) * center[i];
      variance += w[i] * row[i];
    }
    mean[c] = at_center + shift;
    var[c] = std::max(variance, 0.0);
  }
}

ExpansionNumbers::ExpansionNumbers(const Chain& chain, const void* x, double eps, const float* gamma, const float* beta,
                                   const double* mean, const double* var)
    : chain_(chain),
      stage_(chain.stages[0]),
      center_(round_up(stage_.in_channels, kAlignment)),
      rstd_(round_up(stage_.out_channels, kAlignment)),
      bias_(round_up(stage_.out_channels, kAlignment)),
      scale_(round_up(stage_.out_channels, kAlignment)),
      shift_(round_up(stage_.out_channels, kAlignment)) {
  if (stage_.batch_statistics) sample_mean(chain, x, center_.data());
  const std::vector<double> offset = expansion_offset(stage_, center_.data(), mean);
  for (int64_t c = 0; c < stage_.out_channels; ++c) {
    const double r = 1 / std::sqrt(var[c] + eps);
    rstd_.data()[c] = static_cast<float>(r);
    bias_.data()[c] = static_cast<float>(offset[c] * r);
    scale_.data()[c] = gamma[c];
    shift_.data()[c] = beta[c];
  }
  weight_.emplace(chain.bfloat16, stage_.weight, stage_.in_channels, stage_.out_channels, 1, stage_.in_channels,
                  nullptr, rstd_.data());
}

Expansion ExpansionNumbers::expansion(const void* x) const {
  Expansion e{};
  e.in_channels = stage_.in_channels;
  e.x = x;
  e.center = center_.data();
  e.weight = weight_->data();
  e.bias = bias_.data();
  e.bn = {nullptr, scale_.data(), shift_.data(), nullptr, nullptr, stage_.bn.fold().act};
  return e;
}

Packed ExpansionNumbers::backward_weight() const {
  return Packed(chain_.bfloat16, stage_.weight, stage_.out_channels, stage_.in_channels, stage_.in_channels, 1,
                stage_.bn.fold().scale);
}

void ExpansionNumbers::affine_gradients(const double* sums, float* dweight, float* dbias) const {
  const int64_t hidden = stage_.out_channels;
  for (int64_t c = 0; c < hidden; ++c) {
    if (dbias) dbias[c] = static_cast<float>(sums[c]);
    if (dweight) dweight[c] = static_cast<float>(sums[hidden + c]);
  }
}

void ExpansionNumbers::finish_input_gradient(const void* x, const double* sums, const void* added, void* dx) const {
  if (!stage_.batch_statistics && !added) return;
  const RowItems items(stage_.rows);
  CorrectionParams p{};
  p.bfloat16 = chain_.bfloat16;
  p.rows = items.rows;
  p.item_rows = items.item_rows;
  p.channels = stage_.in_channels;
  p.added = added;
  p.dx = dx;
  const auto correct = [&] {
    const auto kernel = kernels().conv.correction;
    run_items(items.items, items.item_rows * p.channels, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
  };
  if (!stage_.batch_statistics) return correct();
  const int64_t channels = stage_.in_channels, hidden = stage_.out_channels;
  // dx = v - A (x - center) - c, where W is the weight times rstd:
  // A = W^T diag(gamma mean(dz xhat)) W, c = W^T (gamma (mean(dz) + bias mean(dz xhat)))
  const double rows = static_cast<double>(stage_.rows);
  std::vector<double> a(channels * channels), constant(channels), w(channels);
  for (int64_t c = 0; c < hidden; ++c) {
    const double gamma = scale_.data()[c];
    const double along = gamma * sums[hidden + c] / rows;
    const double all = gamma * sums[c] / rows + bias_.data()[c] * along;
    for (int64_t j = 0; j < channels; ++j) w[j] = stage_.weight[c * channels + j] * rstd_.data()[c];
    for (int64_t j = 0; j < channels; ++j) {
      constant[j] -= w[j] * all;
      const double left = w[j] * along;
      for (int64_t k = 0; k < channels; ++k) a[j * channels + k] += left * w[k];
    }
  }
  const std::vector<float> a_float(a.begin(), a.end());
  AlignedFloats bias(round_up(channels, kAlignment));
  std::copy(constant.begin(), constant.end(), bias.data());
  const Packed weight(chain_.bfloat16, a_float.data(), channels, channels, channels, 1);
  p.x = x;
  p.center = center_.data();
  p.weight = weight.data();
  p.bias = bias.data();
  correct();
}

}  // namespace nasfast::cpu
