// Launcher of chains of convolution -> BatchNorm -> activation: geometry, packed weights, BatchNorm arithmetic between the
// phases, and the order in which stages run.

#include "conv_bn_act.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bn_act.h"
#include "isa.h"
#include "launch.h"
#include "pool.h"

namespace nasfast::cpu {
namespace {

constexpr const char* kOp = "conv_bn_act";

// A strip of an image computes the rows at its upper edge anew, so images are cut only when there are fewer than this many
// for the threads to share, and into strips of at least this many rows.
constexpr int64_t kMinStrips = 16;
constexpr int64_t kMinStripRows = 8;
// A result that does not fit beside its inputs in the last-level cache is written past it. Below, the next stage finds it
// there. Rows must be whole cache lines: others would be written in parts.
constexpr int64_t kStreamBytes = 8 * 1024 * 1024;
// Partial second moments are channels^2 numbers per item.
constexpr int64_t kMaxCovarianceItems = 32;
// Rows of the sample whose mean the second moments are taken around.
constexpr int64_t kSampleRows = 256;

struct Kernels {
  const ConvKernels& conv;
  const DepthwiseKernels& depthwise;
  const BnActKernels& bn;
};

Kernels kernels() {
  switch (current_isa()) {
#ifdef NASFAST_X86_ISAS
    case Isa::kAvx512Bf16:
      return {avx512bf16::kConvKernels, avx512bf16::kDepthwiseKernels, avx512bf16::kBnActKernels};
    case Isa::kAvx512:
      return {avx512::kConvKernels, avx512::kDepthwiseKernels, avx512::kBnActKernels};
    case Isa::kAvx2:
      return {avx2::kConvKernels, avx2::kDepthwiseKernels, avx2::kBnActKernels};
#endif
    default:
      return {baseline::kConvKernels, baseline::kDepthwiseKernels, baseline::kBnActKernels};
  }
}

// Whether a result of so many rows goes past the caches.
bool streams(bool bfloat16, int64_t rows, int64_t channels) {
  return !bfloat16 && channels % kAlignment == 0 && rows * channels * 4 >= kStreamBytes;
}

std::vector<std::string> split(const std::string& acts) {
  std::vector<std::string> names(1);
  for (char c : acts) {
    if (c == ',') {
      names.emplace_back();
    } else {
      names.back() += c;
    }
  }
  return names;
}

// A packed weight.
class Packed {
 public:
  Packed(bool bfloat16, const float* w, int64_t depth, int64_t columns, int64_t stride_k, int64_t stride_n,
         const float* scale_k = nullptr, const float* scale_n = nullptr)
      : storage_(kernels().conv.packed_bytes(bfloat16, depth, columns) / sizeof(float) + 1) {
    kernels().conv.pack(bfloat16, w, depth, columns, stride_k, stride_n, scale_k, scale_n, storage_.data());
  }
  const void* data() const { return storage_.data(); }

 private:
  AlignedFloats storage_;
};

enum class Kind { kPointwise, kDepthwise, kDense };

struct Stage {
  Kind kind;
  int64_t in_channels, out_channels, kernel, stride, padding;
  int64_t height, width, out_height, out_width;
  int64_t rows;  // output pixels
  std::vector<float> weight;
  BatchNorm bn;
  bool batch_statistics;
  int64_t saved_at;       // element of the saved tensor where y starts, or -1
  int64_t statistics_at;  // element of the statistics where mean starts
};

// The stages of one call, checked, with geometry and the layout of the saved tensor.
struct Chain {
  bool bfloat16;
  bool recompute;
  int64_t batch, height, width, channels;  // of the input of the first stage
  std::vector<Stage> stages;
  int64_t saved_size = 0;
  int64_t statistics_size = 0;

