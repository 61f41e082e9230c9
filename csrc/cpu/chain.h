// The stages of one call of conv_bn_act_chain with their weights, and the kernel parameters that follow from a stage.
#pragma once

#include <memory>
#include <vector>

#include "conv_bn_act.h"
#include "launch.h"
#include "plan.h"
#include "pool.h"

namespace nasfast::cpu {

struct Stage : StagePlan {
  const float* weight = nullptr;  // in the order of the tensor
  std::vector<float> converted;   // the memory of weight where the tensor is not float
  BatchNorm bn;
  bool batch_statistics = true;

  explicit Stage(const StagePlan& plan) : StagePlan(plan), bn(plan.act, plan.out_channels) {}
};

// One call of the operator: its plan, and its stages with their tensors.
struct Chain {
  bool bfloat16;
  bool recompute, shuffle;
  int64_t batch, height, width, channels;  // of the input of the first stage
  int64_t saved_size, statistics_size;
  std::vector<Stage> stages;

  // Refuses tensors that are not those of the plan.
  Chain(const ChainPlan& plan, ScalarType type, const std::vector<Tensor>& conv_weights,
        const std::vector<Tensor>& bn_weights, const std::vector<Tensor>& bn_biases, size_t eps_count);

  size_t element_size() const { return bfloat16 ? 2 : 4; }
  const Stage& last() const { return stages.back(); }

  char* saved(Tensor& tensor, const Stage& stage) const {
    return static_cast<char*>(tensor.mutable_data_ptr()) + stage.saved_at * element_size();
  }
  const char* saved(const Tensor& tensor, const Stage& stage) const {
    return static_cast<const char*>(tensor.const_data_ptr()) + stage.saved_at * element_size();
  }

  ScalarType type() const { return bfloat16 ? ScalarType::BFloat16 : ScalarType::Float; }

  // Elements between the rows of y and of its gradient, and bytes from a row's start to the result of the stages.
  int64_t ldy() const { return shuffle ? 2 * channels : last().out_channels; }
  int64_t result_offset() const { return shuffle ? channels * static_cast<int64_t>(element_size()) : 0; }

  Tensor empty_image(int64_t c, int64_t h, int64_t w) const {
    return pool_empty({batch, c, h, w}, {c * h * w, 1, w * c, c}, type());
  }

  // Refuses an image tensor that is not channels_last with `ld` elements between pixels (0: c), or has another type or
  // shape.
  void check_image(const char* name, const Tensor& tensor, int64_t c, int64_t h, int64_t w, int64_t ld = 0) const;
};

// A weight in the layout that the matrix products read.
class Packed {
 public:
  // B[k][n] = w[k * stride_k + n * stride_n] * scale_k[k] * scale_n[n], depth x columns. A scale that is null is 1; one
  // of the strides must be 1.
  Packed(bool bfloat16, const float* w, int64_t depth, int64_t columns, int64_t stride_k, int64_t stride_n,
         const float* scale_k = nullptr, const float* scale_n = nullptr);
  const void* data() const { return storage_->data(); }

 private:
  std::unique_ptr<PoolBlock> storage_;
};

// The packed weight of a pointwise or dense stage, for forward.
Packed forward_weight(const Chain& chain, const Stage& stage);

// Whether a result of this many rows is written past the caches.
bool streams(bool bfloat16, int64_t rows, int64_t channels);

PointwiseParams pointwise_params(const Chain& chain, const Stage& stage, const RowItems& items);
DepthwiseParams depthwise_params(const Chain& chain, const Stage& stage, const Strips& strips);

}  // namespace nasfast::cpu
