#include "chain.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"
#include "pool.h"

namespace nasfast::cpu {
namespace {

// A result of this size or more is written past the caches, because it does not fit into the last-level cache beside
// its inputs. A smaller result stays there for the next stage. Rows must be whole cache lines, as others would be
// written in parts.
constexpr int64_t kStreamBytes = 8 * 1024 * 1024;

// The values of the weight; where they are not float, they are converted into `to`.
const float* weight_data(const Tensor& weight, std::vector<float>* to) {
  if (weight.scalar_type() == ScalarType::Float) return float_data(weight);
  STD_TORCH_CHECK(weight.scalar_type() == ScalarType::BFloat16, kConvOp, ": conv_weight must be float32 or bfloat16");
  const int64_t count = weight.numel();
  to->resize(count);
  const uint16_t* bits = static_cast<const uint16_t*>(weight.const_data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t wide = static_cast<uint32_t>(bits[i]) << 16;
    std::memcpy(to->data() + i, &wide, sizeof wide);
  }
  return to->data();
}

// The parameters that all kinds of stages have.
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

}  // namespace

Chain::Chain(const ChainPlan& plan, ScalarType type, const std::vector<Tensor>& conv_weights,
             const std::vector<Tensor>& bn_weights, const std::vector<Tensor>& bn_biases, size_t eps_count)
    : bfloat16(type == ScalarType::BFloat16),
      recompute(plan.recompute()),
      shuffle(plan.shuffle),
      batch(plan.batch),
      height(plan.height),
      width(plan.width),
      channels(plan.channels),
      saved_size(plan.saved_size),
      statistics_size(plan.statistics_size) {
  check_image_type(kConvOp, type);
  const size_t count = plan.stages.size();
  STD_TORCH_CHECK(
      conv_weights.size() == count && bn_weights.size() == count && bn_biases.size() == count && eps_count == count,
      kConvOp, ": every stage of the plan needs one of each: conv_weight, bn_weight, bn_bias, eps");
  stages.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    Stage stage(plan.stages[i]);
    const Tensor& weight = conv_weights[i];
    const int64_t per_group = stage.kind == Kind::kDepthwise ? 1 : stage.in_channels;
    STD_TORCH_CHECK(weight.dim() == 4 && weight.size(0) == stage.out_channels && weight.size(1) == per_group &&
                        weight.size(2) == stage.kernel && weight.size(3) == stage.kernel && weight.is_contiguous(),
                    kConvOp, ", stage ", i, ": conv_weight must be contiguous and, for this plan, of shape (",
                    stage.out_channels, ", ", per_group, ", ", stage.kernel, ", ", stage.kernel, ")");
    check_vector(kConvOp, "bn_weight", bn_weights[i], stage.out_channels, ScalarType::Float);
    check_vector(kConvOp, "bn_bias", bn_biases[i], stage.out_channels, ScalarType::Float);
    stage.weight = weight_data(weight, &stage.converted);
    stages.push_back(std::move(stage));
  }
}

void Chain::check_image(const char* name, const Tensor& tensor, int64_t c, int64_t h, int64_t w, int64_t ld) const {
  cpu::check_image(kConvOp, name, tensor, {batch, c, h, w}, type(), ld);
}

Packed::Packed(bool bfloat16, const float* w, int64_t depth, int64_t columns, int64_t stride_k, int64_t stride_n,
               const float* scale_k, const float* scale_n)
    : storage_(std::make_unique<PoolBlock>(kernels().conv.packed_bytes(bfloat16, depth, columns))) {
  const int64_t panels = kernels().conv.panel_count(columns);
  run_items(panels, depth * columns / panels, [&](int64_t begin, int64_t end) {
    kernels().conv.pack(bfloat16, w, depth, columns, stride_k, stride_n, scale_k, scale_n, storage_->data(), begin,
                        end);
  });
}

Packed forward_weight(const Chain& chain, const Stage& stage) {
  const int64_t taps = stage.kernel * stage.kernel;
  const int64_t depth = taps * stage.in_channels;
  if (taps == 1) return Packed(chain.bfloat16, stage.weight, depth, stage.out_channels, 1, depth);
  // a patch is [ky][kx][channel], but a weight is (out, channel, ky, kx)
  std::vector<float> patches(depth * stage.out_channels);
  for (int64_t o = 0; o < stage.out_channels; ++o) {
    for (int64_t c = 0; c < stage.in_channels; ++c) {
      for (int64_t t = 0; t < taps; ++t) {
        patches[(o * taps + t) * stage.in_channels + c] = stage.weight[(o * stage.in_channels + c) * taps + t];
      }
    }
  }
  return Packed(chain.bfloat16, patches.data(), depth, stage.out_channels, 1, depth);
}

bool streams(bool bfloat16, int64_t rows, int64_t channels) {
  return !bfloat16 && channels % kAlignment == 0 && rows * channels * 4 >= kStreamBytes;
}

PointwiseParams pointwise_params(const Chain& chain, const Stage& stage, const RowItems& items) {
  auto p = stage_params<PointwiseParams>(chain, stage);
  p.rows = items.rows;
  p.item_rows = items.item_rows;
  p.in_channels = stage.in_channels;
  p.out_channels = stage.out_channels;
  p.padding = stage.padding();
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

}  // namespace nasfast::cpu