  Chain(const std::vector<int64_t>& shape, ScalarType type, const std::vector<Tensor>& conv_weights, const std::vector<Tensor>& bn_weights,
        const std::vector<Tensor>& bn_biases, const std::vector<int64_t>& strides, const std::string& acts, size_t eps_count,
        bool recompute_first, bool shuffle)
      : recompute(recompute_first) {
    STD_TORCH_CHECK(shape.size() == 4, kOp, ": x must be 4-d (N, C, H, W), got ", shape.size(), " dimensions");
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, kOp, ": x must be float32 or bfloat16");
    const std::vector<std::string> names = split(acts);
    const size_t count = conv_weights.size();
    STD_TORCH_CHECK(count > 0 && bn_weights.size() == count && bn_biases.size() == count && strides.size() == count &&
                        names.size() == count && eps_count == count,
                    kOp, ": every stage needs one of each: weight, bn_weight, bn_bias, stride, act, eps");
    bfloat16 = type == ScalarType::BFloat16;
    batch = shape[0];
    STD_TORCH_CHECK(!shuffle || shape[1] % 2 == 0, kOp, ": shuffle splits an even number of channels, got ", shape[1]);
    channels = shuffle ? shape[1] / 2 : shape[1];
    height = shape[2];
    width = shape[3];
    STD_TORCH_CHECK(batch * height * width > 0 && channels > 0, kOp, ": x is empty");
    int64_t c = channels, h = height, w = width;
    stages.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      const Tensor& weight = conv_weights[i];
      STD_TORCH_CHECK(weight.dim() == 4 && weight.size(2) == weight.size(3) && weight.size(2) % 2 == 1, kOp, ", stage ", i,
                      ": conv_weight must be (out, in / groups, k, k) with odd k");
      STD_TORCH_CHECK(weight.is_contiguous(), kOp, ", stage ", i, ": conv_weight must be contiguous");
      Stage stage{Kind::kDense, c, weight.size(0), weight.size(2), strides[i], weight.size(2) / 2, h, w, 0, 0, 0, {},
                  BatchNorm(kOp, names[i], weight.size(0)), true, -1, statistics_size};
      const bool small = stage.kernel == 3 || stage.kernel == 5 || stage.kernel == 7;
      if (weight.size(1) == 1 && weight.size(0) == c && small && (stage.stride == 1 || stage.stride == 2)) {
        stage.kind = Kind::kDepthwise;
      } else if (weight.size(1) == c && stage.kernel == 1 && stage.stride == 1) {
        stage.kind = Kind::kPointwise;
      } else {
        STD_TORCH_CHECK(weight.size(1) == c && i == 0 && stage.stride >= 1, kOp, ", stage ", i,
                        ": must be pointwise with stride 1, depthwise with kernel 3, 5 or 7 and stride 1 or 2, or, as the "
                        "first stage, dense; got a weight of shape (",
                        weight.size(0), ", ", weight.size(1), ", ", weight.size(2), ", ", weight.size(3), ") for ", c,
                        " channels, stride ", strides[i]);
      }
      check_vector(kOp, "bn_weight", bn_weights[i], stage.out_channels, ScalarType::Float);
      check_vector(kOp, "bn_bias", bn_biases[i], stage.out_channels, ScalarType::Float);
      stage.out_height = (h + 2 * stage.padding - stage.kernel) / stage.stride + 1;
      stage.out_width = (w + 2 * stage.padding - stage.kernel) / stage.stride + 1;
      stage.rows = batch * stage.out_height * stage.out_width;
      copy_weight(weight, &stage.weight);
      statistics_size += 2 * stage.out_channels;
      if (i > 0 || !recompute) {
        stage.saved_at = saved_size;
        saved_size += round_up(stage.rows * stage.out_channels, 64);
      }
      c = stage.out_channels;
      h = stage.out_height;
      w = stage.out_width;
      stages.push_back(std::move(stage));
    }
    STD_TORCH_CHECK(!recompute || (count > 1 && stages[0].kind == Kind::kPointwise && stages[1].kind == Kind::kDepthwise), kOp,
                    ": recompute needs a pointwise stage before a depthwise one");
    STD_TORCH_CHECK(!shuffle || (h == height && w == width && c == channels), kOp,
                    ": shuffle needs stages that keep the shape of their input");
    STD_TORCH_CHECK(!shuffle || !recompute, kOp, ": shuffle and recompute exclude each other");
  }

  size_t element_size() const { return bfloat16 ? 2 : 4; }
  const Stage& last() const { return stages.back(); }

  char* saved(Tensor& tensor, const Stage& stage) const {
    return static_cast<char*>(tensor.mutable_data_ptr()) + stage.saved_at * element_size();
  }
  const char* saved(const Tensor& tensor, const Stage& stage) const {
    return static_cast<const char*>(tensor.const_data_ptr()) + stage.saved_at * element_size();
  }

  ScalarType type() const { return bfloat16 ? ScalarType::BFloat16 : ScalarType::Float; }

  Tensor empty_image(int64_t c, int64_t h, int64_t w) const {
    return pool_empty({batch, c, h, w}, {c * h * w, 1, w * c, c}, type());
  }

  void check_image(const char* name, const Tensor& tensor, int64_t c, int64_t h, int64_t w) const {
    STD_TORCH_CHECK(tensor.dim() == 4 && tensor.size(0) == batch && tensor.size(1) == c && tensor.size(2) == h &&
                        tensor.size(3) == w && is_channels_last(tensor) &&
                        tensor.scalar_type() == type(),
                    kOp, ": ", name, " must be channels_last, of the type of x and of shape (", batch, ", ", c, ", ", h, ", ", w,
                    ")");
  }

 private:
  static void copy_weight(const Tensor& weight, std::vector<float>* to) {
    const int64_t count = weight.numel();
    to->resize(count);
    if (weight.scalar_type() == ScalarType::Float) {
      std::memcpy(to->data(), weight.const_data_ptr(), count * sizeof(float));
      return;
    }
    STD_TORCH_CHECK(weight.scalar_type() == ScalarType::BFloat16, kOp, ": conv_weight must be float32 or bfloat16");
    const uint16_t* bits = static_cast<const uint16_t*>(weight.const_data_ptr());
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t wide = static_cast<uint32_t>(bits[i]) << 16;
      std::memcpy(to->data() + i, &wide, sizeof wide);
    }
  }
};

// Strips of the images of a depthwise stage whose result has `height` rows.
struct Strips {
  int64_t strips, strip_rows;
  Strips(int64_t batch, int64_t height) {
    const int64_t wanted = (kMinStrips + batch - 1) / batch;
    const int64_t most = std::max<int64_t>(1, height / kMinStripRows);
    strip_rows = (height + std::min(wanted, most) - 1) / std::min(wanted, most);
    strips = (height + strip_rows - 1) / strip_rows;
  }
};

// [kernel^2][ld] from (channels, 1, kernel, kernel)
AlignedFloats depthwise_weight(const Stage& stage, bool flipped) {
  const int64_t taps = stage.kernel * stage.kernel;
  const int64_t ld = round_up(stage.out_channels, kAlignment);
  AlignedFloats packed(taps * ld);
  for (int64_t c = 0; c < stage.out_channels; ++c) {
    for (int64_t t = 0; t < taps; ++t) packed.data()[(flipped ? taps - 1 - t : t) * ld + c] = stage.weight[c * taps + t];
  }
  return packed;
}

// What the parameters of all kinds of stages have in common.
template <typename Params>
Params stage_params(const Chain& chain, const Stage& stage) {
  Params p{};
  p.bfloat16 = chain.bfloat16;
  p.kernel = stage.kernel;
  p.stride = stage.stride;
  p.height = stage.height;
  p.width = stage.width;
  p.out_height = stage.out_height;
  p.out_width = stage.out_width;
  return p;
}

PointwiseParams pointwise_params(const Chain& chain, const Stage& stage, const RowItems& items) {
  auto p = stage_params<PointwiseParams>(chain, stage);
  p.rows = items.rows;
  p.item_rows = items.item_rows;
  p.in_channels = stage.in_channels;
  p.out_channels = stage.out_channels;
  p.padding = stage.padding;
  return p;
}

DepthwiseParams depthwise_params(const Chain& chain, const Stage& stage, const Strips& strips) {
  auto p = stage_params<DepthwiseParams>(chain, stage);
  p.channels = stage.out_channels;
  p.strips = strips.strips;
  p.strip_rows = strips.strip_rows;
  p.weight_ld = round_up(stage.out_channels, kAlignment);
  return p;
}

// The numbers of an expansion that is computed where its result is read:
// xhat = (W x - mean) rstd = (rstd W)(x - center) + bias.
struct ExpansionNumbers {
  // With the statistics of a batch, a mean of x, rounded; any vector near it would do. Otherwise zero, so that no image of a
  // batch depends on another.
  AlignedFloats center;
  AlignedFloats rstd, bias, scale, shift;
  std::optional<Packed> weight;

  ExpansionNumbers(int64_t in, int64_t hidden)
      : center(round_up(in, kAlignment)),
        rstd(round_up(hidden, kAlignment)),
        bias(round_up(hidden, kAlignment)),
        scale(round_up(hidden, kAlignment)),
        shift(round_up(hidden, kAlignment)) {}

  // offset: W center - mean, per hidden channel
  void fix(bool bfloat16, const Stage& stage, const std::vector<double>& offset, const double* var, double eps,
           const float* gamma, const float* beta) {
    for (int64_t c = 0; c < stage.out_channels; ++c) {
      const double r = 1 / std::sqrt(var[c] + eps);
      rstd.data()[c] = static_cast<float>(r);
      bias.data()[c] = static_cast<float>(offset[c] * r);
      scale.data()[c] = gamma[c];
      shift.data()[c] = beta[c];
    }
    weight.emplace(bfloat16, stage.weight.data(), stage.in_channels, stage.out_channels, 1, stage.in_channels, nullptr,
                   rstd.data());
  }

  Expansion expansion(const Stage& stage, const void* x) const {
    Expansion e{};
    e.in_channels = stage.in_channels;
    e.x = x;
    e.center = center.data();
    e.weight = weight->data();
    e.bias = bias.data();
    e.bn = {nullptr, scale.data(), shift.data(), nullptr, nullptr, stage.bn.fold().act};
    return e;
  }
};

double load_element(const void* data, bool bfloat16, int64_t i) {
  if (!bfloat16) return static_cast<const float*>(data)[i];
  const uint32_t wide = static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i]) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// The mean of at most kSampleRows rows spread over x: near the mean of x, but cheap.
void sample_mean(const Chain& chain, const void* x, float* mean) {
  const int64_t rows = chain.batch * chain.height * chain.width;
  const int64_t count = std::min(rows, kSampleRows);
  for (int64_t c = 0; c < chain.channels; ++c) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += load_element(x, chain.bfloat16, i * rows / count * chain.channels + c);
    mean[c] = static_cast<float>(sum / static_cast<double>(count));
  }
}

// W (center - mean of x), and mean and variance of W x, without computing W x: Fact 1 of docs/method.md 6.
void expansion_statistics(const Chain& chain, const void* x, const float* center, std::vector<double>* offset, double* mean,
                          double* var) {
  const Stage& stage = chain.stages[0];
  const int64_t in = stage.in_channels;
  CovarianceParams p{};
  p.bfloat16 = chain.bfloat16;
  p.rows = stage.rows;
  p.item_rows = round_up(std::max(kMinItemRows, (p.rows + kMaxCovarianceItems - 1) / kMaxCovarianceItems), kMinItemRows);
  p.channels = in;
  p.x = x;
  p.center = center;
  const int64_t items = (p.rows + p.item_rows - 1) / p.item_rows;
  std::vector<double> first(items * in), second(items * in * in);
  p.first = first.data();
  p.second = second.data();
  const auto kernel = kernels().conv.covariance;
  run_items(items, p.item_rows * in, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
  for (int64_t item = 1; item < items; ++item) {
    for (int64_t i = 0; i < in; ++i) first[i] += first[item * in + i];
    for (int64_t i = 0; i < in * in; ++i) second[i] += second[item * in * in + i];
  }
  const double count = static_cast<double>(p.rows);
  for (int64_t i = 0; i < in; ++i) first[i] /= count;
  for (int64_t i = 0; i < in; ++i) {
    for (int64_t j = i; j < in; ++j) {
      second[i * in + j] = second[j * in + i] = second[i * in + j] / count - first[i] * first[j];
    }
  }
  offset->resize(stage.out_channels);
  std::vector<double> row(in);
  for (int64_t c = 0; c < stage.out_channels; ++c) {
    const float* w = stage.weight.data() + c * in;
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
    (*offset)[c] = -shift;
    mean[c] = at_center + shift;
    var[c] = std::max(variance, 0.0);
  }
}

// W center - mean for a mean that is given
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
    std::vector<int64_t> strides, std::string acts, std::vector<double> eps, bool add_input, bool recompute,
    bool shuffle) {
  STD_TORCH_CHECK(x.dim() == 4 && is_channels_last(x), kOp, ": x must be 4-d and channels_last");
  Chain chain({x.size(0), x.size(1), x.size(2), x.size(3)}, x.scalar_type(), conv_weights, bn_weights, bn_biases, strides, acts,
              eps.size(), recompute, shuffle);
  STD_TORCH_CHECK(running_means.size() == chain.stages.size() && running_vars.size() == chain.stages.size(), kOp,
                  ": every stage needs running statistics, empty where it uses those of the batch");
  const Stage& last = chain.last();
  STD_TORCH_CHECK(!shuffle || (!residual && !add_input), kOp, ": shuffle and a residual exclude each other");
  if (residual) chain.check_image("residual", *residual, last.out_channels, last.out_height, last.out_width);
  if (add_input) chain.check_image("x, to be added,", x, last.out_channels, last.out_height, last.out_width);

  const int64_t y_channels = shuffle ? 2 * last.out_channels : last.out_channels;
  Tensor y = chain.empty_image(y_channels, last.out_height, last.out_width);
  Tensor saved = pool_empty({chain.saved_size}, {1}, chain.type());
  Tensor statistics = empty_vector(x, chain.statistics_size, ScalarType::Double);
  double* numbers = static_cast<double*>(statistics.mutable_data_ptr());

  StageInput input{x.const_data_ptr(), false, {}};
  std::unique_ptr<PoolBlock> odd;
  if (shuffle) {
    odd = std::make_unique<PoolBlock>(last.rows * chain.channels * chain.element_size());
    ShuffleParams p = shuffle_params(chain);
    p.source_whole = x.const_data_ptr();
    p.left = y.mutable_data_ptr();
    p.ld_left = 2 * chain.channels;
    p.right = odd->data();
    p.ld_right = chain.channels;
    run_shuffle(p, kernels().conv.shuffle_split);
    input.data = odd->data();
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
      check_vector(kOp, "running_mean", running_means[i], out, ScalarType::Float);
      check_vector(kOp, "running_var", running_vars[i], out, ScalarType::Float);
      std::copy_n(float_data(running_means[i]), out, mean);
      std::copy_n(float_data(running_vars[i]), out, var);
    }
    if (i == 0 && recompute) {
      expansion.emplace(stage.in_channels, out);
      std::vector<double> offset;
      if (stage.batch_statistics) {
        sample_mean(chain, x.const_data_ptr(), expansion->center.data());
        expansion_statistics(chain, x.const_data_ptr(), expansion->center.data(), &offset, mean, var);
      } else {
        offset = expansion_offset(stage, expansion->center.data(), mean);
      }
      expansion->fix(chain.bfloat16, stage, offset, var, eps[0], float_data(bn_weights[0]), float_data(bn_biases[0]));
      continue;
    }
    int64_t groups;
    if (stage.kind == Kind::kDepthwise) {
      const Strips strips(chain.batch, stage.out_height);
      const AlignedFloats weight = depthwise_weight(stage, false);
      DepthwiseParams p = depthwise_params(chain, stage, strips);
      p.weight = weight.data();
      p.x = input;
      p.y = chain.saved(saved, stage);
      p.streams = streams(chain.bfloat16, stage.rows, out);
      if (i == 1 && expansion) p.expansion = expansion->expansion(chain.stages[0], x.const_data_ptr());
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
      const int64_t taps = stage.kernel * stage.kernel;
      // a patch is [ky][kx][channel], a weight (out, channel, ky, kx)
      std::vector<float> patches;
      if (taps > 1) {
        patches.resize(stage.weight.size());
        for (int64_t o = 0; o < out; ++o) {
          for (int64_t c = 0; c < stage.in_channels; ++c) {
            for (int64_t t = 0; t < taps; ++t) {
              patches[(o * taps + t) * stage.in_channels + c] = stage.weight[(o * stage.in_channels + c) * taps + t];
            }
          }
        }
      }
      const int64_t depth = taps * stage.in_channels;
      const Packed weight(chain.bfloat16, taps > 1 ? patches.data() : stage.weight.data(), depth, out, 1, depth);
      PointwiseParams p = pointwise_params(chain, stage, items);
      p.weight = weight.data();
      p.x = input;
      p.y = chain.saved(saved, stage);
      p.streams = streams(chain.bfloat16, stage.rows, out);
      if (stage.batch_statistics) partial.assign(items.items * 2 * out, 0);
      p.partial = stage.batch_statistics ? partial.data() : nullptr;
      const auto kernel = kernels().conv.pointwise_fwd;
      run_items(items.items, items.item_rows * (out + depth), [&](int64_t b, int64_t e) { kernel(p, b, e); });
      if (stage.batch_statistics) {
        BatchNorm::join(partial.data(), items.items, out, [&](int64_t group) { return items.count(group); }, mean, var);
      }
    }
    stage.bn.set_statistics(mean, var, eps[i], float_data(bn_weights[i]), float_data(bn_biases[i]));
    input = {chain.saved(saved, stage), true, stage.bn.fold()};
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
    std::vector<int64_t> strides, std::string acts, std::vector<double> eps, bool add_input, bool recompute, bool shuffle,
    std::vector<bool> wants) {
  Chain chain(shape, saved.scalar_type(), conv_weights, bn_weights, bn_biases, strides, acts, eps.size(), recompute, shuffle);
  const size_t count = chain.stages.size();
  STD_TORCH_CHECK(batch_statistics.size() == count && wants.size() == 1 + 2 * count, kOp, ": wrong number of flags");
  STD_TORCH_CHECK(saved.numel() == chain.saved_size && saved.is_contiguous(), kOp,
                  ": saved does not belong to this chain");
  check_vector(kOp, "statistics", statistics, chain.statistics_size, ScalarType::Double);
  const int64_t ldgrad = shuffle ? 2 * chain.channels : chain.last().out_channels;
  chain.check_image("grad", grad, ldgrad, chain.last().out_height, chain.last().out_width);
  // of the last stage's result
  const char* last_grad = static_cast<const char*>(grad.const_data_ptr()) + (shuffle ? chain.channels * chain.element_size() : 0);
  STD_TORCH_CHECK(x.has_value() == recompute, kOp, ": x is needed exactly when recompute is asked for");
  if (x) chain.check_image("x", *x, chain.channels, chain.height, chain.width);
  const bool want_x = wants[0];
  STD_TORCH_CHECK(!want_x || chain.stages[0].kind != Kind::kDense, kOp, ": a dense stage has no input gradient");

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

    const bool expanded = i == 1 && recompute;
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
        // backward of the expansion along with the depthwise one: Fact 3 of docs/method.md 6
        const int64_t hidden = before->out_channels, channels = before->in_channels;
        const double* mean = double_data(statistics) + before->statistics_at;
        ExpansionNumbers numbers(channels, hidden);
        if (before->batch_statistics) sample_mean(chain, x->const_data_ptr(), numbers.center.data());
        numbers.fix(chain.bfloat16, *before, expansion_offset(*before, numbers.center.data(), mean), mean + hidden, eps[0],
                    float_data(bn_weights[0]), float_data(bn_biases[0]));
        p.expansion = numbers.expansion(*before, x->const_data_ptr());
        const Packed weight_bwd(chain.bfloat16, before->weight.data(), hidden, channels, channels, 1, before->bn.fold().scale);
        p.expansion.weight_bwd = weight_bwd.data();
        p.expansion.v = want_x ? dx.mutable_data_ptr() : nullptr;
        run_items(groups, item_elements, [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
        for (int64_t group = 1; group < groups; ++group) {
          for (int64_t c = 0; c < 2 * hidden; ++c) partial[c] += partial[group * 2 * hidden + c];
        }
        const double* sum = partial.data();
        const double* sum_xhat = sum + hidden;
        float* dweight = affine(wants[1], dweights[0]);
        float* dbias = affine(wants[2], dbiases[0]);
        for (int64_t c = 0; c < hidden; ++c) {
          if (dbias) dbias[c] = static_cast<float>(sum[c]);
          if (dweight) dweight[c] = static_cast<float>(sum_xhat[c]);
        }
        if (want_x && (before->batch_statistics || added)) {
          // dx = v - A (x - center) - c with W the weight times rstd:
          // A = W^T diag(gamma mean(dz xhat)) W, c = W^T (gamma (mean(dz) + bias mean(dz xhat)))
          const double rows = before->batch_statistics ? static_cast<double>(before->rows) : HUGE_VAL;
          std::vector<double> a(channels * channels), constant(channels);
          std::vector<double> w(channels);
          for (int64_t c = 0; c < hidden; ++c) {
            const double gamma = float_data(bn_weights[0])[c];
            const double along = gamma * sum_xhat[c] / rows;
            const double all = gamma * sum[c] / rows + numbers.bias.data()[c] * along;
            for (int64_t j = 0; j < channels; ++j) w[j] = before->weight[c * channels + j] * numbers.rstd.data()[c];
            for (int64_t j = 0; j < channels; ++j) {
              constant[j] -= w[j] * all;
              const double left = w[j] * along;
              for (int64_t k = 0; k < channels; ++k) a[j * channels + k] += left * w[k];
            }
          }
          std::vector<float> a_float(a.begin(), a.end());
          AlignedFloats bias(round_up(channels, kAlignment));
          std::copy(constant.begin(), constant.end(), bias.data());
          const Packed weight_a(chain.bfloat16, a_float.data(), channels, channels, channels, 1);
          const RowItems items(before->rows);
          CorrectionParams q{};
          q.bfloat16 = chain.bfloat16;
          q.rows = items.rows;
          q.item_rows = items.item_rows;
          q.channels = channels;
          q.x = x->const_data_ptr();
          q.center = numbers.center.data();
          q.weight = weight_a.data();
          q.bias = bias.data();
          q.added = added;
          q.dx = dx.mutable_data_ptr();
          const auto correct = kernels().conv.correction;
          run_items(items.items, items.item_rows * channels, [&](int64_t begin, int64_t end) { correct(q, begin, end); });
        }
        break;
      }
    } else {
      const RowItems items(stage.rows);
      const Packed weight(chain.bfloat16, stage.weight.data(), stage.out_channels, stage.in_channels, stage.in_channels, 1);
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
